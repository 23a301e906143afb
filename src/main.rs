//! The program: run, print one chain of errors, pick the exit code.

use std::{
    io::{self, ErrorKind::BrokenPipe},
    process::ExitCode,
};

use mimalloc::MiMalloc;
use sluicegate::cli;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    match cli::run() {
        Ok(code) => code,
        // Whoever reads has read enough.
        Err(error) if error.downcast_ref().is_some_and(|error: &io::Error| error.kind() == BrokenPipe) => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("sluicegate: {error:#}");
            ExitCode::FAILURE
        }
    }
}
