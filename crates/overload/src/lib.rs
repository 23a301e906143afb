#![doc = include_str!("../README.md")]

pub mod adaptive;
pub mod shedder;
