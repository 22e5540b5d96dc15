//! What the registry promises, case by case and with threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use crate::regions::{claim, claim_all, read_only, region};
use posthorse_core::{Access, Claim, Deadline, Error, ErrorKind, Gate, GrantToken, RegionId, Result};
use posthorse_segment::{Registry, RegistryLimits, RegistryStats};

const PAST: Duration = Duration::ZERO;

fn kind<T>(result: Result<T>) -> ErrorKind {
    result.err().expect("a refusal").kind()
}

fn refusal(registry: &Registry, claim: &Claim<'_>) -> Error {
    registry.admit(claim).expect_err("a refusal")
}

#[test]
fn an_overlap_names_both_regions() {
    let registry = Registry::new();
    let first = registry.register(region(0x1000, 0x1000), Access::None).unwrap();
    for (address, len) in [(0x1000, 0x1000), (0xfff, 2), (0x1fff, 1), (0x800, 0x4000), (0x1800, 8)] {
        let error = registry.register(region(address, len), Access::None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Overlap);
        let text = error.to_string();
        assert!(text.contains(&format!("region {}", first.id)) && text.contains("0x1000"), "{text}");
        assert!(text.contains(&format!("{address:#x}")), "{text}");
    }
    // Neighbours do not overlap.
    registry.register(region(0xfff, 1), Access::None).unwrap();
    registry.register(region(0x2000, 1), Access::None).unwrap();
}

#[test]
fn what_cannot_be_registered_or_granted_is_refused() {
    let registry = Registry::new();
    assert_eq!(kind(registry.register(region(0x1000, 0), Access::None)), ErrorKind::InvalidArgument);
    assert_eq!(kind(registry.register(region(u64::MAX - 1, 3), Access::None)), ErrorKind::InvalidArgument);
    for access in [Access::Write, Access::ReadWrite] {
        assert_eq!(kind(registry.register(read_only(0x1000, 16), access)), ErrorKind::InvalidArgument);
    }
    let id = registry.register(read_only(0x1000, 16), Access::Read).unwrap().id;
    assert_eq!(kind(registry.grant(id, 0, 16, Access::Write, None)), ErrorKind::InvalidArgument);
    assert_eq!(kind(registry.grant(id, 0, 0, Access::Read, None)), ErrorKind::InvalidArgument);
    assert_eq!(kind(registry.grant(id, 0, 16, Access::None, None)), ErrorKind::InvalidArgument);
    for (offset, len) in [(0, 17), (16, 1), (u64::MAX, 2), (1, u64::MAX)] {
        assert_eq!(kind(registry.grant(id, offset, len, Access::Read, None)), ErrorKind::OutOfBounds);
    }
    assert_eq!(kind(registry.grant(RegionId(77), 0, 1, Access::Read, None)), ErrorKind::NotRegistered);
    assert_eq!(registry.stats(), RegistryStats { regions: 1, grants: 1, fencing: 0 });
}

#[test]
fn limits_hold_and_say_so() {
    let registry = Registry::with_limits(RegistryLimits { regions: 2, grants: 2 });
    let id = registry.register(region(0x1000, 16), Access::Read).unwrap().id;
    registry.register(region(0x2000, 16), Access::None).unwrap();
    assert_eq!(kind(registry.register(region(0x3000, 16), Access::None)), ErrorKind::LimitReached);
    let grant = registry.grant(id, 0, 1, Access::Read, None).unwrap();
    let error = registry.grant(id, 0, 1, Access::Read, None).unwrap_err();
    assert!(error.kind() == ErrorKind::LimitReached && error.to_string().contains("2 grants"), "{error}");
    registry.revoke(grant.token, Deadline::NEVER).unwrap();
    registry.grant(id, 0, 1, Access::Read, None).unwrap();
}

#[test]
fn a_claim_is_checked_in_every_part() {
    let registry = Registry::new();
    let id = registry.register(region(0x1000, 0x1000), Access::None).unwrap().id;
    let grant = registry.grant(id, 0x100, 0x100, Access::Write, Some("b:1")).unwrap();
    assert_eq!((grant.address, grant.len), (0x1100, 0x100));
    let admission = registry.admit(&claim(Some(grant.token), 0x1180, 0x80, Access::Write)).unwrap();
    assert_eq!((admission.view().address(), admission.view().len()), (0x1180, 0x80));

    let token = grant.token;
    let all = claim_all(&grant);
    let wrong_secret = GrantToken { secret: token.secret ^ 1, ..token };
    let stale = GrantToken { handle: token.handle - (1 << 32), ..token };
    let beyond = GrantToken { handle: token.handle + 1, ..token };
    for (claim, kind, part) in [
        (Claim { token: Some(wrong_secret), ..all }, ErrorKind::AccessDenied, "secret"),
        (Claim { token: Some(stale), ..all }, ErrorKind::AccessDenied, "not held here"),
        (Claim { token: Some(beyond), ..all }, ErrorKind::AccessDenied, "not held here"),
        (Claim { token: None, ..all }, ErrorKind::AccessDenied, "no token"),
        (Claim { peer: "c:1", ..all }, ErrorKind::AccessDenied, "another peer"),
        (Claim { access: Access::Read, ..all }, ErrorKind::AccessDenied, "wants Read"),
        (Claim { access: Access::ReadWrite, ..all }, ErrorKind::AccessDenied, "wants ReadWrite"),
        (Claim { len: 0x101, ..all }, ErrorKind::OutOfBounds, "0x1100"),
        (Claim { address: 0x10ff, ..all }, ErrorKind::OutOfBounds, "0x10ff"),
        (Claim { len: u64::MAX, ..all }, ErrorKind::OutOfBounds, "leave"),
        (Claim { address: u64::MAX, ..all }, ErrorKind::OutOfBounds, "leave"),
    ] {
        let error = refusal(&registry, &claim);
        assert_eq!(error.kind(), kind, "{error}");
        let text = error.to_string();
        assert!(text.contains(part), "{part} is missing in {text}");
        assert!(
            !text.contains(&token.secret.to_string()) && !text.contains(&format!("{:x}", token.secret)),
            "{text}"
        );
        assert_eq!(error.peer(), Some(claim.peer));
    }
}

#[test]
fn without_a_token_only_grants_that_need_none_count() {
    let registry = Registry::new();
    let open = registry.register(region(0x1000, 0x100), Access::Read).unwrap().id;
    let closed = registry.register(region(0x2000, 0x100), Access::None).unwrap().id;
    registry.grant(closed, 0, 0x100, Access::ReadWrite, None).unwrap();
    registry.admit(&claim(None, 0x10f0, 0x10, Access::Read)).unwrap();
    for (claim, kind) in [
        (claim(None, 0x10f0, 0x11, Access::Read), ErrorKind::OutOfBounds),
        (claim(None, 0x10f0, u64::MAX, Access::Read), ErrorKind::OutOfBounds),
        (claim(None, 0x1000, 1, Access::Write), ErrorKind::AccessDenied),
        (claim(None, 0x2000, 1, Access::Read), ErrorKind::AccessDenied),
        (claim(None, 0x3000, 1, Access::Read), ErrorKind::NotRegistered),
        (claim(None, 0, 1, Access::Read), ErrorKind::NotRegistered),
    ] {
        assert_eq!(refusal(&registry, &claim).kind(), kind);
    }
    // Grants that need no token may overlap: whichever contains the range will do.
    let wide = registry.grant_tokenless(closed, 0, 0x80, Access::Write, Some("b:1")).unwrap();
    let narrow = registry.grant_tokenless(closed, 0x40, 0x10, Access::Write, Some("c:1")).unwrap();
    registry.admit(&claim(None, 0x2048, 8, Access::Write)).unwrap();
    registry.admit(&Claim { peer: "c:1", ..claim(None, 0x2048, 8, Access::Write) }).unwrap();
    assert_eq!(refusal(&registry, &claim(None, 0x2048, 0x40, Access::Write)).kind(), ErrorKind::AccessDenied);
    registry.revoke(wide.token, Deadline::NEVER).unwrap();
    assert_eq!(refusal(&registry, &claim(None, 0x2048, 8, Access::Write)).kind(), ErrorKind::AccessDenied);
    registry.admit(&Claim { peer: "c:1", ..claim(None, 0x2048, 8, Access::Write) }).unwrap();
    registry.admit(&Claim { peer: "c:1", ..claim_all(&narrow) }).unwrap();
    registry.unregister(open, Deadline::NEVER).unwrap();
    assert_eq!(refusal(&registry, &claim(None, 0x1000, 1, Access::Read)).kind(), ErrorKind::NotRegistered);
}

#[test]
fn a_published_region_is_a_standing_grant_of_the_whole() {
    let registry = Registry::new();
    let first = registry.register(region(0x9000, 0x100), Access::ReadWrite).unwrap();
    registry.register(region(0x5000, 0x100), Access::None).unwrap();
    let third = registry.register(region(0x1000, 0x100), Access::Read).unwrap();
    let published = registry.published();
    assert_eq!(
        published.iter().map(|buffer| buffer.region).collect::<Vec<_>>(),
        [Some(first.id), Some(third.id)]
    );
    let grant = registry.standing_grant(first.id).unwrap().unwrap();
    assert_eq!(published[0].token, Some(grant.token));
    assert_eq!((grant.address, grant.len, grant.access), (0x9000, 0x100, Access::ReadWrite));
    registry.admit(&claim_all(&grant)).unwrap();
    // It can be revoked by itself; the region stays registered for local ends.
    registry.revoke(grant.token, Deadline::NEVER).unwrap();
    assert_eq!(refusal(&registry, &claim_all(&grant)).kind(), ErrorKind::AccessDenied);
    assert_eq!(registry.standing_grant(first.id).unwrap(), None);
    assert_eq!(registry.published().len(), 1);
    assert!(registry.pin(first.id).is_ok());
}

#[test]
fn a_range_is_found_by_address() {
    let registry = Registry::new();
    let id = registry.register(region(0x1000, 0x100), Access::None).unwrap().id;
    assert_eq!(registry.find(0x1000, 0x100), Some((id, 0)));
    assert_eq!(registry.find(0x10ff, 1), Some((id, 0xff)));
    for (address, len) in [(0xfff, 1), (0x1100, 0), (0x1000, 0x101), (0x1001, u64::MAX), (u64::MAX, 1)] {
        assert_eq!(registry.find(address, len), None, "{address:#x} {len}");
    }
    assert_eq!(registry.region(id).unwrap().region.view().address(), 0x1000);
    assert_eq!(registry.pin(id).unwrap().region().view().len(), 0x100);
}

#[test]
fn revoking_waits_for_those_inside_this_grant_alone() {
    let registry = Registry::new();
    let id = registry.register(region(0x1000, 0x100), Access::None).unwrap().id;
    let busy = registry.grant(id, 0, 0x10, Access::Write, None).unwrap();
    let idle = registry.grant(id, 0x10, 0x10, Access::Write, None).unwrap();
    let admission = registry.admit(&claim_all(&busy)).unwrap();
    let inside = admission.enter().unwrap();
    registry.revoke(idle.token, Deadline::after(PAST)).unwrap();

    assert_eq!(kind(registry.revoke(busy.token, Deadline::after(PAST))), ErrorKind::DeadlineExceeded);
    assert_eq!(registry.stats(), RegistryStats { regions: 1, grants: 1, fencing: 1 });
    assert!(refusal(&registry, &claim_all(&busy)).to_string().contains("being revoked"));
    assert!(admission.enter().is_none(), "an admission from before lets nobody in any more");
    drop(inside);
    registry.revoke(busy.token, Deadline::after(PAST)).unwrap();
    assert_eq!(registry.stats(), RegistryStats { regions: 1, grants: 0, fencing: 0 });
    assert_eq!(kind(registry.revoke(busy.token, Deadline::after(PAST))), ErrorKind::NotFound);

    // The slot is used again; the old token does not fit.
    let next = registry.grant(id, 0, 0x10, Access::Write, None).unwrap();
    assert_eq!(next.token.handle as u32, busy.token.handle as u32);
    for secret in [busy.token.secret, next.token.secret] {
        let stale = GrantToken { handle: busy.token.handle, secret };
        assert_eq!(
            refusal(&registry, &Claim { token: Some(stale), ..claim_all(&next) }).kind(),
            ErrorKind::AccessDenied
        );
    }
}

#[test]
fn unregistering_waits_for_pins_and_admissions_and_withholds_the_memory() {
    let registry = Registry::new();
    let memory = region(0x1000, 0x100);
    let id = registry.register(Arc::clone(&memory), Access::Read).unwrap().id;
    let grant = registry.grant(id, 0, 0x10, Access::Write, None).unwrap();
    let admission = registry.admit(&claim_all(&grant)).unwrap();
    let inside = admission.enter().unwrap();
    let pin = registry.pin(id).unwrap();

    for _ in 0..2 {
        assert_eq!(kind(registry.unregister(id, Deadline::after(PAST))), ErrorKind::DeadlineExceeded);
    }
    assert_eq!(registry.stats(), RegistryStats { regions: 1, grants: 2, fencing: 2 });
    assert_eq!(kind(registry.pin(id)), ErrorKind::NotRegistered);
    assert_eq!(kind(registry.region(id)), ErrorKind::NotRegistered);
    assert_eq!(kind(registry.grant(id, 0, 1, Access::Read, None)), ErrorKind::NotRegistered);
    assert_eq!(registry.find(0x1000, 1), None);
    assert!(registry.published().is_empty());
    assert_eq!(refusal(&registry, &claim_all(&grant)).kind(), ErrorKind::AccessDenied);
    assert_eq!(kind(registry.register(region(0x1080, 1), Access::None)), ErrorKind::Overlap);
    drop(inside);
    assert_eq!(kind(registry.unregister(id, Deadline::after(PAST))), ErrorKind::DeadlineExceeded);
    drop(pin);
    registry.unregister(id, Deadline::after(PAST)).unwrap();
    assert_eq!(kind(registry.unregister(id, Deadline::after(PAST))), ErrorKind::NotRegistered);
    assert_eq!(registry.stats(), RegistryStats::default());

    drop(admission);
    assert_eq!(Arc::strong_count(&memory), 1, "nothing of the region is kept");
    let again = registry.register(memory, Access::None).unwrap().id;
    assert_ne!(again, id, "a region's number is never used twice");
}

#[test]
fn racing_revocation_nobody_is_inside_once_it_returned() {
    const ROUNDS: usize = 100;
    const WORKERS: usize = 3;
    let registry = Registry::new();
    let id = registry.register(region(0x1000, 0x1000), Access::None).unwrap().id;
    for round in 0..ROUNDS {
        let grant = registry.grant(id, 0, 64, Access::Write, None).unwrap();
        let quiet = AtomicBool::new(false);
        let start = Barrier::new(WORKERS + 1);
        thread::scope(|scope| {
            for _ in 0..WORKERS {
                scope.spawn(|| {
                    start.wait();
                    while let Ok(admission) = registry.admit(&claim_all(&grant)) {
                        let Some(_inside) = admission.enter() else { break };
                        assert!(!quiet.load(Ordering::Acquire), "inside a grant that was revoked");
                    }
                });
            }
            start.wait();
            if round % 2 == 0 {
                // Two at once: both return, and only when it is quiet.
                scope.spawn(|| {
                    let _ = registry.revoke(grant.token, Deadline::NEVER);
                    quiet.store(true, Ordering::Release);
                });
            }
            let _ = registry.revoke(grant.token, Deadline::NEVER);
            quiet.store(true, Ordering::Release);
        });
    }
    assert_eq!(registry.stats(), RegistryStats { regions: 1, grants: 0, fencing: 0 });
}
