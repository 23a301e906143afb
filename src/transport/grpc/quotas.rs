//! `envoy.service.rate_limit_quota.v3.RateLimitQuotaService`, on tonic because a stream has only a few messages per
//! second.

use std::{pin::Pin, time::Duration};

use futures_util::{FutureExt, Stream, stream};
use prost_types::Duration as ProtoDuration;
use sluicegate_proto::envoy::{
    service::rate_limit_quota::v3::{
        BucketId as ProtoBucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports,
        rate_limit_quota_response::{
            BucketAction as ProtoAction,
            bucket_action::{AbandonAction, BucketAction as Kind, QuotaAssignmentAction},
        },
        rate_limit_quota_service_server::RateLimitQuotaService,
        rate_limit_quota_usage_reports::BucketQuotaUsage,
    },
    r#type::v3::{
        RateLimitStrategy, TokenBucket as ProtoTokenBucket,
        rate_limit_strategy::{BlanketRule, Strategy},
    },
};
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    time::sleep,
};
use tonic::{Request, Response, Status, Streaming};

use super::{Limits, wait_for_shutdown};
use crate::{
    engine::{Micros, Quota, TokenBucket},
    service::quotas::{BucketAction, BucketId, QuotaError, QuotaSession, Quotas, Usage},
};

/// Maximum number of buckets in one response.
const MAX_ACTIONS: usize = 1_000;
/// Maximum time since the last report, in seconds. Longer times, of callers that were disconnected, are shortened.
const MAX_ELAPSED_SECS: i64 = 300;
/// Number of responses that wait for a slow caller. Its reports are read only as fast as it reads responses.
const QUEUED_RESPONSES: usize = 4;

/// Header with the name of the caller, which stays the same when it connects again.
const CALLER_HEADER: &str = "sluicegate-caller";

type Outcome = Result<RateLimitQuotaResponse, Status>;

/// Implements the service. Sessions run on the runtime to which the store connection of `quotas` belongs.
pub struct QuotaService {
    quotas: Quotas,
    limits: Limits,
    runtime: Handle,
    stopping: watch::Receiver<bool>,
}

impl QuotaService {
    /// Creates the service, whose streams end when `stopping` is true. Must be called on the runtime to which the store
    /// connection of `quotas` belongs.
    ///
    /// # Panics
    ///
    /// Panics if it is called outside of a Tokio runtime.
    #[must_use]
    pub fn new(quotas: Quotas, limits: Limits, stopping: watch::Receiver<bool>) -> Self {
        Self { quotas, limits, runtime: Handle::current(), stopping }
    }
}

#[tonic::async_trait]
impl RateLimitQuotaService for QuotaService {
    type StreamRateLimitQuotasStream = Pin<Box<dyn Stream<Item = Outcome> + Send>>;

    async fn stream_rate_limit_quotas(
        &self,
        request: Request<Streaming<RateLimitQuotaUsageReports>>,
    ) -> Result<Response<Self::StreamRateLimitQuotasStream>, Status> {
        let (sender, receiver) = mpsc::channel(QUEUED_RESPONSES);
        let name = request.metadata().get(CALLER_HEADER).and_then(|name| name.to_str().ok());
        let (session, limits, stopping) = (self.quotas.session(name), self.limits, self.stopping.clone());
        self.runtime.spawn(run(session, request.into_inner(), sender, limits, stopping));
        let responses = stream::unfold(receiver, |mut receiver| async move {
            let outcome = receiver.recv().await?;
            Some((outcome, receiver))
        });
        Ok(Response::new(Box::pin(responses)))
    }
}

/// Serves a stream until the caller or the service ends it, and then waits for the end of its quotas.
async fn run(
    mut session: QuotaSession,
    reports: Streaming<RateLimitQuotaUsageReports>,
    sender: mpsc::Sender<Outcome>,
    limits: Limits,
    mut stopping: watch::Receiver<bool>,
) {
    serve(&mut session, reports, sender, limits, &mut stopping).await;
    if let Some(wait) = session.close() {
        tokio::select! {
            () = sleep(wait) => session.return_unused().boxed().await,
            () = wait_for_shutdown(&mut stopping) => {}
        }
    }
}

async fn serve(
    session: &mut QuotaSession,
    mut reports: Streaming<RateLimitQuotaUsageReports>,
    sender: mpsc::Sender<Outcome>,
    limits: Limits,
    stopping: &mut watch::Receiver<bool>,
) {
    loop {
        let actions = tokio::select! {
            message = reports.message() => match message {
                Ok(Some(message)) => match read(message, limits) {
                    Ok((domain, usages)) => {
                        // Boxed, as the compiler otherwise reaches its limit of nested types.
                        session.report(&domain, usages).boxed().await.map_err(|error| status(&error))
                    }
                    Err(error) => Err(error),
                },
                Ok(None) | Err(_) => return,
            },
            () = sleep(session.until_tick()) => Ok(session.tick().boxed().await),
            () = wait_for_shutdown(stopping) => return,
            () = sender.closed() => return,
        };
        match actions {
            Ok(actions) => {
                for part in actions.chunks(MAX_ACTIONS) {
                    let response = RateLimitQuotaResponse { bucket_action: part.iter().map(write).collect() };
                    if sender.send(Ok(response)).await.is_err() {
                        return;
                    }
                }
            }
            Err(error) => {
                let _ = sender.send(Err(error)).await;
                return;
            }
        }
    }
}

/// Reads the domain and the reports of a message.
pub(super) fn read(message: RateLimitQuotaUsageReports, limits: Limits) -> Result<(String, Vec<Usage>), Status> {
    let max = limits.max_text_bytes;
    if message.domain.len() > max {
        return Err(Status::invalid_argument(format!("the domain has more than {max} bytes")));
    }
    let usage = |usage: BucketQuotaUsage| {
        let entries = usage.bucket_id.unwrap_or_default().bucket;
        if entries.len() > limits.max_entries {
            let message = format!("a bucket_id has more than {} entries", limits.max_entries);
            return Err(Status::invalid_argument(message));
        }
        // All texts together, because a stream stores them.
        if entries.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>() > max {
            return Err(Status::invalid_argument(format!("a bucket_id has more than {max} bytes")));
        }
        let bucket = entries.into_iter().collect();
        let elapsed = usage.time_elapsed.map_or(0, |elapsed| elapsed.seconds.clamp(0, MAX_ELAPSED_SECS) as u64);
        let (allowed, denied) = (usage.num_requests_allowed, usage.num_requests_denied);
        Ok(Usage { bucket, allowed, denied, elapsed: Micros::from_secs(elapsed) })
    };
    let usages = message.bucket_quota_usages.into_iter().map(usage).collect::<Result<_, _>>()?;
    Ok((message.domain, usages))
}

fn status(error: &QuotaError) -> Status {
    let message = crate::errors::chain(error);
    match error {
        QuotaError::NoDomain | QuotaError::OtherDomain | QuotaError::NoEntries => Status::invalid_argument(message),
        QuotaError::TooManyBuckets(_) => Status::resource_exhausted(message),
    }
}

fn write(action: &BucketAction) -> ProtoAction {
    let (id, kind) = match action {
        BucketAction::Assign(id, quota, ttl) => {
            let assignment = QuotaAssignmentAction {
                assignment_time_to_live: Some(duration(*ttl)),
                rate_limit_strategy: Some(RateLimitStrategy { strategy: Some(strategy(*quota)) }),
            };
            (id, Kind::QuotaAssignmentAction(assignment))
        }
        BucketAction::Abandon(id) => (id, Kind::AbandonAction(AbandonAction {})),
    };
    ProtoAction { bucket_id: Some(write_id(id)), bucket_action: Some(kind) }
}

fn write_id(id: &BucketId) -> ProtoBucketId {
    ProtoBucketId { bucket: id.entries().map(|entry| (entry.key.to_owned(), entry.value.to_owned())).collect() }
}

fn strategy(quota: Quota) -> Strategy {
    match quota {
        Quota::AllowAll => Strategy::BlanketRule(BlanketRule::AllowAll.into()),
        Quota::DenyAll => Strategy::BlanketRule(BlanketRule::DenyAll.into()),
        Quota::TokenBucket(TokenBucket { max_tokens, tokens, interval_secs }) => {
            Strategy::TokenBucket(ProtoTokenBucket {
                max_tokens,
                tokens_per_fill: Some(tokens),
                fill_interval: Some(duration(Duration::from_secs(interval_secs.into()))),
            })
        }
    }
}

fn duration(duration: Duration) -> ProtoDuration {
    ProtoDuration { seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX), nanos: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(entries: &[(&str, &str)], seconds: i64) -> RateLimitQuotaUsageReports {
        let bucket = entries.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        let usage = BucketQuotaUsage {
            bucket_id: Some(ProtoBucketId { bucket }),
            time_elapsed: Some(ProtoDuration { seconds, nanos: 0 }),
            num_requests_allowed: 3,
            num_requests_denied: 4,
        };
        RateLimitQuotaUsageReports { domain: "d".into(), bucket_quota_usages: vec![usage] }
    }

    /// Equal buckets are recognised by their names, so the entries need an order.
    #[test]
    fn the_entries_of_a_bucket_are_ordered_by_their_keys() {
        let keys: Vec<String> = (0..20).map(|number| format!("k{number:02}")).collect();
        let entries: Vec<_> = keys.iter().rev().map(|key| (&**key, "v")).collect();
        let (domain, usages) = read(report(&entries, 5), Limits::default()).unwrap();
        let [Usage { bucket, allowed: 3, denied: 4, elapsed }] = &usages[..] else { panic!("{usages:?}") };
        assert_eq!((&*domain, *elapsed), ("d", Micros::from_secs(5)));
        let read: Vec<&str> = bucket.entries().map(|entry| entry.key).collect();
        assert_eq!(read, keys);
        assert_eq!(
            write_id(bucket).bucket,
            report(&entries, 5).bucket_quota_usages[0].bucket_id.as_ref().unwrap().bucket
        );
    }

    #[test]
    fn the_size_of_a_bucket_and_its_time_are_bounded() {
        let keys: Vec<String> = (0..33).map(|number| format!("k{number}")).collect();
        let entries: Vec<_> = keys.iter().map(|key| (&**key, "v")).collect();
        let status = |entries: &[(&str, &str)]| read(report(entries, 0), Limits::default()).unwrap_err();
        assert_eq!(status(&entries).message(), "a bucket_id has more than 32 entries");
        assert!(read(report(&entries[..32], 0), Limits::default()).is_ok());
        let long = "x".repeat(1_025);
        for entries in [[("a", "v"), ("k", &long[2..])], [("a", "v"), (&long[2..], "v")]] {
            assert_eq!(status(&entries).message(), "a bucket_id has more than 1024 bytes");
        }
        assert!(read(report(&[("k", &long[2..])], 0), Limits::default()).is_ok());
        let message = RateLimitQuotaUsageReports { domain: long, ..RateLimitQuotaUsageReports::default() };
        assert_eq!(read(message, Limits::default()).unwrap_err().message(), "the domain has more than 1024 bytes");
        let elapsed = |seconds| read(report(&[("k", "v")], seconds), Limits::default()).unwrap().1[0].elapsed;
        assert_eq!([-1, 0, 300, i64::MAX].map(elapsed), [0, 0, 300, 300].map(Micros::from_secs));
    }
}
