//! The owner's side: the regions that peers may map, the grants on them, and who is touching what.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use posthorse_core::{
    Access, Deadline, Error, ErrorKind, Grant, GrantToken, HostView, Region, RegionId, RegisteredRegion,
    Result,
};
use posthorse_memory::reopen_read_only;

use crate::client::{Client, ClientProcess};
use crate::table::{Key, PeerHash, Table, Terms};

#[derive(Debug)]
struct Owned {
    region: Arc<dyn Region>,
    view: HostView,
    access: Access,
    /// No further grants or mappings; it stays listed until it is quiet.
    closing: bool,
}

#[derive(Debug)]
struct Granted {
    token: GrantToken,
    region: RegionId,
    access: Access,
    /// Dead in the table, and not yet known to be quiet.
    retired: bool,
}

#[derive(Debug, Default)]
struct State {
    regions: HashMap<RegionId, Owned>,
    /// By index of the table.
    grants: HashMap<u32, Granted>,
}

/// A region as a client gets it.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) view: HostView,
    /// Its file and the offset in it, if there is one.
    pub(crate) file: Option<(OwnedFd, u64)>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Owner {
    table: Table,
    state: Mutex<State>,
    clients: RwLock<Vec<Arc<Client>>>,
    stopping: AtomicBool,
}

const fn index_of(token: GrantToken) -> u32 {
    token.handle as u32
}

impl Owner {
    pub(crate) fn new(max_grants: u32) -> Result<Self> {
        Ok(Self {
            table: Table::new(max_grants)?,
            state: Mutex::default(),
            clients: RwLock::default(),
            stopping: AtomicBool::new(false),
        })
    }

    pub(crate) const fn table(&self) -> &Table {
        &self.table
    }

    /// Counts a client from now on. It learns of the table only afterwards, so that a grant retired before is
    /// dead to it, and one retired later waits for it.
    pub(crate) fn add_client(&self, client: &Arc<Client>) {
        self.clients.write().push(Arc::clone(client));
    }

    /// A process with one pidfd for all its clients, and how many those are.
    pub(crate) fn share_process(&self, found: ClientProcess) -> (Arc<ClientProcess>, usize) {
        let all: Vec<_> = self.clients.read().iter().map(|client| Arc::clone(client.process())).collect();
        // Not under the lock, as it takes system calls.
        let Some(known) = all.iter().find(|known| found.is(known)) else { return (Arc::new(found), 0) };
        (Arc::clone(known), all.iter().filter(|other| Arc::ptr_eq(other, known)).count())
    }

    /// Forgets the clients that were let go and are over.
    pub(crate) fn forget_gone(&self) {
        let mut gone = self.let_go();
        // Not under the lock, as it takes system calls.
        gone.retain(|client| client.is_over());
        if !gone.is_empty() {
            self.clients.write().retain(|client| !gone.iter().any(|gone| Arc::ptr_eq(gone, client)));
        }
    }

    /// The clients that were let go and are not known to be over.
    pub(crate) fn let_go(&self) -> Vec<Arc<Client>> {
        self.clients.read().iter().filter(|client| client.is_let_go()).map(Arc::clone).collect()
    }

    #[cfg(test)]
    pub(crate) fn clients(&self) -> usize {
        self.clients.read().len()
    }

    pub(crate) fn register(&self, region: &RegisteredRegion) -> Result<()> {
        let view = region.region.view().host().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "shared memory moves host memory only, and this is a device's")
        })?;
        refuse_writes_to_read_only(&*region.region, region.access)?;
        let owned = Owned { region: Arc::clone(&region.region), view, access: region.access, closing: false };
        match self.state.lock().regions.entry(region.id) {
            std::collections::hash_map::Entry::Occupied(_) => {
                Err(Error::new(ErrorKind::Overlap, format!("region {} is registered already", region.id)))
            }
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(owned);
                Ok(())
            }
        }
    }

    /// Retires every grant of a region, waits until nobody touches it, and forgets it.
    pub(crate) fn unregister(&self, region: RegionId, deadline: Deadline) -> Result<()> {
        let tokens: Vec<_> = {
            let mut state = self.state.lock();
            let Some(owned) = state.regions.get_mut(&region) else { return Ok(()) };
            owned.closing = true;
            state.grants.values().filter(|grant| grant.region == region).map(|grant| grant.token).collect()
        };
        // All at once, so that no client begins with one while another is waited for.
        for token in &tokens {
            self.retire(*token);
        }
        for token in tokens {
            self.revoke(token, deadline)?;
        }
        let forgotten = self.state.lock().regions.remove(&region);
        // Not under the lock: it may be the last that holds the memory.
        drop(forgotten);
        Ok(())
    }

    pub(crate) fn grant(&self, grant: &Grant<'_>) -> Result<()> {
        let desc = grant.desc;
        let mut state = self.state.lock();
        let owned = state.open_region(desc.region)?;
        let start = owned.view.address();
        let inside = desc
            .address
            .checked_sub(start)
            .and_then(|offset| offset.checked_add(desc.len))
            .is_some_and(|end| end <= owned.view.len() as u64);
        if !inside {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                format!(
                    "the grant of {} bytes at {:#x} leaves region {} of {} bytes at {start:#x}",
                    desc.len,
                    desc.address,
                    desc.region,
                    owned.view.len()
                ),
            ));
        }
        refuse_writes_to_read_only(&*owned.region, desc.access)?;
        if let Some(before) = state.grants.get(&index_of(desc.token)) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("{:?} would take the place of {:?}, which has not ended", desc.token, before.token),
            ));
        }
        let terms = Terms {
            region: desc.region,
            address: desc.address,
            len: desc.len,
            access: desc.access,
            peer: grant.peer.map(PeerHash::of),
        };
        self.table.publish(desc.token, &terms)?;
        let granted = Granted { token: desc.token, region: desc.region, access: desc.access, retired: false };
        state.grants.insert(index_of(desc.token), granted);
        Ok(())
    }

    /// Makes a grant dead. False when there is no such grant.
    fn retire(&self, token: GrantToken) -> bool {
        let mut state = self.state.lock();
        let Some(grant) = state.grants.get_mut(&index_of(token)).filter(|grant| grant.token == token) else {
            return false;
        };
        if !grant.retired {
            grant.retired = true;
            self.table.retire(token);
        }
        true
    }

    /// Retires a grant, and returns when no client touches memory under it any more. A grant that is not
    /// known has ended.
    pub(crate) fn revoke(&self, token: GrantToken, deadline: Deadline) -> Result<()> {
        if !self.retire(token) {
            return Ok(());
        }
        let key = Key::of(token)?;
        let clients = self.clients.read().clone();
        for client in clients {
            wait_until(deadline, "a peer to leave the memory", || !client.holds(key))?;
        }
        let mut state = self.state.lock();
        // Somebody else may have waited for the same, and the entry may be another grant's by now.
        if state.grants.get(&index_of(token)).is_some_and(|grant| grant.token == token) {
            state.grants.remove(&index_of(token));
        }
        Ok(())
    }

    /// Grants can be used again.
    pub(crate) fn begin(&self) {
        self.forget_gone();
        self.stopping.store(false, Ordering::Relaxed);
        self.table.set_stopping(false);
    }

    /// Retires everything: for the end of the transport.
    pub(crate) fn end(&self, deadline: Deadline) -> Result<()> {
        self.stopping.store(true, Ordering::Relaxed);
        self.table.set_stopping(true);
        let tokens: Vec<_> = self.state.lock().grants.values().map(|grant| grant.token).collect();
        for token in &tokens {
            self.retire(*token);
        }
        tokens.into_iter().try_for_each(|token| self.revoke(token, deadline))
    }

    /// A region for a client that holds a grant on it.
    ///
    /// # Errors
    /// `NotRegistered`; `AccessDenied` when nothing on the region lets peers write and the client wants to.
    pub(crate) fn lend(&self, id: RegionId, write: bool) -> Result<Lent> {
        let (region, view) = {
            let state = self.state.lock();
            let owned = state.open_region(id)?;
            let wanted = if write { Access::Write } else { Access::Read };
            let live = state.grants.values().filter(|grant| grant.region == id && !grant.retired);
            // Whatever a grant allows, a mapping of it can be read.
            let allowed = owned.access.allows(wanted)
                || live.map(|grant| grant.access).any(|access| access.allows(wanted) || !write);
            if !allowed && self.stopping.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::PeerGone, "the transport is stopping"));
            }
            if !allowed {
                return Err(Error::new(
                    ErrorKind::AccessDenied,
                    format!("no grant on region {id} lets a peer {}", if write { "write" } else { "read" }),
                ));
            }
            (Arc::clone(&owned.region), owned.view)
        };
        let file = match region.shared_file() {
            None => None,
            Some(file) if write => {
                let fd = file.fd.try_clone_to_owned().map_err(|error| Error::os("dup of a memfd", &error))?;
                Some((fd, file.offset))
            }
            Some(file) => Some((reopen_read_only(file.fd.as_fd())?, file.offset)),
        };
        Ok(Lent { view, file })
    }
}

impl State {
    fn open_region(&self, id: RegionId) -> Result<&Owned> {
        self.regions.get(&id).filter(|owned| !owned.closing).ok_or_else(|| not_registered(id))
    }
}

/// A peer writes past this process, which cannot stop it there.
fn refuse_writes_to_read_only(region: &dyn Region, access: Access) -> Result<()> {
    if access.allows(Access::Write) && !region.writable() {
        let value = format_args!("{access:?} of a region that is not writable");
        return Err(Error::invalid_argument("access", value, "None, Read"));
    }
    Ok(())
}

pub(crate) fn not_registered(id: RegionId) -> Error {
    Error::new(ErrorKind::NotRegistered, format!("region {id} is not registered"))
}

/// Waits for something that another process does, of which nothing wakes us: briefly by spinning, then with
/// growing pauses, since what is waited for is one copy of a piece, or as long as a lease.
pub(crate) fn wait_until(deadline: Deadline, what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let mut pause = Duration::from_micros(1);
    for round in 0_u32.. {
        if done() {
            break;
        }
        if deadline.is_past(Instant::now()) {
            return Err(Deadline::exceeded(what));
        }
        if round < 64 {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(deadline.remaining(Instant::now()).map_or(pause, |left| pause.min(left)));
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }
    Ok(())
}
