//! A client for Envoy's rate limit protocol v3: one unary call per question.
//!
//! ```no_run
//! # async fn example() -> Result<(), sluicegate_client::Error> {
//! use sluicegate_client::{Client, Descriptor, Request};
//!
//! let client = Client::connect("http://127.0.0.1:8081").await?;
//! let request = Request::new("example").descriptor(Descriptor::new().entry("user", "alice"));
//! let answer = client.check(request).await?;
//! if !answer.allowed() {
//!     println!("come back in {:?}", answer.retry_after());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! What it does not do yet: cache refusals, hold leased quota, or fall back when the service is out of reach. A call
//! that fails is an [`Error`], and the caller decides what that means.

mod request;

use std::time::Duration;

use prost_types::{Value, value::Kind};

pub use request::{Descriptor, Request, Unit};
pub use sluicegate_proto as proto;
use sluicegate_proto::envoy::service::ratelimit::v3::{
    RateLimitResponse, rate_limit_response::Code, rate_limit_service_client::RateLimitServiceClient,
};
use tonic::transport::{Channel, Endpoint};

/// A call that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(1);

/// There is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is not one, or nobody listens there.
    #[error("cannot connect")]
    Connect(#[from] tonic::transport::Error),
    /// The service, or the way to it, says no.
    #[error("the call failed: {}", .0.message())]
    Call(#[from] Box<tonic::Status>),
}

impl Error {
    /// The gRPC code of a call that failed.
    #[must_use]
    pub fn code(&self) -> Option<tonic::Code> {
        match self {
            Self::Connect(_) => None,
            Self::Call(status) => Some(status.code()),
        }
    }
}

/// A connection to the service. Cheap to clone; all clones share it.
#[derive(Clone, Debug)]
pub struct Client {
    service: RateLimitServiceClient<Channel>,
}

impl Client {
    /// Connects to `http://host:port`.
    pub async fn connect(address: impl Into<String>) -> Result<Self, Error> {
        Self::with(Endpoint::from_shared(address.into())?.timeout(TIMEOUT)).await
    }

    /// Connects as the endpoint says: TLS, time-outs, keep-alive.
    pub async fn with(endpoint: Endpoint) -> Result<Self, Error> {
        let channel = endpoint.tcp_nodelay(true).connect().await?;
        Ok(Self { service: RateLimitServiceClient::new(channel) })
    }

    /// Asks once.
    pub async fn check(&self, request: Request) -> Result<Answer, Error> {
        let response = self.service.clone().should_rate_limit(request.into_message()).await;
        Ok(Answer(response.map_err(Box::new)?.into_inner()))
    }
}

/// What the service says.
#[derive(Clone, Debug)]
pub struct Answer(pub RateLimitResponse);

impl Answer {
    /// Whether the request may pass.
    #[must_use]
    pub fn allowed(&self) -> bool {
        self.0.overall_code() != Code::OverLimit
    }

    /// The least that remains of any limit that applied.
    #[must_use]
    pub fn remaining(&self) -> Option<u32> {
        let limited = self.0.statuses.iter().filter(|status| status.current_limit.is_some());
        limited.map(|status| status.limit_remaining).min()
    }

    /// When refused: how long until the last of the limits that refused would let the request pass, in whole seconds.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let over = self.0.statuses.iter().filter(|status| status.code() == Code::OverLimit);
        over.filter_map(|status| Duration::try_from(status.duration_until_reset?).ok()).max()
    }

    /// How long to wait before going on, when a limit shapes instead of refusing: the longest of all its limits. Needs
    /// `response.dynamic_metadata`.
    #[must_use]
    pub fn delay(&self) -> Option<Duration> {
        self.exact().into_iter().filter_map(|status| status.delay).max()
    }

    /// The exact numbers of each descriptor, in their order; none unless the service is set to send them
    /// (`response.dynamic_metadata`).
    #[must_use]
    pub fn exact(&self) -> Vec<ExactStatus> {
        let statuses = self.0.dynamic_metadata.as_ref().and_then(|all| all.fields.get("sluicegate.statuses"));
        let Some(Kind::ListValue(list)) = statuses.and_then(|value| value.kind.as_ref()) else {
            return Vec::new();
        };
        list.values.iter().map(ExactStatus::read).collect()
    }
}

/// What the protocol has no field for. What does not apply is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExactStatus {
    /// Whether the descriptor's limit lets it pass.
    pub allowed: bool,
    /// It passes only because the limit is soft.
    pub soft: bool,
    /// Hits that would still pass.
    pub remaining: Option<u32>,
    /// Until everything is restored.
    pub reset: Option<Duration>,
    /// When refused: until the same cost would pass; `None` when it never will.
    pub retry_after: Option<Duration>,
    /// When allowed: how long to wait before going on.
    pub delay: Option<Duration>,
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
