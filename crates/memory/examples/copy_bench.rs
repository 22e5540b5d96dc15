//! Measures copies, population and mappings: `cargo run --release --example copy_bench [-- PART…]`, where PART
//! is any of `large`, `sizes`, `pieces`, `populate`, `map` (by default all of them).
//!
//! The ways to be compared take turns, so that a change of the machine's load meets all of them; what is printed
//! is the median (with the least and the most) in GB/s, GB = 1e9, and the ratio of medians to `memcpy`. Buffers
//! are rotated through several GiB on huge pages, unless a row says `cached`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::hint::black_box;
use std::time::Instant;

use posthorse_core::{HostView, Region};
use posthorse_memory::{
    CopyPiece, CopyPool, CopyTuning, HostMemory, MappedFile, MemoryOptions, Pages, copy_pieces,
};

const MIB: usize = 1 << 20;
/// Bytes on each side, in all.
const SPAN: usize = 3 << 30;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let is_wanted = |part: &str| wanted.is_empty() || wanted.iter().any(|name| name == part);
    if is_wanted("populate") {
        populate();
    }
    if is_wanted("map") {
        map();
    }
    if !["large", "sizes", "pieces"].into_iter().any(is_wanted) {
        return;
    }
    let memory = || MemoryOptions::new(SPAN).shared(true).allocate().expect("6 GiB of memory");
    let buffers = Buffers { src: memory(), dst: memory(), at: 0 };
    println!(
        "# buffers: 2 x {} MiB, {} MiB of it on huge pages",
        SPAN / MIB,
        2 * buffers.src.huge_bytes() / MIB
    );
    let mut buffers = buffers;
    if is_wanted("large") {
        large(&mut buffers);
    }
    if is_wanted("sizes") {
        sizes(&mut buffers);
    }
    if is_wanted("pieces") {
        pieces(&mut buffers);
    }
}

struct Buffers {
    src: HostMemory,
    dst: HostMemory,
    at: usize,
}

impl Buffers {
    /// The next pair of `len` bytes in the rotation.
    fn next(&mut self, len: usize) -> CopyPiece {
        let at = if self.at + len > SPAN { 0 } else { self.at };
        self.at = at + len;
        self.pair(at, len)
    }

    fn pair(&self, at: usize, len: usize) -> CopyPiece {
        let part = |memory: &HostMemory| memory.host_view().slice(at, len).unwrap();
        CopyPiece::new(part(&self.src), part(&self.dst)).unwrap()
    }
}

type Way<'a> = (String, Box<dyn Fn(&[CopyPiece]) + 'a>);

fn libc_memcpy(pieces: &[CopyPiece]) {
    for piece in pieces {
        // SAFETY: the buffers are alive, apart, and used by nobody else.
        unsafe { libc::memcpy(piece.dst().as_ptr().cast(), piece.src().as_ptr().cast(), piece.len()) };
    }
}

fn tuning(stream_bytes: usize, share_bytes: usize, chunk_bytes: usize) -> CopyTuning {
    let mut tuning = CopyTuning::default();
    (tuning.stream_bytes, tuning.share_bytes, tuning.chunk_bytes) = (stream_bytes, share_bytes, chunk_bytes);
    tuning
}

fn pool_way(name: &str, helpers: usize, tuning: CopyTuning) -> Way<'static> {
    let pool = CopyPool::new(helpers).unwrap().with_tuning(tuning);
    // SAFETY: as in `libc_memcpy`.
    (name.to_owned(), Box::new(move |pieces| unsafe { pool.copy_pieces(pieces) }))
}

fn memcpy_way() -> Way<'static> {
    ("memcpy".to_owned(), Box::new(libc_memcpy))
}

fn large(buffers: &mut Buffers) {
    println!("\n# one copy of 256 MiB");
    let never = usize::MAX;
    let mut ways = vec![memcpy_way(), pool_way("stream, alone", 0, tuning(0, never, never))];
    // SAFETY: as in `libc_memcpy`.
    ways.push(("copy(), as set".to_owned(), Box::new(|pieces| unsafe { copy_pieces(pieces) })));
    ways.push(pool_way("memcpy, 1 helper", 1, tuning(never, 0, 512 << 10)));
    for chunk_kib in [128, 256, 512, 1024, 4096] {
        ways.push(pool_way(&format!("stream, 1 helper, {chunk_kib} KiB"), 1, tuning(0, 0, chunk_kib << 10)));
    }
    let helpers = CopyPool::default_helpers();
    ways.push(pool_way(&format!("pool as set, {helpers} helpers"), helpers, CopyTuning::default()));
    compare(&ways, 15, 256 * MIB, || vec![buffers.next(256 * MIB)]);
}

fn sizes(buffers: &mut Buffers) {
    let never = usize::MAX;
    let ways = || {
        [
            memcpy_way(),
            pool_way("stream, alone", 0, tuning(0, never, never)),
            pool_way("stream, 1 helper", 1, tuning(0, 0, 256 << 10)),
        ]
    };
    for kib in [64, 256, 1024, 2048, 4096, 16384, 65536] {
        let len = kib << 10;
        println!("\n# one copy of {kib} KiB, rotated");
        let ways = ways();
        compare(&ways, 31, len, || vec![buffers.next(len)]);
        println!(
            "# one copy of {kib} KiB, source just written, destination read afterwards (all three timed)"
        );
        for (name, way) in &ways {
            let mut rates = Vec::new();
            let pairs = [buffers.pair(0, len), buffers.pair(len, len)];
            for round in 0..31 {
                let piece = pairs[round % 2];
                let start = Instant::now();
                // SAFETY: the buffers are alive and used by nobody else now.
                unsafe { piece.src().bytes_mut() }.fill(round as u8);
                way(&[piece]);
                // SAFETY: as above.
                black_box(sum(unsafe { piece.dst().bytes() }));
                rates.push(len as f64 / start.elapsed().as_secs_f64() / 1e9);
            }
            print_row(name, &mut rates[1..], None);
        }
    }
}

fn pieces(buffers: &mut Buffers) {
    let never = usize::MAX;
    for (kib, count) in [(1, 65536), (2, 32768), (4, 64), (4, 16384), (16, 4096), (64, 1024)] {
        let len = kib << 10;
        println!("\n# {count} pieces of {kib} KiB, scattered and rotated");
        let ways = [
            memcpy_way(),
            pool_way("stream, alone", 0, tuning(0, never, never)),
            pool_way("stream, 1 helper", 1, tuning(0, 0, 512 << 10)),
        ];
        let mut round = 0;
        compare(&ways, 21, len * count, || {
            round += 1;
            let slots = SPAN / len;
            let slot = |index: usize| (round * 7919 * count + index * 769) % slots * len;
            (0..count).map(|index| buffers.pair(slot(index), len)).collect()
        });
    }
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).fold(0, u64::wrapping_add)
}

/// Each way in turn, on the pieces that `next` makes for it.
fn compare(ways: &[Way<'_>], rounds: usize, bytes: usize, mut next: impl FnMut() -> Vec<CopyPiece>) {
    let mut rates = vec![Vec::new(); ways.len()];
    for round in 0..=rounds {
        for ((_, way), rates) in ways.iter().zip(&mut rates) {
            let pieces = next();
            let start = Instant::now();
            way(&pieces);
            let rate = bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
            if round > 0 {
                rates.push(rate);
            }
        }
    }
    let mut base = None;
    for ((name, _), rates) in ways.iter().zip(&mut rates) {
        let median = print_row(name, rates, base);
        base.get_or_insert(median);
    }
}

fn print_row(name: &str, rates: &mut [f64], base: Option<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    let (median, last) = (rates[rates.len() / 2], rates.len() - 1);
    let ratio = base.map(|base| format!("  x {:.2}", median / base)).unwrap_or_default();
    println!("{name:<28} {median:6.2} ({:.2}-{:.2}){ratio}", rates[0], rates[last]);
    median
}

fn populate() {
    const LEN: usize = 1 << 30;
    println!("# first touch of 1 GiB (GB/s)");
    for shared in [false, true] {
        let kind = if shared { "memfd" } else { "anonymous" };
        let options = MemoryOptions::new(LEN).shared(shared);
        let allocate = |options: &MemoryOptions| {
            let start = Instant::now();
            let memory = options.allocate().expect("1 GiB of memory");
            (memory, LEN as f64 / start.elapsed().as_secs_f64() / 1e9)
        };
        let (mut huge, mut base, mut touched) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..5 {
            let (memory, rate) = allocate(&options);
            assert!(memory.huge_bytes() == LEN || !memory.notices().is_empty());
            huge.push(rate);
            drop(memory);
            base.push(allocate(&options.clone().pages(Pages::Base)).1);
            let start = Instant::now();
            let memory =
                options.clone().pages(Pages::Base).populate(false).allocate().expect("1 GiB of memory");
            touch(memory.host_view());
            touched.push(LEN as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        print_row(&format!("{kind}, huge pages"), &mut huge, None);
        print_row(&format!("{kind}, base pages by advice"), &mut base, None);
        print_row(&format!("{kind}, base pages by touch"), &mut touched, None);
    }
}

fn touch(view: HostView) {
    for at in (0..view.len()).step_by(posthorse_memory::page_size()) {
        // SAFETY: inside the view, which is alive and used by nobody else.
        unsafe { view.as_ptr().add(at).write_volatile(1) };
    }
}

fn map() {
    const LEN: usize = 1 << 30;
    println!("\n# a peer maps 1 GiB (ms)");
    for pages in [Pages::Transparent, Pages::Base] {
        let memory = MemoryOptions::new(LEN).shared(true).pages(pages).allocate().expect("1 GiB of memory");
        for writable in [false, true] {
            let mut times = Vec::new();
            for _ in 0..9 {
                let fd = memory.shared_file().unwrap().fd.try_clone_to_owned().unwrap();
                let start = Instant::now();
                let peer = MappedFile::map(fd, 0, LEN, writable).unwrap();
                times.push(start.elapsed().as_secs_f64() * 1e3);
                drop(peer);
            }
            print_row(&format!("{pages:?} pages, writable={writable}"), &mut times, None);
        }
    }
}
