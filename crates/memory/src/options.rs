//! What to ask of an allocation.

use posthorse_core::Result;

use crate::host::HostMemory;

/// Which pages should back a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Pages {
    /// The base pages of the system alone (4 KiB on most).
    Base,
    /// Transparent huge pages wherever the kernel can make them, base pages elsewhere.
    #[default]
    Transparent,
    /// Pages that the administrator reserved in hugetlbfs; transparent ones, with a
    /// [`Notice`](crate::Notice), when there are too few.
    HugeTlb,
}

/// How a [`HostMemory`] region is to be allocated.
///
/// By default: private to the process, transparent huge pages, populated, not locked, on any node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct MemoryOptions {
    pub(crate) size: usize,
    pub(crate) pages: Pages,
    pub(crate) shared: bool,
    pub(crate) locked: bool,
    pub(crate) node: Option<u16>,
    pub(crate) populate: bool,
}

impl MemoryOptions {
    /// A region of `size` bytes.
    pub const fn new(size: usize) -> Self {
        Self { size, pages: Pages::Transparent, shared: false, locked: false, node: None, populate: true }
    }

    /// Which pages should back it.
    pub const fn pages(mut self, pages: Pages) -> Self {
        self.pages = pages;
        self
    }

    /// Whether it is a memfd that other processes may map, sealed so that nobody can resize it.
    pub const fn shared(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }

    /// Whether its pages are locked into memory (`mlock(2)`). Locked memory is populated too.
    pub const fn locked(mut self, locked: bool) -> Self {
        self.locked = locked;
        self
    }

    /// The NUMA node its pages must come from (`mbind(2)` with `MPOL_BIND`).
    pub const fn node(mut self, node: u16) -> Self {
        self.node = Some(node);
        self
    }

    /// Whether every page is made present before the call returns, which is far cheaper than at first touch.
    pub const fn populate(mut self, populate: bool) -> Self {
        self.populate = populate;
        self
    }

    /// Allocates the region, zeroed.
    ///
    /// # Errors
    /// `InvalidArgument` for a size of zero or one that cannot be addressed, or a node that does not exist;
    /// `OutOfMemory` when the system has no memory for it; `LimitReached` when locking it would pass
    /// `RLIMIT_MEMLOCK`; `Io` when the system refuses for another reason.
    pub fn allocate(&self) -> Result<HostMemory> {
        HostMemory::allocate(self)
    }
}
