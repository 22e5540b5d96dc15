//! Memory that a device knows.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::Arc;

use posthorse_core::{Error, ErrorKind, Result};
use posthorse_memory::memlock_limit;
use rdma_sys::{ibv_access_flags, ibv_mr};
use rustix::io::Errno;

use super::handles::Domain;
use crate::verbs::{Access, Limits, Memory, MemoryRegion};

/// A memory region, deregistered when it is dropped.
#[derive(Debug)]
pub(super) struct SystemRegion {
    domain: Arc<Domain>,
    region: NonNull<ibv_mr>,
}

// SAFETY: libibverbs may be called from any thread, and from several at once; the keys do not change.
unsafe impl Send for SystemRegion {}
// SAFETY: as above.
unsafe impl Sync for SystemRegion {}

impl SystemRegion {
    /// # Errors
    /// As [`Device::register`](crate::verbs::Device::register).
    ///
    /// # Safety
    /// The memory stays allocated until what is returned is dropped.
    pub(super) unsafe fn new(
        domain: &Arc<Domain>,
        limits: &Limits,
        memory: Memory<'_>,
        access: Access,
    ) -> Result<Self> {
        domain.context.check_fork()?;
        let len = usize::try_from(memory.len()).unwrap_or(0);
        if len == 0 {
            let accepted = "at least one byte, and no more than there are addresses";
            return Err(Error::invalid_argument("the length of the memory", memory.len(), accepted));
        }
        if access.remote_write && !access.local_write {
            let accepted = "true, where peers may write";
            return Err(Error::invalid_argument("local_write", access.local_write, accepted));
        }
        // SAFETY: the caller's promise.
        let region = unsafe { register(domain, memory, len, access) }?;
        let region = NonNull::new(region)
            .ok_or_else(|| refusal(domain, limits, &memory, &io::Error::last_os_error()))?;
        Ok(Self { domain: Arc::clone(domain), region })
    }
}

impl MemoryRegion for SystemRegion {
    fn local_key(&self) -> u32 {
        // SAFETY: registered until this is dropped.
        unsafe { self.region.as_ref() }.lkey
    }

    fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.region.as_ref() }.rkey
    }
}

impl Drop for SystemRegion {
    fn drop(&mut self) {
        let context = &self.domain.context;
        if !context.is_forked() {
            // SAFETY: registered by `new`, and nobody has the handle any more. A refusal is of a device that is gone,
            // and then it touches nothing.
            unsafe { (context.library.dereg_mr)(self.region.as_ptr()) };
        }
    }
}

/// Null with `errno` when it is refused.
///
/// # Safety
/// As for [`SystemRegion::new`].
unsafe fn register(domain: &Domain, memory: Memory<'_>, len: usize, access: Access) -> Result<*mut ibv_mr> {
    let library = domain.context.library;
    let flags = flags(access);
    match memory {
        Memory::Host { address, .. } => {
            let start = with_exposed_provenance_mut::<c_void>(address as usize);
            Ok(match library.reg_mr_iova2 {
                // SAFETY: the caller's promise.
                Some(register) => unsafe { register(domain.as_ptr(), start, len, address, flags.0) },
                // Whoever knows this function alone does not know the flag that may be ignored.
                None => {
                    let flags = self::flags(Access { relaxed_ordering: false, ..access });
                    // SAFETY: as above.
                    unsafe { (library.reg_mr)(domain.as_ptr(), start, len, number(flags)) }
                }
            })
        }
        Memory::DmaBuf { file, offset, address, .. } => {
            let register = library.reg_dmabuf_mr.ok_or_else(|| {
                let text = "libibverbs is too old to register a dma-buf: it has no ibv_reg_dmabuf_mr";
                Error::new(ErrorKind::Unsupported, text).with_advice("install rdma-core 34 or later")
            })?;
            let file = file.as_raw_fd();
            // SAFETY: the caller's promise.
            Ok(unsafe { register(domain.as_ptr(), offset, len, address, file, number(flags)) })
        }
    }
}

fn flags(access: Access) -> ibv_access_flags {
    let Access { local_write, remote_read, remote_write, relaxed_ordering } = access;
    let wanted = [
        (local_write, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
        (remote_read, ibv_access_flags::IBV_ACCESS_REMOTE_READ),
        (remote_write, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
        (relaxed_ordering, ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING),
    ];
    wanted.into_iter().filter(|(wanted, _)| *wanted).fold(ibv_access_flags(0), |all, (_, flag)| all | flag)
}

/// The flags as the older functions take them.
const fn number(flags: ibv_access_flags) -> i32 {
    flags.0.cast_signed()
}

/// Why a region was refused, with the limit that may be behind it.
fn refusal(domain: &Domain, limits: &Limits, memory: &Memory<'_>, error: &io::Error) -> Error {
    let what = match memory {
        Memory::Host { .. } => "host memory",
        Memory::DmaBuf { .. } => "a dma-buf",
    };
    let len = memory.len();
    let what = format!("registering {len} bytes of {what} at {:#x}", memory.address());
    let (kind, advice) = match Errno::from_io_error(error) {
        Some(Errno::NOMEM | Errno::AGAIN | Errno::PERM) => (ErrorKind::LimitReached, memlock_advice(limits)),
        _ if len > limits.region_bytes => (
            ErrorKind::LimitReached,
            format!("the device takes at most {} bytes a region", limits.region_bytes),
        ),
        Some(Errno::NOSPC | Errno::MFILE) => {
            (ErrorKind::LimitReached, format!("the device has {} regions at most", limits.regions))
        }
        Some(Errno::FAULT) => (ErrorKind::Unsupported, unreachable_advice(memory)),
        Some(Errno::OPNOTSUPP | Errno::NOSYS) => {
            (ErrorKind::Unsupported, "neither kernel nor driver can do this for such memory".to_owned())
        }
        _ => return domain.context.refused(&what, error),
    };
    Error::new(kind, format!("{what}: {error}")).with_device(&*domain.context.name).with_advice(advice)
}

/// What to do where memory may not be pinned.
pub(super) fn memlock_advice(limits: &Limits) -> String {
    advice_within(memlock_limit(), limits.regions)
}

/// The same under a limit of locked memory, of a device with so many regions.
fn advice_within(limit: Option<u64>, regions: u32) -> String {
    match limit {
        Some(bytes) => format!(
            "RLIMIT_MEMLOCK is {bytes} bytes: raise it by `ulimit -l unlimited` before the start, \
             `LimitMEMLOCK=infinity` in a systemd unit or `--ulimit memlock=-1` for a container, or give the \
             process CAP_IPC_LOCK; the device has {regions} regions at most"
        ),
        None => format!(
            "RLIMIT_MEMLOCK is unlimited: it is the device, which has {regions} regions at most, or the system, \
             which has no memory to pin"
        ),
    }
}

fn unreachable_advice(memory: &Memory<'_>) -> String {
    match memory {
        Memory::Host { .. } => {
            "the range must be mapped, and writable unless only peers' READs are allowed; a GPU's memory \
                                needs the module nvidia_peermem, or is registered as a dma-buf"
        }
        Memory::DmaBuf { .. } => "the exporter does not let this device reach the memory",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_access_has_its_flag() {
        let all = Access { local_write: true, remote_read: true, remote_write: true, relaxed_ordering: true };
        assert_eq!(flags(all).0, 0x10_0007);
        assert_eq!(flags(Access { remote_read: true, ..Access::default() }).0, 4);
        assert_eq!(flags(Access::default()).0, 0);
    }

    #[test]
    fn what_to_do_about_pinned_memory_names_the_limit_and_the_remedies() {
        let advice = advice_within(Some(65536), 77);
        for part in ["65536 bytes", "ulimit -l unlimited", "CAP_IPC_LOCK", "77 regions"] {
            assert!(advice.contains(part), "{part} is missing in {advice}");
        }
        let advice = advice_within(None, 77);
        assert!(advice.contains("77 regions") && !advice.contains("ulimit"), "{advice}");
    }
}
