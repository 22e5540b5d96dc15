//! A device of this host, opened and ready.

use std::sync::Arc;

use parking_lot::RwLock;
use posthorse_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::config::RdmaConfig;
use crate::gid::{Gid, choose};
use crate::handshake::Word;
use crate::verbs::{Access, Device, GidEntry, Link, Memory, MemoryRegion, Port, PortState, Verbs};

/// A device, its port, and the address it uses there.
#[derive(Debug)]
pub(crate) struct Rail {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) index: usize,
    gid: RwLock<GidEntry>,
    words: Words,
}

/// Two words of memory that the device knows: one that peers read, one that is read into.
#[derive(Debug)]
struct Words {
    // The order matters: the device forgets the memory before it goes.
    region: Arc<dyn MemoryRegion>,
    memory: Box<[u64; 2]>,
}

/// What is published of a rail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RailDesc {
    pub(crate) name: String,
    pub(crate) lid: u16,
    pub(crate) gid: String,
    /// Bytes per second; zero when unknown.
    #[serde(default)]
    pub(crate) bandwidth: u64,
}

impl Rail {
    /// Opens a device. Its port need not be up: it may come up later.
    pub(crate) fn open(verbs: &dyn Verbs, name: &str, index: usize, config: &RdmaConfig) -> Result<Self> {
        let device = verbs.open(name)?;
        let named = |error: Error| error.with_device(name);
        let gids = device.gids(config.port).map_err(named)?;
        let gid = choose(&gids, config.gid_index).map_err(named)?.clone();
        let words = Words::new(&*device)?;
        Ok(Self { device, index, gid: RwLock::new(gid), words })
    }

    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }

    pub(crate) fn gid(&self) -> Gid {
        self.gid.read().gid
    }

    /// Looks at the port's addresses again: they may have changed since.
    pub(crate) fn choose_again(&self, config: &RdmaConfig) -> Result<()> {
        let gids = self.device.gids(config.port)?;
        *self.gid.write() = choose(&gids, config.gid_index)?.clone();
        Ok(())
    }

    pub(crate) fn gid_index(&self) -> u8 {
        self.gid.read().index
    }

    pub(crate) fn port(&self, config: &RdmaConfig) -> Result<Port> {
        self.device.port(config.port)
    }

    /// Why its port carries nothing, if so.
    pub(crate) fn down(&self, config: &RdmaConfig) -> Option<Error> {
        match self.port(config) {
            Ok(port) if port.state == PortState::Active => None,
            Ok(_) => Some(port_down(self.name(), config.port)),
            Err(error) => Some(error.with_device(self.name())),
        }
    }

    pub(crate) fn desc(&self, config: &RdmaConfig) -> Result<RailDesc> {
        let port = self.port(config)?;
        Ok(RailDesc {
            name: self.name().to_owned(),
            lid: port.lid,
            gid: self.gid().to_string(),
            bandwidth: port.bandwidth,
        })
    }

    /// This end of a connection to a port of `mtu`.
    pub(crate) fn link(&self, config: &RdmaConfig, port: &Port, mtu: u32) -> Link {
        Link {
            port: config.port,
            gid_index: self.gid_index(),
            pkey_index: config.pkey_index,
            mtu: config.mtu.min(port.mtu).min(mtu),
            reads: config.reads.min(self.device.limits().reads).max(1),
            service_level: config.service_level,
            traffic_class: config.traffic_class,
            hop_limit: config.hop_limit,
            timeout: config.ack_timeout,
            retries: config.retries,
            receiver_retries: config.retries,
        }
    }

    /// The word that peers read.
    pub(crate) fn word(&self) -> Word {
        Word { address: self.words.address(0), key: self.words.region.remote_key() }
    }

    /// Where a peer's word is read into: address and key.
    pub(crate) fn scratch(&self) -> (u64, u32) {
        (self.words.address(1), self.words.region.local_key())
    }
}

/// The error of what was to go by a port that is down.
pub(crate) fn port_down(device: &str, port: u8) -> Error {
    Error::new(ErrorKind::PathFailed, format!("port {port} of the device is down")).with_device(device)
}

impl Words {
    fn new(device: &dyn Device) -> Result<Self> {
        let memory = Box::new([0_u64; 2]);
        let address = memory.as_ptr().expose_provenance() as u64;
        let access = Access { local_write: true, remote_read: true, ..Access::default() };
        let host = Memory::Host { address, len: size_of::<[u64; 2]>() as u64 };
        // SAFETY: the region is dropped before the memory, which nobody looks at.
        let region = unsafe { device.register(host, access) }?;
        Ok(Self { region, memory })
    }

    fn address(&self, word: usize) -> u64 {
        self.memory.as_ptr().expose_provenance() as u64 + (word * size_of::<u64>()) as u64
    }
}
