//! What the waker of a batch may do: it may end the engine, or the very thing that calls it, on whatever thread it is
//! called.
#![cfg(all(feature = "shm", feature = "tcp"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake};
use std::thread;
use std::time::Duration;

use posthorse_core::{Access, Deadline, Error, ErrorKind, Opcode, Route, TransferRequest, TransferState};
use posthorse_engine::{
    Batch, EngineConfig, RegisteredMemory, Segment, SubmitOptions, TaskId, TransferEngine,
};
use posthorse_memory::MemoryOptions;
use posthorse_testkit::MemoryHub;
use support::hooked::Hooked;
use support::{request, soon};

const LEN: u64 = 4096;

/// Does something when it is woken first.
struct Once(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Once {
    fn wake(self: Arc<Self>) {
        let work = self.0.lock().unwrap().take();
        work.into_iter().for_each(|work| work());
    }
}

/// Two engines, the memory of the one and ways for the other to write there. What goes by the transport `stuck` does
/// not end by itself, and the transport `broken` cannot be connected.
struct Scene {
    /// The only handle of the engine that writes, until a waker takes it.
    writer: Arc<Mutex<Option<TransferEngine>>>,
    _owner: TransferEngine,
    segment: Segment,
    source: RegisteredMemory,
    target: RegisteredMemory,
}

impl Scene {
    fn new(inline_bytes: usize) -> Self {
        let hub = MemoryHub::new();
        let engine = |writes: bool| {
            let mut config = EngineConfig { advertise: "127.0.0.1".to_owned(), ..EngineConfig::default() };
            config.shm.iter_mut().for_each(|shm| (shm.inline_bytes, shm.copy_threads) = (inline_bytes, 1));
            let mut stuck = Hooked::new(hub.transport(), "stuck");
            let mut broken = Hooked::new(hub.transport(), "broken");
            if writes {
                stuck.submit = Some(Box::new(|_, _, _, _| Some(Ok(0))));
                broken.connect =
                    Some(Box::new(|_, _, _| Some(Err(Error::new(ErrorKind::NoPath, "the hook")))));
            }
            let builder = TransferEngine::builder().config(config);
            builder.transport(Arc::new(stuck)).transport(Arc::new(broken)).build().unwrap()
        };
        let (writer, owner) = (engine(true), engine(false));
        let register = |engine: &TransferEngine| {
            let memory = MemoryOptions::new(LEN as usize).shared(true).allocate().unwrap();
            engine.register(Arc::new(memory), Access::ReadWrite).unwrap()
        };
        let (source, target) = (register(&writer), register(&owner));
        let segment = writer.open(owner.name(), soon()).unwrap();
        Self { writer: Arc::new(Mutex::new(Some(writer))), _owner: owner, segment, source, target }
    }

    fn writer(&self) -> TransferEngine {
        self.writer.lock().unwrap().clone().unwrap()
    }

    fn submit(&self, batch: &mut Batch, transport: &str) {
        self.submit_until(Deadline::NEVER, batch, transport);
    }

    fn submit_until(&self, deadline: Deadline, batch: &mut Batch, transport: &str) {
        let route = Route::Require(self.writer().transport_id(transport).unwrap());
        let write = request(Opcode::Write, self.source.at(0), self.segment.id(), self.target.address(), LEN);
        let options = SubmitOptions { deadline, ..SubmitOptions::default() };
        batch.submit(&[TransferRequest { route, ..write }], options).unwrap();
    }

    /// A batch that will not end by itself, and does something as soon as anything of it does.
    fn batch(&self, work: impl FnOnce() + Send + 'static) -> Batch {
        let mut batch = self.writer().batch();
        self.submit(&mut batch, "stuck");
        let waker = Arc::new(Once(Mutex::new(Some(Box::new(work))))).into();
        let mut done = batch.done();
        let pending = Pin::new(&mut done).poll(&mut Context::from_waker(&waker));
        assert!(matches!(pending, Poll::Pending));
        // The task waits on: one whose future is dropped is not woken.
        std::mem::forget(done);
        batch
    }
}

/// What a waker does with an engine, a segment and the transport that carried the transfer, before it drops what may be
/// the last handle of the engine.
type Act = fn(&TransferEngine, Segment, &str);

const ACTS: [(&str, Act); 4] = [
    ("a shutdown", |engine, _, _| engine.shutdown()),
    ("a close", |engine, segment, _| engine.close(segment)),
    ("an uninstall", |engine, _, transport| engine.uninstall(transport).unwrap()),
    ("a drop", |_, _, _| {}),
];

/// Has a waker do each of the acts on a thread whose name begins so; `carry` has a transfer of a batch end there, and so.
fn each_act(
    transport: &'static str,
    inline_bytes: usize,
    on: &'static str,
    end: TransferState,
    carry: fn(&Scene, Batch) -> Batch,
) {
    for (name, act) in ACTS {
        let (tell, done) = mpsc::channel();
        let play = move || {
            let scene = Scene::new(inline_bytes);
            // From here on the memory is mapped: it may be written where the write is submitted.
            let mut before = scene.writer().batch();
            scene.submit(&mut before, transport);
            before.wait(soon()).unwrap();
            let (writer, segment) = (Arc::clone(&scene.writer), scene.segment.clone());
            let (tell_end, ended) = mpsc::channel();
            let batch = scene.batch(move || {
                let engine = writer.lock().unwrap().take().unwrap();
                act(&engine, segment, transport);
                drop(engine);
                tell_end.send(thread::current().name().unwrap_or_default().to_owned()).unwrap();
            });
            let batch = carry(&scene, batch);
            let thread = ended.recv().unwrap();
            assert!(thread.starts_with(on), "{name} on {thread}");
            let _ = batch.wait(soon());
            let states = [0, 1].map(|task| batch.task(TaskId(task)).unwrap().state);
            assert_eq!(states, [TransferState::Failed, end], "{name}");
            tell.send(()).unwrap();
        };
        // On another thread, so that a test whose thread hangs ends all the same.
        thread::Builder::new().name("submitter".to_owned()).spawn(play).unwrap();
        assert_eq!(done.recv_timeout(Duration::from_secs(60)), Ok(()), "{name} waits for itself");
    }
}

#[test]
fn the_waker_of_a_batch_may_end_what_calls_it_on_a_lane_of_tcp() {
    each_act("tcp", 0, "tcp-lane", TransferState::Completed, |scene, mut batch| {
        scene.submit(&mut batch, "tcp");
        batch
    });
}

#[test]
fn the_waker_of_a_batch_may_end_what_calls_it_on_a_copy_thread() {
    each_act("shm", 0, "shm-copy", TransferState::Completed, |scene, mut batch| {
        scene.submit(&mut batch, "shm");
        batch
    });
}

#[test]
fn the_waker_of_a_batch_may_end_what_calls_it_on_a_thread_that_submits() {
    each_act("shm", LEN as usize, "submitter", TransferState::Completed, |scene, mut batch| {
        scene.submit(&mut batch, "shm");
        batch
    });
}

#[test]
fn the_waker_of_a_batch_may_end_what_calls_it_on_a_thread_that_helps() {
    each_act("shm", 0, "submitter", TransferState::Completed, |scene, mut batch| {
        // The one copy thread is busy with another waker, until that of the batch is called.
        let (tell, busy) = mpsc::channel();
        let writer = Arc::clone(&scene.writer);
        let mut other = scene.batch(move || {
            tell.send(()).unwrap();
            while writer.lock().unwrap().is_some() {
                thread::yield_now();
            }
        });
        scene.submit(&mut other, "shm");
        busy.recv().unwrap();
        scene.submit(&mut batch, "shm");
        let _ = batch.wait(soon());
        batch
    });
}

#[test]
fn the_waker_of_a_batch_may_end_what_calls_it_on_the_thread_that_looks_at_deadlines() {
    each_act("tcp", 0, "engine-ticker", TransferState::Timeout, |scene, mut batch| {
        scene.submit_until(Deadline::after(Duration::from_millis(1)), &mut batch, "stuck");
        batch
    });
}

#[test]
fn the_waker_of_a_batch_may_end_what_calls_it_on_a_thread_that_connects() {
    each_act("tcp", 0, "engine-control", TransferState::Failed, |scene, mut batch| {
        scene.submit(&mut batch, "broken");
        batch
    });
}

#[test]
fn a_waker_that_panics_harms_nothing_but_its_own_task() {
    for (transport, inline_bytes) in [("tcp", 0), ("shm", 0)] {
        let scene = Scene::new(inline_bytes);
        let mut before = scene.writer().batch();
        scene.submit(&mut before, transport);
        before.wait(soon()).unwrap();
        let (tell, told) = mpsc::channel();
        let mut batch = scene.batch(move || {
            tell.send(()).unwrap();
            panic!("the waker of a test, which panics");
        });
        scene.submit(&mut batch, transport);
        told.recv().unwrap();
        for _ in 0..10 {
            let mut after = scene.writer().batch();
            scene.submit(&mut after, transport);
            after.wait(soon()).unwrap();
        }
        assert_eq!(batch.task(TaskId(1)).unwrap().state, TransferState::Completed);
    }
}
