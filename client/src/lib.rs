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

    /// When refused: how long until the last of the limits that refused starts afresh.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let over = self.0.statuses.iter().filter(|status| status.code() == Code::OverLimit);
        over.filter_map(|status| Duration::try_from(status.duration_until_reset?).ok()).max()
    }
}
