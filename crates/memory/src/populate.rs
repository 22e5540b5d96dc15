//! Making pages present before first use.
//!
//! A fault costs more than copying the page that it brings. Memory is populated by extents the size of a
//! huge page: the first base page of an extent is made present and the rest collapsed onto it
//! (`MADV_COLLAPSE`, Linux 6.1), which makes huge pages even of a memfd and even where the system makes none
//! by itself. What cannot be collapsed is populated in base pages (`MADV_POPULATE_WRITE`, Linux 5.14), and
//! where there is not even that, each page is touched.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use posthorse_core::{Error, ErrorKind, Result};

use crate::limits::page_size;
use crate::mapping::{Advice, Mapping};

/// Extent where no huge pages are asked for.
const BASE_EXTENT: usize = 16 << 20;
/// Below this a second thread costs more than it saves.
const BYTES_PER_THREAD: usize = 64 << 20;
/// More threads than this only contend for the locks of the kernel's memory management.
const MAX_THREADS: usize = 4;

/// What population achieved.
#[derive(Debug, Default)]
pub(crate) struct Populated {
    /// Bytes that now lie on huge pages, as far as the kernel said so.
    pub(crate) huge_bytes: usize,
    /// Why some extent could not be collapsed.
    pub(crate) not_huge: Option<io::Error>,
}

/// Makes the first `len` bytes of `mapping` present, on huge pages of `huge` bytes if given. Never changes
/// what the memory holds.
pub(crate) fn populate(
    mapping: &Mapping,
    len: usize,
    writable: bool,
    huge: Option<usize>,
) -> Result<Populated> {
    let work = Work {
        mapping,
        len,
        advice: if writable { Advice::PopulateWrite } else { Advice::PopulateRead },
        huge,
        next: AtomicUsize::new(0),
        collapse: AtomicBool::new(huge.is_some()),
        huge_bytes: AtomicUsize::new(0),
        not_huge: Mutex::new(None),
    };
    let helpers = threads_for(len, thread::available_parallelism().map_or(1, usize::from)) - 1;
    thread::scope(|scope| {
        let helpers: Vec<_> = (0..helpers)
            .filter_map(|_| {
                thread::Builder::new().name("populate".into()).spawn_scoped(scope, || work.run()).ok()
            })
            .collect();
        let own = work.run();
        helpers.into_iter().map(|helper| helper.join().unwrap_or(Ok(()))).fold(own, Result::and)
    })
    .map_err(|error| failure(len, &error))?;
    Ok(Populated {
        huge_bytes: work.huge_bytes.into_inner(),
        not_huge: work.not_huge.into_inner().unwrap_or_else(PoisonError::into_inner),
    })
}

fn threads_for(len: usize, processors: usize) -> usize {
    (len / BYTES_PER_THREAD).clamp(1, processors.clamp(1, MAX_THREADS))
}

fn failure(len: usize, error: &io::Error) -> Error {
    // A fault that cannot be served is reported as EFAULT where a touch would have been a SIGBUS.
    let short = matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EFAULT));
    let kind = if short { ErrorKind::OutOfMemory } else { ErrorKind::Io };
    Error::new(kind, format!("populating {len} bytes: {error}"))
}

struct Work<'a> {
    mapping: &'a Mapping,
    len: usize,
    advice: Advice,
    huge: Option<usize>,
    next: AtomicUsize,
    collapse: AtomicBool,
    huge_bytes: AtomicUsize,
    not_huge: Mutex<Option<io::Error>>,
}

impl Work<'_> {
    fn run(&self) -> io::Result<()> {
        let extent = self.huge.unwrap_or(BASE_EXTENT);
        loop {
            let offset = self.next.fetch_add(extent, Ordering::Relaxed);
            if offset >= self.len {
                return Ok(());
            }
            let len = extent.min(self.len - offset);
            // A last extent that is shorter than a huge page stays in base pages.
            if len < extent || !self.collapse_extent(offset, len) {
                self.populate_extent(offset, len)?;
            }
        }
    }

    fn collapse_extent(&self, offset: usize, len: usize) -> bool {
        if !self.collapse.load(Ordering::Relaxed) {
            return false;
        }
        // Populated by advice and not by a touch, so that a lack of memory is an error and not a signal.
        let collapsed = self
            .mapping
            .advise(offset, page_size(), self.advice)
            .and_then(|()| self.mapping.advise(offset, len, Advice::Collapse));
        match collapsed {
            Ok(()) => {
                self.huge_bytes.fetch_add(len, Ordering::Relaxed);
                true
            }
            Err(error) => {
                if error.raw_os_error() == Some(libc::EINVAL) {
                    // Not this extent alone: the kernel does not know the call, or not for such memory.
                    self.collapse.store(false, Ordering::Relaxed);
                }
                *self.not_huge.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                false
            }
        }
    }

    fn populate_extent(&self, offset: usize, len: usize) -> io::Result<()> {
        match self.mapping.advise(offset, len, self.advice) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.mapping.touch(offset, len, page_size())
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_few_and_worth_their_start() {
        assert_eq!(threads_for(1, 64), 1);
        assert_eq!(threads_for(1 << 30, 1), 1);
        assert_eq!(threads_for(1 << 30, 2), 2);
        assert_eq!(threads_for(1 << 30, 64), MAX_THREADS);
        assert_eq!(threads_for(usize::MAX, 0), 1, "an unknown number of processors is one");
    }

    #[cfg(not(miri))]
    #[test]
    fn population_keeps_the_contents_and_reaches_every_page() {
        use crate::mapping::Backing;
        use posthorse_core::HostView;
        let page = page_size();
        let huge = 2 << 20;
        for (len, huge) in
            [(3 * page, None), (3 * page, Some(huge)), (2 * huge + page, Some(huge)), (huge, None)]
        {
            let mapping = Mapping::new(len, huge.unwrap_or(page), Backing::Anonymous).unwrap();
            // SAFETY: nobody else knows of this mapping.
            let bytes = unsafe { HostView::new(mapping.base(), len).bytes_mut() };
            bytes[0] = 7;
            populate(&mapping, len, true, huge).unwrap();
            assert!(bytes[0] == 7 && bytes[len - 1] == 0);
            let mut resident = vec![0_u8; len / page];
            // SAFETY: the range is mapped and the vector has a byte for each of its pages.
            let status = unsafe { libc::mincore(bytes.as_mut_ptr().cast(), len, resident.as_mut_ptr()) };
            assert_eq!(status, 0);
            assert!(resident.iter().all(|page| page & 1 == 1));
        }
    }
}
