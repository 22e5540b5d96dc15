//! Queue pairs, and the completion queue that they share.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, from_ref, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use posthorse_core::{Error, ErrorKind, Result};
use rdma_sys::{
    ibv_access_flags, ibv_cq, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr,
    ibv_qp_state, ibv_qp_type, ibv_req_notify_cq,
};
use rustix::io::Errno;

use super::events::Announced;
use super::handles::{Channel, Context, Domain, outcome};
use super::memory::memlock_advice;
use super::{port, requests};
use crate::verbs::{Limits, Link, PostError, QueuePairs, QueueSize, Remote, WorkCompletion, WorkRequest};

/// How long a peer is to wait before it sends again what found no receive posted: 0.64 ms (IBTA specification, table
/// 45).
const RECEIVER_NOT_READY_TIMER: u8 = 12;

/// Queue pairs of one peer.
#[derive(Debug)]
pub(super) struct SystemQueuePairs {
    // Given up before the queue that their completions go to.
    queues: Vec<Queue>,
    numbers: Vec<u32>,
    max_inline: u32,
    completions: CompletionQueue,
}

impl SystemQueuePairs {
    /// # Errors
    /// As [`Device::queue_pairs`](crate::verbs::Device::queue_pairs).
    pub(super) fn new(
        domain: &Arc<Domain>,
        channel: &Arc<Channel>,
        limits: &Limits,
        count: usize,
        size: QueueSize,
        key: u64,
    ) -> Result<Self> {
        domain.context.check_fork()?;
        let capacity =
            capacity(limits, count, size).map_err(|error| error.with_device(&*domain.context.name))?;
        let completions = CompletionQueue::new(channel, limits, capacity, key)?;
        let mut max_inline = u32::MAX;
        let mut queues = Vec::with_capacity(count);
        for _ in 0..count {
            let (queue, inline) = Queue::new(domain, limits, &completions, size)?;
            max_inline = max_inline.min(inline);
            queues.push(queue);
        }
        let numbers = queues.iter().map(Queue::number).collect();
        Ok(Self { queues, numbers, max_inline, completions })
    }

    fn context(&self) -> &Context {
        &self.completions.channel.context
    }

    fn queue(&self, queue: usize) -> Result<&Queue> {
        self.context().check_fork()?;
        let accepted = || format!("0 to {}", self.queues.len() - 1);
        self.queues.get(queue).ok_or_else(|| Error::invalid_argument("queue", queue, &accepted()))
    }

    fn check_usable(&self) -> Result<()> {
        self.context().check_fork()?;
        if self.completions.announced.overrun.load(Ordering::Acquire) {
            let text = "the completion queue has lost completions";
            return Err(Error::new(ErrorKind::Io, text).with_device(&*self.context().name));
        }
        Ok(())
    }
}

impl QueuePairs for SystemQueuePairs {
    fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    fn max_inline(&self) -> u32 {
        self.max_inline
    }

    fn connect(&self, queue: usize, link: &Link, remote: &Remote) -> Result<()> {
        let queue = self.queue(queue)?;
        let path_mtu = check(link)?;
        let steps = [
            ("RESET", state(ibv_qp_state::IBV_QPS_RESET)),
            ("INIT", init(link)),
            ("RTR", ready_to_receive(link, remote, path_mtu)),
            ("RTS", ready_to_send(link)),
        ];
        for (name, (attributes, mask)) in steps {
            // Set before it comes to a state in which it takes requests.
            queue.blank.store(name == "RESET", Ordering::Release);
            queue.modify(attributes, mask).map_err(|error| {
                let error = queue.refused(name, link, remote, &error);
                error.with_device(&*self.context().name)
            })?;
        }
        Ok(())
    }

    fn fail(&self) -> Result<()> {
        self.context().check_fork()?;
        let mut outcome = Ok(());
        // All of them, whatever becomes of one.
        for queue in self.queues.iter().filter(|queue| !queue.blank.load(Ordering::Acquire)) {
            let (attributes, mask) = state(ibv_qp_state::IBV_QPS_ERR);
            let moved = queue.modify(attributes, mask).map_err(|error| {
                self.context().refused(&format!("moving queue pair {} to ERR", queue.number()), &error)
            });
            outcome = outcome.and(moved);
        }
        outcome
    }

    unsafe fn post(&self, queue: usize, requests: &[WorkRequest]) -> Result<(), PostError> {
        let queue = self.queue(queue).map_err(|error| PostError { posted: 0, error })?;
        // Some drivers refuse what is too long as if the queue were full.
        let too_long = requests.iter().position(|request| request.inline && request.len > self.max_inline);
        let fit = &requests[..too_long.unwrap_or(requests.len())];
        // SAFETY: the queue pair is there until this is dropped; for the memory the caller has promised.
        unsafe { requests::post(queue.as_ptr(), fit) }
            .map_err(|(posted, error)| PostError { posted, error: self.full(&error) })?;
        match too_long {
            None => Ok(()),
            Some(posted) => {
                let accepted = format!("up to {}", self.max_inline);
                let error =
                    Error::invalid_argument("the length of inline bytes", requests[posted].len, &accepted);
                Err(PostError { posted, error })
            }
        }
    }

    fn post_receives(&self, queue: usize, ids: &[u64]) -> Result<(), PostError> {
        let queue = self.queue(queue).map_err(|error| PostError { posted: 0, error })?;
        // SAFETY: the queue pair is there until this is dropped; the requests have no memory.
        unsafe { requests::post_receives(queue.as_ptr(), ids) }
            .map_err(|(posted, error)| PostError { posted, error: self.full(&error) })
    }

    fn poll(&self, into: &mut [WorkCompletion]) -> Result<usize> {
        self.check_usable()?;
        // SAFETY: the completion queue is there until this is dropped.
        unsafe { requests::poll(self.completions.as_ptr(), into) }
            .map_err(|error| self.context().refused("taking completions", &error))
    }

    fn arm(&self) -> Result<()> {
        self.check_usable()?;
        // SAFETY: as above. Zero asks for any completion.
        outcome(unsafe { ibv_req_notify_cq(self.completions.as_ptr(), 0) })
            .map_err(|error| self.context().refused("asking to be told of completions", &error))
    }
}

impl SystemQueuePairs {
    /// Why a request was not posted.
    fn full(&self, error: &io::Error) -> Error {
        match Errno::from_io_error(error) {
            Some(Errno::NOMEM) => {
                Error::new(ErrorKind::QueueFull, "the queue pair has no room for another work request")
                    .with_device(&*self.context().name)
            }
            _ => self.context().refused("posting work requests", error),
        }
    }
}

/// How many completions there are to be room for.
fn capacity(limits: &Limits, count: usize, size: QueueSize) -> Result<i32> {
    if count == 0 {
        return Err(Error::invalid_argument("the number of queue pairs", count, "at least 1"));
    }
    let work_requests = size.sends.max(size.receives);
    if work_requests > limits.work_requests {
        let text = format!("{work_requests} work requests a queue; accepted: up to {}", limits.work_requests);
        return Err(Error::new(ErrorKind::LimitReached, text));
    }
    let wanted = count as u64 * (u64::from(size.sends) + u64::from(size.receives)).max(1);
    i32::try_from(wanted).ok().filter(|_| wanted <= limits.completions.into()).ok_or_else(|| {
        let text = format!(
            "{count} queue pairs of {} sends and {} receives need a completion queue of {wanted}; accepted: up to {}",
            size.sends, size.receives, limits.completions
        );
        Error::new(ErrorKind::LimitReached, text).with_advice("use fewer queue pairs a peer, or shorter queues")
    })
}

/// A refusal to make a queue.
fn not_made(context: &Context, limits: &Limits, what: &str) -> Error {
    let error = io::Error::last_os_error();
    match Errno::from_io_error(&error) {
        Some(Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::AGAIN) => {
            let advice = format!(
                "the device has {} queue pairs at most; {}",
                limits.queue_pairs,
                memlock_advice(limits)
            );
            Error::new(ErrorKind::LimitReached, format!("{what}: {error}"))
                .with_device(&*context.name)
                .with_advice(advice)
        }
        _ => context.refused(what, &error),
    }
}

/// A completion queue.
#[derive(Debug)]
struct CompletionQueue {
    channel: Arc<Channel>,
    queue: NonNull<ibv_cq>,
    /// The queue's context: whoever reads an event looks there, so it must not move.
    announced: Arc<Announced>,
}

// SAFETY: libibverbs may be called from any thread, and from several at once.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    fn new(channel: &Arc<Channel>, limits: &Limits, capacity: i32, key: u64) -> Result<Self> {
        let context = &channel.context;
        let announced = Arc::new(Announced { key, overrun: AtomicBool::new(false) });
        let about = Arc::as_ptr(&announced).cast_mut().cast();
        // SAFETY: device and channel are there, and so is `announced` until the queue is destroyed.
        let queue =
            unsafe { (context.library.create_cq)(context.as_ptr(), capacity, about, channel.as_ptr(), 0) };
        let queue = NonNull::new(queue)
            .ok_or_else(|| not_made(context, limits, &format!("making a completion queue of {capacity}")))?;
        Ok(Self { channel: Arc::clone(channel), queue, announced })
    }

    const fn as_ptr(&self) -> *mut ibv_cq {
        self.queue.as_ptr()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let context = &self.channel.context;
        // SAFETY: made by `new`; nobody polls it any more, and its queue pairs are gone. It waits until whoever takes
        // events has acknowledged those of this queue, which is done as soon as they are taken.
        if context.is_forked() || outcome(unsafe { (context.library.destroy_cq)(self.as_ptr()) }).is_err() {
            // The queue may still point there.
            std::mem::forget(Arc::clone(&self.announced));
        }
    }
}

/// A queue pair.
#[derive(Debug)]
struct Queue {
    domain: Arc<Domain>,
    queue: NonNull<ibv_qp>,
    /// Whether it is in the state RESET, from which there is no way to ERR: it takes no requests, and no packets.
    blank: AtomicBool,
}

// SAFETY: libibverbs may be called from any thread, and from several at once.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Queue {
    /// With the number of bytes that it takes inline.
    fn new(
        domain: &Arc<Domain>,
        limits: &Limits,
        completions: &CompletionQueue,
        size: QueueSize,
    ) -> Result<(Self, u32)> {
        let mut wanted = ibv_qp_init_attr {
            qp_context: from_ref(&*completions.announced).cast_mut().cast(),
            send_cq: completions.as_ptr(),
            recv_cq: completions.as_ptr(),
            srq: null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: size.sends,
                max_recv_wr: size.receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: size.inline_bytes,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            // Each request says itself whether its success makes a completion.
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the completion queue are there, and the attributes outlive the call.
        let queue = unsafe { (domain.context.library.create_qp)(domain.as_ptr(), &raw mut wanted) };
        let queue = NonNull::new(queue).ok_or_else(|| {
            let QueueSize { sends, receives, inline_bytes } = size;
            let what = format!(
                "making a queue pair of {sends} sends and {receives} receives, with {inline_bytes} bytes inline"
            );
            not_made(&domain.context, limits, &what)
        })?;
        // What the device made of it.
        Ok((
            Self { domain: Arc::clone(domain), queue, blank: AtomicBool::new(true) },
            wanted.cap.max_inline_data,
        ))
    }

    const fn as_ptr(&self) -> *mut ibv_qp {
        self.queue.as_ptr()
    }

    fn number(&self) -> u32 {
        // SAFETY: there until this is dropped; the number does not change.
        unsafe { (*self.as_ptr()).qp_num }
    }

    fn modify(&self, mut attributes: ibv_qp_attr, mask: ibv_qp_attr_mask) -> io::Result<()> {
        let library = self.domain.context.library;
        // SAFETY: the queue pair is there, and the attributes outlive the call.
        outcome(unsafe { (library.modify_qp)(self.as_ptr(), &raw mut attributes, mask.0.cast_signed()) })
    }

    /// Why it did not come to a state.
    fn refused(&self, state: &str, link: &Link, remote: &Remote, error: &io::Error) -> Error {
        let Link { port, gid_index, mtu, .. } = link;
        let Remote { number, gid, lid } = remote;
        let what = format!(
            "moving queue pair {} to {state}, towards queue pair {number} at GID {gid} (LID {lid}) \
             from GID index {gid_index} of port {port} with an MTU of {mtu}",
            self.number()
        );
        match Errno::from_io_error(error) {
            Some(
                Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::NETDOWN | Errno::NODEV
                | Errno::ADDRNOTAVAIL,
            ) => Error::new(ErrorKind::PathFailed, format!("{what}: {error}")).with_advice(
                "see that the peer's address is up and reachable from this port's interface, and that both sides use \
                 addresses of one kind and network",
            ),
            _ => Error::os(&what, error),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let context = &self.domain.context;
        if !context.is_forked() {
            // SAFETY: made by `new`, and nobody posts to it any more.
            unsafe { (context.library.destroy_qp)(self.as_ptr()) };
        }
    }
}

/// Checks what a device would refuse without saying which it was, or take in a way of its own. The number of the MTU.
fn check(link: &Link) -> Result<u32> {
    let refused = |name: &str, value: u32, accepted| Err(Error::invalid_argument(name, value, accepted));
    if link.retries > 6 {
        return refused("retries", link.retries.into(), "0 to 6: with 7 some devices never give up");
    }
    if link.receiver_retries > 7 {
        return refused("receiver_retries", link.receiver_retries.into(), "0 to 7");
    }
    if link.timeout > 31 {
        return refused("timeout", link.timeout.into(), "0 to 31");
    }
    if link.service_level > 15 {
        return refused("service_level", link.service_level.into(), "0 to 15");
    }
    port::mtu_number(link.mtu)
        .ok_or_else(|| Error::invalid_argument("mtu", link.mtu, "256, 512, 1024, 2048 or 4096"))
}

fn cleared() -> ibv_qp_attr {
    // SAFETY: numbers and bytes alone, for which zero is a value.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// The attributes of a change of state that takes no more than the state.
fn state(state: u32) -> (ibv_qp_attr, ibv_qp_attr_mask) {
    (ibv_qp_attr { qp_state: state, ..cleared() }, ibv_qp_attr_mask::IBV_QP_STATE)
}

fn init(link: &Link) -> (ibv_qp_attr, ibv_qp_attr_mask) {
    type Mask = ibv_qp_attr_mask;
    let access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
        | ibv_access_flags::IBV_ACCESS_REMOTE_READ
        | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
    let attributes = ibv_qp_attr {
        qp_state: ibv_qp_state::IBV_QPS_INIT,
        pkey_index: link.pkey_index,
        port_num: link.port,
        qp_access_flags: access.0,
        ..cleared()
    };
    let mask = Mask::IBV_QP_STATE | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS;
    (attributes, mask)
}

fn ready_to_receive(link: &Link, remote: &Remote, path_mtu: u32) -> (ibv_qp_attr, ibv_qp_attr_mask) {
    type Mask = ibv_qp_attr_mask;
    let mut attributes = ibv_qp_attr {
        qp_state: ibv_qp_state::IBV_QPS_RTR,
        path_mtu,
        dest_qp_num: remote.number,
        rq_psn: 0,
        max_dest_rd_atomic: link.reads,
        min_rnr_timer: RECEIVER_NOT_READY_TIMER,
        ..cleared()
    };
    // The address is always the global one: Ethernet has no other, and an InfiniBand subnet takes both.
    let address = &mut attributes.ah_attr;
    address.is_global = 1;
    address.grh.dgid.raw = remote.gid.0;
    address.grh.sgid_index = link.gid_index;
    address.grh.hop_limit = link.hop_limit;
    address.grh.traffic_class = link.traffic_class;
    address.dlid = remote.lid;
    address.sl = link.service_level;
    address.port_num = link.port;
    let mask = Mask::IBV_QP_STATE
        | Mask::IBV_QP_AV
        | Mask::IBV_QP_PATH_MTU
        | Mask::IBV_QP_DEST_QPN
        | Mask::IBV_QP_RQ_PSN
        | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | Mask::IBV_QP_MIN_RNR_TIMER;
    (attributes, mask)
}

fn ready_to_send(link: &Link) -> (ibv_qp_attr, ibv_qp_attr_mask) {
    type Mask = ibv_qp_attr_mask;
    let attributes = ibv_qp_attr {
        qp_state: ibv_qp_state::IBV_QPS_RTS,
        sq_psn: 0,
        max_rd_atomic: link.reads,
        timeout: link.timeout,
        retry_cnt: link.retries,
        rnr_retry: link.receiver_retries,
        ..cleared()
    };
    let mask = Mask::IBV_QP_STATE
        | Mask::IBV_QP_SQ_PSN
        | Mask::IBV_QP_MAX_QP_RD_ATOMIC
        | Mask::IBV_QP_TIMEOUT
        | Mask::IBV_QP_RETRY_CNT
        | Mask::IBV_QP_RNR_RETRY;
    (attributes, mask)
}
