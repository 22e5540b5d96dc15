//! Payloads that stay where the caller has them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use common::{Pair, edge, eventually, soon};
use posthorse_core::DType;
use posthorse_omni::{GetOptions, PutOptions, TensorSet};
use posthorse_testkit::pattern;

const LEN: usize = 1 << 20;

/// Bytes that say when nobody holds them any more.
struct Owner {
    bytes: Vec<u8>,
    gone: Arc<AtomicBool>,
}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

fn owned(seed: u64) -> (Bytes, Arc<AtomicBool>) {
    let gone = Arc::new(AtomicBool::new(false));
    let owner = Owner { bytes: pattern::bytes(seed, LEN), gone: Arc::clone(&gone) };
    (Bytes::from_owner(owner), gone)
}

#[test]
fn shared_tensors_are_sent_from_where_they_lie() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        let (first, gone) = owned(1);
        let second = Bytes::from(pattern::bytes(2, LEN));
        let (lent, few) = (pattern::bytes(3, 70_000), Bytes::from(pattern::bytes(4, 100)));
        let mut set = TensorSet::new();
        set.push_shared("first", DType::U8, &[LEN as u64], first.clone()).unwrap();
        set.push("lent", DType::U8, &[70_000], &lent).unwrap();
        set.push_shared("few", DType::U8, &[100], few.clone()).unwrap();
        set.push("none", DType::F32, &[0, 4], &[]).unwrap();
        set.push_shared("second", DType::F16, &[LEN as u64 / 2], second.clone()).unwrap();
        let options = PutOptions { consumers: NonZeroU32::new(2), ..PutOptions::default() };
        pair.sender.put(&edge(), "set", &set, options).unwrap();
        drop((set, first));
        let used = pair.sender.health().pool.used;
        assert!(used > 0 && used < LEN as u64 / 2, "only what is not shared was copied: {used}");
        assert!(!gone.load(Ordering::SeqCst), "the offer keeps it");

        for round in 0..2 {
            let got = pair.get("set").unwrap();
            assert_eq!(got.transport(), transport);
            let names: Vec<_> = got.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
            assert_eq!(names, ["first", "lent", "few", "none", "second"]);
            let bytes = |name| got.tensor(name).unwrap().bytes();
            assert!(bytes("first") == pattern::bytes(1, LEN), "{transport}, round {round}");
            assert!(bytes("lent") == lent && bytes("few") == few && bytes("none").is_empty());
            assert!(bytes("second") == second);
            assert_eq!(got.tensor("second").unwrap().elements::<u16>().unwrap().len(), LEN / 2);
        }
        eventually("the last byte is let go of", || gone.load(Ordering::SeqCst));
        pair.assert_whole();
    }
}

#[test]
fn the_same_bytes_can_be_offered_more_than_once_and_in_parts() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        let (whole, gone) = owned(7);
        let put = |key: &str, bytes: Bytes| {
            pair.sender.put(&edge(), key, bytes, PutOptions::default()).unwrap();
        };
        let ranges = [0..LEN, 0..LEN, 0..LEN / 2, LEN / 4..LEN, LEN / 2..LEN, 5..LEN - 7];
        for (number, range) in ranges.iter().enumerate() {
            put(&format!("k{number}"), whole.slice(range.clone()));
        }
        for (number, range) in ranges.iter().enumerate() {
            let got = pair.get(&format!("k{number}")).unwrap();
            assert!(got.bytes().unwrap() == &whole[range.clone()], "{transport} {range:?}");
        }
        // Offered again when it was let go of.
        for round in 0..3 {
            put("again", whole.clone());
            assert!(pair.get("again").unwrap().bytes().unwrap() == whole, "{transport} {round}");
        }
        drop(whole);
        eventually("the last byte is let go of", || gone.load(Ordering::SeqCst));
        pair.assert_whole();
    }
}

#[test]
fn a_lease_of_shared_bytes_is_a_copy() {
    let pair = Pair::by("shm");
    let (bytes, _) = owned(9);
    pair.sender.put(&edge(), "k", bytes.clone(), PutOptions::default()).unwrap();
    let options = GetOptions { lease: true, ..GetOptions::until(soon()) };
    let got = pair.receiver.get(&edge(), "k", options).unwrap();
    assert!(!got.is_leased() && got.bytes().unwrap() == bytes);
    drop(got);
    pair.assert_whole();
}

#[test]
fn shared_bytes_that_nobody_gets_are_let_go_of() {
    let pair = Pair::by("shm");
    let (bytes, gone) = owned(11);
    pair.sender.put(&edge(), "k", bytes, PutOptions::default()).unwrap();
    assert!(!gone.load(Ordering::SeqCst));
    assert!(pair.sender.cleanup(&edge(), "k").unwrap());
    eventually("the last byte is let go of", || gone.load(Ordering::SeqCst));
    let (bytes, gone) = owned(12);
    pair.sender.put(&edge(), "k", bytes, PutOptions::default()).unwrap();
    pair.sender.close();
    eventually("the last byte is let go of", || gone.load(Ordering::SeqCst));
}
