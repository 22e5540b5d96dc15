#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| posthorse_shm::fuzzing::rendezvous(bytes));
