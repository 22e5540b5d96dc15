//! The memory of this process that transfers may touch, and the grants that peers hold on it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use crossbeam_utils::sync::{ShardedLock, ShardedLockReadGuard, ShardedLockWriteGuard};
use posthorse_core::{
    Access, Admission, Attributes, BufferDesc, Claim, Deadline, Error, ErrorKind, Gate, GrantDesc,
    GrantToken, Location, Pin, Region, RegionId, RegisteredRegion, Result, Usage, View,
};

use crate::grants::{GrantEntry, GrantTable, denied, outside};

/// The region that was registered last. One registry's number means nothing to another, so that nobody reaches other memory
/// than he was given by handing it to the wrong engine.
static LAST: AtomicU64 = AtomicU64::new(0);

/// How much a [`Registry`] holds at the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegistryLimits {
    /// Regions, those being unregistered included.
    pub regions: usize,
    /// Grants, those of whole regions and those being revoked included.
    pub grants: usize,
}

impl Default for RegistryLimits {
    fn default() -> Self {
        Self { regions: 1 << 20, grants: 1 << 20 }
    }
}

/// What a [`Registry`] holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegistryStats {
    /// Regions, those being unregistered included.
    pub regions: usize,
    /// Grants, those of whole regions and those being revoked included.
    pub grants: usize,
    /// Grants that are closed to their holders, and not yet known to be quiet.
    pub fencing: usize,
}

/// The registered regions of a process and the grants on them: the [`Gate`] of every transport.
///
/// All regions share one address space. Host memory does by nature; so does the memory of devices whose driver
/// gives it addresses apart from the host's, as CUDA's unified addressing does.
///
/// Admitting a claim takes one shared lock for a moment, allocates nothing and, with a token, looks at one slot
/// of a table. A region or grant that is closed stays here, counted and withheld, until nobody is inside.
#[derive(Default)]
pub struct Registry {
    limits: RegistryLimits,
    tables: ShardedLock<Tables>,
}

#[derive(Default)]
struct Tables {
    regions: HashMap<RegionId, RegionEntry>,
    /// By first address; no two overlap.
    by_address: BTreeMap<u64, RegionId>,
    grants: GrantTable,
}

/// It is being unregistered once its usage is closed.
struct RegionEntry {
    registered: RegisteredRegion,
    view: View,
    location: Location,
    /// Counts the local ends of transfers; each grant counts its own.
    usage: Arc<Usage>,
    standing: Option<GrantToken>,
    grants: HashSet<GrantToken>,
    tokenless: Tokenless,
}

/// The grants of a region that need no token, by where they start. They may overlap.
#[derive(Default)]
struct Tokenless {
    by_start: BTreeSet<(u64, TokenKey)>,
    /// No grant here is longer: how far back from an address one may start that contains it.
    longest: u64,
}

/// A token by its parts, which have an order.
type TokenKey = (u64, u64);

impl Registry {
    /// An empty registry with the usual limits.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty registry with these limits.
    pub fn with_limits(limits: RegistryLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Registers a region. An `access` other than [`Access::None`] grants the whole of it to whoever reads this
    /// process's descriptor, and to peers whose protocol knows no tokens.
    ///
    /// # Errors
    /// `Overlap` with another region, naming both; `InvalidArgument` for an empty region, for one that wraps
    /// around the end of the address space, and for remote writes to memory that is not writable;
    /// `LimitReached`; `Io` when the system gives no random numbers.
    pub fn register(&self, region: Arc<dyn Region>, access: Access) -> Result<RegisteredRegion> {
        let (view, location) = (region.view(), region.location());
        let (address, len) = (view.address(), view.len());
        if len == 0 || address.checked_add(len).is_none() {
            return Err(Error::invalid_argument(
                "region",
                format_args!("{len} bytes at {address:#x}"),
                "at least one byte, not wrapping around the end of the address space",
            ));
        }
        refuse_writes_to_read_only(&*region, access)?;
        let usage = Arc::new(Usage::new(Arc::clone(&region)));
        let standing = match access {
            Access::None => None,
            _ => Some((Arc::new(Usage::new(Arc::clone(&region))), secret()?)),
        };

        let mut tables = self.write();
        if tables.regions.len() >= self.limits.regions {
            return Err(limit_reached("regions", self.limits.regions));
        }
        if let Some((other, entry)) = tables.overlapping(address, len) {
            let (at, bytes) = (entry.view.address(), entry.view.len());
            return Err(Error::new(
                ErrorKind::Overlap,
                format!(
                    "{len} bytes at {address:#x} overlap region {other}, which is {bytes} bytes at {at:#x}"
                ),
            ));
        }
        let id = RegionId(LAST.fetch_add(1, Ordering::Relaxed) + 1);
        let standing = match standing {
            None => None,
            Some((usage, secret)) => {
                let grant =
                    GrantEntry { region: id, view, access, peer: None, usage, tokenless: true, secret };
                Some(tables.insert_grant(grant, self.limits.grants)?)
            }
        };
        let registered = RegisteredRegion { id, region, access };
        tables.by_address.insert(address, id);
        tables.regions.insert(
            id,
            RegionEntry {
                registered: registered.clone(),
                view,
                location,
                usage,
                standing,
                grants: standing.into_iter().collect(),
                tokenless: Tokenless::default(),
            },
        );
        Ok(registered)
    }

    /// Closes a region and every grant on it: nobody begins to use it any more. Those inside go on.
    ///
    /// # Errors
    /// `NotRegistered`.
    pub fn close(&self, id: RegionId) -> Result<()> {
        self.write().close_region(id).map(drop).ok_or_else(|| not_registered(id))
    }

    /// Unregisters a region: closes it and every grant on it, then waits for pins and admissions to end.
    ///
    /// # Errors
    /// `NotRegistered`; `DeadlineExceeded` when somebody is still inside: the region stays closed and withheld,
    /// and it can be asked again.
    pub fn unregister(&self, id: RegionId, deadline: Deadline) -> Result<()> {
        let usages = self.write().close_region(id).ok_or_else(|| not_registered(id))?;
        for usage in &usages {
            usage
                .close_and_wait(deadline)
                .map_err(|error| error.context(format_args!("unregistering region {id}")))?;
        }
        // Dropping the last of a region frees its memory: not under the lock.
        let removed = self.write().remove_region(id);
        drop(removed);
        Ok(())
    }

    /// Holds a region for the local end of a transfer: unregistering waits until the pin is dropped.
    ///
    /// # Errors
    /// `NotRegistered`, also while it is being unregistered.
    pub fn pin(&self, id: RegionId) -> Result<Pin> {
        self.read().regions.get(&id).and_then(|entry| entry.usage.pin()).ok_or_else(|| not_registered(id))
    }

    /// The region that contains the whole range, and where in it the range starts.
    pub fn find(&self, address: u64, len: u64) -> Option<(RegionId, u64)> {
        let tables = self.read();
        let (id, entry) = tables.region_at(address)?;
        let offset = address - entry.view.address();
        (offset.checked_add(len)? <= entry.view.len()).then_some((id, offset))
    }

    /// The region of this number.
    ///
    /// # Errors
    /// `NotRegistered`, also while it is being unregistered.
    pub fn region(&self, id: RegionId) -> Result<RegisteredRegion> {
        self.read().open_region(id).map(|entry| entry.registered.clone())
    }

    /// The grant of the whole of a region that registering it made, if it did. Attributes are empty.
    ///
    /// # Errors
    /// `NotRegistered`, also while it is being unregistered.
    pub fn standing_grant(&self, id: RegionId) -> Result<Option<GrantDesc>> {
        let tables = self.read();
        let entry = tables.open_region(id)?;
        Ok(entry.standing.map(|token| GrantDesc {
            region: id,
            address: entry.view.address(),
            len: entry.view.len(),
            access: entry.registered.access,
            token,
            attributes: Attributes::new(),
        }))
    }

    /// Grants `len` bytes at `offset` of a region to whoever shows the token; only to `peer`, if one is named.
    ///
    /// # Errors
    /// `NotRegistered`; `OutOfBounds` when the range leaves the region; `InvalidArgument` for an empty range, for
    /// no access, and for remote writes to memory that is not writable; `LimitReached`; `Io` when the system
    /// gives no random numbers.
    pub fn grant(
        &self,
        region: RegionId,
        offset: u64,
        len: u64,
        access: Access,
        peer: Option<&str>,
    ) -> Result<GrantDesc> {
        self.insert(region, offset, len, access, peer, false)
    }

    /// As [`Registry::grant`], and peers whose protocol knows no tokens may use it too.
    ///
    /// # Errors
    /// As [`Registry::grant`].
    pub fn grant_tokenless(
        &self,
        region: RegionId,
        offset: u64,
        len: u64,
        access: Access,
        peer: Option<&str>,
    ) -> Result<GrantDesc> {
        self.insert(region, offset, len, access, peer, true)
    }

    fn insert(
        &self,
        region: RegionId,
        offset: u64,
        len: u64,
        access: Access,
        peer: Option<&str>,
        tokenless: bool,
    ) -> Result<GrantDesc> {
        if len == 0 {
            return Err(Error::invalid_argument("len of a grant", len, "at least one byte"));
        }
        if access == Access::None {
            return Err(Error::invalid_argument("access of a grant", "None", "Read, Write, ReadWrite"));
        }
        let memory = self.region(region)?.region;
        refuse_writes_to_read_only(&*memory, access)?;
        let view = memory.view().slice(offset, len)?;
        let usage = Arc::new(Usage::new(memory));
        let secret = secret()?;
        let grant = GrantEntry { region, view, access, peer: peer.map(Box::from), usage, tokenless, secret };

        let mut tables = self.write();
        tables.open_region(region)?;
        let token = tables.insert_grant(grant, self.limits.grants)?;
        if let Some(entry) = tables.regions.get_mut(&region) {
            entry.grants.insert(token);
            if tokenless {
                entry.tokenless.insert(view, token);
            }
        }
        Ok(GrantDesc { region, address: view.address(), len, access, token, attributes: Attributes::new() })
    }

    /// Revokes a grant: closes it to its holder, then waits for those inside.
    ///
    /// # Errors
    /// `NotFound` when there is no such grant, or no more; `DeadlineExceeded` when somebody is still inside: the
    /// grant stays closed, and it can be asked again.
    pub fn revoke(&self, token: GrantToken, deadline: Deadline) -> Result<()> {
        let handle = token.handle;
        let usage = self.write().grants.close(token).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("grant {handle:#x} was revoked before, or never made"))
        })?;
        usage
            .close_and_wait(deadline)
            .map_err(|error| error.context(format_args!("revoking grant {handle:#x}")))?;
        let removed = self.write().remove_grant(token);
        drop(removed);
        Ok(())
    }

    /// What the segment descriptor publishes: each region that peers may touch as a whole, with the token of
    /// that grant, in the order of registration. What transports publish is for the caller to add.
    pub fn published(&self) -> Vec<BufferDesc> {
        let tables = self.read();
        let open = tables.regions.iter().filter(|(_, entry)| !entry.usage.is_closed());
        let mut buffers: Vec<_> = open
            .filter_map(|(id, entry)| {
                let token = entry.standing?;
                Some(BufferDesc {
                    region: Some(*id),
                    location: entry.location,
                    address: entry.view.address(),
                    len: entry.view.len(),
                    access: entry.registered.access,
                    token: Some(token),
                    attributes: Attributes::new(),
                })
            })
            .collect();
        drop(tables);
        buffers.sort_by_key(|buffer| buffer.region);
        buffers
    }

    // The lock is sharded since every admission takes it: threads that only read share no cache line. That
    // a thread panicked while it held it is no reason to refuse everybody else from then on.
    fn read(&self) -> ShardedLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> ShardedLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much there is.
    pub fn stats(&self) -> RegistryStats {
        let tables = self.read();
        RegistryStats {
            regions: tables.regions.len(),
            grants: tables.grants.live(),
            fencing: tables.grants.fencing(),
        }
    }
}

impl Gate for Registry {
    fn admit(&self, claim: &Claim<'_>) -> Result<Admission> {
        let tables = self.read();
        let (grant, offset) = match claim.token {
            Some(token) => tables.grants.admit(claim, token)?,
            None => tables.admit_tokenless(claim)?,
        };
        let start = grant.view.address() - grant.usage.region().view().address();
        Admission::new(Arc::clone(&grant.usage), start + offset, claim.len, claim.access)
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("limits", &self.limits).field("stats", &self.stats()).finish()
    }
}

impl Tables {
    fn open_region(&self, id: RegionId) -> Result<&RegionEntry> {
        self.regions.get(&id).filter(|entry| !entry.usage.is_closed()).ok_or_else(|| not_registered(id))
    }

    /// The open region that contains the address.
    fn region_at(&self, address: u64) -> Option<(RegionId, &RegionEntry)> {
        let (_, id) = self.by_address.range(..=address).next_back()?;
        let entry = self.open_region(*id).ok()?;
        (address - entry.view.address() < entry.view.len()).then_some((*id, entry))
    }

    /// A region, open or not, that shares a byte with the range. The range does not wrap around.
    fn overlapping(&self, address: u64, len: u64) -> Option<(RegionId, &RegionEntry)> {
        // Regions do not overlap each other, so the last one that starts before the range's end is the one.
        let (start, id) = self.by_address.range(..address + len).next_back()?;
        let entry = self.regions.get(id)?;
        (start + entry.view.len() > address).then_some((*id, entry))
    }

    fn insert_grant(&mut self, grant: GrantEntry, limit: usize) -> Result<GrantToken> {
        if self.grants.live() >= limit {
            return Err(limit_reached("grants", limit));
        }
        self.grants.insert(grant)
    }

    fn remove_grant(&mut self, token: GrantToken) -> Option<GrantEntry> {
        let grant = self.grants.remove(token)?;
        if let Some(entry) = self.regions.get_mut(&grant.region) {
            entry.grants.remove(&token);
            if entry.standing == Some(token) {
                entry.standing = None;
            } else if grant.tokenless {
                entry.tokenless.remove(grant.view, token);
            }
        }
        Some(grant)
    }

    /// Closes a region and its grants, and returns what has to become quiet.
    fn close_region(&mut self, id: RegionId) -> Option<Vec<Arc<Usage>>> {
        let entry = self.regions.get(&id)?;
        entry.usage.close();
        let mut usages = vec![Arc::clone(&entry.usage)];
        usages.extend(entry.grants.iter().filter_map(|token| self.grants.close(*token)));
        Some(usages)
    }

    /// Takes out a region that is quiet, with its grants. `None` when another call has done so already.
    fn remove_region(&mut self, id: RegionId) -> Option<(RegionEntry, Vec<GrantEntry>)> {
        let entry = self.regions.remove(&id)?;
        self.by_address.remove(&entry.view.address());
        let grants = entry.grants.iter().filter_map(|token| self.grants.remove(*token)).collect();
        Some((entry, grants))
    }

    /// The grant that a claim without a token may use, and where in it the claimed range starts.
    fn admit_tokenless(&self, claim: &Claim<'_>) -> Result<(&GrantEntry, u64)> {
        let Claim { peer, address, len, access, .. } = *claim;
        let Some((id, entry)) = self.region_at(address) else {
            let why = format!("no registered region contains the {len} bytes at {address:#x}");
            return Err(Error::new(ErrorKind::NotRegistered, why).with_peer(peer));
        };
        let mut candidates = entry.standing.into_iter().chain(entry.tokenless.around(address));
        let admitted = candidates.find_map(|token| {
            let grant = self.grants.get(token)?;
            let offset = grant.offset_of(address, len)?;
            (grant.is_for(peer) && grant.access.allows(access) && !grant.usage.is_closed())
                .then_some((grant, offset))
        });
        admitted.ok_or_else(|| {
            let (start, limit) = (entry.view.address(), entry.view.len());
            if (address - start).checked_add(len).is_none_or(|end| end > limit) {
                outside(claim, format_args!("region {id}"), start, limit)
            } else {
                let why =
                    format!("{access:?} of {len} bytes at {address:#x} has no grant that needs no token");
                denied(claim, why)
            }
        })
    }
}

impl Tokenless {
    fn insert(&mut self, view: View, token: GrantToken) {
        self.by_start.insert((view.address(), (token.handle, token.secret)));
        self.longest = self.longest.max(view.len());
    }

    fn remove(&mut self, view: View, token: GrantToken) {
        self.by_start.remove(&(view.address(), (token.handle, token.secret)));
        if self.by_start.is_empty() {
            self.longest = 0;
        }
    }

    /// The grants that may contain the address, the one that starts nearest first.
    fn around(&self, address: u64) -> impl Iterator<Item = GrantToken> {
        let from = address.saturating_sub(self.longest);
        self.by_start
            .range((from, (0, 0))..=(address, (u64::MAX, u64::MAX)))
            .rev()
            .map(|(_, (handle, secret))| GrantToken { handle: *handle, secret: *secret })
    }
}

fn refuse_writes_to_read_only(region: &dyn Region, access: Access) -> Result<()> {
    if access.allows(Access::Write) && !region.writable() {
        let value = format_args!("{access:?} of a region that is not writable");
        return Err(Error::invalid_argument("access", value, "None, Read"));
    }
    Ok(())
}

fn not_registered(id: RegionId) -> Error {
    Error::new(ErrorKind::NotRegistered, format!("region {id} is not registered, or is being unregistered"))
}

fn limit_reached(what: &str, limit: usize) -> Error {
    Error::new(ErrorKind::LimitReached, format!("the registry holds {limit} {what}, its limit"))
        .with_advice("give some up, or raise the registry's limit")
}

/// What only the holders of a grant know.
fn secret() -> Result<u64> {
    getrandom::u64()
        .map_err(|error| Error::new(ErrorKind::Io, format!("drawing a grant's secret at random: {error}")))
}
