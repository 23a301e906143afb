//! The methods that decide: Envoy's `RateLimitService`, and `Stream` and `Batch` of `sluicegate.v1`.
//!
//! A message is decoded by hand (`decode`), decided (`message_decider`) and encoded, as Envoy's response (`encode`) or with exact
//! numbers (`exact`). `frames` has the checks of a stream. Nothing here uses tonic's codec, which makes a call a fifth
//! cheaper.

mod decode;
mod encode;
mod exact;
pub(super) mod feedback;
mod frames;
mod headers;
mod message_decider;
mod settings;

pub(super) use decode::decode;
#[cfg(any(test, fuzzing))]
pub(super) use decode::{decode_by_hand, decode_with_prost};
pub(super) use encode::encode;
#[cfg(any(test, fuzzing))]
pub(super) use frames::{MAX_CHECKS, decide_frame};
pub(super) use frames::{ResponseStream, batch};
pub(super) use headers::each as each_header;
pub(super) use message_decider::MessageDecider;
pub use settings::{HeaderStyle, ResponseSettings};
