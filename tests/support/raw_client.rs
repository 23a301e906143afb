//! [`Client`]: a test client for Envoy's protocol alone. It makes one unary call per request and returns the answer
//! unchanged.

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

/// Error returned when a check has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The address is invalid, or no server listens there.
    #[error("cannot connect")]
    Connect(#[from] tonic::transport::Error),
    /// The service or the connection to it returned an error.
    #[error("the call failed: {}", .0.message())]
    Call(#[from] Box<tonic::Status>),
}

impl Error {
    /// Returns the gRPC code of a failed call.
    pub(crate) fn code(&self) -> Option<tonic::Code> {
        match self {
            Self::Connect(_) => None,
            Self::Call(status) => Some(status.code()),
        }
    }
}

/// A connection to the service. It is cheap to clone, and all clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    service: RateLimitServiceClient<Channel>,
}

impl Client {
    /// Connects with the endpoint's TLS, timeouts and keep-alive.
    pub(crate) async fn connect(endpoint: Endpoint) -> Result<Self, Error> {
        let channel = endpoint.tcp_nodelay(true).connect().await?;
        Ok(Self { service: RateLimitServiceClient::new(channel) })
    }

    /// Sends one request and returns the answer.
    pub(crate) async fn check(&self, request: Request) -> Result<Answer, Error> {
        let response = self.service.clone().should_rate_limit(request.into_message()).await;
        Ok(Answer(response.map_err(Box::new)?.into_inner()))
    }
}

/// The service's answer to one request.
#[derive(Clone, Debug)]
pub(crate) struct Answer(pub(crate) RateLimitResponse);

impl Answer {
    /// Returns whether the request is allowed.
    pub(crate) fn allowed(&self) -> bool {
        self.0.overall_code() != Code::OverLimit
    }

    /// Returns the minimum of `remaining` over all limits that applied.
    pub(crate) fn remaining(&self) -> Option<u32> {
        let limited = self.0.statuses.iter().filter(|status| status.current_limit.is_some());
        limited.map(|status| status.limit_remaining).min()
    }

    /// Returns the time in whole seconds until all limits that denied the request would allow it. Returns `None` if no
    /// limit denied it.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let over = self.0.statuses.iter().filter(|status| status.code() == Code::OverLimit);
        over.filter_map(|status| Duration::try_from(status.duration_until_reset?).ok()).max()
    }

    /// Returns the longest delay by a limit that shapes traffic. Needs `response.dynamic_metadata`.
    pub(crate) fn delay(&self) -> Option<Duration> {
        self.exact().into_iter().filter_map(|status| status.delay).max()
    }

    /// Returns the exact numbers of each descriptor, in order, or no numbers unless `response.dynamic_metadata` is set.
    pub(crate) fn exact(&self) -> Vec<ExactStatus> {
        let statuses = self.0.dynamic_metadata.as_ref().and_then(|all| all.fields.get("sluicegate.statuses"));
        let Some(Kind::ListValue(list)) = statuses.and_then(|value| value.kind.as_ref()) else {
            return Vec::new();
        };
        list.values.iter().map(ExactStatus::read).collect()
    }
}

/// The numbers of one descriptor for which the protocol has no field. A number that does not apply is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExactStatus {
    /// Whether the descriptor's limit allows the request.
    pub(crate) allowed: bool,
    /// Whether the request is allowed only because the limit is soft.
    pub(crate) soft: bool,
    /// Hits that would still be allowed.
    pub(crate) remaining: Option<u32>,
    /// Time until the full limit is available again.
    pub(crate) reset: Option<Duration>,
    /// If the request is denied: time until the same cost would be allowed. `None` if it never will be.
    pub(crate) retry_after: Option<Duration>,
    /// If the request is allowed: time that it must wait before it continues.
    pub(crate) delay: Option<Duration>,
    /// Statuses by the other limits of a rule with several.
    pub(crate) others: Vec<ExactStatus>,
    /// Name of the limit, if the rule has several.
    pub(crate) name: Option<String>,
}

impl ExactStatus {
    fn read(value: &Value) -> Self {
        let Some(Kind::StructValue(fields)) = &value.kind else {
            return Self::default();
        };
        let field = |name: &str| fields.fields.get(name).and_then(|value| value.kind.as_ref());
        let boolean = |name: &str| matches!(field(name), Some(Kind::BoolValue(true)));
        let number = |name: &str| match field(name) {
            Some(Kind::NumberValue(number)) => Some(*number as u64),
            _ => None,
        };
        let duration = |name: &str| number(name).map(Duration::from_micros);
        Self {
            allowed: boolean("allowed"),
            soft: boolean("soft"),
            remaining: number("remaining").map(|number| u32::try_from(number).unwrap_or(u32::MAX)),
            reset: duration("reset_us"),
            retry_after: duration("retry_after_us"),
            delay: duration("delay_us"),
            others: match field("others") {
                Some(Kind::ListValue(list)) => list.values.iter().map(Self::read).collect(),
                _ => Vec::new(),
            },
            name: match field("name") {
                Some(Kind::StringValue(name)) => Some(name.clone()),
                _ => None,
            },
        }
    }
}

/// A rate limit request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request(RateLimitRequest);

impl Request {
    /// Creates a request for the rules of this domain.
    pub(crate) fn new(domain: impl Into<String>) -> Self {
        Self(RateLimitRequest { domain: domain.into(), ..RateLimitRequest::default() })
    }

    /// Adds a descriptor.
    pub(crate) fn descriptor(mut self, descriptor: Descriptor) -> Self {
        self.0.descriptors.push(descriptor.0);
        self
    }

    /// Sets the cost of descriptors that do not set their own; 1 by default.
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

/// A list of entries that describes one aspect of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Descriptor(RateLimitDescriptor);

impl Descriptor {
    /// Creates a descriptor without entries.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Appends an entry. Entries are ordered from the general to the particular.
    pub(crate) fn entry(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.entries.push(Entry { key: key.into(), value: value.into() });
        self
    }

    /// Sets the cost. A cost of 0 is a peek and takes nothing.
    pub(crate) fn hits(mut self, hits: u64) -> Self {
        self.0.hits_addend = Some(hits);
        self
    }

    /// Makes the descriptor refund its hits instead of taking them.
    pub(crate) fn refund(mut self) -> Self {
        self.0.is_negative_hits = true;
        self
    }

    /// Sets a requested limit of `requests_per_unit` requests per `unit_multiplier` units, which replaces the rule's
    /// limit.
    pub(crate) fn limit(mut self, requests_per_unit: u32, unit: Unit, unit_multiplier: Option<u32>) -> Self {
        self.0.limit = Some(RateLimitOverride { requests_per_unit, unit: unit.into(), unit_multiplier });
        self
    }
}
