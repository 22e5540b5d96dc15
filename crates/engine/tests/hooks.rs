//! What an engine does when something happens in the middle of a call.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::task::{Context, Wake};
use std::thread;
use std::time::{Duration, Instant};

use posthorse_core::{
    Access, Completion, Deadline, Error, ErrorKind, FarEnd, Level, Path, PathId, PathState, Result, Route,
    SegmentDesc, Slice, SliceError, TransferRequest,
};
use posthorse_engine::{EngineConfig, SubmitOptions, TransferEngine};
use posthorse_segment::Directory;
use posthorse_testkit::memory::HeapRegion;
use posthorse_testkit::{MemoryHub, assert_in_forked_child};
use support::hooked::Hooked;
use support::{Pair, World, soon};

fn options() -> SubmitOptions {
    SubmitOptions { deadline: soon(), ..SubmitOptions::default() }
}

fn until(what: &str, done: impl Fn() -> bool) {
    let late = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < late, "{what}");
        thread::yield_now();
    }
}

fn failed() -> Error {
    Error::new(ErrorKind::PathFailed, "the hook")
}

/// A path that no transport has, and which is down.
fn down_path(id: u64) -> Path {
    Path {
        id: PathId(id),
        local_device: String::new(),
        remote_device: String::new(),
        numa_node: None,
        bandwidth: 0,
        state: PathState::Down(failed()),
    }
}

/// A pair whose engine `a` goes by a hooked transport.
fn pair(hook: impl FnOnce(&mut Hooked)) -> (Pair, Arc<Hooked>) {
    let world = World::default();
    let mut hooked = Hooked::new(world.hub.transport(), "memory");
    hook(&mut hooked);
    let hooked = Arc::new(hooked);
    let config = EngineConfig { retry_after_ms: 1, ..EngineConfig::default() };
    (Pair::over(world, Arc::clone(&hooked) as _, 1 << 16, config), hooked)
}

/// A second transport, `better`, between the engines of a pair, which is preferred.
fn with_better(hook: impl FnOnce(&mut Hooked)) -> (Pair, Arc<Hooked>) {
    let world = World::default();
    let hub = MemoryHub::new();
    let order = vec!["better".to_owned(), "memory".to_owned()];
    // What failed is tried again whenever it is asked for.
    let config = EngineConfig { transport_order: order, retry_after_ms: 0, ..EngineConfig::default() };
    let mut hooked = Hooked::new(hub.transport(), "better");
    hook(&mut hooked);
    let hooked = Arc::new(hooked);
    let a = world.engine_by("a", world.hub.transport(), config);
    a.install(Arc::clone(&hooked) as _).unwrap();
    let b = world.engine("b");
    b.install(Arc::new(Hooked::new(hub.transport(), "better"))).unwrap();
    let (source_region, source) = support::filled(&a, support::SEED, 1 << 16, Access::None);
    let (target_region, target) = support::filled(&b, 0, 1 << 16, Access::ReadWrite);
    let to_b = a.open("b", soon()).unwrap();
    (Pair { world, a, b, to_b, source, source_region, target, target_region }, hooked)
}

fn write(pair: &Pair, route: Route) -> Result<()> {
    let mut batch = pair.a.batch();
    batch.submit(&[TransferRequest { route, ..pair.write(0, 4096) }], options())?;
    batch.wait(soon())
}

#[test]
fn a_run_that_is_put_back_while_its_path_goes_down_takes_another() {
    let (pair, _) = pair(|hooked| {
        hooked.submit = Some(Box::new(|call, path, _, events| match call {
            // Full, so that the run is queued; full again, when the path goes down at the same time.
            0 => Some(Ok(0)),
            1 => {
                events.path_changed(path, &PathState::Down(failed()));
                Some(Ok(0))
            }
            _ => None,
        }));
    });
    write(&pair, Route::Auto).unwrap();
    assert!(pair.arrived(4096));
}

#[test]
fn a_path_that_comes_up_again_is_used_without_connecting() {
    let (pair, hooked) = pair(|hooked| {
        hooked.submit = Some(Box::new(|call, path, _, events| {
            if call == 0 {
                events.path_changed(path, &PathState::Down(failed()));
                events.path_changed(path, &PathState::Up);
            }
            None
        }));
    });
    for _ in 0..3 {
        write(&pair, Route::Auto).unwrap();
    }
    assert_eq!(hooked.connected.load(Ordering::SeqCst), 1);
}

#[test]
fn a_notice_outlives_a_path_that_is_down_and_a_queue_that_is_full() {
    let (pair, hooked) = pair(|hooked| {
        hooked.notify = Some(Box::new(|call, path, _| match call {
            0..8 => Some(Err(Error::new(ErrorKind::QueueFull, "the hook"))),
            // Whatever is sent by the first path, since nobody says that it is down.
            _ => (path == PathId(1)).then(|| Err(failed())),
        }));
    });
    pair.a.notify(&pair.to_b, b"hello", soon()).unwrap();
    assert_eq!(pair.b.notifications().len(), 1);
    assert_eq!(hooked.connected.load(Ordering::SeqCst), 2, "the path was made again");
}

#[test]
fn a_notice_that_finds_no_room_ends_at_its_deadline() {
    let (pair, _) = pair(|hooked| {
        hooked.notify = Some(Box::new(|_, _, _| Some(Err(Error::new(ErrorKind::QueueFull, "the hook")))));
    });
    let deadline = Deadline::after(Duration::from_millis(50));
    let error = pair.a.notify(&pair.to_b, b"hello", deadline).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
}

#[test]
fn a_segment_that_could_not_be_opened_can_be_later_and_leaves_no_path_behind() {
    let world = World::default();
    let open = Arc::new(AtomicBool::new(false));
    let mut hooked = Hooked::new(world.hub.transport(), "memory");
    hooked.connect = Some(Box::new({
        let open = Arc::clone(&open);
        move |call, _, _| (!open.load(Ordering::SeqCst)).then(|| Ok(vec![down_path(1000 + call as u64)]))
    }));
    let hooked = Arc::new(hooked);
    let a = world.engine_by("a", Arc::clone(&hooked) as _, EngineConfig::default());
    let _b = world.engine("b");
    for _ in 0..5 {
        let error = a.open("b", soon()).unwrap_err();
        assert!(error.kind() == ErrorKind::NoPath && error.to_string().contains("the hook"), "{error}");
    }
    let counts = || (hooked.connected.load(Ordering::SeqCst), hooked.disconnected.load(Ordering::SeqCst));
    assert_eq!(counts(), (5, 5), "each open tries, and gives up what cannot be used");
    open.store(true, Ordering::SeqCst);
    a.open("b", soon()).unwrap();
    assert_eq!(counts(), (6, 5));
}

/// A path of a hook's, which is up.
fn up_path(id: u64) -> Path {
    Path { state: PathState::Up, ..down_path(id) }
}

#[test]
fn a_path_that_stays_down_beside_another_is_kept_for_when_it_comes_up() {
    let (pair, hooked) = pair(|hooked| {
        hooked.connect = Some(Box::new(|call, _, _| match call {
            0 => Some(Ok(vec![up_path(1000), up_path(1001)])),
            _ => Some(Ok(vec![up_path(2000)])),
        }));
        hooked.submit = Some(Box::new(|_, _, slices, events| {
            let done = |slice: &Slice| Completion { token: slice.token, result: Ok(Level::Visible) };
            events.completed(&slices.iter().map(done).collect::<Vec<_>>());
            Some(Ok(slices.len()))
        }));
    });
    let _c = pair.world.engine("c");
    let _to_c = pair.a.open("c", soon()).unwrap();
    let down = |path| hooked.events().path_changed(PathId(path), &PathState::Down(failed()));
    down(1000);
    // The one that goes down clearly later, and has no other beside it, shows when the first was looked at.
    thread::sleep(Duration::from_millis(50));
    down(2000);
    until("the path to the other peer is given up", || hooked.disconnected.load(Ordering::SeqCst) == 1);
    hooked.events().path_changed(PathId(1000), &PathState::Up);
    down(1001);
    write(&pair, Route::Auto).unwrap();
    assert_eq!(hooked.connected.load(Ordering::SeqCst), 3, "nothing was connected anew");
    // Nor is it kept for ever.
    down(1000);
    until("both are given up", || hooked.disconnected.load(Ordering::SeqCst) == 3);
}

#[test]
fn a_path_that_was_never_up_is_given_up_with_its_peer() {
    let (pair, hooked) = pair(|hooked| {
        hooked.connect = Some(Box::new(|_, _, _| Some(Ok(vec![up_path(1000), down_path(1001)]))));
    });
    drop(pair.to_b);
    hooked.events().path_changed(PathId(1000), &PathState::Down(failed()));
    until("both are given up", || hooked.disconnected.load(Ordering::SeqCst) == 2);
}

#[test]
fn a_path_that_stays_down_is_given_up_and_its_peer_forgotten() {
    let (pair, hooked) = pair(|hooked| {
        hooked.submit = Some(Box::new(|call, path, _, events| {
            if call == 0 {
                events.path_changed(path, &PathState::Down(failed()));
            }
            (call == 0).then(|| Err(failed()))
        }));
    });
    let disconnected = || hooked.disconnected.load(Ordering::SeqCst);
    // Another takes its place.
    write(&pair, Route::Auto).unwrap();
    until("the path is given up", || disconnected() == 1);
    let (segment, id) = (pair.to_b.clone(), pair.to_b.id());
    pair.b.shutdown();
    assert!(write(&pair, Route::Auto).is_err());
    let request = pair.write(0, 1);
    until("the other is given up", || disconnected() == 2);
    // The peer is known as long as it is held.
    pair.a.plan(&[request]).unwrap();
    drop((segment, pair.to_b));
    let c = pair.world.engine("c");
    pair.a.open("c", soon()).unwrap();
    assert_eq!(
        pair.a.plan(&[request]).unwrap_err().kind(),
        ErrorKind::InvalidArgument,
        "{id:?} is forgotten"
    );
    drop(c);
}

/// A hook that waits to be let go on, and says that it is there.
fn waiting() -> (mpsc::Receiver<()>, mpsc::Sender<()>, impl Fn() + Send + Sync) {
    let (there, is_there) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let may_go = Mutex::new(may_go);
    let hook = move || {
        let _ = there.send(());
        let _ = may_go.lock().unwrap().recv();
    };
    (is_there, go, hook)
}

#[test]
fn a_segment_that_is_closed_while_it_is_connected_leaves_no_path_behind() {
    let (there, go, wait) = waiting();
    let (pair, hooked) = with_better(|hooked| {
        hooked.connect = Some(Box::new(move |call, _, _| match call {
            0 => Some(Err(failed())),
            _ => {
                wait();
                None
            }
        }));
    });
    let better = pair.a.transport_id("better").unwrap();
    let mut batch = pair.a.batch();
    let request = TransferRequest { route: Route::Require(better), ..pair.write(0, 4096) };
    batch.submit(&[request], options()).unwrap();
    there.recv().unwrap();
    pair.a.close(pair.to_b.clone());
    assert_eq!(batch.wait(soon()).unwrap_err().kind(), ErrorKind::Closed);
    go.send(()).unwrap();
    until("the path is given up", || hooked.disconnected.load(Ordering::SeqCst) == 1);
    assert_eq!(hooked.connected.load(Ordering::SeqCst), 1);
}

#[test]
fn a_better_transport_that_hangs_does_not_hold_up_what_another_carries() {
    let (there, go, wait) = waiting();
    let (pair, _) = with_better(|hooked| {
        hooked.connect = Some(Box::new(move |call, _, _| match call {
            0 => Some(Err(failed())),
            1 => {
                wait();
                None
            }
            _ => None,
        }));
    });
    write(&pair, Route::Auto).unwrap();
    there.recv().unwrap();
    write(&pair, Route::Auto).unwrap();
    assert_eq!(pair.a.best_transport(&pair.to_b, Route::Auto).unwrap().0, "memory");
    go.send(()).unwrap();
    until("the better transport is taken when it is there", || {
        pair.a.best_transport(&pair.to_b, Route::Auto).unwrap().0 == "better"
    });
}

#[test]
fn peers_that_cannot_be_connected_do_not_hold_up_what_takes_another_path() {
    const GONE: usize = 80;
    let (go, may_go) = mpsc::channel::<()>();
    let may_go = Mutex::new(may_go);
    let (pair, _) = with_better(|hooked| {
        hooked.connect = Some(Box::new(move |call, _, _| {
            if call > 0 {
                // Ends with the test.
                let _ = may_go.lock().unwrap().recv();
            }
            None
        }));
        hooked.submit = Some(Box::new(|_, path, _, events| {
            events.path_changed(path, &PathState::Down(failed()));
            Some(Err(failed()))
        }));
    });
    // Both ways are there.
    write(&pair, Route::Require(pair.a.transport_id("memory").unwrap())).unwrap();
    let of_b = pair.world.directory.lookup("b", soon()).unwrap();
    for number in 0..GONE {
        let gone = SegmentDesc { name: format!("gone {number}"), ..of_b.clone() };
        pair.world.directory.publish(&gone, soon()).unwrap();
        let error = pair.a.open(&gone.name, Deadline::at(Instant::now())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    }
    write(&pair, Route::Auto).unwrap();
    drop(go);
}

#[test]
fn a_transport_that_is_uninstalled_while_it_is_connected_is_forgotten_and_leaves_no_path_behind() {
    let (there, go, wait) = waiting();
    let (pair, hooked) = with_better(|hooked| {
        hooked.connect = Some(Box::new(move |call, _, _| {
            // Connected the first time; the second time it is uninstalled meanwhile.
            (call > 0).then(|| {
                wait();
                Ok(vec![Path { state: PathState::Up, ..down_path(77) }])
            })
        }));
    });
    let names = |pair: &Pair| {
        let known = pair.a.explain(&pair.to_b).transports;
        known.into_iter().map(|transport| transport.name).collect::<Vec<_>>()
    };
    assert_eq!(names(&pair), ["better", "memory", "local"]);
    let [better, memory] = ["better", "memory"].map(|name| pair.a.transport_id(name).unwrap());
    write(&pair, Route::Require(memory)).unwrap();
    hooked.events().path_changed(PathId(1), &PathState::Down(failed()));
    let mut batch = pair.a.batch();
    let request = TransferRequest { route: Route::Require(better), ..pair.write(0, 4096) };
    batch.submit(&[request], options()).unwrap();
    there.recv().unwrap();
    pair.a.uninstall("better").unwrap();
    assert_eq!(batch.wait(soon()).unwrap_err().kind(), ErrorKind::NoPath, "it waits for nothing any more");
    go.send(()).unwrap();
    until("both paths are given up", || hooked.disconnected.load(Ordering::SeqCst) == 2);
    assert_eq!(hooked.connected.load(Ordering::SeqCst), 2);
    assert_eq!(names(&pair), ["memory", "local"]);
    write(&pair, Route::Auto).unwrap();
}

#[test]
fn a_thread_that_helps_its_batch_ends_what_is_past_its_deadline() {
    let (there, go, wait) = waiting();
    let (pair, _) = pair(|hooked| {
        let tokens = Arc::new(Mutex::new(Vec::new()));
        let posted = Arc::clone(&tokens);
        hooked.submit = Some(Box::new(move |_, _, slices, _| {
            posted.lock().unwrap().extend(slices.iter().map(|slice| slice.token));
            Some(Ok(slices.len()))
        }));
        hooked.help = Some(Box::new(|| true));
        hooked.cancel = Some(Box::new(move |which, events| {
            let is_ticker = thread::current().name() == Some("engine-ticker");
            if is_ticker {
                wait();
            }
            let called_off: Vec<u64> = tokens.lock().unwrap().extract_if(.., |token| which(*token)).collect();
            let error = Error::new(ErrorKind::Cancelled, "the hook");
            let result = Err(SliceError { error, far_end: FarEnd::Quiet });
            let of = |token| Completion { token, result: result.clone() };
            events.completed(&called_off.into_iter().map(of).collect::<Vec<_>>());
        }));
    });
    let submit = || {
        let mut batch = pair.a.batch();
        let deadline = Deadline::after(Duration::from_millis(20));
        batch.submit(&[pair.write(0, 64)], SubmitOptions { deadline, ..options() }).unwrap();
        batch
    };
    // The engine's own clock, which would end it too, is held up by another batch.
    let other = submit();
    there.recv().unwrap();
    let batch = submit();
    let outcome = batch.wait(soon());
    let done = batch.is_done();
    drop(go);
    assert!(done, "{outcome:?}");
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(other.wait(soon()).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
}

#[test]
fn a_shutdown_ends_whoever_waits_for_a_connection() {
    let (there, go, wait) = waiting();
    let world = World::default();
    let mut hooked = Hooked::new(world.hub.transport(), "memory");
    hooked.connect = Some(Box::new(move |_, _, _| {
        wait();
        None
    }));
    let config = EngineConfig { fence_timeout_ms: 50, ..EngineConfig::default() };
    let a = world.engine_by("a", Arc::new(hooked), config);
    let _b = world.engine("b");
    thread::scope(|scope| {
        let open = scope.spawn(|| a.open("b", Deadline::NEVER).map(drop));
        there.recv().unwrap();
        a.shutdown();
        assert_eq!(open.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
        go.send(()).unwrap();
    });
}

#[test]
fn a_second_shutdown_returns_when_the_engine_is_down() {
    let (there, go, wait) = waiting();
    let world = World::default();
    let mut hooked = Hooked::new(world.hub.transport(), "memory");
    hooked.stop = Some(Box::new(wait));
    let a = world.engine_by("a", Arc::new(hooked), EngineConfig::default());
    let is_down = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            a.shutdown();
            assert!(is_down.load(Ordering::SeqCst));
        });
        there.recv().unwrap();
        let (done, is_done) = mpsc::channel();
        let a = &a;
        scope.spawn(move || {
            a.shutdown();
            done.send(()).unwrap();
        });
        // What is waited for is that nothing happens.
        let early = is_done.recv_timeout(Duration::from_millis(50));
        assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout), "the engine is not down yet");
        is_down.store(true, Ordering::SeqCst);
        go.send(()).unwrap();
        is_done.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(world.directory.lookup("a", soon()).is_err(), "the name is withdrawn");
    });
}

/// Shuts an engine down when it is woken.
struct ShutDown(TransferEngine, AtomicUsize);

impl Wake for ShutDown {
    fn wake(self: Arc<Self>) {
        self.0.shutdown();
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_waker_may_shut_the_engine_down_while_that_is_shut_down() {
    let (pair, _) = pair(|hooked| hooked.submit = Some(Box::new(|_, _, _, _| Some(Ok(0)))));
    let mut batch = pair.a.batch();
    batch.submit(&[pair.write(0, 64)], SubmitOptions::default()).unwrap();
    let waker = Arc::new(ShutDown(pair.a.clone(), AtomicUsize::new(0)));
    let mut done = std::pin::pin!(batch.done());
    let pending = done.as_mut().poll(&mut Context::from_waker(&Arc::clone(&waker).into()));
    assert!(pending.is_pending());
    pair.a.shutdown();
    assert_eq!(waker.1.load(Ordering::SeqCst), 1, "it was woken, and did not wait for itself");
}

#[test]
fn transports_installed_at_once_get_numbers_of_their_own() {
    let world = World::default();
    let a = world.engine("a");
    let barrier = Barrier::new(8);
    let install = |index: usize| {
        let hooked = Arc::new(Hooked::new(MemoryHub::new().transport(), &format!("t{}", index / 2)));
        barrier.wait();
        a.install(hooked)
    };
    let ids: HashSet<_> = thread::scope(|scope| {
        let install = &install;
        let threads: Vec<_> = (0..8).map(|index| scope.spawn(move || install(index))).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap().ok()).collect()
    });
    assert_eq!(ids.len(), 4, "one of each name");
    assert_eq!(a.transports().len(), 6);
}

#[test]
fn a_transport_learns_of_memory_that_was_registered_before_it() {
    let world = World::default();
    let a = world.engine("a");
    let (_region, memory) = support::filled(&a, 1, 64, Access::Read);
    let late = Arc::new(Hooked::new(MemoryHub::new().transport(), "late"));
    a.install(Arc::clone(&late) as _).unwrap();
    assert_eq!(*late.regions.lock().unwrap(), [memory.id()]);
}

#[test]
fn memory_that_was_unregistered_is_published_no_more() {
    let world = World::default();
    let a = world.engine("a");
    let published = || world.directory.lookup("a", soon()).unwrap().buffers.len();
    let (_region, memory) = support::filled(&a, 1, 64, Access::Read);
    assert_eq!(published(), 1);
    memory.unregister(soon()).unwrap();
    until("the descriptor says so", || published() == 0);
}

#[test]
fn of_memory_registered_at_once_all_is_published() {
    let world = World::default();
    let a = world.engine("a");
    let memories: Vec<_> = thread::scope(|scope| {
        let register = || a.register(HeapRegion::new(64) as _, Access::Read).unwrap();
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(register)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let published = || world.directory.lookup("a", soon()).unwrap().buffers.len();
    assert_eq!(published(), memories.len());
    a.unregister_many(memories, soon()).unwrap();
    until("none is published", || published() == 0);
    assert_eq!(a.withheld(), 0);
}

#[test]
fn an_engine_can_be_built_shut_down_and_dropped_by_a_task() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    runtime.block_on(async {
        let world = World::default();
        world.engine("a").shutdown();
        drop(world.engine("b"));
        let taken = EngineConfig { connect_timeout_ms: 0, ..EngineConfig::default() };
        assert!(TransferEngine::builder().config(taken).build().is_err());
        // Fails after the runtime was started.
        let twice = TransferEngine::builder()
            .directory("c", Arc::clone(&world.directory) as _, world.control.channel("c"))
            .bare()
            .transport(world.hub.transport())
            .transport(world.hub.transport())
            .build();
        assert_eq!(twice.unwrap_err().kind(), ErrorKind::Busy);
    });
}

#[test]
fn a_forked_child_gets_errors_and_ends() {
    let pair = Pair::new(4096);
    let (mut done, open) = (pair.a.batch(), pair.a.batch());
    let plan = pair.a.plan(&[pair.write(0, 64)]).unwrap();
    done.submit(&[pair.write(0, 64)], options()).unwrap();
    done.wait(soon()).unwrap();
    // Taken by the child, which drops all of it; the parent keeps its own.
    let mut held = Some((pair, done, open));
    let child = || {
        let (pair, done, mut open) = held.take().unwrap();
        let forked = |outcome: Result<()>| outcome.is_err_and(|error| error.kind() == ErrorKind::Forked);
        let mut well = forked(open.submit(&[pair.write(0, 64)], options()).map(drop));
        well &= forked(open.post(&plan, options()).map(drop));
        well &= forked(open.wait(Deadline::NEVER)) && forked(pair.a.local().map(drop));
        drop((done, open));
        drop(pair);
        well
    };
    // SAFETY: the child calls nothing that needs the parent's threads, which is what is tested.
    unsafe { assert_in_forked_child(child) };
    let (pair, ..) = held.unwrap();
    write(&pair, Route::Auto).unwrap();
}
