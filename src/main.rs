//! The program: parse, run, print one chain of errors, pick the exit code.

use std::process::ExitCode;

use clap::Parser;
use mimalloc::MiMalloc;
use sluicegate::cli::Cli;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("sluicegate: {error:#}");
            ExitCode::FAILURE
        }
    }
}
