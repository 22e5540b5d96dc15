//! Software devices, and the thread of each that carries out what is posted.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};
use posthorse_core::{Error, ErrorKind, Result};

use super::memory::{Known, SoftRegion, Want, copy};
use super::queue_pairs::{Phase, Posted, QueuePair, SoftQueuePairs};
use super::{Net, Wire};
use crate::gid::GidKind;
use crate::verbs::{
    Access, Device, GidEntry, Limits, Memory, MemoryRegion, Operation, Port, PortState, QueuePairs,
    QueueSize, Status, Wakeup, WorkCompletion,
};

/// A device as its network knows it.
pub(crate) struct Core {
    net: Arc<Net>,
    wire: Arc<Wire>,
    regions: RwLock<HashMap<u32, Arc<Known>>>,
    pairs: RwLock<HashMap<u32, Arc<QueuePair>>>,
    work: Mutex<Work>,
    more: Condvar,
    happened: Mutex<VecDeque<Wakeup>>,
    something: Condvar,
}

#[derive(Debug, Default)]
struct Work {
    /// How often somebody said that there is something to do.
    rings: u64,
    over: bool,
}

/// What became of the first request of a queue pair.
enum Step {
    /// It has ended.
    Done(Status),
    /// Nobody answers: look again then.
    Silence(Instant),
}

impl Core {
    pub(super) fn start(net: Arc<Net>, wire: Arc<Wire>) -> Result<Arc<Self>> {
        let core = Arc::new(Self {
            net,
            wire,
            regions: RwLock::default(),
            pairs: RwLock::default(),
            work: Mutex::default(),
            more: Condvar::new(),
            happened: Mutex::default(),
            something: Condvar::new(),
        });
        let device = Arc::downgrade(&core);
        std::thread::Builder::new()
            .name(format!("soft-{}", core.wire.name))
            .spawn(move || run(&device))
            .map_err(|error| Error::os("starting the thread of a software device", &error))?;
        Ok(core)
    }

    pub(super) fn net(&self) -> &Net {
        &self.net
    }

    pub(super) fn name(&self) -> &str {
        &self.wire.name
    }

    pub(super) fn limits(&self) -> Limits {
        self.wire.state.lock().limits
    }

    /// Has the thread look for work.
    pub(super) fn look(&self) {
        self.work.lock().rings += 1;
        self.more.notify_one();
    }

    pub(super) fn wire_changed(&self) {
        self.happen(Wakeup::PortChanged(1));
        self.look();
    }

    pub(super) fn happen(&self, what: Wakeup) {
        self.happened.lock().push_back(what);
        self.something.notify_all();
    }

    /// Announces the completions of a queue, if somebody `asked` to be told.
    pub(super) fn tell(&self, asked: bool, key: u64) {
        if asked {
            self.happen(Wakeup::Completions(key));
        }
    }

    pub(super) fn add_queue_pairs(&self, new: &[Arc<QueuePair>]) -> Result<()> {
        let limit = self.limits().queue_pairs as usize;
        let mut pairs = self.pairs.write();
        if pairs.len() + new.len() > limit {
            let text = format!("the device has {limit} queue pairs, which is the most there can be");
            return Err(Error::new(ErrorKind::LimitReached, text).with_device(self.name()));
        }
        pairs.extend(new.iter().map(|pair| (pair.number, Arc::clone(pair))));
        Ok(())
    }

    pub(super) fn remove_queue_pairs(&self, numbers: &[u32]) {
        let mut pairs = self.pairs.write();
        for number in numbers {
            pairs.remove(number);
        }
    }

    pub(super) fn forget_region(&self, key: u32) {
        self.regions.write().remove(&key);
    }

    /// Carries out one request of each queue pair that has any. Says when to look again where nobody answers, and whether
    /// there is more to do now.
    fn work(&self) -> (Option<Instant>, bool) {
        let pairs: Vec<_> = self.pairs.read().values().cloned().collect();
        let (mut again, mut more) = (None, false);
        for pair in pairs {
            // Whoever fails or destroys the queue pair waits for this.
            let _carrying = pair.carrying.lock();
            let Some(posted) = pair.sends.lock().pop_front() else { continue };
            match self.step(&pair, &posted) {
                Step::Done(status) => {
                    *pair.silent_since.lock() = None;
                    self.end(&pair, &posted, status);
                    more = true;
                }
                Step::Silence(until) => {
                    // A flush that came meanwhile has not seen it.
                    let phase = pair.phase.read();
                    if matches!(*phase, Phase::Ready { .. }) {
                        pair.sends.lock().push_front(posted);
                        again = Some(again.map_or(until, |other: Instant| other.min(until)));
                    } else {
                        drop(phase);
                        self.end(&pair, &posted, Status::Flushed);
                    }
                }
            }
        }
        (again, more)
    }

    fn end(&self, pair: &QueuePair, posted: &Posted, status: Status) {
        let mut told = false;
        let failed = status != Status::Success;
        if failed {
            *pair.phase.write() = Phase::Failed;
        }
        if failed || posted.request.signalled {
            let id = posted.request.id;
            told = pair.completions.push(WorkCompletion { id, status, ..WorkCompletion::EMPTY });
        }
        if failed {
            told |= pair.flush();
        }
        self.tell(told, pair.completions.key);
    }

    fn step(&self, pair: &QueuePair, posted: &Posted) -> Step {
        let Phase::Ready { gid, number } = *pair.phase.read() else { return Step::Done(Status::Flushed) };
        let request = &posted.request;
        let peer = match self.net.device(gid) {
            Some(peer) if !self.net.is_cut(self.wire.gid) && !self.net.is_cut(gid) => peer,
            _ => return self.silence(pair, Status::RetriesExceeded),
        };
        let Some(there) = peer.pairs.read().get(&number).cloned() else {
            return self.silence(pair, Status::RetriesExceeded);
        };
        let phase = there.phase.read();
        if *phase != (Phase::Ready { gid: self.wire.gid, number: pair.number }) {
            return self.silence(pair, Status::RetriesExceeded);
        }
        let outcome = self.carry(posted, &peer);
        if outcome == Status::RemoteAccess {
            drop(phase);
            *there.phase.write() = Phase::Failed;
            let told = there.flush();
            peer.tell(told, there.completions.key);
            return Step::Done(outcome);
        }
        if let (Operation::WriteWithImmediate(value), Status::Success) = (request.operation, outcome) {
            let Some(id) = there.receives.lock().pop_front() else {
                return self.silence(pair, Status::ReceiverNotReady);
            };
            let completion = WorkCompletion { id, immediate: Some(value), ..WorkCompletion::EMPTY };
            peer.tell(there.completions.push(completion), there.completions.key);
        }
        Step::Done(outcome)
    }

    /// Moves the bytes of a request.
    fn carry(&self, posted: &Posted, peer: &Self) -> Status {
        let request = &posted.request;
        if request.len == 0 {
            return Status::Success;
        }
        let (local, remote) = match request.operation {
            Operation::Read => (Want::LocalWrite, Want::RemoteRead),
            _ => (Want::LocalRead, Want::RemoteWrite),
        };
        let near = match &posted.inline {
            Some(_) => None,
            None => match self.regions.read().get(&request.local_key).cloned() {
                Some(near) if near.allows(local, request.local_address, request.len) => Some(near),
                _ => return Status::LocalProtection,
            },
        };
        let far = match peer.regions.read().get(&request.remote_key).cloned() {
            Some(far) if far.allows(remote, request.remote_address, request.len) => far,
            _ => return Status::RemoteAccess,
        };
        let source = posted
            .inline
            .as_ref()
            .map_or(request.local_address, |bytes| bytes.as_ptr().expose_provenance() as u64);
        let (from, to) = match request.operation {
            Operation::Read => (request.remote_address, source),
            _ => (source, request.remote_address),
        };
        // SAFETY: who registered memory keeps it allocated for as long as it is registered, which it is while it is
        // touched; bytes that were taken along are the request's own.
        let copy = || unsafe { copy(from, to, request.len) };
        let copied = far.touch(|| match &near {
            Some(near) => near.touch(copy),
            None => {
                copy();
                Some(())
            }
        });
        match copied {
            None => Status::RemoteAccess,
            Some(None) => Status::LocalProtection,
            Some(Some(())) => {
                self.wire.carried.fetch_add(request.len.into(), std::sync::atomic::Ordering::Relaxed);
                let rate = self.wire.state.lock().rate;
                if rate > 0 {
                    std::thread::sleep(Duration::from_secs_f64(f64::from(request.len) / rate as f64));
                }
                Status::Success
            }
        }
    }

    /// Nobody answers a queue pair's first request: that ends it, when it lasts.
    fn silence(&self, pair: &QueuePair, status: Status) -> Step {
        let until = *pair.silent_since.lock().get_or_insert_with(Instant::now) + self.net.patience();
        if until <= Instant::now() { Step::Done(status) } else { Step::Silence(until) }
    }
}

/// The device's thread. It ends with the device.
fn run(device: &Weak<Core>) {
    let mut heard = 0;
    let mut again = None;
    loop {
        let Some(core) = device.upgrade() else { return };
        let mut work = core.work.lock();
        // Not for long, so that a device that nobody has any more is noticed.
        let soon = Instant::now() + Duration::from_millis(50);
        while work.rings == heard && !work.over {
            let until = again.map_or(soon, |again: Instant| again.min(soon));
            if core.more.wait_until(&mut work, until).timed_out() {
                break;
            }
        }
        if work.over {
            return;
        }
        heard = work.rings;
        drop(work);
        loop {
            let (later, more) = core.work();
            again = later;
            if !more {
                break;
            }
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.work.lock().over = true;
        self.more.notify_all();
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("wire", &self.wire).finish_non_exhaustive()
    }
}

/// An open device.
#[derive(Debug)]
pub(crate) struct SoftDevice {
    core: Arc<Core>,
}

impl SoftDevice {
    pub(super) const fn new(core: Arc<Core>) -> Self {
        Self { core }
    }

    fn check_port(&self, port: u8) -> Result<()> {
        if port == 1 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NotFound, format!("the device has one port, not a port {port}"))
            .with_device(self.core.name()))
    }
}

impl Device for SoftDevice {
    fn name(&self) -> &str {
        self.core.name()
    }

    fn limits(&self) -> Limits {
        self.core.limits()
    }

    fn port(&self, port: u8) -> Result<Port> {
        self.check_port(port)?;
        let state = *self.core.wire.state.lock();
        Ok(Port {
            state: if state.cut { PortState::Down } else { PortState::Active },
            mtu: 4096,
            lid: 0,
            ethernet: true,
            bandwidth: state.rate,
            message_bytes: 1 << 30,
        })
    }

    fn gids(&self, port: u8) -> Result<Vec<GidEntry>> {
        self.check_port(port)?;
        let gid = self.core.wire.gid;
        Ok(vec![GidEntry { index: 1, gid, kind: Some(GidKind::RoceV2), interface: None }])
    }

    unsafe fn register(&self, memory: Memory<'_>, access: Access) -> Result<Arc<dyn MemoryRegion>> {
        let state = *self.core.wire.state.lock();
        let limits = state.limits;
        let refused =
            |text: String| Err(Error::new(ErrorKind::LimitReached, text).with_device(self.core.name()));
        if matches!(memory, Memory::DmaBuf { .. }) {
            let text = "software devices know host memory alone";
            return Err(Error::new(ErrorKind::Unsupported, text).with_device(self.core.name()));
        }
        if memory.len() > limits.region_bytes {
            return refused(format!(
                "a region of {} bytes; the device takes {}",
                memory.len(),
                limits.region_bytes
            ));
        }
        let mut regions = self.core.regions.write();
        if state.refuses_memory || regions.len() >= limits.regions as usize {
            return refused(format!("the device knows {} regions already", regions.len()));
        }
        let key = self.core.net.number();
        let known = Arc::new(Known::new(memory.address(), memory.len(), access));
        regions.insert(key, Arc::clone(&known));
        Ok(Arc::new(SoftRegion { key, known, device: Arc::downgrade(&self.core) }))
    }

    fn queue_pairs(&self, count: usize, size: QueueSize, key: u64) -> Result<Arc<dyn QueuePairs>> {
        Ok(Arc::new(SoftQueuePairs::new(Arc::clone(&self.core), count, size, key)?))
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<Wakeup> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut happened = self.core.happened.lock();
        loop {
            if let Some(what) = happened.pop_front() {
                return Ok(what);
            }
            match until {
                None => self.core.something.wait(&mut happened),
                Some(until) => {
                    if self.core.something.wait_until(&mut happened, until).timed_out() && happened.is_empty()
                    {
                        return Ok(Wakeup::TimedOut);
                    }
                }
            }
        }
    }

    fn wake(&self) {
        self.core.happen(Wakeup::Woken);
    }
}
