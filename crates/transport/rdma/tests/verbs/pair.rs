//! Two devices of the VM that reach each other, each with memory and queue pairs.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_rdma::SystemVerbs;
use posthorse_rdma::verbs::{
    Access, Device, GidEntry, Link, Memory, MemoryRegion, Operation, QueuePairs, QueueSize, Remote, Status,
    Verbs, Wakeup, WorkCompletion, WorkRequest,
};

/// Longer than anything takes, in a VM on a busy host.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The key of every side's queue pairs.
pub(crate) const KEY: u64 = u64::MAX - 7;

pub(crate) const SIZE: QueueSize = QueueSize { sends: 128, receives: 16, inline_bytes: 64 };

pub(crate) const ALL: Access =
    Access { local_write: true, remote_read: true, remote_write: true, relaxed_ordering: true };

/// Whether this is the VM; if not, the test is skipped.
pub(crate) fn in_vm() -> bool {
    let here = std::env::var_os("POSTHORSE_VM").is_some();
    if !here {
        posthorse_testkit::skip("rdma-devices", "these tests run in the VM of `cargo xtask vm`");
    }
    here
}

/// Memory with its registration, which ends first.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) region: Arc<dyn MemoryRegion>,
    bytes: Box<[u8]>,
}

impl Region {
    pub(crate) fn new(device: &dyn Device, len: usize) -> Self {
        let bytes = vec![0_u8; len].into_boxed_slice();
        let memory = Memory::Host { address: bytes.as_ptr().expose_provenance() as u64, len: len as u64 };
        // SAFETY: the bytes are dropped after the registration.
        let region = unsafe { device.register(memory, ALL) }.unwrap();
        Self { region, bytes }
    }

    pub(crate) fn address(&self) -> u64 {
        self.bytes.as_ptr().expose_provenance() as u64
    }

    pub(crate) fn fill(&mut self, with: impl Fn(usize) -> u8) {
        self.bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = with(at));
    }

    /// The bytes as they are now, however the device changed them.
    pub(crate) fn copy(&self) -> Vec<u8> {
        // SAFETY: inside of the allocation.
        (0..self.bytes.len()).map(|at| unsafe { self.bytes.as_ptr().add(at).read_volatile() }).collect()
    }
}

/// One end.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) queues: Arc<dyn QueuePairs>,
    pub(crate) memory: Region,
    pub(crate) gid: GidEntry,
    pub(crate) device: Arc<dyn Device>,
}

impl Side {
    /// The device that has the address, with two queue pairs and memory.
    pub(crate) fn new(address: Ipv4Addr, len: usize) -> Self {
        let (device, gid) = device_of(address);
        let queues = device.queue_pairs(2, SIZE, KEY).unwrap();
        let memory = Region::new(&*device, len);
        Self { queues, memory, gid, device }
    }

    pub(crate) fn remote(&self, queue: usize) -> Remote {
        Remote { number: self.queues.numbers()[queue], gid: self.gid.gid, lid: 0 }
    }

    pub(crate) fn link(&self) -> Link {
        link(self.gid.index)
    }

    /// The next completion; sleeps until there is one.
    pub(crate) fn completion(&self) -> WorkCompletion {
        let end = Instant::now() + PATIENCE;
        let mut into = [WorkCompletion::EMPTY];
        loop {
            if self.queues.poll(&mut into).unwrap() == 1 {
                return into[0];
            }
            self.queues.arm().unwrap();
            if self.queues.poll(&mut into).unwrap() == 1 {
                return into[0];
            }
            let left = end.saturating_duration_since(Instant::now());
            match self.device.wait(Some(left)).unwrap() {
                Wakeup::TimedOut => panic!("no completion came"),
                Wakeup::Completions(key) => assert_eq!(key, KEY),
                _ => {}
            }
        }
    }

    /// Posts one request to queue pair 0, and returns its completion's status.
    pub(crate) fn run(&self, request: WorkRequest) -> Status {
        // SAFETY: the memory of this side is there, and nobody looks at it until the completion.
        unsafe { self.queues.post(0, &[request]) }.unwrap();
        let completion = self.completion();
        assert_eq!(completion.id, request.id);
        completion.status
    }

    /// A signalled request for all of this side's memory and as much of the peer's.
    pub(crate) fn request(&self, operation: Operation, peer: &Region) -> WorkRequest {
        WorkRequest {
            id: 0x1234_5678_9abc_def0,
            operation,
            local_address: self.memory.address(),
            len: self.memory.bytes.len() as u32,
            local_key: self.memory.region.local_key(),
            remote_address: peer.address(),
            remote_key: peer.region.remote_key(),
            signalled: true,
            inline: false,
        }
    }
}

pub(crate) const fn link(gid_index: u8) -> Link {
    Link {
        port: 1,
        gid_index,
        pkey_index: 0,
        mtu: 1024,
        reads: 16,
        service_level: 0,
        traffic_class: 0,
        hop_limit: 16,
        timeout: 14,
        retries: 6,
        receiver_retries: 7,
    }
}

/// The device that has an address.
pub(crate) fn device_of(address: Ipv4Addr) -> (Arc<dyn Device>, GidEntry) {
    let verbs = SystemVerbs::new().unwrap();
    let wanted = address.to_ipv6_mapped();
    let mut all = verbs.devices().unwrap().into_iter().map(|name| verbs.open(&name).unwrap());
    all.find_map(|device| {
        let gid = device.gids(1).unwrap().into_iter().find(|entry| Ipv6Addr::from(entry.gid.0) == wanted)?;
        Some((device, gid))
    })
    .unwrap_or_else(|| panic!("no device has the address {address}"))
}

/// Both ends of a rail of the VM, not connected.
pub(crate) fn ends(rail: u8, len: usize) -> (Side, Side) {
    (Side::new(Ipv4Addr::new(10, 77, rail, 1), len), Side::new(Ipv4Addr::new(10, 77, rail, 2), len))
}

/// Connects queue pair 0 of one to that of the other.
pub(crate) fn connect(a: &Side, b: &Side) {
    a.queues.connect(0, &a.link(), &b.remote(0)).unwrap();
    b.queues.connect(0, &b.link(), &a.remote(0)).unwrap();
}

/// Both ends of a rail, connected.
pub(crate) fn pair(rail: u8, len: usize) -> (Side, Side) {
    let (a, b) = ends(rail, len);
    connect(&a, &b);
    (a, b)
}
