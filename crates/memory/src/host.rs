//! Host memory that this process allocates.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use posthorse_core::{Error, ErrorKind, HostView, Location, Region, Result, SharedFile, View};

use crate::limits::{
    available_memory, huge_page_size, hugetlb_page_size, memlock_limit, memlock_used, page_size,
};
use crate::mapping::{Advice, Backing, Mapping};
use crate::memfd;
use crate::notice::Notice;
use crate::numa::{check_node, numa_nodes};
use crate::options::{MemoryOptions, Pages};
use crate::populate::{Populated, populate};

const HUGETLB_ADVICE: &str = "reserve huge pages by `sysctl vm.nr_hugepages=N` (each of the size that Hugepagesize in /proc/meminfo says)";
const TRANSPARENT_ADVICE: &str = "huge pages need Linux 6.1 or `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`, and memory \
     that is not fragmented";

/// Memory of the host that this process allocated by [`MemoryOptions`]; it is unmapped on drop.
///
/// A child of `fork` does not have the memory (`MADV_DONTFORK`): the parent is not disturbed, and a child that
/// touches it ends with a segmentation fault. [`Region::is_here`] tells the two apart.
#[derive(Debug)]
pub struct HostMemory {
    mapping: Mapping,
    size: usize,
    file: Option<OwnedFd>,
    location: Location,
    huge_bytes: usize,
    notices: Vec<Notice>,
}

/// Memory as it was obtained, before it is locked.
struct Backed {
    mapping: Mapping,
    file: Option<OwnedFd>,
    populated: Populated,
}

impl HostMemory {
    pub(crate) fn allocate(options: &MemoryOptions) -> Result<Self> {
        if options.size == 0 {
            return Err(Error::invalid_argument("the size", 0, "at least one byte"));
        }
        let nodes = options.node.map(|_| numa_nodes()).unwrap_or_default();
        if let Some(node) = options.node {
            check_node(node, &nodes)?;
        }
        if options.populate || options.locked {
            check_available(options.size, available_memory())?;
        }

        let mut notices = Vec::new();
        let hugetlb = match options.pages {
            Pages::HugeTlb => hugetlb(options, &nodes)
                .map_err(|error| notices.push(no_hugetlb_pages(options.size, &error)))
                .ok(),
            Pages::Base | Pages::Transparent => None,
        };
        let Backed { mapping, file, populated } = match hugetlb {
            Some(backed) => backed,
            None => ordinary(options, &nodes)?,
        };
        if let Some(error) = &populated.not_huge {
            notices.push(Notice::new(
                format!(
                    "{} of {} bytes are on base pages, since huge pages could not be made: {error}",
                    options.size - populated.huge_bytes.min(options.size),
                    options.size
                ),
                TRANSPARENT_ADVICE,
            ));
        }
        if options.locked {
            mapping.lock().map_err(|error| {
                lock_refusal(&error, mapping.len(), memlock_limit(), memlock_used().unwrap_or(0))
            })?;
        }
        Ok(Self {
            mapping,
            size: options.size,
            file,
            location: options.node.map_or(Location::Any, Location::Cpu),
            huge_bytes: populated.huge_bytes,
            notices,
        })
    }

    /// The memory, of the size that was asked for. It starts at a huge page's boundary, or a base page's if
    /// base pages were asked for.
    pub const fn host_view(&self) -> HostView {
        HostView::new(self.mapping.base(), self.size)
    }

    /// Bytes.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Bytes that are known to lie on huge pages, from when the region was populated.
    pub const fn huge_bytes(&self) -> usize {
        self.huge_bytes
    }

    /// What the allocation had to do without.
    pub fn notices(&self) -> &[Notice] {
        &self.notices
    }

    /// A descriptor of the file behind a shared region through which it can only be read, for a peer that is
    /// not to write. ([`Region::shared_file`] gives the one that can be written.)
    ///
    /// # Errors
    /// `Unsupported` when the region is private; `Io` when `/proc` is not mounted.
    pub fn read_only_file(&self) -> Result<OwnedFd> {
        let file = self.file.as_ref().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "the region is private to this process: there is no file to share",
            )
            .with_advice("allocate it with `MemoryOptions::shared(true)`")
        })?;
        memfd::reopen_read_only(file)
    }
}

// SAFETY: the mapping stays where it is until the value is dropped, and is readable and writable throughout.
unsafe impl Region for HostMemory {
    fn view(&self) -> View {
        View::Host(self.host_view())
    }

    fn location(&self) -> Location {
        self.location
    }

    fn is_here(&self) -> bool {
        self.mapping.is_here()
    }

    fn shared_file(&self) -> Option<SharedFile<'_>> {
        self.file.as_ref().map(|file| SharedFile { fd: file.as_fd(), offset: 0 })
    }
}

/// Memory from hugetlbfs.
fn hugetlb(options: &MemoryOptions, nodes: &[u16]) -> Result<Backed> {
    let page = hugetlb_page_size()
        .ok_or_else(|| Error::new(ErrorKind::Unsupported, "this kernel has no hugetlbfs"))?;
    let len = round_up(options.size, page)?;
    let file = if options.shared { Some(create_file(len, true)?) } else { None };
    let mapping = Mapping::new(len, page, backing(file.as_ref(), Backing::HugeTlb))?;
    bind(&mapping, options, nodes)?;
    let mut populated = Populated { huge_bytes: 0, not_huge: None };
    if options.populate || options.locked {
        // Fails, where a touch would be a SIGBUS, when a control group or a node has too few of these pages.
        populate(&mapping, len, true, None)?;
        populated.huge_bytes = len;
    }
    Ok(Backed { mapping, file, populated })
}

/// Memory in base pages or transparent huge ones.
fn ordinary(options: &MemoryOptions, nodes: &[u16]) -> Result<Backed> {
    let huge = if options.pages == Pages::Base { None } else { huge_page_size() };
    let len = round_up(options.size, page_size())?;
    let file = if options.shared { Some(create_file(len, false)?) } else { None };
    let align = huge.unwrap_or_else(page_size);
    let mapping = Mapping::new(len, align, backing(file.as_ref(), Backing::Anonymous))?;
    bind(&mapping, options, nodes)?;
    // Only a hint, and refused by kernels without transparent huge pages; what came of it is known later.
    let hint = if huge.is_some() { Advice::HugePages } else { Advice::NoHugePages };
    let _ = mapping.advise(0, len, hint);
    let populated = if options.populate || options.locked {
        populate(&mapping, len, true, huge)?
    } else {
        Populated::default()
    };
    Ok(Backed { mapping, file, populated })
}

fn backing<'a>(file: Option<&'a OwnedFd>, private: Backing<'a>) -> Backing<'a> {
    file.map_or(private, |file| Backing::File { fd: file.as_fd(), offset: 0, writable: true })
}

fn create_file(len: usize, hugetlb: bool) -> Result<OwnedFd> {
    memfd::create("posthorse", len, hugetlb)
        .map_err(|error| Error::os(&format!("creating a memfd of {len} bytes"), &error.into()))
}

fn bind(mapping: &Mapping, options: &MemoryOptions, nodes: &[u16]) -> Result<()> {
    let Some(node) = options.node else { return Ok(()) };
    match mapping.bind(node) {
        // Where there is one node, memory comes from it anyway; containers may forbid the call.
        Err(_) if nodes.len() == 1 => Ok(()),
        Err(error) => Err(Error::os(&format!("binding memory to NUMA node {node} (mbind)"), &error)
            .with_advice("allow mbind: containers need `--cap-add SYS_NICE`")),
        Ok(()) => Ok(()),
    }
}

fn round_up(size: usize, page: usize) -> Result<usize> {
    size.checked_next_multiple_of(page)
        .ok_or_else(|| Error::invalid_argument("the size", size, "what fits into the address space"))
}

fn check_available(size: usize, available: Option<u64>) -> Result<()> {
    match available {
        Some(available) if size as u64 > available => Err(Error::new(
            ErrorKind::OutOfMemory,
            format!(
                "{size} bytes were asked for and {available} are available (MemAvailable in /proc/meminfo)"
            ),
        )
        .with_advice("ask for less, or free memory first")),
        _ => Ok(()),
    }
}

fn no_hugetlb_pages(size: usize, error: &Error) -> Notice {
    let why = error.message();
    Notice::new(
        format!(
            "{size} bytes are on transparent huge pages, since those of hugetlbfs could not be had: {why}"
        ),
        HUGETLB_ADVICE,
    )
}

/// The error of an `mlock(2)` of `size` bytes that the system refused, `used` being locked before.
fn lock_refusal(error: &io::Error, size: usize, limit: Option<u64>, used: u64) -> Error {
    let needed = used.saturating_add(size as u64);
    match (error.raw_os_error(), limit) {
        (Some(libc::EPERM | libc::ENOMEM | libc::EAGAIN), Some(limit)) if needed > limit => Error::new(
            ErrorKind::LimitReached,
            format!("locking {size} bytes into memory was refused: RLIMIT_MEMLOCK is {limit} bytes, {used} of them used"),
        )
        .with_advice(format!(
            "raise the limit to at least {needed} bytes: `ulimit -l {}` before the start, `LimitMEMLOCK=infinity` \
             in a systemd unit, `--ulimit memlock=-1` for a container, or the line `* - memlock unlimited` in \
             /etc/security/limits.conf",
            needed.div_ceil(1024)
        )),
        (Some(libc::ENOMEM | libc::EAGAIN), _) => {
            Error::new(ErrorKind::OutOfMemory, format!("locking {size} bytes into memory: {error}"))
        }
        _ => Error::os(&format!("locking {size} bytes into memory (mlock)"), error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_lock_names_the_limit_and_how_to_raise_it() {
        for code in [libc::ENOMEM, libc::EPERM, libc::EAGAIN] {
            let error = lock_refusal(&io::Error::from_raw_os_error(code), 1 << 20, Some(65536), 4096);
            assert_eq!(error.kind(), ErrorKind::LimitReached);
            let text = error.to_string();
            for part in
                ["1048576", "RLIMIT_MEMLOCK is 65536", "4096 of them", "ulimit -l 1028", "LimitMEMLOCK"]
            {
                assert!(text.contains(part), "{part} is missing in {text}");
            }
        }
    }

    #[test]
    fn a_lock_that_fails_below_the_limit_is_a_lack_of_memory() {
        let error = io::Error::from_raw_os_error(libc::ENOMEM);
        assert_eq!(lock_refusal(&error, 4096, None, 0).kind(), ErrorKind::OutOfMemory);
        assert_eq!(lock_refusal(&error, 4096, Some(8192), 0).kind(), ErrorKind::OutOfMemory);
        let error = io::Error::from_raw_os_error(libc::EINVAL);
        assert_eq!(lock_refusal(&error, 4096, Some(0), 0).kind(), ErrorKind::Io);
    }

    #[test]
    fn more_than_is_available_is_refused() {
        check_available(10, Some(10)).unwrap();
        check_available(10, None).unwrap();
        let error = check_available(11, Some(10)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(error.to_string().contains("11 bytes") && error.to_string().contains("10 are available"));
    }
}
