//! An open device.

use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use posthorse_core::Result;
use rdma_sys::ibv_device_attr;

use super::events::Events;
use super::handles::{Channel, Context, Domain, outcome};
use super::memory::SystemRegion;
use super::port;
use super::queue_pairs::SystemQueuePairs;
use crate::verbs::{
    Access, Device, GidEntry, Limits, Memory, MemoryRegion, Port, QueuePairs, QueueSize, Wakeup,
};

/// An open device with its protection domain.
#[derive(Debug)]
pub(super) struct SystemDevice {
    context: Arc<Context>,
    domain: Arc<Domain>,
    channel: Arc<Channel>,
    events: Events,
    limits: Limits,
    ports: u8,
}

impl SystemDevice {
    pub(super) fn new(context: Arc<Context>) -> Result<Self> {
        let attributes = query(&context).map_err(|error| context.refused("asking for its limits", &error))?;
        let domain = Domain::new(&context)?;
        let channel = Channel::new(&context)?;
        let events = Events::new(&channel)?;
        let ports = attributes.phys_port_cnt;
        Ok(Self { context, domain, channel, events, limits: limits(&attributes), ports })
    }
}

impl Device for SystemDevice {
    fn name(&self) -> &str {
        &self.context.name
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn port(&self, port: u8) -> Result<Port> {
        Ok(port::port(&port::query(&self.context, self.ports, port)?))
    }

    fn gids(&self, port: u8) -> Result<Vec<GidEntry>> {
        let attributes = port::query(&self.context, self.ports, port)?;
        Ok(port::gids(&self.context, port, attributes.gid_tbl_len))
    }

    unsafe fn register(&self, memory: Memory<'_>, access: Access) -> Result<Arc<dyn MemoryRegion>> {
        // SAFETY: the caller's promise.
        let region = unsafe { SystemRegion::new(&self.domain, &self.limits, memory, access) }?;
        Ok(Arc::new(region))
    }

    fn queue_pairs(&self, count: usize, size: QueueSize, key: u64) -> Result<Arc<dyn QueuePairs>> {
        Ok(Arc::new(SystemQueuePairs::new(&self.domain, &self.channel, &self.limits, count, size, key)?))
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<Wakeup> {
        self.events.wait(&self.channel, timeout)
    }

    fn wake(&self) {
        self.events.wake();
    }
}

fn query(context: &Context) -> io::Result<ibv_device_attr> {
    let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
    // SAFETY: the device is open, and the attributes outlive the call.
    outcome(unsafe { (context.library.query_device)(context.as_ptr(), attributes.as_mut_ptr()) })?;
    // SAFETY: numbers alone, cleared before they were filled.
    Ok(unsafe { attributes.assume_init() })
}

fn limits(attributes: &ibv_device_attr) -> Limits {
    let count = |number: i32| u32::try_from(number).unwrap_or(0);
    let reads = attributes.max_qp_rd_atom.min(attributes.max_qp_init_rd_atom).clamp(0, i32::from(u8::MAX));
    Limits {
        region_bytes: attributes.max_mr_size,
        regions: count(attributes.max_mr),
        queue_pairs: count(attributes.max_qp),
        work_requests: count(attributes.max_qp_wr),
        completions: count(attributes.max_cqe),
        reads: u8::try_from(reads).unwrap_or(u8::MAX),
    }
}
