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

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::ffi::c_int;

    use rdma_sys::{ibv_context, ibv_wc_opcode};
    use rustix::io::Errno;

    use super::*;

    /// What a driver was given of a work request.
    #[derive(Debug, Clone, PartialEq, Eq, Default)]
    struct Seen {
        id: u64,
        opcode: u32,
        flags: u32,
        pieces: Vec<(u64, u32, u32)>,
        immediate: u32,
        remote: (u64, u32),
    }

    thread_local! {
        static CALLS: RefCell<Vec<Vec<Seen>>> = const { RefCell::new(Vec::new()) };
        /// The id at which the driver refuses, and whether it says so.
        static REFUSED: Cell<Option<(u64, bool)>> = const { Cell::new(None) };
        static DONE: RefCell<Vec<ibv_wc>> = const { RefCell::new(Vec::new()) };
    }

    extern "C" fn post_send(_: *mut ibv_qp, first: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
        let mut seen = Vec::new();
        let mut at = first;
        // SAFETY: a chain of requests, each with as many pieces as it says.
        while let Some(request) = unsafe { at.as_ref() } {
            if let Some((_, says)) = REFUSED.get().filter(|(id, _)| *id == request.wr_id) {
                // SAFETY: the place that the caller gave.
                unsafe { *bad = if says { at } else { null_mut() } };
                CALLS.with_borrow_mut(|calls| calls.push(seen));
                return Errno::NOMEM.raw_os_error();
            }
            let pieces = (0..usize::try_from(request.num_sge).unwrap()).map(|piece| {
                // SAFETY: as above.
                let piece = unsafe { &*request.sg_list.add(piece) };
                (piece.addr, piece.length, piece.lkey)
            });
            // SAFETY: numbers, whichever of the union's is meant.
            let (immediate, remote) = unsafe {
                let remote = request.wr.rdma;
                (request.imm_data_invalidated_rkey_union.imm_data, (remote.remote_addr, remote.rkey))
            };
            seen.push(Seen {
                id: request.wr_id,
                opcode: request.opcode,
                flags: request.send_flags,
                pieces: pieces.collect(),
                immediate,
                remote,
            });
            at = request.next;
        }
        CALLS.with_borrow_mut(|calls| calls.push(seen));
        0
    }

    extern "C" fn poll_cq(_: *mut ibv_cq, room: c_int, into: *mut ibv_wc) -> c_int {
        DONE.with_borrow_mut(|done| {
            let count = done.len().min(usize::try_from(room).unwrap());
            for (at, done) in done.drain(..count).enumerate() {
                // SAFETY: the caller has that much room.
                unsafe { into.add(at).write(done) };
            }
            // An empty queue is a damaged one here.
            if count == 0 { -1 } else { c_int::try_from(count).unwrap() }
        })
    }

    /// A device whose driver is the functions above. All else of it is zeros.
    fn context() -> Box<ibv_context> {
        // SAFETY: numbers, pointers and optional functions alone, for which zero is a value.
        let mut context: Box<ibv_context> = Box::new(unsafe { MaybeUninit::zeroed().assume_init() });
        context.ops.post_send = Some(post_send);
        context.ops.poll_cq = Some(poll_cq);
        context
    }

    /// How many were posted, and the error's number.
    type Refused = (usize, Option<i32>);

    /// What the driver is given for some requests, call by call, and the outcome.
    fn posted(requests: &[WorkRequest]) -> (Vec<Vec<Seen>>, Result<(), Refused>) {
        let mut context = context();
        // SAFETY: as for the context.
        let mut queue: ibv_qp = unsafe { MaybeUninit::zeroed().assume_init() };
        queue.context = &raw mut *context;
        // SAFETY: the queue pair is there, and its driver touches no memory.
        let outcome = unsafe { post(&raw mut queue, requests) };
        (CALLS.take(), outcome.map_err(|(posted, error)| (posted, error.raw_os_error())))
    }

    const REQUEST: WorkRequest = WorkRequest {
        id: 0,
        operation: Operation::Write,
        local_address: 0x1000,
        len: 10,
        local_key: 2,
        remote_address: 0x2000,
        remote_key: 3,
        signalled: false,
        inline: false,
    };

    fn chain(len: u64) -> Vec<WorkRequest> {
        (0..len).map(|id| WorkRequest { id, ..REQUEST }).collect()
    }

    #[test]
    fn each_request_is_what_it_says() {
        let immediate = Operation::WriteWithImmediate(0x0102_0304);
        let (calls, outcome) = posted(&[
            WorkRequest { id: 7, signalled: true, ..REQUEST },
            WorkRequest { operation: immediate, inline: true, ..REQUEST },
            // What is read cannot be inline.
            WorkRequest { operation: Operation::Read, inline: true, ..REQUEST },
            WorkRequest { len: 0, ..REQUEST },
        ]);
        assert_eq!(outcome, Ok(()));
        let seen = Seen { pieces: vec![(0x1000, 10, 2)], remote: (0x2000, 3), ..Seen::default() };
        let expected = vec![
            Seen { id: 7, flags: 2, ..seen.clone() },
            Seen { opcode: 1, flags: 8, immediate: u32::from_ne_bytes([1, 2, 3, 4]), ..seen.clone() },
            Seen { opcode: 4, ..seen.clone() },
            Seen { pieces: Vec::new(), ..seen },
        ];
        assert_eq!(calls, [expected]);
    }

    #[test]
    fn a_long_chain_goes_in_parts_and_in_order() {
        let (calls, outcome) = posted(&chain(70));
        assert_eq!(outcome, Ok(()));
        assert_eq!(calls.iter().map(Vec::len).collect::<Vec<_>>(), [32, 32, 6]);
        assert!(calls.concat().iter().map(|seen| seen.id).eq(0..70));
        assert_eq!(posted(&[]), (Vec::new(), Ok(())));
    }

    #[test]
    fn of_what_is_refused_the_place_is_told() {
        let no_room = Some(Errno::NOMEM.raw_os_error());
        for at in [0, 5, 31, 32, 69] {
            REFUSED.set(Some((at, true)));
            let (calls, outcome) = posted(&chain(70));
            assert_eq!(outcome, Err((at as usize, no_room)));
            assert_eq!(calls.concat().len(), at as usize);
        }
        // Of a driver that does not say which it refused, nothing of that call is counted.
        REFUSED.set(Some((40, false)));
        assert_eq!(posted(&chain(70)).1, Err((32, no_room)));
        REFUSED.set(None);
    }

    #[test]
    fn completions_are_taken_in_parts_and_an_error_comes_after_them() {
        let mut context = context();
        // SAFETY: as for the context.
        let mut queue: ibv_cq = unsafe { MaybeUninit::zeroed().assume_init() };
        queue.context = &raw mut *context;
        DONE.set((0..70).map(|id| done(id, ibv_wc_status::IBV_WC_SUCCESS)).collect());
        let mut into = [WorkCompletion::EMPTY; 64];
        // SAFETY: the queue is there.
        let mut taken =
            || unsafe { poll(&raw mut queue, &mut into) }.map(|count| (count, into[count - 1].id));
        assert_eq!(taken().unwrap(), (64, 63));
        assert_eq!(taken().unwrap(), (6, 69));
        assert!(taken().unwrap_err().to_string().contains("damaged"));
    }

    #[test]
    fn a_completion_has_its_status_and_an_immediate_value_only_when_there_is_one() {
        let mut with = done(1, ibv_wc_status::IBV_WC_SUCCESS);
        with.wc_flags = ibv_wc_flags::IBV_WC_WITH_IMM.0;
        with.opcode = ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        with.imm_data_invalidated_rkey_union.imm_data = u32::from_ne_bytes([1, 2, 3, 4]);
        assert_eq!(completion(&with).immediate, Some(0x0102_0304));
        with.status = ibv_wc_status::IBV_WC_WR_FLUSH_ERR;
        with.vendor_err = 9;
        let flushed = WorkCompletion { id: 1, status: Status::Flushed, immediate: None, vendor_error: 9 };
        assert_eq!(completion(&with), flushed);
        assert_eq!(status(ibv_wc_status::IBV_WC_REM_ACCESS_ERR), Status::RemoteAccess);
        assert_eq!(status(ibv_wc_status::IBV_WC_GENERAL_ERR), Status::Other(21));
        assert_eq!(status(9999), Status::Other(9999));
    }

    fn done(id: u64, status: u32) -> ibv_wc {
        // SAFETY: numbers alone.
        let mut done: ibv_wc = unsafe { MaybeUninit::zeroed().assume_init() };
        (done.wr_id, done.status) = (id, status);
        done
    }
}
