//! What is dropped leaves nothing in the kernel. In a program of its own: it counts what the whole process and the
//! whole VM have.
#![cfg(feature = "rdma")]
#![allow(clippy::unwrap_used, clippy::panic)]
#![expect(dead_code, reason = "the tests of verbs need more of it")]

#[path = "verbs/pair.rs"]
mod pair;

use std::process::Command;

use posthorse_rdma::verbs::{Operation, Status};

use crate::pair::{KEY, SIZE, ends, in_vm, pair};

#[test]
fn two_hundred_queue_pairs_and_what_they_stand_on_leave_nothing_behind() {
    if !in_vm() {
        return;
    }
    // The first use loads the library and its drivers.
    drop(pair(0, 4096));
    let before = held();
    assert!(before.1.contains("qp"), "{before:?}");
    {
        let (a, b) = pair(0, 4096);
        let many: Vec<_> = (0..200).map(|_| a.device.queue_pairs(2, SIZE, KEY).unwrap()).collect();
        assert_ne!(held().1, before.1);
        drop(many);
        assert_eq!(a.run(a.request(Operation::Write, &b.memory)), Status::Success);
    }
    assert_eq!(held(), before);
    for _ in 0..20 {
        // Dropped with receives that are posted, and with completions and their announcements that nobody took.
        let (a, b) = pair(0, 4096);
        b.queues.post_receives(0, &[1, 2, 3]).unwrap();
        a.queues.arm().unwrap();
        // SAFETY: nobody looks at the memory.
        unsafe { a.queues.post(0, &[a.request(Operation::Write, &b.memory)]) }.unwrap();
        a.device.wait(None).unwrap();
        b.queues.fail().unwrap();
    }
    for _ in 0..20 {
        // What is made last may be dropped first, and the other way about.
        let (a, b) = ends(0, 4096);
        let pair::Side { queues, memory, device, .. } = a;
        drop((device, memory, queues, b));
    }
    assert_eq!(held(), before);
}

/// How many files the process has open, and what the kernel counts of each device's objects.
fn held() -> (usize, String) {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let output = Command::new("rdma").args(["resource", "show"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    (files, String::from_utf8(output.stdout).unwrap())
}
