#![doc = include_str!("../README.md")]

// Its macros replace those of the standard library in the other modules.
#[macro_use]
pub mod output;

pub mod ctl;
pub mod entries;
mod grpc;
pub mod request;
