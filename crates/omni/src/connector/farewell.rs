//! Messages that need no answer, but have to go out before the connector closes: that a get has ended.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use posthorse_core::Deadline;

/// Counts messages on their way.
#[derive(Debug, Default)]
pub(super) struct Farewells {
    under_way: Mutex<usize>,
    changed: Condvar,
}

/// A message on its way; dropped when it was answered or given up.
#[derive(Debug)]
pub(super) struct Farewell(Arc<Farewells>);

impl Farewells {
    pub(super) fn begin(self: &Arc<Self>) -> Farewell {
        *self.under_way.lock() += 1;
        Farewell(Arc::clone(self))
    }

    /// Waits until none is under way; says whether that is so by the deadline.
    pub(super) fn wait(&self, deadline: Deadline) -> bool {
        let mut under_way = self.under_way.lock();
        while *under_way > 0 {
            match deadline.instant() {
                None => self.changed.wait(&mut under_way),
                Some(at) if self.changed.wait_until(&mut under_way, at).timed_out() => break,
                Some(_) => {}
            }
        }
        *under_way == 0
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        *self.0.under_way.lock() -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn waiting_ends_with_the_last_message_or_the_deadline() {
        let farewells = Arc::new(Farewells::default());
        assert!(farewells.wait(Deadline::NEVER));
        let (first, second) = (farewells.begin(), farewells.begin());
        drop(first);
        assert!(!farewells.wait(Deadline::after(Duration::from_millis(1))));
        let other = std::thread::spawn(move || drop(second));
        assert!(farewells.wait(Deadline::NEVER));
        other.join().unwrap();
    }
}
