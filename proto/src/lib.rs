//! Rust types, tonic clients and servers of Envoy's rate limit protocol v3 and rate limit quota protocol v3,
//! `sluicegate.v1`, `sluicegate.admin.v1` and `sluicegate.cluster.v1`, and the parts of Envoy's discovery protocol (xDS) by
//! which control planes send rules.
//!
//! The modules mirror the protobuf packages. The code in `gen/` is generated from `proto/*.proto` and committed, so that
//! dependent crates need no generator. `tests/fresh.rs` checks that it is up to date.

/// All messages and services as one encoded `FileDescriptorSet`, with the well-known types, for reflection and proto3
/// JSON.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("gen/descriptor_set.bin");

#[allow(missing_docs, clippy::all, reason = "the code is generated")]
mod generated {
    pub mod envoy {
        pub mod config {
            pub mod core {
                pub mod v3 {
                    include!("gen/envoy.config.core.v3.rs");
                }
            }
        }
        pub mod extensions {
            pub mod common {
                pub mod ratelimit {
                    pub mod v3 {
                        include!("gen/envoy.extensions.common.ratelimit.v3.rs");
                    }
                }
            }
        }
        pub mod service {
            pub mod discovery {
                pub mod v3 {
                    include!("gen/envoy.service.discovery.v3.rs");
                }
            }
            pub mod rate_limit_quota {
                pub mod v3 {
                    include!("gen/envoy.service.rate_limit_quota.v3.rs");
                }
            }
            pub mod ratelimit {
                pub mod v3 {
                    include!("gen/envoy.service.ratelimit.v3.rs");
                }
            }
        }
        pub mod r#type {
            pub mod v3 {
                include!("gen/envoy.r#type.v3.rs");
            }
        }
    }
    pub mod ratelimit {
        pub mod config {
            pub mod ratelimit {
                pub mod v3 {
                    include!("gen/ratelimit.config.ratelimit.v3.rs");
                }
            }
        }
    }
    pub mod sluicegate {
        pub mod admin {
            pub mod v1 {
                include!("gen/sluicegate.admin.v1.rs");
            }
        }
        pub mod cluster {
            pub mod v1 {
                include!("gen/sluicegate.cluster.v1.rs");
            }
        }
        pub mod v1 {
            include!("gen/sluicegate.v1.rs");
        }
    }
}

pub use generated::{envoy, ratelimit, sluicegate};
