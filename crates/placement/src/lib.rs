#![doc = include_str!("../README.md")]

mod identity;
mod ring;
mod text;

pub use identity::Identity;
pub use ring::Ring;
pub use text::{ESCAPED, ESCAPED_PATTERN, escape};
