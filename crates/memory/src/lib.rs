#![doc = include_str!("../README.md")]

mod copy;
mod foreign;
mod fork;
mod host;
mod limits;
mod mapped;
mod mapping;
mod memfd;
mod notice;
mod numa;
mod options;
mod populate;

pub use copy::{CopyPiece, CopyPool, CopyTuning, copy, copy_part_of, copy_pieces};
pub use foreign::{ForeignMemory, HeapMemory};
pub use fork::ForkGuard;
pub use host::HostMemory;
pub use limits::{available_memory, huge_page_size, hugetlb_page_size, memlock_limit, page_size};
pub use mapped::MappedFile;
pub use memfd::{reopen_read_only, sealed_file};
pub use notice::Notice;
pub use numa::numa_nodes;
pub use options::{MemoryOptions, Pages};
