//! A peer's region as this process reaches it, and the copies to and from it.

use std::os::fd::OwnedFd;

use posthorse_core::{Checksum, Error, ErrorKind, HostView, Opcode, Region, Result, View};
use posthorse_memory::{MappedFile, page_size};

use crate::rendezvous::wire::RegionReply;
use crate::sys::{Direction, Process, process_vm, same_bytes};

/// Sampled checksums compare this many bytes at each place.
const SAMPLE: usize = 64;
/// Sampled checksums look at the start of every so many bytes, and at the end.
const SAMPLE_EVERY: usize = 64 << 10;
/// Bytes read back at a time to be compared, where the far end is not mapped.
const READ_BACK: usize = 16 << 10;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct RemoteRegion {
    /// In the owner's address space.
    address: u64,
    len: u64,
    reach: Reach,
}

#[derive(Debug)]
enum Reach {
    Mapped {
        map: MappedFile,
        /// Where in the mapping the region starts: mappings start at a page.
        skip: usize,
    },
    Process(Process),
}

impl RemoteRegion {
    /// Maps what the owner sent.
    ///
    /// # Errors
    /// As [`MappedFile::map`]: the file must be long enough, and sealed against shrinking.
    pub(crate) fn map(reply: &RegionReply, offset: u64, file: OwnedFd) -> Result<Self> {
        let page = page_size() as u64;
        let skip = offset % page;
        let len = reply.len.checked_add(skip).and_then(|len| usize::try_from(len).ok()).ok_or_else(|| {
            Error::new(ErrorKind::Malformed, format!("the peer's region has {} bytes", reply.len))
        })?;
        let map = MappedFile::map(file, offset - skip, len, reply.request.write)?;
        let reach = Reach::Mapped { map, skip: skip as usize };
        Ok(Self { address: reply.address, len: reply.len, reach })
    }

    /// Memory without a file, reached through its process.
    pub(crate) const fn in_process(reply: &RegionReply, process: Process) -> Self {
        Self { address: reply.address, len: reply.len, reach: Reach::Process(process) }
    }

    /// Whether it can be written.
    pub(crate) fn writable(&self) -> bool {
        match &self.reach {
            Reach::Mapped { map, .. } => map.writable(),
            Reach::Process(_) => true,
        }
    }

    /// Whether this process has it: a forked child has not.
    pub(crate) fn is_here(&self) -> bool {
        match &self.reach {
            Reach::Mapped { map, .. } => map.is_here(),
            Reach::Process(_) => true,
        }
    }

    /// Where a range of the owner's address space lies in this process.
    ///
    /// # Errors
    /// `OutOfBounds`; `Unsupported` when it is not mapped.
    pub(crate) fn view(&self, address: u64, len: u64) -> Result<HostView> {
        let offset = self.offset(address, len)?;
        match &self.reach {
            Reach::Mapped { map, skip } => {
                let (offset, len) = (usize::try_from(offset), usize::try_from(len));
                let (Ok(offset), Ok(len)) = (offset, len) else {
                    return Err(self.outside(address, len_of(len)));
                };
                map.host_view().slice(skip.saturating_add(offset), len)
            }
            Reach::Process(_) => Err(Error::new(
                ErrorKind::Unsupported,
                "the peer's region is not a file in memory, so that it cannot be read in place",
            )
            .with_advice("the owner has to allocate it as shared memory (a sealed memfd)")),
        }
    }

    /// The offset of a range of the owner's address space, which is checked here whatever the grant says.
    fn offset(&self, address: u64, len: u64) -> Result<u64> {
        address
            .checked_sub(self.address)
            .filter(|offset| offset.checked_add(len).is_some_and(|end| end <= self.len))
            .ok_or_else(|| self.outside(address, len))
    }

    fn outside(&self, address: u64, len: u64) -> Error {
        Error::new(
            ErrorKind::OutOfBounds,
            format!(
                "the range of {len} bytes at {address:#x} leaves the peer's region of {} bytes at {:#x}",
                self.len, self.address
            ),
        )
    }

    /// Copies between `local` and as many bytes at `address`, and compares as `checksum` says. It is part of a copy
    /// of `total` bytes.
    ///
    /// # Errors
    /// `OutOfBounds`, `Corrupt`; what the kernel says where the memory is not mapped.
    ///
    /// # Safety
    /// `local` is alive, and nobody uses it meanwhile in a way that Rust forbids beside this copy. The owner
    /// has been told of this access (it is announced in a hazard slot).
    pub(crate) unsafe fn copy(
        &self,
        opcode: Opcode,
        local: HostView,
        address: u64,
        checksum: Checksum,
        total: u64,
    ) -> Result<()> {
        let len = local.len() as u64;
        match &self.reach {
            Reach::Mapped { .. } => {
                let remote = self.view(address, len)?;
                let (from, to) = match opcode {
                    Opcode::Write => (local, remote),
                    Opcode::Read => (remote, local),
                };
                // SAFETY: ours by the caller's promise; theirs is mapped while `self` lives, and Rust
                // references to it exist nowhere in this process.
                unsafe { posthorse_memory::copy_part_of(from, to, total as usize) }?;
                self.compare(checksum, local, |part, offset| {
                    let theirs = remote.slice(offset, part.len())?;
                    // SAFETY: as above.
                    Ok(unsafe { same_bytes(part, theirs) })
                })
            }
            Reach::Process(process) => {
                self.offset(address, len)?;
                let direction = match opcode {
                    Opcode::Write => Direction::ToPeer,
                    Opcode::Read => Direction::FromPeer,
                };
                // SAFETY: the caller's promise.
                unsafe { process_vm(process, local, address, direction) }?;
                let mut scratch = [0; READ_BACK];
                let scratch = HostView::of_mut(&mut scratch);
                self.compare(checksum, local, |part, offset| {
                    let mut done = 0;
                    while done < part.len() {
                        let len = READ_BACK.min(part.len() - done);
                        let (ours, theirs) = (part.slice(done, len)?, scratch.slice(0, len)?);
                        let at = address + (offset + done) as u64;
                        // SAFETY: the array outlives the call and has no other user.
                        unsafe { process_vm(process, theirs, at, Direction::FromPeer) }?;
                        // SAFETY: as above, and ours by the caller's promise.
                        if !unsafe { same_bytes(ours, theirs) } {
                            return Ok(false);
                        }
                        done += len;
                    }
                    Ok(true)
                })
            }
        }
    }

    /// Compares parts of `local` with the same parts at the far end.
    fn compare(
        &self,
        checksum: Checksum,
        local: HostView,
        mut same: impl FnMut(HostView, usize) -> Result<bool>,
    ) -> Result<()> {
        let mut check = |offset: usize, len: usize| {
            if same(local.slice(offset, len)?, offset)? {
                return Ok(());
            }
            Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "the {len} bytes at offset {offset} of the slice differ at the two ends after the copy"
                ),
            )
            .with_advice("the memory was written to by somebody else meanwhile, or is faulty"))
        };
        let len = local.len();
        match checksum {
            Checksum::Off => Ok(()),
            Checksum::Full => check(0, len),
            Checksum::Sampled => {
                for offset in (0..len).step_by(SAMPLE_EVERY) {
                    check(offset, SAMPLE.min(len - offset))?;
                }
                let tail = SAMPLE.min(len);
                check(len - tail, tail)
            }
        }
    }
}

fn len_of(len: std::result::Result<usize, std::num::TryFromIntError>) -> u64 {
    len.map_or(u64::MAX, |len| len as u64)
}

/// A part of a local view, which must be the host's.
pub(crate) fn local_part(view: View, offset: u64, len: u64) -> Result<HostView> {
    let host = view.host().ok_or_else(|| {
        Error::new(
            ErrorKind::Unsupported,
            "shared memory moves host memory only, and the local end is a device's",
        )
    })?;
    let wide = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    host.slice(wide(offset), wide(len))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use posthorse_core::RegionId;
    use posthorse_memory::MemoryOptions;

    use super::*;
    use crate::rendezvous::wire::MapRequest;

    fn reply(len: u64, write: bool) -> RegionReply {
        RegionReply {
            request: MapRequest { region: RegionId(1), write },
            address: 1 << 40,
            len,
            offset: Some(0),
        }
    }

    fn remote(len: u64, write: bool, offset: u64) -> (posthorse_memory::HostMemory, Result<RemoteRegion>) {
        let memory = MemoryOptions::new(16384).shared(true).allocate().unwrap();
        let file = memory.shared_file().unwrap().fd.as_fd().try_clone_to_owned().unwrap();
        let remote = RemoteRegion::map(&reply(len, write), offset, file);
        (memory, remote)
    }

    #[test]
    fn bytes_go_to_their_place_and_come_back() {
        let (owner, remote) = remote(9000, true, 100);
        let remote = remote.unwrap();
        let mut ours: Vec<u8> = (0..200).collect();
        for checksum in [Checksum::Off, Checksum::Sampled, Checksum::Full] {
            let local = HostView::of(&ours);
            // SAFETY: the vector is alive and unused meanwhile.
            unsafe { remote.copy(Opcode::Write, local, (1 << 40) + 5000, checksum, 200) }.unwrap();
        }
        // SAFETY: nobody writes to it now.
        let there = unsafe { owner.host_view().bytes() };
        assert_eq!(there[5100..5300], ours[..]);
        assert!(there[..5100].iter().chain(&there[5300..]).all(|&byte| byte == 0));
        ours.fill(0);
        let local = HostView::of_mut(&mut ours);
        // SAFETY: as above.
        unsafe { remote.copy(Opcode::Read, local, (1 << 40) + 5001, Checksum::Full, 200) }.unwrap();
        assert_eq!(ours[..199], (1..200).collect::<Vec<u8>>()[..]);
    }

    #[test]
    fn no_range_leaves_the_region_whatever_was_granted() {
        let (_owner, remote) = remote(9000, true, 0);
        let remote = remote.unwrap();
        let base = 1_u64 << 40;
        for (address, len) in
            [(base - 1, 1), (base + 9000, 1), (base, 9001), (base + 1, u64::MAX), (u64::MAX, 2), (0, 1)]
        {
            assert_eq!(
                remote.view(address, len).unwrap_err().kind(),
                ErrorKind::OutOfBounds,
                "{address} {len}"
            );
        }
        assert_eq!(remote.view(base + 9000, 0).unwrap().len(), 0);
    }

    #[test]
    fn a_region_longer_than_its_file_is_refused() {
        assert!(remote(16385, true, 0).1.is_err());
        assert!(remote(u64::MAX, true, 0).1.is_err());
        assert!(remote(8193, true, 8192).1.is_err());
    }

    #[test]
    fn a_process_is_reached_without_a_file() {
        let theirs = vec![7_u8; 40000];
        let address = HostView::of(&theirs).address();
        let reply = RegionReply { address, offset: None, ..reply(40000, false) };
        let pid = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let remote = RemoteRegion::in_process(&reply, Process { pid, pidfd: pidfd.into() });
        let mut ours = vec![0_u8; 40000];
        let local = HostView::of_mut(&mut ours);
        for checksum in [Checksum::Full, Checksum::Sampled] {
            // SAFETY: the vectors are alive and unused meanwhile.
            unsafe { remote.copy(Opcode::Read, local, address, checksum, 200) }.unwrap();
        }
        assert_eq!(ours, theirs);
        assert_eq!(remote.view(address, 1).unwrap_err().kind(), ErrorKind::Unsupported);
        // SAFETY: as above.
        let error = unsafe { remote.copy(Opcode::Read, local, address + 1, Checksum::Off, 200) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    }

    #[test]
    fn a_difference_is_found() {
        let (_owner, remote) = remote(9000, true, 0);
        let ours = vec![1_u8; 9000];
        let local = HostView::of(&ours);
        let remote = remote.unwrap();
        for (checksum, at, found) in
            [(Checksum::Full, 5000, true), (Checksum::Sampled, 8999, true), (Checksum::Sampled, 0, true)]
        {
            let result = remote
                .compare(checksum, local, |part, offset| Ok(!(offset..offset + part.len()).contains(&at)));
            assert_eq!(result.is_err_and(|error| error.kind() == ErrorKind::Corrupt), found);
        }
    }
}
