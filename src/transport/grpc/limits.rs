//! [`Limits`] on the size of a request. A request above a limit is rejected with an error that names the limit.

use serde::{Deserialize, Serialize};

/// Limits on the size of one request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Limits {
    /// Maximum size of a message in bytes.
    pub max_message_bytes: usize,
    /// Maximum size in bytes of a frame with several checks (`sluicegate.v1`).
    pub max_frame_bytes: usize,
    /// Maximum number of descriptors in a request.
    pub max_descriptors: usize,
    /// Maximum number of entries in a descriptor.
    pub max_entries: usize,
    /// Maximum length of the domain in bytes. Keys and values can be longer.
    pub max_text_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // As in other implementations of gRPC: Envoy can send headers of 60 KiB in several descriptors.
            max_message_bytes: 4 << 20,
            max_frame_bytes: 4 << 20,
            max_descriptors: 128,
            max_entries: 32,
            max_text_bytes: 1024,
        }
    }
}
