//! Output of the commands. A reader such as `head` can close the pipe early; the command then ends quietly.
//!
//! The macros of the standard library panic in this case. Those in this module have the same names, and
//! discard the rest of the output.

use std::{
    fmt,
    io::{self, ErrorKind, Write},
};

use parking_lot::Mutex;

/// The first error of standard output. After it, output is discarded.
static FAILURE: Mutex<Option<io::Error>> = Mutex::new(None);

/// Writes like the macro of the standard library, and discards the rest of the output after its reader has closed the pipe.
#[macro_export]
macro_rules! print {
    ($($argument:tt)*) => { $crate::output::write(format_args!($($argument)*)) };
}

/// Writes like the macro of the standard library, and discards the rest of the output after its reader has closed the pipe.
#[macro_export]
macro_rules! println {
    () => { $crate::output::write(format_args!("\n")) };
    ($($argument:tt)*) => { $crate::output::write(format_args!("{}\n", format_args!($($argument)*))) };
}

/// Writes like the macro of the standard library, and discards the rest of the output after its reader has closed the pipe.
#[macro_export]
macro_rules! eprint {
    ($($argument:tt)*) => { $crate::output::write_error(format_args!($($argument)*)) };
}

/// Writes like the macro of the standard library, and discards the rest of the output after its reader has closed the pipe.
#[macro_export]
macro_rules! eprintln {
    () => { $crate::output::write_error(format_args!("\n")) };
    ($($argument:tt)*) => { $crate::output::write_error(format_args!("{}\n", format_args!($($argument)*))) };
}

/// Writes a text to standard output, unless an earlier one could not be written.
pub fn write(text: fmt::Arguments<'_>) {
    record(|| io::stdout().write_fmt(text));
}

/// Writes a text to standard error. There is no place to report that this has failed.
pub fn write_error(text: fmt::Arguments<'_>) {
    let _ = io::stderr().write_fmt(text);
}

/// Returns whether output is discarded, so that a command that prints for ever can end.
pub fn is_closed() -> bool {
    FAILURE.lock().is_some()
}

/// Writes the rest of the output.
///
/// # Errors
///
/// Returns the first error of standard output, except that its reader has closed the pipe, which is not a failure.
pub fn finish() -> io::Result<()> {
    record(|| io::stdout().flush());
    match FAILURE.lock().take() {
        Some(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

fn record(write: impl FnOnce() -> io::Result<()>) {
    let mut failure = FAILURE.lock();
    if failure.is_none()
        && let Err(error) = write()
    {
        *failure = Some(error);
    }
}
