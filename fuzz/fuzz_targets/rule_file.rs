#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| sluicegate::fuzz::rule_file(input));
