use proptest::prelude::*;

use super::*;

const FLUSH: Flush = Flush { local_address: 1, local_key: 2, remote_address: 3, remote_key: 4 };

fn entry(token: u64, opcode: Opcode, level: Level) -> Entry {
    Entry {
        token,
        opcode,
        level,
        region: RegionId(1),
        local_address: 100,
        len: 10,
        local_key: 5,
        remote_address: 200,
        remote_key: 6,
        inline: false,
    }
}

fn queue(entries: &[(Opcode, Level)]) -> SendQueue {
    let mut queue = SendQueue::new(16);
    for (token, (opcode, level)) in entries.iter().enumerate() {
        queue.push(entry(token as u64, *opcode, *level));
    }
    queue
}

fn chain(queue: &mut SendQueue) -> Vec<WorkRequest> {
    let mut chain = Vec::new();
    queue.next_chain(&FLUSH, &mut chain);
    chain
}

fn ends(queue: &mut SendQueue, id: u64, status: Status) -> Vec<(u64, Ended)> {
    let mut ends = Vec::new();
    queue.completed(id, status, |entry, ended| ends.push((entry.token, ended)));
    ends
}

use Level::{Placed, Sent, Visible};
use Opcode::{Read, Write};

#[test]
fn a_chain_makes_one_completion_and_writes_are_flushed_when_they_are_to_be_visible() {
    let mut queue = queue(&[(Write, Visible), (Read, Visible), (Write, Visible)]);
    let posted = chain(&mut queue);
    assert_eq!(posted.len(), 4);
    assert_eq!(
        posted.iter().map(|request| request.signalled).collect::<Vec<_>>(),
        [false, false, false, true]
    );
    assert_eq!((posted[3].operation, posted[3].remote_key), (Operation::Read, FLUSH.remote_key));
    assert!(chain(&mut queue).is_empty(), "nothing is posted twice");
    let done = ends(&mut queue, 3, Status::Success);
    assert_eq!(done, [0, 1, 2].map(|token| (token, Ended::Done(Visible))));
    assert!(queue.is_empty() && queue.is_drained());
}

#[test]
fn what_needs_no_flush_has_none() {
    let mut queue = queue(&[(Write, Sent), (Read, Visible), (Write, Placed)]);
    let posted = chain(&mut queue);
    assert_eq!(posted.len(), 3);
    let done = ends(&mut queue, 2, Status::Success);
    assert_eq!(done, [(0, Ended::Done(Placed)), (1, Ended::Done(Visible)), (2, Ended::Done(Placed))]);
}

#[test]
fn a_refusal_is_one_entrys_own_and_the_rest_goes_out_again() {
    let mut queue = queue(&[(Write, Visible), (Read, Visible), (Write, Visible), (Write, Sent)]);
    assert_eq!(chain(&mut queue).len(), 5);
    // The READ before it has ended; the WRITE before that was not flushed.
    let done = ends(&mut queue, 2, Status::RemoteAccess);
    assert_eq!(done, [(1, Ended::Done(Visible)), (2, Ended::Refused(Status::RemoteAccess))]);
    assert!(queue.has_failed() && !queue.is_drained());
    assert!(chain(&mut queue).is_empty(), "a queue pair that failed takes nothing");
    let mut cancelled = 0;
    queue.cancel(&mut |_| true, |_, _| cancelled += 1);
    assert_eq!(cancelled, 0, "what was posted may still arrive");
    assert_eq!(ends(&mut queue, 3, Status::Flushed), []);
    assert_eq!(ends(&mut queue, 4, Status::Flushed), []);
    assert!(queue.is_drained());
    queue.rewind();
    let again = chain(&mut queue);
    assert_eq!(again.len(), 3, "two WRITEs and a flush");
    assert_eq!(again[0].id, 5, "numbers are not used again");
    let done = ends(&mut queue, 7, Status::Success);
    assert_eq!(done, [(0, Ended::Done(Visible)), (3, Ended::Done(Placed))]);
    assert!(queue.is_empty());
}

#[test]
fn of_what_ends_early_it_is_said_whether_it_was_posted() {
    let mut queue = queue(&[(Write, Visible)]);
    chain(&mut queue);
    queue.push(entry(1, Write, Visible));
    ends(&mut queue, 0, Status::RetriesExceeded);
    let mut dropped = Vec::new();
    queue.end_all(|entry, ended| dropped.push((entry.token, ended)));
    assert_eq!(dropped, [(0, Ended::Dropped { stale: true }), (1, Ended::Dropped { stale: false })]);
    assert!(queue.is_empty() && queue.is_drained());
}

#[test]
fn what_the_device_did_not_take_waits_again() {
    let mut queue = queue(&[(Write, Sent), (Write, Sent)]);
    assert_eq!(chain(&mut queue).len(), 2);
    queue.unpost(1);
    assert_eq!(ends(&mut queue, 0, Status::Flushed), []);
    let mut cancelled = Vec::new();
    queue.cancel(&mut |_| true, |entry, _| cancelled.push(entry.token));
    assert_eq!(cancelled, [1]);
}

#[test]
fn whether_the_peer_is_there_is_asked_only_in_silence() {
    let mut queue = queue(&[]);
    let asked = queue.alive().unwrap();
    assert_eq!((asked.len, asked.signalled), (0, true));
    assert!(queue.alive().is_none(), "it was asked");
    assert_eq!(ends(&mut queue, asked.id, Status::Success), []);
    queue.push(entry(0, Write, Sent));
    assert!(queue.alive().is_none(), "something else shows it");
}

proptest! {
    /// Whatever fails and is made again, each entry ends once, and none before its last work request.
    #[test]
    fn every_entry_ends_once(
        entries in prop::collection::vec((any::<bool>(), 0..3_u8), 1..60),
        faults in prop::collection::vec((0..8_u64, 0..4_u8), 0..40),
    ) {
        let mut queue = SendQueue::new(8);
        let mut next = entries.iter().enumerate();
        let mut faults = faults.into_iter();
        let mut ended = vec![0; entries.len()];
        for _ in 0..1000 {
            while queue.room() > 0 && let Some((token, (write, level))) = next.next() {
                let opcode = if *write { Write } else { Read };
                queue.push(entry(token as u64, opcode, [Sent, Placed, Visible][usize::from(*level)]));
            }
            let posted = chain(&mut queue);
            prop_assert!(posted.len() <= CHAIN);
            let Some(last) = posted.last() else { break };
            let mut tell = |entry: &Entry, _| ended[entry.token as usize] += 1;
            let (at, status) = match faults.next() {
                Some((at, kind)) if kind < 3 => {
                    let statuses = [Status::RemoteAccess, Status::RetriesExceeded, Status::Flushed];
                    (posted[(at as usize).min(posted.len() - 1)].id, statuses[usize::from(kind)])
                }
                _ => (last.id, Status::Success),
            };
            if queue.completed(at, status, &mut tell) {
                for id in at + 1..=last.id {
                    queue.completed(id, Status::Flushed, &mut tell);
                }
                prop_assert!(queue.is_drained());
                queue.rewind();
            }
        }
        prop_assert!(queue.is_empty());
        prop_assert!(ended.iter().all(|count| *count == 1), "{:?}", ended);
    }
}
