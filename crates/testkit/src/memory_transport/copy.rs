//! One slice, carried out.

use std::sync::atomic::{AtomicBool, Ordering};

use posthorse_core::{
    Access, Admission, Checksum, Claim, Error, ErrorKind, HostView, Inside, Level, Opcode, Result, Slice,
};

use super::hub::Endpoint;

/// Bytes copied at a time: whoever revokes or fences waits for one such piece.
const PIECE: usize = 256 << 10;

/// Copies a slice of `own`, as far as `peer` admits it and until the path is `down`.
pub(super) fn carry_out(slice: &Slice, own: &Endpoint, peer: &Endpoint, down: &AtomicBool) -> Result<Level> {
    drop(peer.visit()?);
    let local = slice.local.host().ok_or_else(unsupported)?;
    let access = match slice.opcode {
        Opcode::Read => Access::Read,
        Opcode::Write => Access::Write,
    };
    let claim = Claim {
        peer: &own.context.name,
        token: slice.grant,
        address: slice.remote_address,
        len: local.len() as u64,
        access,
    };
    let admission = peer.context.gate.admit(&claim)?;
    if !admission.access().allows(access) {
        return Err(Error::new(ErrorKind::AccessDenied, "the gate admitted something else"));
    }
    let remote = admission.view().host().ok_or_else(unsupported)?;
    let mut offset = 0;
    while offset < local.len() {
        if down.load(Ordering::SeqCst) {
            return Err(flushed());
        }
        let len = PIECE.min(local.len() - offset);
        let _serving = peer.visit()?;
        let inside = enter(&admission)?;
        let (local, remote) = (local.slice(offset, len)?, remote.slice(offset, len)?);
        let (from, to) = match slice.opcode {
            Opcode::Read => (remote, local),
            Opcode::Write => (local, remote),
        };
        copy(&inside, from, to);
        if slice.checksum != Checksum::Off && !same(&inside, from, to) {
            return Err(Error::new(ErrorKind::Corrupt, "the copy differs from what was copied"));
        }
        offset += len;
    }
    Ok(Level::Visible)
}

pub(super) fn flushed() -> Error {
    Error::new(ErrorKind::Flushed, "the path was fenced")
}

fn enter(admission: &Admission) -> Result<Inside<'_>> {
    admission.enter().ok_or_else(|| {
        Error::new(ErrorKind::AccessDenied, "the owner of the memory ended the grant during the transfer")
    })
}

fn unsupported() -> Error {
    Error::new(ErrorKind::Unsupported, "only host memory can be copied")
}

/// Copies between two views of the same length.
fn copy(_: &Inside<'_>, from: HostView, to: HostView) {
    debug_assert_eq!(from.len(), to.len());
    // SAFETY: one view is the peer's memory, alive and open to us while inside; the other is the local memory of
    // a slice without completion, which whoever submitted it keeps alive. They may overlap.
    unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), from.len()) };
}

fn same(_: &Inside<'_>, a: HostView, b: HostView) -> bool {
    // SAFETY: as in `copy`; both are read only. That nobody writes to them meanwhile is what submitting a slice
    // and granting a range promise.
    unsafe { a.bytes() == b.bytes() }
}
