//! The owner of the memory decides what is touched.

use std::sync::atomic::{AtomicBool, Ordering};

use posthorse_core::*;

use crate::support::*;

#[test]
fn what_no_grant_allows_is_refused_and_the_path_stays_usable() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let (source, target) = (Memory::patterned(100_000, 1), Memory::new(200_000));
    let (region, token) = there.publish(target, Access::Read);
    let half = there.registry.grant(region, 0, 100_000, Access::Write, None);
    // The region is published for reading; a grant may allow more only if the registry says so.
    let writable = Memory::new(200_000);
    let (region, all) = there.publish(writable, Access::ReadWrite);
    let other = there.registry.grant(region, 0, 100_000, Access::Write, Some("somebody:1")).unwrap().token;
    let mine = there.registry.grant(region, 0, 100_000, Access::Write, Some("here:1")).unwrap().token;
    drop(half);
    let wrong = GrantToken { secret: all.secret ^ 1, ..all };
    for len in [10, 100_000] {
        let local = source.part(0, len);
        let at = writable.address();
        for (slice, kind) in [
            (write(local, target.address(), token), ErrorKind::AccessDenied),
            (write(local, at, wrong), ErrorKind::AccessDenied),
            (write(local, at, other), ErrorKind::AccessDenied),
            (read(local, at, mine), ErrorKind::AccessDenied),
            (write(local, at + 100_001 - len as u64, mine), ErrorKind::OutOfBounds),
            (write(local, u64::MAX - 3, all), ErrorKind::OutOfBounds),
        ] {
            let error = here.transfer(path, slice).unwrap_err();
            assert_eq!((error.error.kind(), error.far_end), (kind, FarEnd::Quiet), "{error:?}");
            assert_eq!(error.error.peer(), Some("there:1"));
        }
        assert!(writable.bytes().iter().all(|byte| *byte == 0));
        here.transfer(path, write(local, at, mine)).unwrap();
        writable.bytes_mut().fill(0);
    }
}

#[test]
fn after_a_revocation_in_the_middle_not_one_byte_changes() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let len = 32 << 20;
    let (source, target) = (Memory::patterned(len, 1), Memory::new(len));
    let (region, _) = there.publish(target, Access::ReadWrite);
    for opcode in [Opcode::Write, Opcode::Read] {
        let grant = there.registry.grant(region, 0, len as u64, Access::ReadWrite, Some("here:1")).unwrap();
        let slices: Vec<Slice> =
            (0..8).map(|_| slice(opcode, source.part(0, len), target.address(), grant.token)).collect();
        here.submit_all(path, &slices);
        // The first ones end well, the last ones do not.
        here.events.completion(slices[0].token).unwrap();
        there.registry.revoke(grant.token, Deadline::after(PATIENCE)).unwrap();
        target.bytes_mut().fill(0);
        let refused = slices[1..]
            .iter()
            .filter_map(|slice| here.events.completion(slice.token).err())
            .inspect(|error| assert_eq!(error.error.kind(), ErrorKind::AccessDenied))
            .count();
        assert!(refused > 0, "all of 256 MiB were faster than the revocation");
        assert!(
            target.bytes().iter().all(|byte| *byte == 0),
            "{opcode:?} touched the memory after the revocation"
        );
    }
    assert!(!here.events.is_down());
}

#[test]
fn a_region_is_given_up_only_when_no_slice_uses_it() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let len = 32 << 20;
    let (source, target) = (Memory::patterned(len, 1), Memory::new(len));
    let (_, token) = there.publish(target, Access::Write);
    let slices: Vec<Slice> = (0..4).map(|_| write(source.part(0, len), target.address(), token)).collect();
    here.submit_all(path, &slices);
    let error =
        here.transport.unregister(RegionId(1), Deadline::after(std::time::Duration::ZERO)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    here.transport.unregister(RegionId(2), Deadline::NEVER).unwrap();
    here.transport.unregister(RegionId(1), Deadline::after(PATIENCE)).unwrap();
    here.events.completions(4);
}

#[test]
fn grants_come_and_go_under_traffic() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let (source, target) = (Memory::patterned(8192, 1), Memory::new(8192));
    let (region, standing) = there.publish(target, Access::Write);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..300 {
                let grant = there.registry.grant(region, 0, 8192, Access::Write, Some("here:1")).unwrap();
                let slice = write(source.part(0, 8192), target.address(), grant.token);
                here.submit(path, &[slice]).unwrap();
                there.registry.revoke(grant.token, Deadline::after(PATIENCE)).unwrap();
                if let Err(error) = here.events.completion(slice.token) {
                    assert_eq!(error.error.kind(), ErrorKind::AccessDenied);
                }
            }
            stop.store(true, Ordering::Release);
        });
        while !stop.load(Ordering::Acquire) {
            here.transfer(path, write(source.part(0, 8192), target.address(), standing)).unwrap();
        }
    });
}
