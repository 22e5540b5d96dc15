//! Facts about this host, from sysfs and procfs (`proc(5)`), tolerant of their absence.

use std::fs;

use rustix::process::{Resource, getrlimit};

/// The size of a base page, in bytes.
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// The size of a transparent huge page, in bytes; `None` where the kernel has none.
pub fn huge_page_size() -> Option<usize> {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok()?;
    text.trim().parse().ok().filter(|size: &usize| size.is_power_of_two())
}

/// The size of a page reserved in hugetlbfs, in bytes (the default size, where there are several); `None`
/// where the kernel has none.
pub fn hugetlb_page_size() -> Option<usize> {
    usize::try_from(meminfo_field("Hugepagesize")?).ok().filter(|size| size.is_power_of_two())
}

/// Bytes that this process may lock into memory (`RLIMIT_MEMLOCK`, the soft limit); `None` when unlimited.
///
/// A process with `CAP_IPC_LOCK` may pass the limit.
pub fn memlock_limit() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

/// Bytes that can be allocated without swapping (`MemAvailable` of `/proc/meminfo`), if that is known.
pub fn available_memory() -> Option<u64> {
    meminfo_field("MemAvailable")
}

/// Bytes that this process has locked now, if that is known.
pub(crate) fn memlock_used() -> Option<u64> {
    field_bytes(&fs::read_to_string("/proc/self/status").ok()?, "VmLck")
}

fn meminfo_field(name: &str) -> Option<u64> {
    field_bytes(&fs::read_to_string("/proc/meminfo").ok()?, name)
}

/// The value of a `Name:  123 kB` line, in bytes.
fn field_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_by_their_whole_name() {
        let text = "HugePages_Total:       0\nHugepagesize:       2048 kB\nMemAvailable:   12 kB\n";
        assert_eq!(field_bytes(text, "Hugepagesize"), Some(2 << 20));
        assert_eq!(field_bytes(text, "MemAvailable"), Some(12 << 10));
        assert_eq!(field_bytes(text, "Mem"), None);
        assert_eq!(field_bytes(text, "HugePages_Total"), None, "a count is no size");
        assert_eq!(field_bytes("", "MemAvailable"), None);
    }

    #[cfg(not(miri))]
    #[test]
    fn the_page_size_is_a_power_of_two() {
        assert!(page_size().is_power_of_two());
    }

    #[cfg(not(miri))]
    #[test]
    fn huge_pages_are_larger_than_base_pages() {
        for size in [huge_page_size(), hugetlb_page_size()].into_iter().flatten() {
            assert!(size > page_size() && size.is_multiple_of(page_size()), "{size}");
        }
    }
}
