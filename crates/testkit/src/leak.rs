//! What a process has open, before and after.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use posthorse_core::Deadline;

/// How the names of threads begin.
const THREAD: &str = "thread ";

/// A count of what this process has open: file descriptors, threads and mappings of files, by name.
///
/// It counts the whole process: use it where nothing else runs, as in [`peer::isolated`](crate::peer::isolated).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeakCheck {
    open: BTreeMap<String, usize>,
}

impl LeakCheck {
    /// Counts what is open now.
    pub fn begin() -> Self {
        let mut open = BTreeMap::new();
        let mut count = |name: String| *open.entry(name).or_insert(0) += 1;
        let names = |folder: &str| {
            let entries = fs::read_dir(folder).expect("/proc is mounted");
            entries.flatten().map(|entry| entry.path()).collect::<Vec<_>>()
        };
        for fd in names("/proc/self/fd") {
            // The descriptor by which the folder was read is gone by now.
            if let Ok(target) = fs::read_link(fd) {
                count(format!("file descriptor of {}", without_number(&target)));
            }
        }
        for task in names("/proc/self/task") {
            if let Ok(name) = fs::read_to_string(task.join("comm")) {
                count(format!("{THREAD}{}", name.trim_end()));
            }
        }
        for line in fs::read_to_string("/proc/self/maps").expect("/proc is mounted").lines() {
            // Anonymous memory belongs to the allocator, which keeps what it has had.
            if let Some(name) = line.split_whitespace().nth(5).filter(|name| !name.starts_with('[')) {
                count(format!("mapping of {name}"));
            }
        }
        Self { open }
    }

    /// What has been opened since and is still open, by name, with how many.
    pub fn leaked(&self) -> Vec<String> {
        self.leaked_by(&Self::begin())
    }

    fn leaked_by(&self, now: &Self) -> Vec<String> {
        let before = |name: &str| self.open.get(name).copied().unwrap_or(0);
        // A thread bears its parent's name until it begins to run: one that was renamed is no new one.
        let same_threads = now.threads() <= self.threads();
        let more = |(name, count): (&String, &usize)| {
            let more = count.saturating_sub(before(name));
            (more > 0 && !(same_threads && name.starts_with(THREAD))).then(|| format!("{more} x {name}"))
        };
        now.open.iter().filter_map(more).collect()
    }

    fn threads(&self) -> usize {
        self.open.iter().filter(|(name, _)| name.starts_with(THREAD)).map(|(_, count)| count).sum()
    }

    /// Fails if anything that has been opened since is still open at the deadline.
    ///
    /// # Panics
    /// With the names of what has leaked.
    pub fn assert_clean(&self, deadline: Deadline) {
        // A thread that was joined stays in the table for a moment, and the kernel tells nobody when it goes.
        loop {
            let leaked = self.leaked();
            if leaked.is_empty() {
                return;
            }
            assert!(!deadline.is_past(Instant::now()), "leaked: {}", leaked.join(", "));
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// `socket:[4711]` is a socket: sockets and pipes are told apart by numbers that never come again.
fn without_number(target: &Path) -> String {
    let text = target.to_string_lossy();
    text.split_once(":[").map_or_else(|| text.to_string(), |(kind, _)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_that_takes_its_name_late_is_no_new_one() {
        let count = |names: &[&str]| {
            let mut open = BTreeMap::new();
            names.iter().for_each(|name| *open.entry((*name).to_owned()).or_insert(0) += 1);
            LeakCheck { open }
        };
        let before = count(&["thread parent", "thread parent", "thread worker"]);
        assert_eq!(before.leaked_by(&count(&["thread parent", "thread worker", "thread worker"])), [""; 0]);
        let grown = count(&["thread parent", "thread parent", "thread worker", "thread worker"]);
        assert_eq!(before.leaked_by(&grown), ["1 x thread worker"]);
    }

    /// Other tests run beside this one: it looks only for what it opens itself.
    #[test]
    fn what_is_open_is_named_and_what_was_closed_is_not() {
        let check = LeakCheck::begin();
        let (leave, left) = mpsc::channel::<()>();
        let (begin, begun) = mpsc::channel();
        let work = move || {
            begin.send(()).unwrap();
            left.recv()
        };
        let thread = thread::Builder::new().name("leak-probe".into()).spawn(work).unwrap();
        // A thread takes its name when it begins.
        begun.recv().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("leak-probe-file");
        let file = fs::File::create_new(&path).unwrap();
        let name = |what: &str| format!("1 x {what}");
        let leaked = check.leaked();
        assert!(leaked.contains(&name("thread leak-probe")), "{leaked:?}");
        assert!(leaked.contains(&name(&format!("file descriptor of {}", path.display()))), "{leaked:?}");

        drop(file);
        drop(leave);
        thread.join().unwrap().unwrap_err();
        let deadline = Deadline::after(Duration::from_secs(10));
        while check.leaked().iter().any(|name| name.contains("leak-probe")) {
            assert!(!deadline.is_past(Instant::now()));
            thread::yield_now();
        }
    }
}
