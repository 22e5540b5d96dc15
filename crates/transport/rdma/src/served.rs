//! The ends of peers' connections: queue pairs by which they reach our memory.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, Incarnation, Result};

use crate::handshake::{Close, Extension, HandshakeDesc, decode, encode, nic_path, of_nic_path};
use crate::notices;
use crate::shared::Shared;
use crate::verbs::{QueuePairs, QueueSize, Remote, Status, WorkCompletion};

/// A peer's connection: its life, and its own number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    peer: Incarnation,
    connection: u64,
}

/// Whether a peer that says nothing is there: an empty message is sent now and then, which its device acknowledges.
#[derive(Debug)]
struct Serving {
    pairs: Arc<dyn QueuePairs>,
    asked: bool,
    heard: Heard,
}

/// The last notification of a connection: a control channel may bring one twice.
#[derive(Debug, Default)]
struct Heard {
    number: u64,
    /// What became of it; `None` while that is not decided.
    outcome: Option<Result<()>>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Served {
    known: Mutex<HashMap<Key, Serving>>,
}

/// The queue pairs of a served connection take nothing but the question whether the peer is there.
const SIZE: QueueSize = QueueSize { sends: 2, receives: 1, inline_bytes: 0 };

impl Served {
    /// Answers a handshake.
    ///
    /// # Errors
    /// `Malformed`; `PeerRestarted` for one that was meant for an earlier life; `NotFound` for a device that is not here;
    /// `LimitReached`; what the device says.
    pub(crate) fn connect(&self, shared: &Shared, body: &[u8]) -> Result<Vec<u8>> {
        let desc: HandshakeDesc = decode(body)?;
        let gid = desc.check()?;
        let Some(theirs) = &desc.posthorse else {
            let text = "the handshake is not a Posthorse peer's, and this release serves no other over RDMA";
            return Err(Error::new(ErrorKind::Unsupported, text));
        };
        shared.context.hello.agree(&theirs.hello)?;
        if theirs.to.is_some_and(|meant| meant != shared.context.incarnation) {
            let text = "the handshake is meant for an earlier life of this name";
            return Err(Error::new(ErrorKind::PeerRestarted, text));
        }
        let (name, device) = of_nic_path(&desc.peer_nic_path)?;
        let rail = shared.rails.iter().find(|rail| rail.name() == device).ok_or_else(|| {
            let ours: Vec<_> = shared.rails.iter().map(|rail| rail.name()).collect();
            let text = format!("there is no device {device:?} here; there are: {}", ours.join(", "));
            Error::new(ErrorKind::NotFound, text)
        })?;
        let key = Key { peer: theirs.incarnation, connection: theirs.connection };
        // The older one of this number first: when this is answered, nothing arrives by it any more.
        let (older, count) = {
            let mut known = self.known.lock();
            (known.remove(&key), known.len())
        };
        let heard = older.map(|older| older.heard).unwrap_or_default();
        if count >= shared.config.max_served {
            let text = format!("{count} connections of peers are served, which is the most there may be");
            return Err(Error::new(ErrorKind::LimitReached, text).with_advice("raise rdma.max_served there"));
        }
        let pairs = rail.device.queue_pairs(desc.qp_num.len(), SIZE, 0)?;
        let port = rail.port(&shared.config)?;
        let link = rail.link(&shared.config, &port, theirs.mtu);
        for (queue, number) in desc.qp_num.iter().enumerate() {
            pairs.connect(queue, &link, &Remote { number: *number, gid, lid: desc.local_lid })?;
        }
        let answer = HandshakeDesc {
            local_nic_path: nic_path(name, device),
            peer_nic_path: desc.local_nic_path.clone(),
            local_lid: port.lid,
            local_gid: rail.gid().to_string(),
            qp_num: pairs.numbers().to_vec(),
            posthorse: Some(Extension {
                hello: shared.context.hello.clone(),
                incarnation: shared.context.incarnation,
                to: Some(theirs.incarnation),
                connection: theirs.connection,
                mtu: link.mtu,
                word: Some(rail.word()),
            }),
        };
        let answer = encode(&answer)?;
        let replaced = {
            let mut known = self.known.lock();
            if shared.is_stopped() {
                return Err(crate::shared::stopped());
            }
            known.insert(key, Serving { pairs, asked: false, heard })
        };
        drop(replaced);
        Ok(answer)
    }

    /// Ends connections as their peer asks. When this is answered, nothing arrives by them any more.
    pub(crate) fn close(&self, body: &[u8]) -> Result<Vec<u8>> {
        let close: Close = decode(body)?;
        let ended: Vec<Serving> = {
            let mut known = self.known.lock();
            let key = |connection: &u64| Key { peer: close.incarnation, connection: *connection };
            close.connections.iter().filter_map(|connection| known.remove(&key(connection))).collect()
        };
        drop(ended);
        Ok(b"{}".to_vec())
    }

    /// Passes a notification on, once.
    ///
    /// # Errors
    /// `Malformed`; `NotFound` for one of no connection that is served; why it was refused.
    pub(crate) fn notified(&self, shared: &Shared, from: &str, body: &[u8]) -> Result<Vec<u8>> {
        let (peer, connection, number, data) = notices::decode(body)?;
        let key = Key { peer, connection };
        {
            let mut known = self.known.lock();
            let heard = match known.get_mut(&key) {
                Some(serving) => &mut serving.heard,
                None => return Err(Error::new(ErrorKind::NotFound, "a notification of no connection")),
            };
            match (number.cmp(&heard.number), &heard.outcome) {
                (std::cmp::Ordering::Greater, _) => *heard = Heard { number, outcome: None },
                (std::cmp::Ordering::Equal, Some(outcome)) => return outcome.clone().map(|()| Vec::new()),
                _ => {
                    return Err(Error::new(
                        ErrorKind::Busy,
                        "the notification came before, and is not decided",
                    ));
                }
            }
        }
        let outcome = shared.notified(from, data);
        if let Some(serving) = self.known.lock().get_mut(&key)
            && serving.heard.number == number
        {
            serving.heard.outcome = Some(outcome.clone());
        }
        outcome.map(|()| Vec::new())
    }

    /// Looks whether the peers are there, and ends what is left of those that are not.
    pub(crate) fn look(&self) {
        let mut gone = Vec::new();
        let mut known = self.known.lock();
        known.retain(|_, serving| {
            let there = serving.look();
            if !there {
                gone.push(Arc::clone(&serving.pairs));
            }
            there
        });
        drop(known);
        // What destroys them is not done under the lock.
        drop(gone);
    }

    pub(crate) fn len(&self) -> usize {
        self.known.lock().len()
    }

    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.known.lock());
        drop(all);
    }
}

impl Serving {
    /// Whether nothing shows that the peer is gone. Asks it, unless the last question is still open.
    fn look(&mut self) -> bool {
        let mut completions = [WorkCompletion::EMPTY; 4];
        let Ok(count) = self.pairs.poll(&mut completions) else { return false };
        let heard = completions.get(..count).unwrap_or_default();
        if heard.iter().any(|completion| completion.status != Status::Success) {
            return false;
        }
        self.asked &= heard.is_empty();
        if !self.asked {
            // SAFETY: it names no memory.
            self.asked = unsafe { self.pairs.post(0, &[crate::queue::nothing(0)]) }.is_ok();
        }
        self.asked
    }
}
