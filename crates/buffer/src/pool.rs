//! A pool: one region of memory that is registered once and given out in blocks.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use posthorse_core::{Deadline, Error, ErrorKind, GrantToken, Location, Region, Result, View, wake_all};

use crate::allocator::{Block, DEFAULT_ALIGNMENT, OffsetAllocator};
use crate::buffer::ManagedBuffer;
use crate::queue::{Look, WaitQueue};
use crate::slot::{SlotEvent, SlotGrant, SlotState};
use crate::stats::PoolStats;
use crate::wait::{Alloc, block_on};

/// How a [`Pool`] works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// What the address of each block is a multiple of, in bytes: a power of two. Default 64.
    pub alignment: u64,
    /// How many requests may wait for space at one time. Default 1024.
    pub max_waiters: usize,
    /// How long [`Pool::alloc`] spins for its turn before the thread is parked. Default 20 µs; zero never
    /// spins.
    pub spin: Duration,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { alignment: DEFAULT_ALIGNMENT, max_waiters: 1024, spin: Duration::from_micros(20) }
    }
}

/// A slot that was withdrawn from a peer that may still write to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FencingSlot {
    /// The grant that has to be fenced.
    pub grant: SlotGrant,
    /// Where the slot starts, in bytes from the start of the pool.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// When it was withdrawn.
    pub since: Instant,
}

/// A region that is given out in blocks. Cloning makes another handle to the same pool.
///
/// Each block is given to one [`ManagedBuffer`] at a time. A buffer keeps the pool's region alive.
///
/// Requests that do not fit wait in order of arrival. A later request that fits may pass those that do not,
/// but each waiting request is passed by no more bytes than it asks for itself: small requests do not queue
/// behind large ones, and large ones are not starved by small ones.
///
/// The memory is given out as it is: what the last owner left in a block is still there.
///
/// In a child of `fork` that has not the region ([`Region::is_here`]), every request answers `Forked`, and so does
/// every buffer that is asked for its bytes; there is nothing to see in the pool, and what is dropped goes nowhere.
#[derive(Debug, Clone)]
pub struct Pool {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    region: Arc<dyn Region>,
    view: View,
    spin: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    allocator: OffsetAllocator,
    /// Its wakers are called, as they are foreign code, when the lock is let go.
    queue: WaitQueue,
    /// Withdrawn slots, by the generation of their grant.
    fencing: BTreeMap<u64, (Block, SlotState, Instant)>,
    /// Blocks whose buffers were given up for a raw handle, by offset.
    raw: HashMap<u64, Block>,
    next_grant: u64,
    granted: usize,
    refused: u64,
    timed_out: u64,
    closed: bool,
}

impl Pool {
    /// A pool over `region`, which it takes for itself: memory that nobody else gives out, in this process or
    /// (as with a mapping of another process's pool) outside it.
    ///
    /// # Errors
    /// `InvalidArgument` when the region is empty or cannot be written, when the alignment is no power of two,
    /// or when the region does not start at a multiple of it.
    pub fn new<R: Region>(region: R, config: &PoolConfig) -> Result<Self> {
        Self::over(Arc::new(region), config)
    }

    /// A pool over a region that others hold already, such as one that was registered before.
    ///
    /// # Errors
    /// As [`Pool::new`].
    ///
    /// # Safety
    /// Nobody else gives out references into the region, another pool least of all.
    pub unsafe fn from_shared(region: Arc<dyn Region>, config: &PoolConfig) -> Result<Self> {
        Self::over(region, config)
    }

    fn over(region: Arc<dyn Region>, config: &PoolConfig) -> Result<Self> {
        let view = region.view();
        let allocator = OffsetAllocator::new(view.len(), config.alignment)?;
        if !region.writable() {
            return Err(Error::invalid_argument("region", "read-only", "a region that can be written"));
        }
        if !view.address().is_multiple_of(config.alignment) {
            let value = format_args!("{}, but the region starts at {:#x}", config.alignment, view.address());
            return Err(Error::invalid_argument("alignment", value, "a divisor of the region's address"));
        }
        let state = State {
            allocator,
            queue: WaitQueue::new(config.max_waiters),
            fencing: BTreeMap::new(),
            raw: HashMap::new(),
            next_grant: 1,
            granted: 0,
            refused: 0,
            timed_out: 0,
            closed: false,
        };
        Ok(Self { shared: Arc::new(Shared { region, view, spin: config.spin, state: Mutex::new(state) }) })
    }

    /// The memory, to be registered with an engine as one region.
    ///
    /// # Safety
    /// Transfers go only to blocks of which nobody holds a [`ManagedBuffer`] through which the bytes are looked at
    /// meanwhile: a block that is being received into (a [`ReceiveSlot`](crate::ReceiveSlot)), until nothing goes there
    /// any more and it is [filled](crate::ReceiveSlot::fill) or [fenced](Pool::fenced); or, for reading, one that is
    /// frozen.
    pub unsafe fn region(&self) -> Arc<dyn Region> {
        Arc::clone(&self.shared.region)
    }

    /// Where the memory lies, if that is known.
    pub fn location(&self) -> Location {
        self.shared.region.location()
    }

    /// The range of the memory.
    pub fn view(&self) -> View {
        self.shared.view
    }

    /// A buffer of `len` bytes, now or not at all.
    ///
    /// # Errors
    /// `PoolFull` when there is no space, or when taking it would pass waiting requests that may not be passed
    /// any more; the message names the request, the free bytes and the largest free block. `InvalidArgument`
    /// for zero bytes, `TooLarge` for more than the whole pool, `Closed` after [`Pool::close`], `Forked` in a child
    /// process.
    pub fn try_alloc(&self, len: u64) -> Result<ManagedBuffer> {
        let mut state = self.shared.state()?;
        if let Some(block) = state.take_at_once(len)? {
            drop(state);
            return self.buffer(block);
        }
        state.refused += 1;
        let error = state.allocator.full(len);
        Err(match state.queue.waiting() {
            0 => error,
            waiting => error.context(format_args!("{waiting} requests wait for space already")),
        })
    }

    /// A buffer of `len` bytes, waiting for its turn until `deadline`.
    ///
    /// # Errors
    /// `DeadlineExceeded`; `QueueFull` when too many requests wait already; `Closed` when the pool is closed
    /// before the turn comes; and at once `InvalidArgument` for zero bytes and `TooLarge` for more than the
    /// whole pool; `Forked` in a child process.
    pub fn alloc(&self, len: u64, deadline: Deadline) -> Result<ManagedBuffer> {
        let block = self.shared.state()?.take_at_once(len)?;
        if let Some(block) = block {
            return self.buffer(block);
        }
        if let Some(result) = block_on(&mut self.alloc_async(len), self.shared.spin, deadline) {
            return result;
        }
        let mut state = self.shared.state()?;
        state.timed_out += 1;
        let now = state.allocator.full(len);
        drop(state);
        let error = Deadline::exceeded("space in the pool").context(now.message());
        Err(error.with_advice("release buffers, wait with a later deadline, or make the pool larger"))
    }

    /// A buffer of `len` bytes, as a future.
    ///
    /// It joins the queue when it is first polled. Dropping it leaves the queue, and a buffer that was served
    /// to it meanwhile goes back and on to the next. A future that has been woken holds its buffer, so it
    /// should be polled or dropped soon. There is no timer in this crate: the deadline is a time-out of the
    /// runtime around the future.
    ///
    /// # Errors
    /// Those of [`Pool::alloc`] except `DeadlineExceeded`.
    pub fn alloc_async(&self, len: u64) -> Alloc {
        Alloc::new(self.clone(), len)
    }

    /// Refuses all requests from now on, and ends those that wait, with `Closed`. Buffers that are out stay
    /// valid, and return as usual. Closing twice is closing once.
    pub fn close(&self) {
        let Ok(mut state) = self.shared.state() else { return };
        state.closed = true;
        let wakers = state.queue.dismiss();
        drop(state);
        wake_all(wakers);
    }

    /// What is out, what is left, and who waits.
    pub fn stats(&self) -> PoolStats {
        let Ok(state) = self.shared.state() else { return PoolStats::default() };
        let fencing = state.fencing.values().map(|(block, ..)| state.allocator.span_of(block.len()));
        PoolStats {
            space: state.allocator.stats(),
            granted_slots: state.granted,
            fencing_slots: state.fencing.len(),
            fencing: fencing.sum(),
            waiting: state.queue.waiting(),
            refused: state.refused,
            timed_out: state.timed_out,
        }
    }

    /// The slots in fencing, the oldest grant first.
    pub fn fencing(&self) -> Vec<FencingSlot> {
        let Ok(state) = self.shared.state() else { return Vec::new() };
        let shown = |(block, slot, since): &(Block, SlotState, Instant)| match *slot {
            SlotState::Fencing(grant) => {
                Some(FencingSlot { grant, offset: block.offset(), len: block.len(), since: *since })
            }
            _ => None,
        };
        state.fencing.values().filter_map(shown).collect()
    }

    /// Says that nothing can be written any more under the grant of this generation, and frees its slot.
    ///
    /// # Errors
    /// `BadFree` when no slot of that generation is in fencing; `Forked` in a child process.
    pub fn fenced(&self, generation: u64) -> Result<()> {
        let mut state = self.shared.state()?;
        let slot = state.fencing.get(&generation).map_or(SlotState::Free, |(_, slot, _)| *slot);
        slot.on(SlotEvent::Fenced { generation })?;
        let Some((block, ..)) = state.fencing.remove(&generation) else { return Ok(()) };
        let wakers = state.give_back(block);
        drop(state);
        wake_all(wakers);
        Ok(())
    }

    /// Says that no peer can write to this pool any more, as after the region was unregistered, and frees all
    /// slots in fencing. Returns how many there were.
    pub fn all_fenced(&self) -> usize {
        let Ok(mut state) = self.shared.state() else { return 0 };
        let fencing = mem::take(&mut state.fencing);
        let count = fencing.len();
        let wakers: Vec<_> = fencing.into_values().flat_map(|(block, ..)| state.give_back(block)).collect();
        drop(state);
        wake_all(wakers);
        count
    }

    /// Makes a buffer again out of what [`ManagedBuffer::into_block`] gave up.
    ///
    /// # Errors
    /// `BadFree` when that block was never given up, or was reclaimed already; `Forked` in a child process.
    pub fn reclaim(&self, block: Block) -> Result<ManagedBuffer> {
        self.reclaim_if(block.offset(), |held| held == block, &block)
    }

    /// As [`Pool::reclaim`], for callers whose interface knows offset and length alone. It cannot tell two
    /// allocations of the same range apart.
    ///
    /// # Errors
    /// `BadFree` when no block was given up that starts at `offset` and has `len` bytes; `Forked` in a child process.
    pub fn reclaim_raw(&self, offset: u64, len: u64) -> Result<ManagedBuffer> {
        let what = format_args!("the range of {len} bytes at offset {offset}");
        self.reclaim_if(offset, |held| held.len() == len, &what)
    }

    fn reclaim_if(
        &self,
        offset: u64,
        is_it: impl FnOnce(Block) -> bool,
        what: &dyn std::fmt::Display,
    ) -> Result<ManagedBuffer> {
        let mut state = self.shared.state()?;
        if !state.raw.get(&offset).is_some_and(|&held| is_it(held)) {
            return Err(Error::new(ErrorKind::BadFree, format!("{what} was not given up, or was reclaimed")));
        }
        let block = state.raw.remove(&offset);
        drop(state);
        block.map_or_else(|| Err(internal("a raw block vanished under the lock")), |block| self.buffer(block))
    }

    /// # Errors
    /// `Forked` in a child process that has not the memory.
    pub(crate) fn check_here(&self) -> Result<()> {
        self.shared.check_here()
    }

    /// The buffer of a block that was just taken for it.
    pub(crate) fn buffer(&self, block: Block) -> Result<ManagedBuffer> {
        let view = self.shared.view.slice(block.offset(), block.len())?;
        Ok(ManagedBuffer::new(self.clone(), block, view))
    }

    /// Joins the queue, or is served at once. `Err` when neither is possible.
    pub(crate) fn request(&self, len: u64, waker: Waker) -> Result<Request> {
        let mut state = self.shared.state()?;
        if let Some(block) = state.take_at_once(len)? {
            return Ok(Request::Served(block));
        }
        if state.queue.is_full() {
            state.refused += 1;
            let message = format!("{} requests wait for space in the pool already", state.queue.waiting());
            return Err(Error::new(ErrorKind::QueueFull, message));
        }
        let span = state.allocator.span_of(len);
        Ok(Request::Queued(state.queue.join(len, span, waker)))
    }

    /// Looks whether the turn of `ticket` has come.
    pub(crate) fn look(&self, ticket: u64, mut waker: Waker) -> Result<Option<Block>> {
        let look = self.shared.state()?.queue.look(ticket, &mut waker);
        match look {
            Look::Served(block) => Ok(Some(block)),
            Look::Waiting => Ok(None),
            Look::Gone => Err(closed()),
        }
    }

    /// Gives up the place in the queue, and passes on what was served for it.
    pub(crate) fn leave(&self, ticket: u64) {
        let Ok(mut state) = self.shared.state() else { return };
        let (block, _waker) = state.queue.leave(ticket);
        let wakers = match block {
            Some(block) => state.give_back(block),
            None => state.serve(),
        };
        drop(state);
        wake_all(wakers);
    }

    pub(crate) fn give_back(&self, block: Block) {
        let Ok(mut state) = self.shared.state() else { return };
        let wakers = state.give_back(block);
        drop(state);
        wake_all(wakers);
    }

    pub(crate) fn give_up(&self, block: Block) {
        if let Ok(mut state) = self.shared.state() {
            state.raw.insert(block.offset(), block);
        }
    }

    pub(crate) fn next_grant(&self, token: Option<GrantToken>) -> Result<SlotGrant> {
        let mut state = self.shared.state()?;
        let generation = state.next_grant;
        state.next_grant += 1;
        state.granted += 1;
        Ok(SlotGrant { generation, token })
    }

    /// A grant was used up: the peer writes no more.
    pub(crate) fn grant_filled(&self) -> Result<()> {
        self.shared.state()?.granted -= 1;
        Ok(())
    }

    /// A grant was withdrawn: the block waits for its fence.
    pub(crate) fn grant_withdrawn(&self, block: Block, grant: SlotGrant) {
        let now = Instant::now();
        let Ok(mut state) = self.shared.state() else { return };
        state.granted -= 1;
        state.fencing.insert(grant.generation, (block, SlotState::Fencing(grant), now));
    }
}

impl PartialEq for Pool {
    /// Whether both are handles to one pool.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for Pool {}

impl Shared {
    /// The only way to the state: in a forked child the lock may be held for ever, by a thread that is not there.
    ///
    /// # Errors
    /// `Forked`.
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        self.check_here()?;
        Ok(self.state.lock())
    }

    /// # Errors
    /// `Forked` in a child process that has not the region.
    fn check_here(&self) -> Result<()> {
        if self.region.is_here() { Ok(()) } else { Err(Error::forked()) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // A peer may still write to a slot in fencing. Memory that is leaked is better than memory that is
        // somebody else's by then.
        if !self.state.get_mut().fencing.is_empty() {
            mem::forget(Arc::clone(&self.region));
        }
    }
}

/// How a request for space begins.
pub(crate) enum Request {
    Served(Block),
    Queued(u64),
}

impl State {
    fn take_at_once(&mut self, len: u64) -> Result<Option<Block>> {
        if self.closed {
            return Err(closed());
        }
        self.allocator.check_len(len)?;
        Ok(self.queue.take_at_once(&mut self.allocator, len))
    }

    /// Frees a block and returns whom to wake once the lock is released.
    fn give_back(&mut self, block: Block) -> Vec<Waker> {
        let freed = self.allocator.free(block);
        debug_assert!(freed.is_ok(), "a block has one owner, who frees it once: {freed:?}");
        self.serve()
    }

    fn serve(&mut self) -> Vec<Waker> {
        self.queue.serve(&mut self.allocator)
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the pool is closed")
}

fn internal(what: &'static str) -> Error {
    Error::new(ErrorKind::Internal, what)
}
