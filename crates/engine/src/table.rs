//! The submissions in flight, by the upper half of their pieces' tokens.

use std::sync::Arc;

use parking_lot::RwLock;
use posthorse_core::{Error, ErrorKind, Result};

use crate::submission::Submission;

const INDEX_BITS: u32 = 20;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;

/// A slab whose keys carry a generation, so that a token of an ended submission finds nothing.
#[derive(Debug, Default)]
pub(crate) struct Table {
    slots: RwLock<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    entries: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    submission: Option<Arc<Submission>>,
}

impl Slots {
    /// Takes a place, and returns its key.
    fn reserve(&mut self) -> Result<u32> {
        let count = self.entries.len();
        let index = match self.free.pop() {
            Some(index) => index,
            None if count > INDEX_MASK as usize => {
                let text = format!("{count} submissions are in flight, which is the most there can be");
                return Err(Error::new(ErrorKind::QueueFull, text));
            }
            None => {
                self.entries.push(Slot::default());
                count as u32
            }
        };
        let generation = self.entries.get(index as usize).map_or(0, |slot| slot.generation);
        Ok((generation << INDEX_BITS) | index)
    }
}

impl Table {
    /// Makes a submission under a fresh key and keeps it.
    pub(crate) fn insert(&self, make: impl FnOnce(u32) -> Submission) -> Result<Arc<Submission>> {
        let key = self.slots.write().reserve()?;
        // A large submission takes a while to make: not under the lock.
        let submission = Arc::new(make(key));
        if let Some(slot) = self.slots.write().entries.get_mut((key & INDEX_MASK) as usize) {
            slot.submission = Some(Arc::clone(&submission));
        }
        Ok(submission)
    }

    /// The submission of this key, unless it has ended.
    pub(crate) fn get(&self, key: u32) -> Option<Arc<Submission>> {
        let slots = self.slots.read();
        let slot = slots.entries.get((key & INDEX_MASK) as usize)?;
        slot.submission.as_ref().filter(|submission| submission.key == key).map(Arc::clone)
    }

    /// Forgets a submission that has ended.
    pub(crate) fn remove(&self, key: u32) {
        let mut slots = self.slots.write();
        let index = key & INDEX_MASK;
        let Some(slot) = slots.entries.get_mut(index as usize) else { return };
        if slot.submission.as_ref().is_none_or(|submission| submission.key != key) {
            return;
        }
        slot.generation = (slot.generation + 1) & (u32::MAX >> INDEX_BITS);
        let ended = slot.submission.take();
        slots.free.push(index);
        drop(slots);
        // The last reference may be this one, and dropping it is not the table's business.
        drop(ended);
    }

    /// All submissions in flight.
    pub(crate) fn live(&self) -> Vec<Arc<Submission>> {
        let slots = self.slots.read();
        slots.entries.iter().filter_map(|slot| slot.submission.as_ref()).map(Arc::clone).collect()
    }

    /// How many submissions are in flight.
    pub(crate) fn len(&self) -> usize {
        let slots = self.slots.read();
        slots.entries.len() - slots.free.len()
    }
}
