//! What an engine makes of a directory that answers late, or not at all.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use posthorse_core::{Access, Deadline, Error, ErrorKind, Result, SegmentDesc};
use posthorse_engine::TransferEngine;
use posthorse_segment::{Directory, MemoryDirectory};
use posthorse_testkit::memory::HeapRegion;
use support::{World, soon};

/// A directory with hooks.
#[derive(Debug)]
struct Moody {
    inner: Arc<MemoryDirectory>,
    /// The next answer is kept until it is let go, and says when it is there.
    late: Mutex<Option<(mpsc::SyncSender<()>, mpsc::Receiver<()>)>>,
    refuses: AtomicBool,
}

impl Directory for Moody {
    fn publish(&self, desc: &SegmentDesc, deadline: Deadline) -> Result<()> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::PeerUnreachable, "the directory"));
        }
        self.inner.publish(desc, deadline)
    }

    fn withdraw(&self, name: &str, deadline: Deadline) -> Result<()> {
        self.inner.withdraw(name, deadline)
    }

    fn lookup(&self, name: &str, deadline: Deadline) -> Result<SegmentDesc> {
        let answer = self.inner.lookup(name, deadline);
        let late = self.late.lock().unwrap().take();
        if let Some((there, go)) = late {
            there.send(()).unwrap();
            go.recv().unwrap();
        }
        answer
    }
}

/// A world, an engine of it, and the directory that the engine asks.
fn engine() -> (World, TransferEngine, Arc<Moody>) {
    let world = World::default();
    let inner = Arc::clone(&world.directory);
    let moody = Arc::new(Moody { inner, late: Mutex::new(None), refuses: AtomicBool::new(false) });
    let engine = TransferEngine::builder()
        .directory("a", Arc::clone(&moody) as _, world.control.channel("a"))
        .transport(world.hub.transport())
        .bare()
        .build()
        .unwrap();
    (world, engine, moody)
}

#[test]
fn an_answer_that_comes_late_ends_no_newer_life_of_a_peer() {
    let (world, a, moody) = engine();
    let old = world.engine("b");
    let (there, is_there) = mpsc::sync_channel(1);
    let (go, may_go) = mpsc::channel();
    *moody.late.lock().unwrap() = Some((there, may_go));
    thread::scope(|scope| {
        let late = scope.spawn(|| a.open("b", soon()));
        is_there.recv().unwrap();
        old.shutdown();
        let new = world.engine("b");
        let segment = a.open("b", soon()).unwrap();
        go.send(()).unwrap();
        let late = late.join().unwrap().unwrap();
        assert_eq!(late.incarnation(), Some(new.incarnation()));
        assert_eq!(late.id(), segment.id());
        a.notify(&segment, b"x", soon()).unwrap();
    });
}

#[test]
fn the_first_error_of_memory_that_is_registered_at_once_is_told() {
    let (_world, a, moody) = engine();
    let region = HeapRegion::new(64);
    moody.refuses.store(true, Ordering::SeqCst);
    let error = a.register_many([Arc::clone(&region) as _, region as _], Access::Read).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overlap, "{error}");
    let error = a.register_many([HeapRegion::new(64) as _], Access::Read).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerUnreachable, "{error}");
}
