//! Envoy's protocol and nothing else: one unary call per question, and the answer as it came.

use std::time::Duration;

use prost_types::{Value, value::Kind};
pub(crate) use sluicegate_proto::envoy::r#type::v3::RateLimitUnit as Unit;
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{
        RateLimitDescriptor,
        rate_limit_descriptor::{Entry, RateLimitOverride},
    },
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse, rate_limit_response::Code,
        rate_limit_service_client::RateLimitServiceClient,
    },
};
use tonic::transport::{Channel, Endpoint};

/// There is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The address is not one, or nobody listens there.
    #[error("cannot connect")]
    Connect(#[from] tonic::transport::Error),
    /// The service, or the way to it, says no.
    #[error("the call failed: {}", .0.message())]
    Call(#[from] Box<tonic::Status>),
}

impl Error {
    /// The gRPC code of a call that failed.
    pub(crate) fn code(&self) -> Option<tonic::Code> {
        match self {
            Self::Connect(_) => None,
            Self::Call(status) => Some(status.code()),
        }
    }
}

/// A connection to the service. Cheap to clone; all clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    service: RateLimitServiceClient<Channel>,
}

impl Client {
    /// Connects as the endpoint says: TLS, time-outs, keep-alive.
    pub(crate) async fn with(endpoint: Endpoint) -> Result<Self, Error> {
        let channel = endpoint.tcp_nodelay(true).connect().await?;
        Ok(Self { service: RateLimitServiceClient::new(channel) })
    }

    /// Asks once.
    pub(crate) async fn check(&self, request: Request) -> Result<Answer, Error> {
        let response = self.service.clone().should_rate_limit(request.into_message()).await;
        Ok(Answer(response.map_err(Box::new)?.into_inner()))
    }
}

/// What the service says.
#[derive(Clone, Debug)]
pub(crate) struct Answer(pub(crate) RateLimitResponse);

impl Answer {
    /// Whether the request may pass.
    pub(crate) fn allowed(&self) -> bool {
        self.0.overall_code() != Code::OverLimit
    }

    /// The least that remains of any limit that applied.
    pub(crate) fn remaining(&self) -> Option<u32> {
        let limited = self.0.statuses.iter().filter(|status| status.current_limit.is_some());
        limited.map(|status| status.limit_remaining).min()
    }

    /// When refused: how long until the last of the limits that refused would let the request pass, in whole seconds.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let over = self.0.statuses.iter().filter(|status| status.code() == Code::OverLimit);
        over.filter_map(|status| Duration::try_from(status.duration_until_reset?).ok()).max()
    }

    /// How long to wait before going on, when a limit shapes instead of refusing: the longest of all its limits. Needs
    /// `response.dynamic_metadata`.
    pub(crate) fn delay(&self) -> Option<Duration> {
        self.exact().into_iter().filter_map(|status| status.delay).max()
    }

    /// The exact numbers of each descriptor, in their order; none unless the service is set to send them
    /// (`response.dynamic_metadata`).
    pub(crate) fn exact(&self) -> Vec<ExactStatus> {
        let statuses = self.0.dynamic_metadata.as_ref().and_then(|all| all.fields.get("sluicegate.statuses"));
        let Some(Kind::ListValue(list)) = statuses.and_then(|value| value.kind.as_ref()) else {
            return Vec::new();
        };
        list.values.iter().map(ExactStatus::read).collect()
    }
}

/// What the protocol has no field for. What does not apply is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExactStatus {
    /// Whether the descriptor's limit lets it pass.
    pub(crate) allowed: bool,
    /// It passes only because the limit is soft.
    pub(crate) soft: bool,
    /// Hits that would still pass.
    pub(crate) remaining: Option<u32>,
    /// Until everything is restored.
    pub(crate) reset: Option<Duration>,
    /// When refused: until the same cost would pass; `None` when it never will.
    pub(crate) retry_after: Option<Duration>,
    /// When allowed: how long to wait before going on.
    pub(crate) delay: Option<Duration>,
}

impl ExactStatus {
    fn read(value: &Value) -> Self {
        let Some(Kind::StructValue(fields)) = &value.kind else {
            return Self::default();
        };
        let field = |name: &str| fields.fields.get(name).and_then(|value| value.kind.as_ref());
        let truth = |name: &str| matches!(field(name), Some(Kind::BoolValue(true)));
        let number = |name: &str| match field(name) {
            Some(Kind::NumberValue(number)) => Some(*number as u64),
            _ => None,
        };
        let span = |name: &str| number(name).map(Duration::from_micros);
        Self {
            allowed: truth("allowed"),
            soft: truth("soft"),
            remaining: number("remaining").map(|number| u32::try_from(number).unwrap_or(u32::MAX)),
            reset: span("reset_us"),
            retry_after: span("retry_after_us"),
            delay: span("delay_us"),
        }
    }
}

/// A question about one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request(RateLimitRequest);

impl Request {
    /// Against the rules of this domain.
    pub(crate) fn new(domain: impl Into<String>) -> Self {
        Self(RateLimitRequest { domain: domain.into(), ..RateLimitRequest::default() })
    }

    /// Adds something that the request counts as.
    pub(crate) fn descriptor(mut self, descriptor: Descriptor) -> Self {
        self.0.descriptors.push(descriptor.0);
        self
    }

    /// What the request costs, for descriptors that don't say; 1 by default.
    pub(crate) fn hits(mut self, hits: u32) -> Self {
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
pub(crate) struct Descriptor(RateLimitDescriptor);

impl Descriptor {
    /// Without entries yet.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds an entry, from the general to the particular.
    pub(crate) fn entry(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.entries.push(Entry { key: key.into(), value: value.into() });
        self
    }

    /// What it costs; 0 looks and takes nothing.
    pub(crate) fn hits(mut self, hits: u64) -> Self {
        self.0.hits_addend = Some(hits);
        self
    }

    /// Gives the hits back instead of taking them.
    pub(crate) fn give_back(mut self) -> Self {
        self.0.is_negative_hits = true;
        self
    }

    /// Brings a limit along that replaces whatever the rules say: so many requests in so many units.
    pub(crate) fn limit(mut self, requests_per_unit: u32, unit: Unit, unit_multiplier: Option<u32>) -> Self {
        self.0.limit = Some(RateLimitOverride { requests_per_unit, unit: unit.into(), unit_multiplier });
        self
    }
}
