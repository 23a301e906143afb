#![doc = include_str!("../README.md")]

mod hash_tag;
mod identity;
mod ring;
mod text;

pub use hash_tag::hash_tag;
pub use identity::Identity;
pub use ring::Ring;
pub use text::{ESCAPED, ESCAPED_PATTERN, escape};
