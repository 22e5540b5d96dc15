//! The seeds of the fuzz targets, replayed as tests of every day.
//!
//! A target is a function that decodes bytes from outside and panics when it finds something wrong with the decoder.
//! `fuzz/` hands it what libFuzzer thinks of, and [`Target::replay`] the files of its corpus, whole and damaged.

mod mutate;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};

use crate::{CountingAllocator, Random};

/// With this variable set, tests write the seeds that they have instead of comparing them.
const WRITE: &str = "POSTHORSE_WRITE_CORPUS";

/// A fuzz target as a test sees it.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, which is that of its file in `fuzz/fuzz_targets` and of its folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Decodes, and panics at what must not be.
    pub check: fn(&[u8]),
    /// The most memory that it may take for an input.
    pub memory: Memory,
}

/// What a decoder may take: so many bytes at all, and so many for each byte of input. What a message announces does not
/// count.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Bytes, whatever the input.
    pub base: usize,
    /// Bytes for each byte of the input.
    pub per_byte: usize,
}

impl Memory {
    const fn allowed(self, input: usize) -> usize {
        self.base + self.per_byte * input
    }
}

impl Target {
    /// Checks that the corpus has these seeds, then hands the target every file in it, and `damaged` mutations of
    /// those: bits flipped, pieces cut, repeated and exchanged, lengths announced that are not there. `allocator` is the
    /// test binary's.
    ///
    /// # Panics
    /// When a seed is missing or another than the one here, when the target finds something, or when it takes more memory
    /// than it may; then with the input.
    pub fn replay(&self, allocator: CountingAllocator, seeds: &[(&str, Vec<u8>)], damaged: usize) {
        let folder = folder(self.name);
        if std::env::var_os(WRITE).is_some() {
            write(&folder, seeds).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        }
        let corpus = read(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for (name, bytes) in seeds {
            assert!(
                corpus.get(*name) == Some(bytes),
                "fuzz/corpus/{}/{name} is not the message that this release sends: where the change is meant, run the \
                 test with {WRITE}=1",
                self.name
            );
        }
        for (name, bytes) in &corpus {
            self.try_one(allocator, name, bytes);
        }
        let corpus: Vec<_> = corpus.into_iter().collect();
        let mut random = Random::new(0);
        for _ in 0..damaged {
            let mut pick = || &corpus[random.below(corpus.len() as u64) as usize];
            let ((name, seed), (_, other)) = (pick(), pick());
            let bytes = mutate::mutate(&mut random, seed, other);
            self.try_one(allocator, name, &bytes);
        }
    }

    fn try_one(&self, allocator: CountingAllocator, seed: &str, bytes: &[u8]) {
        let check = AssertUnwindSafe(|| (self.check)(bytes));
        let (outcome, peak) = allocator.peak(|| panic::catch_unwind(check));
        let input =
            || format!("{} from the seed {seed}, {} bytes: {}", self.name, bytes.len(), bytes.escape_ascii());
        if let Err(reason) = outcome {
            eprintln!("{}", input());
            panic::resume_unwind(reason);
        }
        let allowed = self.memory.allowed(bytes.len());
        assert!(peak <= allowed, "{peak} bytes of memory, {allowed} are allowed, for {}", input());
    }
}

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

/// The files of a folder by name, which is the order in which they are replayed.
fn read(folder: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?);
    }
    if files.is_empty() {
        return Err(io::Error::other("there is no seed"));
    }
    Ok(files)
}

fn write(folder: &Path, seeds: &[(&str, Vec<u8>)]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    seeds.iter().try_for_each(|(name, bytes)| fs::write(folder.join(name), bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    fn replay(check: fn(&[u8])) {
        Target { name: "tcp_wire", check, memory: Memory { base: 4096, per_byte: 2 } }.replay(
            ALLOCATOR,
            &[],
            500,
        );
    }

    #[test]
    fn a_target_that_finds_nothing_and_takes_little_passes() {
        replay(|bytes| drop(std::hint::black_box(bytes.to_vec())));
    }

    #[test]
    #[should_panic(expected = "bytes of memory, 4")]
    fn an_announced_length_that_is_believed_fails() {
        replay(|bytes| drop(std::hint::black_box(vec![0_u8; usize::from(bytes.len() > 32) << 20])));
    }

    #[test]
    #[should_panic(expected = "a frame of no kind")]
    fn what_a_target_finds_fails() {
        replay(|bytes| assert!(matches!(bytes, [1..=4 | 0x81..=0x84, ..]), "a frame of no kind"));
    }

    #[test]
    #[should_panic(expected = "no-such-target")]
    fn a_target_without_seeds_fails() {
        let memory = Memory { base: 0, per_byte: 0 };
        Target { name: "no-such-target", check: |_| {}, memory }.replay(ALLOCATOR, &[], 1);
    }
}
