//! The set-up functions of libibverbs, found when they are first needed.
//!
//! rdma-sys declares the same functions, but a program that calls one of those does not start where the library is
//! not installed. So only its types are used here, and its inline verbs, which go through the table of an open
//! device.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

use posthorse_core::{Error, ErrorKind, Result};
use rdma_sys::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_mr,
    ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

const NAME: &str = "libibverbs.so.1";

const ADVICE: &str = "install the RDMA user-space libraries: `apt-get install libibverbs1 ibverbs-providers` on \
                      Debian and Ubuntu, `dnf install libibverbs` on Fedora and RHEL";

/// Declares the table, and how it is filled: names that every release of the library has, then those that came later.
macro_rules! functions {
    (
        required { $($name:ident: $symbol:literal fn($($type:ty),*) $(-> $result:ty)?;)* }
        later { $($late:ident: $late_symbol:literal fn($($late_type:ty),*) $(-> $late_result:ty)?;)* }
    ) => {
        /// The functions.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
            $(pub(super) $late: Option<unsafe extern "C" fn($($late_type),*) $(-> $late_result)?>,)*
            /// What keeps them where they are.
            _library: libloading::Library,
        }

        impl Library {
            fn load() -> Result<Self, libloading::Error> {
                // SAFETY: the initialisers of this library register its drivers, and ask nothing of the caller.
                let library = unsafe { libloading::Library::new(NAME) }?;
                Ok(Self {
                    // SAFETY: verbs.h has each function with this signature, and `_library` keeps it mapped.
                    $($name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,)*
                    // SAFETY: as above.
                    $($late: unsafe { library.get(concat!($late_symbol, "\0").as_bytes()) }.ok().map(|found| *found),)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    required {
        fork_init: "ibv_fork_init" fn() -> c_int;
        get_device_list: "ibv_get_device_list" fn(*mut c_int) -> *mut *mut ibv_device;
        free_device_list: "ibv_free_device_list" fn(*mut *mut ibv_device);
        get_device_name: "ibv_get_device_name" fn(*mut ibv_device) -> *const c_char;
        open_device: "ibv_open_device" fn(*mut ibv_device) -> *mut ibv_context;
        close_device: "ibv_close_device" fn(*mut ibv_context) -> c_int;
        get_async_event: "ibv_get_async_event" fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ack_async_event: "ibv_ack_async_event" fn(*mut ibv_async_event);
        query_device: "ibv_query_device" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        // Fills the part of the structure that its first release had: it is to be cleared before.
        query_port: "ibv_query_port" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        query_gid: "ibv_query_gid" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        alloc_pd: "ibv_alloc_pd" fn(*mut ibv_context) -> *mut ibv_pd;
        dealloc_pd: "ibv_dealloc_pd" fn(*mut ibv_pd) -> c_int;
        reg_mr: "ibv_reg_mr" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        dereg_mr: "ibv_dereg_mr" fn(*mut ibv_mr) -> c_int;
        create_comp_channel: "ibv_create_comp_channel" fn(*mut ibv_context) -> *mut ibv_comp_channel;
        destroy_comp_channel: "ibv_destroy_comp_channel" fn(*mut ibv_comp_channel) -> c_int;
        create_cq: "ibv_create_cq"
            fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        destroy_cq: "ibv_destroy_cq" fn(*mut ibv_cq) -> c_int;
        get_cq_event: "ibv_get_cq_event"
            fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ack_cq_events: "ibv_ack_cq_events" fn(*mut ibv_cq, c_uint);
        create_qp: "ibv_create_qp" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        modify_qp: "ibv_modify_qp" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        destroy_qp: "ibv_destroy_qp" fn(*mut ibv_qp) -> c_int;
    }
    later {
        // Since rdma-core 35: an `ibv_fork_status`.
        is_fork_initialized: "ibv_is_fork_initialized" fn() -> c_int;
        // Since rdma-core 28: leaves out of the access flags what kernel or device do not know, where that is
        // harmless.
        reg_mr_iova2: "ibv_reg_mr_iova2" fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        // Since rdma-core 34.
        reg_dmabuf_mr: "ibv_reg_dmabuf_mr" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAME)
    }
}

/// `IBV_FORK_UNNEEDED` of verbs.h.
const FORK_UNNEEDED: c_int = 2;

impl Library {
    /// Sees to it that memory which a device knows stays this process's own when it forks. Otherwise whoever writes a
    /// page first gets a copy, and if that is the parent, the device goes on with a page that nobody looks at.
    ///
    /// Kernels since 5.12 copy such pages for the child at once. For older ones the library keeps the pages from the
    /// child, with whatever else lies in them: so that is not asked for where it is not needed.
    fn guard_against_forks(&self) {
        // SAFETY: takes no arguments, and may be called at any time.
        let unneeded = self.is_fork_initialized.is_some_and(|ask| unsafe { ask() } == FORK_UNNEEDED);
        if !unneeded {
            // It is too late where something else in this process has used a device before: then that has decided.
            // SAFETY: as above.
            let _too_late = unsafe { (self.fork_init)() };
        }
    }
}

/// The library, which stays loaded once it is.
///
/// # Errors
/// `Unsupported` where it is not installed, or is too old to have all of them.
pub(super) fn library() -> Result<&'static Library> {
    static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let library = Library::load().map_err(|error| error.to_string())?;
        library.guard_against_forks();
        Ok(library)
    });
    loaded.as_ref().map_err(|why| {
        Error::new(ErrorKind::Unsupported, format!("{NAME} cannot be used: {why}")).with_advice(ADVICE)
    })
}
