//! Verbs without hardware, within one process: for tests, and for trying things out.
//!
//! A [`Fabric`] is the network, its hosts have devices, and each device has a thread that carries out what is posted
//! there, one work request after the other as a device does. What goes wrong in a network can be brought about: links
//! that are cut, memory that cannot be registered, limits that are reached.
//!
//! ```
//! use posthorse_rdma::software::Fabric;
//! use posthorse_rdma::verbs::Verbs;
//!
//! let fabric = Fabric::new();
//! let host = fabric.host(&["soft0", "soft1"]);
//! assert_eq!(host.devices()?, ["soft0", "soft1"]);
//! # Ok::<(), posthorse_core::Error>(())
//! ```

mod device;
mod memory;
mod queue_pairs;

use std::collections::HashMap;
use std::fmt;
use std::net::Ipv6Addr;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use posthorse_core::{Error, ErrorKind, Result};

use crate::gid::Gid;
use crate::verbs::{Device, Limits, Verbs};
use device::{Core, SoftDevice};

/// How long a packet is sent again before its sender gives up, unless [`Fabric::set_patience`] says otherwise.
const PATIENCE: Duration = Duration::from_millis(20);

/// A network. A clone is another handle of the same.
#[derive(Clone)]
pub struct Fabric {
    net: Arc<Net>,
}

/// What devices share.
pub(crate) struct Net {
    ports: RwLock<HashMap<Gid, Arc<Wire>>>,
    open: RwLock<HashMap<Gid, Weak<Core>>>,
    patience: Mutex<Duration>,
    next_host: AtomicU16,
    /// Numbers of queue pairs and keys of memory are drawn from it.
    pub(crate) next_number: AtomicU32,
}

/// The end of a wire: what stays when its device is closed.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) gid: Gid,
    pub(crate) name: String,
    pub(crate) state: Mutex<WireState>,
    /// Bytes that its device has moved.
    pub(crate) carried: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct WireState {
    pub(crate) cut: bool,
    /// Bytes per second; zero for as fast as memory is copied.
    pub(crate) rate: u64,
    pub(crate) limits: Limits,
    pub(crate) refuses_memory: bool,
}

impl Default for Fabric {
    fn default() -> Self {
        Self::new()
    }
}

impl Fabric {
    /// A network without hosts.
    pub fn new() -> Self {
        let net = Net {
            ports: RwLock::default(),
            open: RwLock::default(),
            patience: Mutex::new(PATIENCE),
            next_host: AtomicU16::new(1),
            next_number: AtomicU32::new(17),
        };
        Self { net: Arc::new(net) }
    }

    /// A host with devices of these names. Those of one place in their lists are in one subnet; every device reaches every
    /// other.
    pub fn host(&self, devices: &[&str]) -> Arc<dyn Verbs> {
        let host = self.net.next_host.fetch_add(1, Ordering::Relaxed);
        let wires = devices.iter().enumerate().map(|(at, name)| {
            let gid = Gid(Ipv6Addr::new(0xfd00, 0, 0, at as u16, 0, 0, 0, host).octets());
            let limits = Limits {
                region_bytes: u64::MAX,
                regions: u32::MAX,
                queue_pairs: u32::MAX,
                work_requests: 1 << 14,
                completions: 1 << 16,
                reads: 16,
            };
            let state = WireState { cut: false, rate: 0, limits, refuses_memory: false };
            let carried = AtomicU64::new(0);
            let wire = Arc::new(Wire { gid, name: (*name).to_owned(), state: Mutex::new(state), carried });
            self.net.ports.write().insert(gid, Arc::clone(&wire));
            wire
        });
        Arc::new(Host { net: Arc::clone(&self.net), wires: wires.collect() })
    }

    /// Cuts the wires of every device of this name: nothing that is sent over them arrives.
    pub fn cut(&self, device: &str) {
        self.change(device, |state| state.cut = true);
    }

    /// Mends what was cut.
    pub fn restore(&self, device: &str) {
        self.change(device, |state| state.cut = false);
    }

    /// How many bytes a second the devices of this name carry; zero for as fast as memory is copied.
    pub fn set_rate(&self, device: &str, bytes_per_second: u64) {
        self.change(device, |state| state.rate = bytes_per_second);
    }

    /// Changes what the devices of this name can take. Those that are open say so when they are opened again.
    pub fn set_limits(&self, device: &str, change: impl Fn(&mut Limits)) {
        self.change(device, |state| change(&mut state.limits));
    }

    /// Has the devices of this name refuse memory, or take it again.
    pub fn refuse_memory(&self, device: &str, refuse: bool) {
        self.change(device, |state| state.refuses_memory = refuse);
    }

    /// How many bytes the devices of this name have moved at the request of their host.
    pub fn carried(&self, device: &str) -> u64 {
        let ports = self.net.ports.read();
        let named = ports.values().filter(|wire| wire.name == device);
        named.map(|wire| wire.carried.load(Ordering::Relaxed)).sum()
    }

    /// How long a packet that is not acknowledged is sent again.
    pub fn set_patience(&self, patience: Duration) {
        *self.net.patience.lock() = patience;
    }

    fn change(&self, device: &str, change: impl Fn(&mut WireState)) {
        let wires: Vec<_> =
            self.net.ports.read().values().filter(|wire| wire.name == device).cloned().collect();
        for wire in wires {
            change(&mut wire.state.lock());
            if let Some(core) = self.net.device(wire.gid) {
                core.wire_changed();
            }
        }
        // Whoever sends to one of them may have to look again.
        self.net.all().iter().for_each(|core| core.look());
    }
}

impl Net {
    /// The open device of an address.
    pub(crate) fn device(&self, gid: Gid) -> Option<Arc<Core>> {
        self.open.read().get(&gid).and_then(Weak::upgrade)
    }

    fn all(&self) -> Vec<Arc<Core>> {
        self.open.read().values().filter_map(Weak::upgrade).collect()
    }

    /// Whether the wire of an address is cut, or there is none.
    pub(crate) fn is_cut(&self, gid: Gid) -> bool {
        self.ports.read().get(&gid).is_none_or(|wire| wire.state.lock().cut)
    }

    pub(crate) fn patience(&self) -> Duration {
        *self.patience.lock()
    }

    pub(crate) fn number(&self) -> u32 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("ports", &self.net.ports.read().len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Net").finish_non_exhaustive()
    }
}

/// The devices of one host.
#[derive(Debug)]
struct Host {
    net: Arc<Net>,
    wires: Vec<Arc<Wire>>,
}

impl Verbs for Host {
    fn devices(&self) -> Result<Vec<String>> {
        Ok(self.wires.iter().map(|wire| wire.name.clone()).collect())
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Device>> {
        let wire =
            self.wires.iter().find(|wire| wire.name == name).ok_or_else(|| {
                Error::new(ErrorKind::NotFound, "there is no such device").with_device(name)
            })?;
        // A device that is open already is the same device with another protection domain.
        let core = match self.net.device(wire.gid) {
            Some(core) => core,
            None => {
                let core = Core::start(Arc::clone(&self.net), Arc::clone(wire))?;
                self.net.open.write().insert(wire.gid, Arc::downgrade(&core));
                core
            }
        };
        Ok(Arc::new(SoftDevice::new(core)))
    }
}
