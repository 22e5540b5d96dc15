//! Criterion benchmarks of the parts of Posthorse: see `benches/`.
#![forbid(unsafe_code)]
