//! What to ask, built up step by step.

use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{
        RateLimitDescriptor,
        rate_limit_descriptor::{Entry, RateLimitOverride},
    },
    service::ratelimit::v3::RateLimitRequest,
};

pub use sluicegate_proto::envoy::r#type::v3::RateLimitUnit as Unit;

/// A question about one request.
#[derive(Clone, Debug, Default)]
pub struct Request(RateLimitRequest);

impl Request {
    /// Against the rules of this domain.
    pub fn new(domain: impl Into<String>) -> Self {
        Self(RateLimitRequest { domain: domain.into(), ..RateLimitRequest::default() })
    }

    /// Adds something that the request counts as.
    #[must_use]
    pub fn descriptor(mut self, descriptor: Descriptor) -> Self {
        self.0.descriptors.push(descriptor.0);
        self
    }

    /// What the request costs, for descriptors that don't say; 1 by default.
    #[must_use]
    pub fn hits(mut self, hits: u32) -> Self {
        self.0.hits_addend = hits;
        self
    }

    pub(crate) fn into_message(self) -> RateLimitRequest {
        self.0
    }
}

impl From<Request> for RateLimitRequest {
    fn from(request: Request) -> Self {
        request.0
    }
}

/// Something that a request counts as.
#[derive(Clone, Debug, Default)]
pub struct Descriptor(RateLimitDescriptor);

impl Descriptor {
    /// Without entries yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an entry, from the general to the particular.
    #[must_use]
    pub fn entry(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.entries.push(Entry { key: key.into(), value: value.into() });
        self
    }

    /// What it costs; 0 looks and takes nothing.
    #[must_use]
    pub fn hits(mut self, hits: u64) -> Self {
        self.0.hits_addend = Some(hits);
        self
    }

    /// Gives the hits back instead of taking them.
    #[must_use]
    pub fn give_back(mut self) -> Self {
        self.0.is_negative_hits = true;
        self
    }

    /// Brings a limit along that replaces whatever the rules say: so many requests in so many units.
    #[must_use]
    pub fn limit(mut self, requests_per_unit: u32, unit: Unit, unit_multiplier: Option<u32>) -> Self {
        self.0.limit = Some(RateLimitOverride { requests_per_unit, unit: unit.into(), unit_multiplier });
        self
    }
}
