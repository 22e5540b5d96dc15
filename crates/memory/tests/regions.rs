//! Regions as a user and a peer process see them, whatever this host has to give.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::fd::{AsFd, OwnedFd};

use posthorse_core::{ErrorKind, HostView, Location, Region};
use posthorse_memory::{
    HostMemory, MappedFile, MemoryOptions, Pages, huge_page_size, hugetlb_page_size, numa_nodes, page_size,
};

fn options(size: usize) -> MemoryOptions {
    MemoryOptions::new(size)
}

fn fd_of(memory: &HostMemory) -> OwnedFd {
    memory.shared_file().unwrap().fd.try_clone_to_owned().unwrap()
}

fn fill(view: HostView, byte: u8) {
    // SAFETY: the tests use their memory from one thread and hold no other reference into it.
    unsafe { view.bytes_mut() }.fill(byte);
}

fn holds(view: HostView, byte: u8) -> bool {
    // SAFETY: as in `fill`.
    unsafe { view.bytes() }.iter().all(|&b| b == byte)
}

#[test]
fn every_kind_of_region_is_zeroed_aligned_and_writable() {
    let huge = huge_page_size().unwrap_or_else(page_size);
    for pages in [Pages::Base, Pages::Transparent, Pages::HugeTlb] {
        for shared in [false, true] {
            for populate in [false, true] {
                for size in [1, page_size(), 2 * huge + 12345] {
                    let what = format!("{pages:?} shared={shared} populate={populate} {size}");
                    let options = options(size).pages(pages).shared(shared).populate(populate);
                    let memory = options.allocate().unwrap();
                    let view = memory.host_view();
                    assert_eq!((view.len(), memory.size()), (size, size), "{what}");
                    assert!(holds(view, 0), "{what}");
                    fill(view, 0xA5);
                    assert!(holds(view, 0xA5), "{what}");
                    assert_eq!(memory.shared_file().is_some(), shared, "{what}");
                    assert!(memory.writable() && memory.location() == Location::Any, "{what}");
                    let align = if pages == Pages::Base { page_size() } else { huge };
                    assert!(view.address().is_multiple_of(align as u64), "{what}");
                    assert!(pages != Pages::Base || memory.huge_bytes() == 0, "{what}");
                }
            }
        }
    }
}

#[test]
fn huge_pages_are_had_or_missed_by_name() {
    let Some(huge) = huge_page_size() else {
        return assert_eq!(options(4 << 20).allocate().unwrap().huge_bytes(), 0);
    };
    for shared in [false, true] {
        let memory = options(4 * huge).shared(shared).allocate().unwrap();
        assert!(
            memory.huge_bytes() == 4 * huge || !memory.notices().is_empty(),
            "{} bytes are huge and nothing says why",
            memory.huge_bytes()
        );
    }
}

#[test]
fn reserved_pages_are_used_where_there_are_some_and_else_missed_by_name() {
    let size = 3 << 20;
    for shared in [false, true] {
        let memory = options(size).pages(Pages::HugeTlb).shared(shared).allocate().unwrap();
        match memory.notices() {
            // Transparent pages would leave the last part of a page to base pages.
            [] => assert_eq!(memory.huge_bytes(), size.next_multiple_of(hugetlb_page_size().unwrap())),
            [notice, ..] => {
                let notice = notice.to_string();
                assert!(notice.contains("3145728 bytes") && notice.contains("vm.nr_hugepages"), "{notice}");
            }
        }
        if shared {
            let peer = MappedFile::map(fd_of(&memory), 0, size, true).unwrap();
            fill(peer.host_view(), 8);
            assert!(holds(memory.host_view(), 8));
        }
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    for (size, kind) in [
        (0, ErrorKind::InvalidArgument),
        (usize::MAX, ErrorKind::InvalidArgument),
        (usize::MAX / 2 - 4096, ErrorKind::InvalidArgument),
        (1 << 46, ErrorKind::OutOfMemory),
    ] {
        for shared in [false, true] {
            let error = options(size).shared(shared).allocate().unwrap_err();
            // What cannot be addressed is also more than is available; either answer is right.
            assert!(error.kind() == kind || error.kind() == ErrorKind::OutOfMemory, "{error}");
            assert!(error.to_string().contains(&size.to_string()), "{error}");
        }
    }
    let error = options(usize::MAX).populate(false).allocate().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn memory_is_bound_to_a_node_that_exists() {
    let nodes = numa_nodes();
    for shared in [false, true] {
        let memory = options(1 << 20).node(nodes[0]).shared(shared).allocate().unwrap();
        fill(memory.host_view(), 1);
        assert_eq!(memory.location(), Location::Cpu(nodes[0]));
    }
    let missing = nodes.iter().max().unwrap() + 1;
    let error = options(4096).node(missing).allocate().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains(&missing.to_string()), "{error}");
}

#[test]
fn a_peer_sees_what_the_owner_writes_and_the_other_way_round() {
    let huge = huge_page_size().unwrap_or_else(page_size);
    for pages in [Pages::Base, Pages::Transparent] {
        let memory = options(3 * huge + 100).shared(true).pages(pages).allocate().unwrap();
        let peer = MappedFile::map(fd_of(&memory), 0, memory.size(), true).unwrap();
        fill(memory.host_view(), 3);
        assert!(holds(peer.host_view(), 3));
        fill(peer.host_view(), 4);
        assert!(holds(memory.host_view(), 4));

        let offset = page_size() as u64;
        let part = MappedFile::map(fd_of(&memory), offset, 777, false).unwrap();
        assert_eq!((part.host_view().len(), part.writable()), (777, false));
        assert_eq!(part.host_view().address() % huge as u64, offset % huge as u64, "laid out as in the file");
        assert!(part.shared_file().is_none());
        // The owner may go first: the pages stay.
        drop(memory);
        assert!(holds(part.host_view(), 4));
    }
}

#[test]
fn a_descriptor_for_reading_cannot_be_mapped_writable() {
    let memory = options(8192).shared(true).allocate().unwrap();
    fill(memory.host_view(), 5);
    let map = |writable| MappedFile::map(memory.read_only_file().unwrap(), 0, 8192, writable);
    assert_eq!(map(true).unwrap_err().kind(), ErrorKind::Io);
    assert!(holds(map(false).unwrap().host_view(), 5));
    let private = options(8192).allocate().unwrap();
    assert_eq!(private.read_only_file().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn a_bad_part_of_a_file_is_refused() {
    let memory = options(8192).shared(true).pages(Pages::Base).allocate().unwrap();
    let map =
        |offset, len| MappedFile::map(fd_of(&memory), offset, len, false).map(|_| ()).unwrap_err().kind();
    assert_eq!(map(0, 8193), ErrorKind::OutOfBounds);
    assert_eq!(map(8192, 1), ErrorKind::OutOfBounds);
    assert_eq!(map(4096, usize::MAX - 4096), ErrorKind::OutOfBounds);
    assert_eq!(map(u64::MAX - 4095, 8192), ErrorKind::InvalidArgument);
    assert_eq!(map(1, 1), ErrorKind::InvalidArgument);
    assert_eq!(map(0, 0), ErrorKind::InvalidArgument);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert_eq!(MappedFile::map(file.into(), 0, 1, false).unwrap_err().kind(), ErrorKind::AccessDenied);
}

#[test]
fn a_file_with_holes_is_not_filled_by_mapping_it() {
    let memory = options(64 << 20).shared(true).populate(false).allocate().unwrap();
    let peer = MappedFile::map(fd_of(&memory), 0, memory.size(), true).unwrap();
    let stat = rustix::fs::fstat(memory.shared_file().unwrap().fd.as_fd()).unwrap();
    assert_eq!(stat.st_blocks, 0);
    assert!(holds(peer.host_view().slice(12345, 10).unwrap(), 0));
}

#[test]
fn a_forked_child_does_not_have_the_memory() {
    let page = page_size();
    for shared in [false, true] {
        let memory = options(page).shared(shared).allocate().unwrap();
        fill(memory.host_view(), 6);
        let address = memory.host_view().as_ptr();
        // SAFETY: the child only makes system calls, which is all that the child of a threaded process may do.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut resident = 0_u8;
            // SAFETY: asks about one page, with room for one answer; `_exit` runs nothing of the parent's.
            unsafe {
                let status = libc::mincore(address.cast(), page, &raw mut resident);
                let unmapped = status == -1 && *libc::__errno_location() == libc::ENOMEM;
                libc::_exit(if unmapped && !memory.is_here() { 0 } else { 1 });
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "shared={shared}: {status:#x}");
        assert!(holds(memory.host_view(), 6) && memory.is_here());
    }
}
