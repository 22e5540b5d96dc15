//! Two engines in one process, joined by the testkit's memory transport.

pub mod hooked;

use std::sync::Arc;
use std::time::Duration;

use posthorse_core::{
    Access, Deadline, LocalRange, Opcode, Priority, RemoteRange, Route, SegmentId, TransferRequest, Transport,
};
use posthorse_engine::{EngineConfig, RegisteredMemory, Segment, TransferEngine};
use posthorse_segment::MemoryDirectory;
use posthorse_testkit::memory::{self, HeapRegion};
use posthorse_testkit::{ControlHub, MemoryHub, pattern};

/// Where the engines of a test find each other.
#[derive(Debug, Default)]
pub struct World {
    pub hub: MemoryHub,
    pub control: ControlHub,
    pub directory: Arc<MemoryDirectory>,
}

pub fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

impl World {
    pub fn engine(&self, name: &str) -> TransferEngine {
        self.engine_by(name, self.hub.transport(), EngineConfig::default())
    }

    pub fn engine_by(
        &self,
        name: &str,
        transport: Arc<dyn Transport>,
        config: EngineConfig,
    ) -> TransferEngine {
        TransferEngine::builder()
            .directory(name, Arc::clone(&self.directory) as _, self.control.channel(name))
            .transport(transport)
            .bare()
            .config(config)
            .build()
            .unwrap()
    }
}

/// Registers a region filled with a pattern.
pub fn filled(
    engine: &TransferEngine,
    seed: u64,
    len: usize,
    access: Access,
) -> (Arc<HeapRegion>, RegisteredMemory) {
    let region = HeapRegion::new(len);
    memory::write(&*region, 0, &pattern::bytes(seed, len));
    let memory = engine.register(Arc::clone(&region) as _, access).unwrap();
    (region, memory)
}

pub fn holds(region: &HeapRegion, seed: u64, len: usize) -> bool {
    pattern::check(seed, &memory::read(region, 0, len)).is_none()
}

pub fn request(
    opcode: Opcode,
    local: LocalRange,
    segment: SegmentId,
    address: u64,
    len: u64,
) -> TransferRequest {
    TransferRequest {
        opcode,
        local,
        remote: RemoteRange { segment, address, token: None },
        len,
        priority: Priority::Medium,
        route: Route::Auto,
        group: 0,
    }
}

/// One engine writes to the other, whose memory is published.
pub struct Pair {
    pub world: World,
    pub a: TransferEngine,
    pub b: TransferEngine,
    pub to_b: Segment,
    pub source: RegisteredMemory,
    pub source_region: Arc<HeapRegion>,
    pub target: RegisteredMemory,
    pub target_region: Arc<HeapRegion>,
}

pub const SEED: u64 = 7;

impl Pair {
    pub fn new(len: usize) -> Self {
        let world = World::default();
        let transport = world.hub.transport();
        Self::over(world, transport, len, EngineConfig::default())
    }

    pub fn over(world: World, transport: Arc<dyn Transport>, len: usize, config: EngineConfig) -> Self {
        let a = world.engine_by("a", transport, config);
        let b = world.engine("b");
        let (source_region, source) = filled(&a, SEED, len, Access::None);
        let (target_region, target) = filled(&b, 0, len, Access::ReadWrite);
        let to_b = a.open("b", soon()).unwrap();
        Self { world, a, b, to_b, source, source_region, target, target_region }
    }

    pub fn write(&self, offset: u64, len: u64) -> TransferRequest {
        let address = self.target.address() + offset;
        request(Opcode::Write, self.source.at(offset), self.to_b.id(), address, len)
    }

    pub fn read(&self, offset: u64, len: u64) -> TransferRequest {
        TransferRequest { opcode: Opcode::Read, ..self.write(offset, len) }
    }

    pub fn arrived(&self, len: usize) -> bool {
        holds(&self.target_region, SEED, len)
    }
}
