//! What a request may hold. Beyond it there is a sentence that says which limit it was.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Limits on one request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Limits {
    /// Bytes of the message.
    pub max_message_bytes: usize,
    /// Bytes of a frame with many checks.
    pub max_frame_bytes: usize,
    /// Descriptors of a request.
    pub max_descriptors: usize,
    /// Entries of a descriptor.
    pub max_entries: usize,
    /// Bytes of the domain, a key or a value.
    pub max_text_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_message_bytes: 64 * 1024,
            max_frame_bytes: 256 * 1024,
            max_descriptors: 128,
            max_entries: 32,
            max_text_bytes: 1024,
        }
    }
}
