//! The program: run, print one chain of errors, pick the exit code.

use std::process::ExitCode;

use mimalloc::MiMalloc;
use sluicegate::cli;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    match cli::run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("sluicegate: {error:#}");
            ExitCode::FAILURE
        }
    }
}
