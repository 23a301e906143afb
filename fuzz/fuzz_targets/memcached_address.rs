#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| sluicegate::fuzz::run("memcached_address", input));
