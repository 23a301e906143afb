//! The `sluicegate` program: runs the command line, prints an error with its causes, and sets the exit code.

use std::{
    io::{self, ErrorKind::BrokenPipe, Write},
    process::ExitCode,
};

use mimalloc::MiMalloc;
use sluicegate::cli;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    match cli::run() {
        Ok(code) => code,
        // The reader of the output, such as `head`, has closed the pipe: this is not a failure.
        Err(error) if error.downcast_ref().is_some_and(|error: &io::Error| error.kind() == BrokenPipe) => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "sluicegate: {error:#}");
            ExitCode::FAILURE
        }
    }
}
