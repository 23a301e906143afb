//! [`QuotaService`]: the streams of `envoy.service.rate_limit_quota.v3.RateLimitQuotaService`.
//!
//! A stream can report thousands of buckets every few seconds. Its messages are therefore read into and written from the
//! types of the service directly, and a stream has no buffer between two of them.

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Request};
use sluicegate_common::wire::{Fields, Writer};
use sluicegate_proto::envoy::r#type::v3::rate_limit_strategy::BlanketRule;
use smallvec::SmallVec;
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    time::sleep,
};

use super::{
    Limits, RequestError,
    decode::decode_entry,
    message::{Messages, PREFIX, with_prefix},
    request_body::RequestBody,
    wait_for_shutdown,
};
use crate::{
    engine::{Micros, Quota, TokenBucket},
    rules::Entry,
    service::quotas::{BucketAction, QuotaError, QuotaSession, Quotas, Usage},
};

/// Maximum size of a message with reports in bytes. Envoy reports all its buckets in one message.
const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// Maximum number of buckets in one response.
const MAX_ACTIONS: usize = 1_000;
/// Maximum time since the last report, in seconds. Longer times, of callers that were disconnected, are shortened.
const MAX_ELAPSED_SECS: i64 = 300;
/// Number of responses that wait for a slow caller. Its reports are read only as fast as it reads responses.
const QUEUED_RESPONSES: usize = 4;

/// Header with the name of the caller, which stays the same when it connects again.
const CALLER_HEADER: &str = "sluicegate-caller";

/// A response with its prefix, or the status that ends a stream.
type Outcome = Result<Bytes, RequestError>;

/// Serves the streams on the runtime to which the store connection of its quotas belongs.
#[derive(Clone)]
pub struct QuotaService {
    quotas: Quotas,
    limits: Limits,
    runtime: Handle,
    stopping: watch::Receiver<bool>,
}

impl QuotaService {
    /// Creates the service. When `stopping` is true, unused hits are no longer returned. Must be called on the runtime to
    /// which the store connection of `quotas` belongs.
    ///
    /// # Panics
    ///
    /// Panics if it is called outside of a Tokio runtime.
    #[must_use]
    pub fn new(quotas: Quotas, limits: Limits, stopping: watch::Receiver<bool>) -> Self {
        Self { quotas, limits, runtime: Handle::current(), stopping }
    }

    /// Starts a stream, and returns its responses. The stream ends when `leaving` is true.
    pub(super) fn start(
        &self,
        request: Request<RequestBody>,
        leaving: watch::Receiver<bool>,
    ) -> mpsc::Receiver<Outcome> {
        let (sender, receiver) = mpsc::channel(QUEUED_RESPONSES);
        let session = self.quotas.session(caller(request.headers()));
        let reports = Messages::new(request.into_body());
        let stream = Stream { session, reports, sender, limits: self.limits, leaving };
        self.runtime.spawn(stream.run(self.stopping.clone()));
        receiver
    }
}

fn caller(headers: &HeaderMap) -> Option<&str> {
    headers.get(CALLER_HEADER)?.to_str().ok()
}

/// A stream of reports and responses.
struct Stream {
    session: QuotaSession,
    reports: Messages,
    sender: mpsc::Sender<Outcome>,
    limits: Limits,
    leaving: watch::Receiver<bool>,
}

impl Stream {
    /// Serves the stream until the caller or the service ends it, and then waits for the end of its quotas.
    async fn run(mut self, mut stopping: watch::Receiver<bool>) {
        if let Err(error) = self.serve().await {
            let _ = self.sender.send(Err(error)).await;
        }
        let mut session = self.end();
        if let Some(wait) = session.close() {
            tokio::select! {
                () = sleep(wait) => session.return_unused().boxed().await,
                () = wait_for_shutdown(&mut stopping) => {}
            }
        }
    }

    /// Ends the stream for the caller, and returns its session.
    fn end(self) -> QuotaSession {
        self.session
    }

    /// Answers reports. Returns an error if the stream is to end with its status.
    async fn serve(&mut self) -> Result<(), RequestError> {
        loop {
            let actions = tokio::select! {
                message = self.reports.next(MAX_MESSAGE_BYTES) => match message? {
                    Some(message) => {
                        let (domain, usages) = read(&message, self.limits)?;
                        // Boxed, as the compiler otherwise reaches its limit of nested types.
                        self.session.report(domain, usages).boxed().await?
                    }
                    None => return Ok(()),
                },
                () = sleep(self.session.until_tick()) => self.session.tick().boxed().await,
                () = wait_for_shutdown(&mut self.leaving) => return Ok(()),
                () = self.sender.closed() => return Ok(()),
            };
            for actions in actions.chunks(MAX_ACTIONS) {
                if self.sender.send(Ok(write(actions))).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}

impl From<QuotaError> for RequestError {
    fn from(error: QuotaError) -> Self {
        let message = crate::errors::chain(&error);
        match error {
            QuotaError::NoDomain | QuotaError::OtherDomain | QuotaError::NoEntries => Self::invalid(message),
            QuotaError::TooManyBuckets(_) => Self::exhausted(message),
        }
    }
}

/// Reads a `RateLimitQuotaUsageReports`: `domain`, `bucket_quota_usages`.
pub(super) fn read(message: &[u8], limits: Limits) -> Result<(&str, Vec<Usage>), RequestError> {
    let (mut domain, mut usages) = ("", Vec::new());
    for field in Fields::new(message) {
        match field? {
            (1, value) => domain = value.text()?,
            (2, value) => usages.push(read_usage(value.message()?, limits)?),
            _ => {}
        }
    }
    let max = limits.max_text_bytes;
    if domain.len() > max {
        return Err(RequestError::invalid(format!("the domain has more than {max} bytes")));
    }
    Ok((domain, usages))
}

/// Reads a `BucketQuotaUsage`: `bucket_id`, `time_elapsed`, `num_requests_allowed`, `num_requests_denied`.
fn read_usage(fields: Fields<'_>, limits: Limits) -> Result<Usage, RequestError> {
    let mut entries = SmallVec::new();
    let (mut seconds, mut allowed, mut denied) = (0, 0, 0);
    for field in fields {
        match field? {
            (1, value) => read_entries(value.message()?, &mut entries, limits.max_entries)?,
            (2, value) => {
                for field in value.message()? {
                    if let (1, value) = field? {
                        seconds = value.number()? as i64;
                    }
                }
            }
            (3, value) => allowed = value.number()?,
            (4, value) => denied = value.number()?,
            _ => {}
        }
    }
    // All texts together, because a stream stores them.
    let max = limits.max_text_bytes;
    if entries.iter().map(|entry| entry.key.len() + entry.value.len()).sum::<usize>() > max {
        return Err(RequestError::invalid(format!("a bucket_id has more than {max} bytes")));
    }
    entries.sort_unstable_by_key(|entry| entry.key);
    let bucket = entries.into_iter().map(|entry| (entry.key, entry.value)).collect();
    let elapsed = Micros::from_secs(seconds.clamp(0, MAX_ELAPSED_SECS) as u64);
    Ok(Usage { bucket, allowed, denied, elapsed })
}

/// Reads the entries of a `BucketId`. If a key occurs several times, its last value counts.
fn read_entries<'m>(
    fields: Fields<'m>,
    entries: &mut SmallVec<[Entry<'m>; 3]>,
    max: usize,
) -> Result<(), RequestError> {
    for field in fields {
        if let (1, value) = field? {
            let entry = decode_entry(value.message()?)?;
            match entries.iter().position(|former| former.key == entry.key) {
                Some(former) => entries[former] = entry,
                None if entries.len() >= max => {
                    return Err(RequestError::invalid(format!("a bucket_id has more than {max} entries")));
                }
                None => entries.push(entry),
            }
        }
    }
    Ok(())
}

/// Returns a `RateLimitQuotaResponse` after its prefix: `bucket_action`.
fn write(actions: &[BucketAction]) -> Bytes {
    let mut data = vec![0; PREFIX];
    for action in actions {
        Writer(&mut data).message(1, |message| write_action(action, message));
    }
    with_prefix(data)
}

/// Writes a `BucketAction`: `bucket_id`, and `quota_assignment_action` or `abandon_action`.
fn write_action(action: &BucketAction, message: &mut Writer<'_>) {
    let (BucketAction::Assign(id, ..) | BucketAction::Abandon(id)) = action;
    message.message(1, |message| {
        for Entry { key, value } in id.entries() {
            message.message(1, |entry| {
                entry.text(1, key);
                entry.text(2, value);
            });
        }
    });
    match action {
        BucketAction::Assign(_, quota, ttl) => message.message(2, |assignment| {
            assignment.message(2, |duration| duration.number(1, ttl.as_secs()));
            assignment.message(3, |strategy| write_quota(*quota, strategy));
        }),
        BucketAction::Abandon(_) => message.message(3, |_| ()),
    }
}

/// Writes a `RateLimitStrategy`: `blanket_rule` or `token_bucket`.
fn write_quota(quota: Quota, message: &mut Writer<'_>) {
    match quota {
        Quota::AllowAll => message.optional(1, Some(BlanketRule::AllowAll as u64)),
        Quota::DenyAll => message.optional(1, Some(BlanketRule::DenyAll as u64)),
        Quota::TokenBucket(TokenBucket { max_tokens, tokens, interval_secs }) => message.message(3, |bucket| {
            bucket.number(1, max_tokens.into());
            bucket.message(2, |per_fill| per_fill.number(1, tokens.into()));
            bucket.message(3, |duration| duration.number(1, interval_secs.into()));
        }),
    }
}

/// Reads with prost, with which [`read`] must agree.
#[cfg(any(test, fuzzing))]
pub(super) fn read_with_prost(message: &[u8]) -> Option<(String, Vec<Usage>)> {
    use prost::Message;
    use sluicegate_proto::envoy::service::rate_limit_quota::v3::RateLimitQuotaUsageReports;

    let message = RateLimitQuotaUsageReports::decode(message).ok()?;
    let usages = message.bucket_quota_usages.into_iter().map(|usage| {
        let entries: std::collections::BTreeMap<_, _> =
            usage.bucket_id.unwrap_or_default().bucket.into_iter().collect();
        let seconds = usage.time_elapsed.map_or(0, |elapsed| elapsed.seconds.clamp(0, MAX_ELAPSED_SECS));
        Usage {
            bucket: entries.into_iter().collect(),
            allowed: usage.num_requests_allowed,
            denied: usage.num_requests_denied,
            elapsed: Micros::from_secs(seconds as u64),
        }
    });
    Some((message.domain, usages.collect()))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use prost::Message;
    use sluicegate_proto::envoy::{
        service::rate_limit_quota::v3::{
            BucketId as ProtoBucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports,
            rate_limit_quota_response::bucket_action::BucketAction as Kind,
            rate_limit_quota_usage_reports::BucketQuotaUsage,
        },
        r#type::v3::{TokenBucket as ProtoTokenBucket, rate_limit_strategy::Strategy},
    };

    use super::*;
    use crate::service::quotas::BucketId;

    fn usage(entries: &[(&str, &str)], seconds: i64) -> BucketQuotaUsage {
        let bucket = entries.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        BucketQuotaUsage {
            bucket_id: Some(ProtoBucketId { bucket }),
            time_elapsed: Some(prost_types::Duration { seconds, nanos: 0 }),
            num_requests_allowed: 3,
            num_requests_denied: 4,
        }
    }

    fn report(entries: &[(&str, &str)], seconds: i64) -> Vec<u8> {
        let bucket_quota_usages = vec![usage(entries, seconds)];
        RateLimitQuotaUsageReports { domain: "d".into(), bucket_quota_usages }.encode_to_vec()
    }

    fn read_owned(message: &[u8]) -> Result<(String, Vec<Usage>), RequestError> {
        read(message, Limits::default()).map(|(domain, usages)| (domain.to_owned(), usages))
    }

    /// Equal buckets are recognised by their names, so the entries need an order.
    #[test]
    fn the_entries_of_a_bucket_are_ordered_by_their_keys() {
        let keys: Vec<String> = (0..20).map(|number| format!("k{number:02}")).collect();
        let entries: Vec<_> = keys.iter().rev().map(|key| (&**key, "v")).collect();
        let (domain, usages) = read_owned(&report(&entries, 5)).unwrap();
        let [Usage { bucket, allowed: 3, denied: 4, elapsed }] = &usages[..] else { panic!("{usages:?}") };
        assert_eq!((&*domain, *elapsed), ("d", Micros::from_secs(5)));
        let read: Vec<&str> = bucket.entries().map(|entry| entry.key).collect();
        assert_eq!(read, keys);
    }

    #[test]
    fn the_size_of_a_bucket_and_its_time_are_bounded() {
        let keys: Vec<String> = (0..33).map(|number| format!("k{number}")).collect();
        let entries: Vec<_> = keys.iter().map(|key| (&**key, "v")).collect();
        let error = |message: &[u8]| read_owned(message).unwrap_err();
        let is_valid = |entries: &[(&str, &str)]| read_owned(&report(entries, 0)).is_ok();
        assert_eq!(error(&report(&entries, 0)), RequestError::invalid("a bucket_id has more than 32 entries"));
        assert!(is_valid(&entries[..32]));
        let long = "x".repeat(1_025);
        for entries in [[("a", "v"), ("k", &long[2..])], [("a", "v"), (&long[2..], "v")]] {
            assert_eq!(error(&report(&entries, 0)).message, "a bucket_id has more than 1024 bytes");
        }
        assert!(is_valid(&[("k", &long[2..])]));
        let message = RateLimitQuotaUsageReports { domain: long, ..RateLimitQuotaUsageReports::default() };
        assert_eq!(error(&message.encode_to_vec()).message, "the domain has more than 1024 bytes");
        let elapsed = |seconds| read_owned(&report(&[("k", "v")], seconds)).unwrap().1[0].elapsed;
        assert_eq!([-1, 0, 300, i64::MAX].map(elapsed), [0, 0, 300, 300].map(Micros::from_secs));
    }

    #[test]
    fn reports_are_read_as_prost_reads_them() {
        let once = report(&[("user", "alice"), ("path", "/"), ("", "")], 5);
        // Protobuf merges usages that are sent as one.
        let [first, second] = [usage(&[("user", "alice"), ("path", "/")], 5), usage(&[("user", "bob")], 0)];
        let merged = [first.encode_to_vec(), second.encode_to_vec()].concat();
        let merged = [&[0x12, merged.len() as u8], &*merged].concat();
        for message in [&once[..], &[], &once.repeat(3), &merged] {
            assert_eq!(read_owned(message).ok(), Some(read_with_prost(message).unwrap()));
        }
        for end in 1..once.len() {
            assert_eq!(read_owned(&once[..end]).ok(), read_with_prost(&once[..end]), "{end}");
        }
        let error = read_owned(&once[..once.len() - 1]).unwrap_err();
        assert_eq!(error, RequestError::invalid("cannot decode the request: message is truncated"));
    }

    #[test]
    fn prost_reads_responses() {
        let id: BucketId = [("", "v"), ("path", ""), ("user", &*"x".repeat(200))].into_iter().collect();
        let bucket = Quota::TokenBucket(TokenBucket { max_tokens: u32::MAX, tokens: 1, interval_secs: 3 });
        let ttl = Duration::from_secs(15);
        let assign = |quota| BucketAction::Assign(id.clone(), quota, ttl);
        let actions =
            [assign(Quota::AllowAll), assign(Quota::DenyAll), assign(bucket), BucketAction::Abandon(id.clone())];
        let data = write(&actions);
        assert_eq!(data[..PREFIX], [[0].as_slice(), &(data.len() as u32 - 5).to_be_bytes()].concat());
        let strategies =
            RateLimitQuotaResponse::decode(&data[PREFIX..]).unwrap().bucket_action.into_iter().map(|action| {
                let entries: BTreeMap<_, _> = action.bucket_id.unwrap().bucket.into_iter().collect();
                assert_eq!(entries.into_iter().collect::<BucketId>(), id);
                match action.bucket_action.unwrap() {
                    Kind::QuotaAssignmentAction(assignment) => {
                        assert_eq!(assignment.assignment_time_to_live, ttl.try_into().ok());
                        assignment.rate_limit_strategy.unwrap().strategy
                    }
                    Kind::AbandonAction(_) => None,
                }
            });
        let fill_interval = Duration::from_secs(3).try_into().ok();
        let bucket = ProtoTokenBucket { max_tokens: u32::MAX, tokens_per_fill: Some(1), fill_interval };
        let blanket = |rule: BlanketRule| Some(Strategy::BlanketRule(rule.into()));
        assert_eq!(
            strategies.collect::<Vec<_>>(),
            [blanket(BlanketRule::AllowAll), blanket(BlanketRule::DenyAll), Some(Strategy::TokenBucket(bucket)), None]
        );
    }
}
