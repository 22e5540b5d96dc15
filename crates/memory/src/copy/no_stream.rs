//! In place of `stream` where there are no non-temporal stores to be had: `memcpy` does well there.

/// A way of copying that this target does not have.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stream {}

impl Stream {
    pub(crate) const MIN_LEN: usize = usize::MAX;

    pub(crate) fn detect() -> Option<Self> {
        None
    }

    /// # Safety
    /// None is needed: there is no value to call this on.
    pub(crate) unsafe fn copy(self, _src: *const u8, _dst: *mut u8, _len: usize) {
        match self {}
    }

    pub(crate) fn announce(self, _src: *const u8) {
        match self {}
    }

    pub(crate) fn finish(self) {
        match self {}
    }
}
