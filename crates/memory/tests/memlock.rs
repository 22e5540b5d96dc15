//! Page-locking at its limit. Alone in its process, since it lowers the limit of the whole of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use posthorse_core::ErrorKind;
use posthorse_memory::{MemoryOptions, memlock_limit};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

#[test]
fn a_lock_beyond_the_limit_is_refused_by_its_name() {
    const LIMIT: u64 = 64 << 10;
    // Root passes any limit by this capability, which belongs to the thread.
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();
    let maximum = getrlimit(Resource::Memlock).maximum;
    let current = maximum.map_or(LIMIT, |maximum| maximum.min(LIMIT));
    setrlimit(Resource::Memlock, Rlimit { current: Some(current), maximum }).unwrap();
    assert_eq!(memlock_limit(), Some(current));

    for shared in [false, true] {
        let options = MemoryOptions::new(4 << 20).locked(true).shared(shared);
        let error = options.allocate().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitReached, "{error}");
        let text = error.to_string();
        for part in ["4194304", "RLIMIT_MEMLOCK", &current.to_string(), "ulimit -l", "LimitMEMLOCK=infinity"]
        {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
        options.locked(false).allocate().unwrap();
    }
    if current >= 16 << 10 {
        let memory = MemoryOptions::new(8 << 10).locked(true).allocate().unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let locked = status.lines().find(|line| line.starts_with("VmLck")).unwrap();
        assert!(!locked.trim_end().ends_with(" 0 kB"), "{locked}");
        drop(memory);
    }
}
