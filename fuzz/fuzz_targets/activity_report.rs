#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| sluicegate::fuzz::run("activity_report", input));
