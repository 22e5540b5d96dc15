//! The engine's own segment: copies within the process.

use std::sync::Arc;
use std::sync::OnceLock;

use parking_lot::{Condvar, Mutex};
use posthorse_core::{
    Access, AtWork, Capabilities, Claim, Completion, Deadline, Error, ErrorKind, FarEnd, Grants, Level,
    Opcode, Path, PathId, PathState, RegionId, RegisteredRegion, Result, SegmentDesc, Slice, SliceError,
    Transport, TransportContext, View,
};
use posthorse_memory::CopyPool;
use serde_json::Value;

/// The path there is.
const PATH: PathId = PathId(1);

/// Moves bytes between regions of this engine, by the copy engine, before `submit` returns.
#[derive(Debug)]
pub(crate) struct LocalTransport {
    context: OnceLock<TransportContext>,
    copier: Arc<CopyPool>,
    calls: Mutex<Calls>,
    returned: Condvar,
}

/// The calls that are under way.
#[derive(Debug, Default)]
struct Calls {
    under_way: usize,
    stopped: bool,
}

/// A call that is under way, until this is dropped.
struct Call<'a>(&'a LocalTransport);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.calls.lock().under_way -= 1;
        self.0.returned.notify_all();
    }
}

impl LocalTransport {
    pub(crate) const NAME: &'static str = "local";

    pub(crate) fn new(copier: Arc<CopyPool>) -> Self {
        Self { context: OnceLock::new(), copier, calls: Mutex::default(), returned: Condvar::new() }
    }

    /// # Errors
    /// `Closed` after the stop.
    fn enter(&self) -> Result<Call<'_>> {
        let mut calls = self.calls.lock();
        if calls.stopped {
            return Err(Error::new(ErrorKind::Closed, "the local transport was stopped"));
        }
        calls.under_way += 1;
        Ok(Call(self))
    }

    fn context(&self) -> Result<&TransportContext> {
        self.context.get().ok_or_else(|| Error::new(ErrorKind::Closed, "the local transport was not started"))
    }

    /// # Safety
    /// As [`Transport::submit`], for one slice.
    unsafe fn carry(&self, context: &TransportContext, slice: &Slice) -> Result<()> {
        let access = match slice.opcode {
            Opcode::Read => Access::Read,
            Opcode::Write => Access::Write,
        };
        let claim = Claim {
            peer: &context.name,
            token: slice.grant,
            address: slice.remote_address,
            len: slice.local.len(),
            access,
        };
        let admission = context.gate.admit(&claim)?;
        let (View::Host(ours), View::Host(theirs)) = (slice.local, admission.view()) else {
            return Err(Error::new(ErrorKind::Unsupported, "the local transport copies host memory alone"));
        };
        let Some(_inside) = admission.enter() else {
            return Err(Error::new(ErrorKind::AccessDenied, "the grant was revoked"));
        };
        let (from, to) = match slice.opcode {
            Opcode::Read => (theirs, ours),
            Opcode::Write => (ours, theirs),
        };
        // SAFETY: our side is alive by the caller's promise; the other is while we are inside its admission, and
        // who granted it answers for its use meanwhile (`Region`).
        unsafe { self.copier.copy(from, to) }
    }
}

impl Transport for LocalTransport {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            same_host_only: true,
            device_memory: false,
            grants: Grants::Checked,
            notify: true,
            // Both ends are the same memory bus: there is nothing on the way that could be compared.
            checksum: true,
            level: Level::Visible,
            max_slice: u64::MAX,
            preferred_slice: u64::MAX,
        }
    }

    fn start(&self, context: TransportContext) -> Result<Value> {
        let published = Value::from(context.incarnation.0);
        self.context
            .set(context)
            .map_err(|_| Error::new(ErrorKind::Busy, "the local transport was started already"))?;
        Ok(published)
    }

    fn stop(&self) {
        let mut calls = self.calls.lock();
        calls.stopped = true;
        // From within an event it may be one of these calls that waits.
        if !AtWork::is_now() {
            self.returned.wait_while(&mut calls, |calls| calls.under_way > 0);
        }
    }

    fn register(&self, _region: &RegisteredRegion) -> Result<Value> {
        Ok(Value::Null)
    }

    fn unregister(&self, _region: RegionId, _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    fn connect(&self, peer: &SegmentDesc, _deadline: Deadline) -> Result<Vec<Path>> {
        let context = self.context()?;
        if peer.incarnation != Some(context.incarnation) {
            return Err(Error::new(ErrorKind::Unsupported, "the peer is another engine"));
        }
        Ok(vec![Path {
            id: PATH,
            local_device: "memory".to_owned(),
            remote_device: "memory".to_owned(),
            numa_node: None,
            bandwidth: 0,
            state: PathState::Up,
        }])
    }

    fn disconnect(&self, _path: PathId) {}

    unsafe fn submit(&self, _path: PathId, slices: &[Slice]) -> Result<usize> {
        let context = self.context()?;
        let _call = self.enter()?;
        for slice in slices {
            // SAFETY: the caller's promise.
            let outcome = unsafe { self.carry(context, slice) };
            let result = outcome
                .map(|()| Level::Visible)
                .map_err(|error| SliceError { error, far_end: FarEnd::Quiet });
            context.events.completed(&[Completion { token: slice.token, result }]);
        }
        Ok(slices.len())
    }

    fn notify(&self, _path: PathId, token: u64, data: &[u8]) -> Result<()> {
        let context = self.context()?;
        let _call = self.enter()?;
        let result = context.events.notified(&context.name, data);
        let result =
            result.map(|()| Level::Visible).map_err(|error| SliceError { error, far_end: FarEnd::Quiet });
        context.events.completed(&[Completion { token, result }]);
        Ok(())
    }

    fn cancel(&self, _path: PathId, _which: &mut dyn FnMut(u64) -> bool) {}

    fn fence(&self, _path: PathId) {}
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;

    use posthorse_core::{Features, Hello, Incarnation, TransportEvents};
    use posthorse_segment::Registry;
    use posthorse_testkit::ControlHub;

    use super::*;

    /// A message is delivered when it is let.
    #[derive(Debug)]
    struct Slow {
        begun: mpsc::SyncSender<()>,
        go: Mutex<mpsc::Receiver<()>>,
        completed: AtomicBool,
    }

    impl TransportEvents for Slow {
        fn completed(&self, _completions: &[Completion]) {
            self.completed.store(true, Ordering::SeqCst);
        }

        fn writable(&self, _path: PathId) {}

        fn path_changed(&self, _path: PathId, _state: &PathState) {}

        fn notified(&self, _peer: &str, _data: &[u8]) -> Result<()> {
            self.begun.send(()).unwrap();
            self.go.lock().recv().unwrap();
            Ok(())
        }
    }

    #[test]
    fn a_stop_waits_for_what_is_under_way() {
        let (begun, has_begun) = mpsc::sync_channel(1);
        let (go, may_go) = mpsc::channel();
        let events = Arc::new(Slow { begun, go: Mutex::new(may_go), completed: AtomicBool::new(false) });
        let local = LocalTransport::new(Arc::new(CopyPool::new(0).unwrap()));
        let context = TransportContext {
            name: "a".into(),
            incarnation: Incarnation(1),
            hello: Hello::new(Features::NONE, None),
            gate: Arc::new(Registry::new()),
            events: Arc::clone(&events) as _,
            control: ControlHub::new().channel("a"),
        };
        local.start(context).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| local.notify(PATH, 1, b"x").unwrap());
            has_begun.recv().unwrap();
            scope.spawn(|| {
                local.stop();
                assert!(events.completed.load(Ordering::SeqCst), "it did not wait");
            });
            while !local.calls.lock().stopped {
                thread::yield_now();
            }
            assert_eq!(local.notify(PATH, 2, b"y").unwrap_err().kind(), ErrorKind::Closed);
            go.send(()).unwrap();
        });
    }
}
