//! Frames on their way out of a lane.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use posthorse_core::HostView;

use crate::checksum;
use crate::flow::{Outflow, Sent};
use crate::lane_state::Piece;
use crate::sys;
use crate::wire::{REQUEST_BYTES, Request, Sum};

/// The most frames in an outbox: a header and a payload each for one `sendmsg`.
pub(crate) const MAX_FRAMES: usize = sys::MAX_VIEWS / 2;

#[derive(Debug)]
struct Frame {
    header: [u8; REQUEST_BYTES],
    payload: Payload,
    /// The slice's id when this is its last frame.
    ends: Option<u64>,
}

#[derive(Debug)]
enum Payload {
    None,
    /// Memory of a slice, which stays allocated until its completion.
    Memory(HostView),
    Bytes(Arc<[u8]>),
}

/// A bounded queue of frames, sent with few calls.
#[derive(Debug)]
pub(crate) struct Outbox {
    frames: VecDeque<Frame>,
    /// Bytes of the first frame that are sent.
    sent: usize,
    flow: Outflow,
    views: Vec<HostView>,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        Self {
            frames: VecDeque::with_capacity(MAX_FRAMES + 1),
            sent: 0,
            flow: Outflow::plain(),
            views: Vec::with_capacity(sys::MAX_VIEWS + 2),
        }
    }

    /// Forgets everything, and goes on with another connection.
    pub(crate) fn reset(&mut self, flow: Outflow) {
        self.frames.clear();
        self.sent = 0;
        self.flow = flow;
    }

    pub(crate) const fn flow(&mut self) -> &mut Outflow {
        &mut self.flow
    }

    /// Whether nothing is left to send.
    pub(crate) fn is_empty(&self) -> bool {
        self.wants_frames() && self.flow.pending() == 0
    }

    /// Whether all frames are sent, but perhaps for what is pending in the flow.
    pub(crate) fn wants_frames(&self) -> bool {
        self.frames.is_empty()
    }

    /// Appends a piece.
    ///
    /// # Safety
    /// The piece's memory stays allocated, and nothing that Rust knows of writes to it, until the frame is sent or the
    /// outbox reset.
    pub(crate) unsafe fn push(&mut self, piece: Piece) {
        let frame = match piece {
            Piece::Write { id, address, token, memory, checksum, last } => {
                // SAFETY: the caller's promise.
                let value = unsafe { checksum::of(memory, checksum) };
                let sum = Sum { mode: checksum, value };
                let len = memory.len() as u64;
                let header = Request::Write { id, address, len, token, sum, last }.encode();
                Frame { header, payload: Payload::Memory(memory), ends: last.then_some(id) }
            }
            Piece::Read { id, address, len, token, checksum } => {
                let header = Request::Read { id, address, len, token, checksum }.encode();
                Frame { header, payload: Payload::None, ends: Some(id) }
            }
            Piece::Notify { id, data } => {
                let header = Request::Notify { id, len: data.len() }.encode();
                Frame { header, payload: Payload::Bytes(data), ends: Some(id) }
            }
        };
        self.frames.push_back(frame);
    }

    /// Appends a request that neither has a payload nor ends a slice.
    pub(crate) fn push_bare(&mut self, request: Request) {
        self.frames.push_back(Frame { header: request.encode(), payload: Payload::None, ends: None });
    }

    /// Sends as much as the connection takes in one call of about `limit` bytes at most. Returns how many bytes went,
    /// and the last id with which we are done.
    ///
    /// # Errors
    /// As [`Outflow::send`].
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, limit: usize) -> io::Result<(usize, Option<u64>)> {
        self.views.clear();
        let mut total = 0;
        let mut skip = self.sent;
        for frame in &self.frames {
            if self.views.len() + 2 > sys::MAX_VIEWS || total >= limit {
                break;
            }
            for part in [HostView::of(&frame.header), frame.payload.view()] {
                let skipped = skip.min(part.len());
                skip -= skipped;
                let len = (part.len() - skipped).min(limit - total.min(limit));
                if let Ok(rest) = part.slice(skipped, len)
                    && !rest.is_empty()
                {
                    total += rest.len();
                    self.views.push(rest);
                }
            }
        }
        // SAFETY: the headers and byte payloads lie in our frames, which neither move nor change meanwhile; the memory
        // is allocated, and written by nobody that Rust knows of, by the promise of whoever pushed it.
        let Sent { done, went } = unsafe { self.flow.send(socket, &self.views) }?;
        let mut left = self.sent + done;
        let mut ended = None;
        while let Some(frame) = self.frames.front() {
            let len = frame.header.len() + frame.payload.view().len();
            if left < len {
                break;
            }
            left -= len;
            ended = frame.ends.or(ended);
            self.frames.pop_front();
        }
        self.sent = left;
        Ok((went, ended))
    }
}

impl Payload {
    fn view(&self) -> HostView {
        match self {
            Self::None => HostView::empty(),
            Self::Memory(view) => *view,
            Self::Bytes(bytes) => HostView::of(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use posthorse_core::Checksum;

    use super::*;

    #[test]
    fn frames_arrive_whole_however_the_calls_cut_them() {
        let memory: Vec<u8> = (0..1000_u32).map(|n| n as u8).collect();
        for limit in [1, 63, 64, 65, 1064, 100_000] {
            let (a, mut b) = UnixStream::pair().unwrap();
            let mut outbox = Outbox::new();
            let (view, none) = (HostView::of(&memory), Checksum::Off);
            // SAFETY: the memory lives longer than the outbox.
            unsafe {
                outbox.push(Piece::Write {
                    id: 1,
                    address: 5,
                    token: None,
                    memory: view,
                    checksum: none,
                    last: true,
                });
                outbox.push(Piece::Notify { id: 2, data: b"hi"[..].into() });
            }
            outbox.push_bare(Request::Ping);
            let (mut ended, mut got) = (Vec::new(), Vec::new());
            while !outbox.is_empty() {
                let (went, end) = outbox.send(a.as_fd(), limit).unwrap();
                assert!(went > 0 && went <= limit);
                ended.extend(end);
                let start = got.len();
                got.resize(start + went, 0);
                b.read_exact(&mut got[start..]).unwrap();
            }
            assert_eq!(ended.last(), Some(&2));
            assert_eq!(got.len(), 64 + 1000 + 64 + 2 + 64);
            assert_eq!(got[64..1064], memory);
            assert_eq!(got[1128..1130], *b"hi");
        }
    }
}
