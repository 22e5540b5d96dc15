#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| posthorse_omni::fuzzing::manifest(bytes));
