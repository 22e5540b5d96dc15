//! The data path: a slice, or a piece of one, copied under an announced grant.

use std::sync::Arc;

use posthorse_core::{Access, Completion, Error, ErrorKind, GrantToken, Opcode, Result, Slice};

use crate::jobs::{Push, failure, success};
use crate::link::Link;
use crate::remote::{RemoteRegion, local_part};
use crate::rendezvous::wire::MapRequest;
use crate::slots::CopySlot;
use crate::table::Terms;

/// Completions reported at once.
const REPORT: usize = 64;

const fn access_of(opcode: Opcode) -> Access {
    match opcode {
        Opcode::Read => Access::Read,
        Opcode::Write => Access::Write,
    }
}

fn token_of(slice: &Slice) -> Result<GrantToken> {
    slice.grant.ok_or_else(|| Error::new(ErrorKind::AccessDenied, "the slice names no grant of the peer"))
}

/// Copies part of a slice on this thread.
///
/// # Safety
/// The local memory of the slice is alive, and nobody uses it meanwhile in a way that Rust forbids beside this.
pub(crate) unsafe fn copy_piece(link: &Link, slice: &Slice, offset: u64, len: u64) -> Result<()> {
    let token = token_of(slice)?;
    let slot = link.met.slots.claim();
    let terms = slot.announce(&link.met.table, token, link.met.me)?;
    let address = slice.remote_address.checked_add(offset).ok_or_else(|| out_of_space(slice))?;
    terms.check(address, len, access_of(slice.opcode))?;
    let wanted = MapRequest { region: terms.region, write: slice.opcode == Opcode::Write };
    let region = link.region(wanted).ok_or_else(|| link.withdrawn(terms.region))?;
    let local = local_part(slice.local, offset, len)?;
    // SAFETY: the caller's promise; the grant is announced until `slot` is dropped.
    unsafe { region.copy(slice.opcode, local, address, slice.checksum, slice.local.len()) }
}

fn out_of_space(slice: &Slice) -> Error {
    let range = format!("{} bytes at {:#x}", slice.local.len(), slice.remote_address);
    Error::new(ErrorKind::OutOfBounds, format!("the range of {range} leaves the address space"))
}

/// What the last slice of a call was copied under, as the next is often under the same.
struct Announced<'a> {
    slot: CopySlot<'a>,
    token: GrantToken,
    terms: Terms,
    region: Option<(MapRequest, Arc<RemoteRegion>)>,
}

/// What is to be done with a slice.
enum Verdict {
    /// It has been copied, or has failed.
    Over(Result<()>),
    /// It is for the copy threads.
    Queue(MapRequest),
}

/// Takes slices: copies up to `inline_bytes` of them on this thread, and leaves the rest to the copy threads.
/// Returns how many were taken.
///
/// # Safety
/// As [`posthorse_core::Transport::submit`].
pub(crate) unsafe fn submit(link: &Arc<Link>, slices: &[Slice], inline_bytes: usize) -> Result<usize> {
    let mut rest = slices;
    let mut budget = inline_bytes as u64;
    let mut done: Vec<Completion> = Vec::with_capacity(slices.len().min(REPORT));
    loop {
        let inside = match link.enter() {
            Ok(inside) => inside,
            Err(error) if rest.len() == slices.len() => return Err(error),
            // It went down while the slices before were reported.
            Err(_) => break,
        };
        // SAFETY: the caller's promise.
        let has_room = unsafe { take_some(link, &mut rest, &mut budget, &mut done) };
        if !done.is_empty() {
            // No longer inside and with nothing announced, as whoever is told may wait for both.
            let reporting = inside.report();
            link.events().completed(&done);
            done.clear();
            drop(reporting);
        }
        if rest.is_empty() || !has_room {
            break;
        }
    }
    Ok(slices.len() - rest.len())
}

/// Takes slices off `rest` until as many have ended as are reported at once. False when the queue has no room.
///
/// # Safety
/// As [`copy_piece`].
unsafe fn take_some(
    link: &Arc<Link>,
    rest: &mut &[Slice],
    budget: &mut u64,
    done: &mut Vec<Completion>,
) -> bool {
    let mut announced = None;
    while let Some((slice, others)) = rest.split_first()
        && done.len() < REPORT
    {
        // SAFETY: the caller's promise.
        match unsafe { one(link, slice, *budget, &mut announced) } {
            Verdict::Over(result) => {
                *budget = budget.saturating_sub(slice.local.len());
                done.push(result.map_or_else(|error| failure(slice.token, error), |()| success(slice.token)));
            }
            Verdict::Queue(wanted) => match link.enqueue(slice, wanted) {
                Push::Taken => {}
                // A path that is closed meanwhile has room for nothing; the next call says why.
                Push::Full | Push::Closed => return false,
            },
        }
        *rest = others;
    }
    true
}

/// # Safety
/// As [`copy_piece`].
unsafe fn one<'a>(
    link: &'a Link,
    slice: &Slice,
    budget: u64,
    announced: &mut Option<Announced<'a>>,
) -> Verdict {
    match prepare(link, slice, announced) {
        Err(error) => Verdict::Over(Err(error)),
        Ok((wanted, region)) => match region.filter(|_| slice.local.len() <= budget) {
            None => Verdict::Queue(wanted),
            Some(region) => {
                let local = local_part(slice.local, 0, slice.local.len());
                Verdict::Over(local.and_then(|local| {
                    // SAFETY: the caller's promise; `announced` names the grant.
                    unsafe {
                        region.copy(
                            slice.opcode,
                            local,
                            slice.remote_address,
                            slice.checksum,
                            slice.local.len(),
                        )
                    }
                }))
            }
        },
    }
}

/// Announces the slice's grant unless it is announced already, checks its terms, and finds its region.
fn prepare<'a, 's>(
    link: &'a Link,
    slice: &Slice,
    announced: &'s mut Option<Announced<'a>>,
) -> Result<(MapRequest, Option<&'s Arc<RemoteRegion>>)> {
    let token = token_of(slice)?;
    if slice.ready.is_some() {
        return Err(Error::new(ErrorKind::Unsupported, "shared memory waits for no device event"));
    }
    if slice.local.host().is_none() {
        local_part(slice.local, 0, 0)?;
    }
    if announced.as_ref().is_none_or(|before| before.token != token) {
        let slot = announced.take().map_or_else(|| link.met.slots.claim(), |before| before.slot);
        let terms = slot.announce(&link.met.table, token, link.met.me)?;
        *announced = Some(Announced { slot, token, terms, region: None });
    }
    let Some(now) = announced else { return Err(Error::new(ErrorKind::Internal, "nothing is announced")) };
    now.terms.check(slice.remote_address, slice.local.len(), access_of(slice.opcode))?;
    let wanted = MapRequest { region: now.terms.region, write: slice.opcode == Opcode::Write };
    if now.region.as_ref().is_none_or(|(had, _)| *had != wanted) {
        now.region = link.region(wanted).map(|region| (wanted, region));
    }
    Ok((wanted, now.region.as_ref().map(|(_, region)| region)))
}
