//! Work requests and completions, in libibverbs' form. Nothing here allocates.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use rdma_sys::{
    ibv_cq, ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_qp, ibv_recv_wr, ibv_send_flags, ibv_send_wr,
    ibv_sge, ibv_wc, ibv_wc_flags, ibv_wc_status, ibv_wr_opcode, rdma_t,
};

use super::handles::outcome;
use crate::verbs::{Operation, Status, WorkCompletion, WorkRequest};

/// How many go to the device in one call: what they take on the stack is some 5 KiB.
const CHUNK: usize = 32;

/// Posts work requests in order. When not all are, says how many and why.
///
/// # Safety
/// The queue pair is there. For the memory see [`QueuePairs::post`](crate::verbs::QueuePairs::post).
pub(super) unsafe fn post(queue: *mut ibv_qp, requests: &[WorkRequest]) -> Result<(), (usize, io::Error)> {
    let mut pieces = [const { MaybeUninit::<ibv_sge>::uninit() }; CHUNK];
    let mut chain = [const { MaybeUninit::<ibv_send_wr>::uninit() }; CHUNK];
    let mut posted = 0;
    for chunk in requests.chunks(CHUNK) {
        let mut next = null_mut();
        // From the end, so that each knows where the next one is.
        for ((request, place), piece) in chunk.iter().zip(&mut chain).zip(&mut pieces).rev() {
            let piece = piece.write(ibv_sge {
                addr: request.local_address,
                length: request.len,
                lkey: request.local_key,
            });
            next = place.write(send(request, piece, next));
        }
        let mut refused = null_mut();
        // SAFETY: the queue pair is there, and the chain and its pieces outlive the call.
        let outcome = outcome(unsafe { ibv_post_send(queue, next, &raw mut refused) });
        outcome.map_err(|error| (posted + position(next, refused, chunk.len()), error))?;
        posted += chunk.len();
    }
    Ok(())
}

/// Posts receive requests without memory, in order. When not all are, says how many and why.
///
/// # Safety
/// The queue pair is there.
pub(super) unsafe fn post_receives(queue: *mut ibv_qp, ids: &[u64]) -> Result<(), (usize, io::Error)> {
    let mut chain = [const { MaybeUninit::<ibv_recv_wr>::uninit() }; CHUNK];
    let mut posted = 0;
    for chunk in ids.chunks(CHUNK) {
        let mut next = null_mut();
        for (id, place) in chunk.iter().zip(&mut chain).rev() {
            next = place.write(ibv_recv_wr { wr_id: *id, next, sg_list: null_mut(), num_sge: 0 });
        }
        let mut refused = null_mut();
        // SAFETY: the queue pair is there, and the chain outlives the call.
        let outcome = outcome(unsafe { ibv_post_recv(queue, next, &raw mut refused) });
        outcome.map_err(|error| (posted + position(next, refused, chunk.len()), error))?;
        posted += chunk.len();
    }
    Ok(())
}

/// The place in a chain of `len` requests, which lie one behind the other, of the one that was refused. The first,
/// where the driver does not say.
fn position<T>(first: *const T, refused: *const T, len: usize) -> usize {
    let bytes = refused.addr().saturating_sub(first.addr());
    let position = bytes / size_of::<T>();
    if position < len { position } else { 0 }
}

fn send(request: &WorkRequest, piece: *mut ibv_sge, next: *mut ibv_send_wr) -> ibv_send_wr {
    // SAFETY: numbers and pointers alone, for which zero is a value.
    let mut wanted: ibv_send_wr = unsafe { MaybeUninit::zeroed().assume_init() };
    wanted.wr_id = request.id;
    wanted.next = next;
    if request.len > 0 {
        wanted.sg_list = piece;
        wanted.num_sge = 1;
    }
    wanted.opcode = match request.operation {
        Operation::Write => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        Operation::WriteWithImmediate(value) => {
            wanted.imm_data_invalidated_rkey_union.imm_data = value.to_be();
            ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM
        }
        Operation::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
    };
    if request.signalled {
        wanted.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    if request.inline && request.operation != Operation::Read {
        wanted.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
    }
    wanted.wr.rdma = rdma_t { remote_addr: request.remote_address, rkey: request.remote_key };
    wanted
}

/// Takes completions until there are no more, or no more places.
///
/// # Safety
/// The completion queue is there.
pub(super) unsafe fn poll(queue: *mut ibv_cq, into: &mut [WorkCompletion]) -> io::Result<usize> {
    let mut taken = 0;
    let mut found = [const { MaybeUninit::<ibv_wc>::uninit() }; CHUNK];
    for places in into.chunks_mut(CHUNK) {
        let room = places.len();
        // SAFETY: the queue is there, and there is room for so many: no more than `CHUNK`.
        let count = unsafe { ibv_poll_cq(queue, room as i32, found.as_mut_ptr().cast()) };
        let Ok(count) = usize::try_from(count) else {
            // What was taken before is not lost; the next call meets the error again.
            return if taken > 0 { Ok(taken) } else { Err(poll_error(count)) };
        };
        for (place, found) in places.iter_mut().zip(&found[..count.min(room)]) {
            // SAFETY: the device has filled so many.
            *place = completion(unsafe { found.assume_init_ref() });
        }
        taken += count;
        if count < room {
            break;
        }
    }
    Ok(taken)
}

/// Some drivers return an error's number, negated, and some -1 without `errno`.
fn poll_error(returned: i32) -> io::Error {
    match returned {
        -1 => io::Error::other("the driver says that the completion queue is damaged"),
        number => io::Error::from_raw_os_error(number.saturating_neg()),
    }
}

fn completion(found: &ibv_wc) -> WorkCompletion {
    let status = status(found.status);
    let has_immediate = found.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
    // Of what failed, only the status, the id and the maker's word are filled.
    let immediate = (status == Status::Success && has_immediate)
        // SAFETY: the flag says that the field is an immediate value.
        .then(|| u32::from_be(unsafe { found.imm_data_invalidated_rkey_union.imm_data }));
    WorkCompletion { id: found.wr_id, status, immediate, vendor_error: found.vendor_err }
}

fn status(number: ibv_wc_status::Type) -> Status {
    use ibv_wc_status as status;
    match number {
        status::IBV_WC_SUCCESS => Status::Success,
        status::IBV_WC_LOC_LEN_ERR => Status::LocalLength,
        status::IBV_WC_LOC_QP_OP_ERR => Status::LocalQueuePair,
        status::IBV_WC_LOC_PROT_ERR => Status::LocalProtection,
        status::IBV_WC_WR_FLUSH_ERR => Status::Flushed,
        status::IBV_WC_REM_INV_REQ_ERR => Status::RemoteInvalid,
        status::IBV_WC_REM_ACCESS_ERR => Status::RemoteAccess,
        status::IBV_WC_REM_OP_ERR => Status::RemoteOperation,
        status::IBV_WC_RETRY_EXC_ERR => Status::RetriesExceeded,
        status::IBV_WC_RNR_RETRY_EXC_ERR => Status::ReceiverNotReady,
        other => Status::Other(other),
    }
}
