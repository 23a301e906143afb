#![doc = include_str!("../README.md")]
#![warn(clippy::print_stderr, clippy::print_stdout)]

// The macros of the standard library panic after the reader of the output has closed the pipe. These do not.
#[macro_use]
pub mod output;

pub mod ctl;
pub mod entries;
mod grpc;
pub mod request;
