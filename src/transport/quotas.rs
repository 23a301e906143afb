//! [`QuotaService`]: the streams of `envoy.service.rate_limit_quota.v3.RateLimitQuotaService`.
//!
//! A stream can report thousands of buckets every few seconds. Its messages are therefore read into and written from the
//! types of the service directly, and a stream has no buffer between two of them.

use std::{borrow::Cow, future::poll_fn, mem, sync::Arc};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Request};
use sluicegate_proto::envoy::r#type::v3::rate_limit_strategy::BlanketRule;
use sluicegate_wire::{Fields, Malformed, Writer};
use smallvec::SmallVec;
use tokio::{
    runtime::Handle,
    sync::{
        Semaphore,
        mpsc::{self, error::TrySendError},
        watch,
    },
    time::sleep,
};

use super::{
    CallerErrors,
    errors::RequestError,
    grpc::{
        CALL_BYTES, Input, Limits, RequestBody,
        message::{Messages, PREFIX, with_prefix},
    },
    shutdown::wait_for_shutdown,
    texts::text_of,
};
use crate::{
    engine::{Micros, Quota, TokenBucket, bound_hits},
    rules::Entry,
    service::quotas::{BucketAction, BucketId, QuotaError, QuotaSession, Quotas, Usage},
};

/// Maximum size of a message with reports in bytes. Envoy reports all its buckets in one message.
const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// Size in bytes above which a response is sent, and the next bucket begins another one.
const RESPONSE_BYTES: usize = 64 * 1024;
/// Size in bytes above which a message is large. Large messages are decided one at a time, because their buckets need
/// much memory.
const LARGE_MESSAGE_BYTES: usize = 64 * 1024;
/// Maximum time since the last report, in seconds. Longer times, of callers that were disconnected, are shortened.
const MAX_ELAPSED_SECS: i64 = 300;
/// Number of responses that wait for a slow caller. Its reports are read only as fast as it reads responses.
const QUEUED_RESPONSES: usize = 4;

/// Header with the name of the caller, which stays the same when it connects again.
const CALLER_HEADER: &str = "sluicegate-caller";

/// A response with its prefix, or the status that ends a stream.
type Outcome = Result<Bytes, RequestError>;

/// The streams of quotas, served on the runtime to which the store connection of `quotas` belongs.
#[derive(Clone)]
pub struct QuotaService {
    quotas: Quotas,
    limits: Limits,
    errors: Arc<CallerErrors>,
    runtime: Handle,
    /// Permits one large message at a time.
    large: Arc<Semaphore>,
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
    pub fn new(quotas: Quotas, limits: Limits, errors: Arc<CallerErrors>, stopping: watch::Receiver<bool>) -> Self {
        let large = Arc::new(Semaphore::new(1));
        Self { quotas, limits, errors, runtime: Handle::current(), large, stopping }
    }

    /// Starts a stream, and returns its responses. The stream ends when `leaving` is true.
    pub(super) fn start(
        &self,
        request: Request<RequestBody>,
        leaving: watch::Receiver<bool>,
        input: Arc<Input>,
    ) -> mpsc::Receiver<Outcome> {
        let (sender, receiver) = mpsc::channel(QUEUED_RESPONSES);
        let session = self.quotas.session(caller(request.headers()));
        let reports = Messages::new(request.into_body(), Arc::clone(&input));
        let stream = Stream {
            session,
            reports,
            sender,
            input,
            errors: Arc::clone(&self.errors),
            large: Arc::clone(&self.large),
            limits: self.limits,
            leaving,
        };
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
    input: Arc<Input>,
    errors: Arc<CallerErrors>,
    large: Arc<Semaphore>,
    limits: Limits,
    leaving: watch::Receiver<bool>,
}

impl Stream {
    /// Serves the stream until the caller or the service ends it, and then waits for the end of its quotas.
    async fn run(mut self, mut stopping: watch::Receiver<bool>) {
        if let Err(mut error) = self.serve().await {
            error.domain = Some(self.session.domain().into());
            self.errors.record(&error);
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
                    // Boxed, as the compiler otherwise reaches its limit of nested types.
                    Some(message) => self.report(&message).boxed().await?,
                    None => return Ok(()),
                },
                () = sleep(self.session.until_tick()) => self.session.tick().boxed().await,
                () = wait_for_shutdown(&mut self.leaving) => return Ok(()),
                () = self.sender.closed() => return Ok(()),
            };
            if !self.send(write(&actions)).await? {
                return Ok(());
            }
        }
    }

    async fn report(&mut self, message: &Bytes) -> Result<Vec<BucketAction>, RequestError> {
        let large = Arc::clone(&self.large);
        let permit = if message.len() > LARGE_MESSAGE_BYTES {
            // An error means that the semaphore is closed, which it never is.
            large.acquire().await.ok()
        } else {
            None
        };
        let (domain, usages) = read(message, self.limits)?;
        let actions = self.session.report(&domain, usages).await?;
        drop(permit);
        Ok(actions)
    }

    /// Sends responses, and waits until the caller has read enough of them. Returns `false` if the caller is gone.
    async fn send(&mut self, responses: Vec<Bytes>) -> Result<bool, RequestError> {
        let mut bytes: usize = responses.iter().map(Bytes::len).sum();
        let mut memory = None;
        for response in responses {
            let size = response.len();
            match self.sender.try_send(Ok(response)) {
                Ok(()) => {}
                Err(TrySendError::Closed(_)) => return Ok(false),
                Err(TrySendError::Full(response)) => {
                    let memory = memory.get_or_insert_with(|| self.input.call(CALL_BYTES + bytes));
                    tokio::select! {
                        sent = self.sender.send(response) => if sent.is_err() { return Ok(false) },
                        error = poll_fn(|context| memory.poll_end(context)) => return Err(RequestError::from(error)),
                        error = poll_fn(|context| self.reports.poll_evicted(context)) => return Err(RequestError::from(error)),
                    }
                }
            }
            bytes -= size;
        }
        Ok(true)
    }
}

impl From<QuotaError> for RequestError {
    fn from(error: QuotaError) -> Self {
        let message = crate::metrics::chain(&error);
        match error {
            QuotaError::NoDomain | QuotaError::OtherDomain | QuotaError::NoEntries => Self::invalid(message),
        }
    }
}

/// Reads a `RateLimitQuotaUsageReports`: `domain`, `bucket_quota_usages`.
pub(super) fn read(message: &[u8], limits: Limits) -> Result<(Cow<'_, str>, Vec<Usage>), RequestError> {
    let mut domain = Cow::Borrowed("");
    let mut usages = Vec::new();
    for field in Fields::new(message) {
        match field? {
            (1, value) => domain = text_of(value.bytes()?),
            (2, value) => usages.push(read_usage(value.message()?, limits)?),
            _ => {}
        }
    }
    let max = limits.max_text_bytes;
    if domain.len() > max {
        return Err(RequestError::invalid(format!("the domain exceeds grpc.limits.max_text_bytes ({max})")));
    }
    Ok((domain, usages))
}

/// A key and a value of a bucket's name, as the caller sent them.
type RawEntry<'m> = (&'m [u8], &'m [u8]);

/// Reads a `BucketQuotaUsage`: `bucket_id`, `time_elapsed`, `num_requests_allowed`, `num_requests_denied`.
fn read_usage(fields: Fields<'_>, limits: Limits) -> Result<Usage, RequestError> {
    let mut entries = SmallVec::new();
    let mut seconds = 0;
    let mut allowed = 0;
    let mut denied = 0;
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
            (3, value) => allowed = bound_hits(value.number()?),
            (4, value) => denied = bound_hits(value.number()?),
            _ => {}
        }
    }
    entries.sort_unstable_by_key(|(key, _)| *key);
    let BucketName { bucket, descriptor } = name(&entries);
    let elapsed = Micros::from_secs(seconds.clamp(0, MAX_ELAPSED_SECS) as u64);
    Ok(Usage { bucket, descriptor, allowed, denied, elapsed })
}

/// The name of a bucket, and its descriptor.
struct BucketName {
    bucket: BucketId,
    /// `None` if the descriptor has the same texts as the name.
    descriptor: Option<BucketId>,
}

/// Returns the name and the descriptor of the bucket with these entries.
///
/// Envoy rejects a response with a name that is not UTF-8, and drops all its quotas. The requests of such a bucket are
/// counted, and no response contains its name.
fn name(entries: &[RawEntry<'_>]) -> BucketName {
    let mut names = SmallVec::<[(&str, &str); 3]>::new();
    let mut texts = SmallVec::<[(Cow<'_, str>, Cow<'_, str>); 3]>::new();
    let mut is_changed = false;
    for (key, value) in entries {
        let key_text = text_of(key);
        let value_text = text_of(value);
        is_changed |= matches!(key_text, Cow::Owned(_)) || matches!(value_text, Cow::Owned(_));
        texts.push((key_text, value_text));
        if let (Ok(key), Ok(value)) = (str::from_utf8(key), str::from_utf8(value)) {
            names.push((key, value));
        }
    }
    if !is_changed {
        return BucketName { bucket: names.into_iter().collect(), descriptor: None };
    }
    let descriptor: BucketId = texts.into_iter().collect();
    if names.len() < entries.len() {
        return BucketName { bucket: descriptor.into_unreadable(), descriptor: None };
    }
    BucketName { bucket: names.into_iter().collect(), descriptor: Some(descriptor) }
}

/// Reads the entries of a `BucketId`. If a key occurs several times, its last value counts.
fn read_entries<'m>(
    fields: Fields<'m>,
    entries: &mut SmallVec<[RawEntry<'m>; 3]>,
    max: usize,
) -> Result<(), RequestError> {
    for field in fields {
        if let (1, value) = field? {
            let entry = read_entry(value.message()?)?;
            match entries.iter().position(|former| former.0 == entry.0) {
                Some(former) => entries[former] = entry,
                None if entries.len() >= max => {
                    return Err(RequestError::invalid(format!("a bucket_id exceeds grpc.limits.max_entries ({max})")));
                }
                None => entries.push(entry),
            }
        }
    }
    Ok(())
}

/// Reads an entry of a map: `key`, `value`.
fn read_entry(fields: Fields<'_>) -> Result<RawEntry<'_>, Malformed> {
    let mut entry = RawEntry::default();
    for field in fields {
        match field? {
            (1, value) => entry.0 = value.bytes()?,
            (2, value) => entry.1 = value.bytes()?,
            _ => {}
        }
    }
    Ok(entry)
}

/// Encodes actions as messages `RateLimitQuotaResponse` (`bucket_action`), each after its prefix.
fn write(actions: &[BucketAction]) -> Vec<Bytes> {
    let mut responses = Vec::new();
    let mut data = Vec::new();
    for action in actions {
        if data.is_empty() {
            data.resize(PREFIX, 0);
        }
        Writer(&mut data).message(1, |message| write_action(action, message));
        if data.len() >= RESPONSE_BYTES {
            responses.push(with_prefix(mem::take(&mut data)));
        }
    }
    if !data.is_empty() {
        responses.push(with_prefix(data));
    }
    responses
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
        let seconds = usage.time_elapsed.unwrap_or_default().seconds.clamp(0, MAX_ELAPSED_SECS);
        let entries: Vec<_> = entries.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes())).collect();
        let BucketName { bucket, descriptor } = name(&entries);
        Usage {
            bucket,
            descriptor,
            allowed: bound_hits(usage.num_requests_allowed),
            denied: bound_hits(usage.num_requests_denied),
            elapsed: Micros::from_secs(seconds as u64),
        }
    });
    Some((text_of(message.domain.as_bytes()).into_owned(), usages.collect()))
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
        read(message, Limits::default()).map(|(domain, usages)| (domain.into_owned(), usages))
    }

    /// Equal buckets are recognised by their names, so the entries need an order.
    #[test]
    fn the_entries_of_a_bucket_are_ordered_by_their_keys() {
        let keys: Vec<String> = (0..20).map(|number| format!("k{number:02}")).collect();
        let entries: Vec<_> = keys.iter().rev().map(|key| (&**key, "v")).collect();
        let (domain, usages) = read_owned(&report(&entries, 5)).unwrap();
        let [Usage { bucket, descriptor: None, allowed: 3, denied: 4, elapsed }] = &usages[..] else {
            panic!("{usages:?}")
        };
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
        assert_eq!(
            error(&report(&entries, 0)),
            RequestError::invalid("a bucket_id exceeds grpc.limits.max_entries (32)")
        );
        assert!(is_valid(&entries[..32]));
        let long = "x".repeat(100_000);
        assert!(is_valid(&[("k", &long)]), "a value may have any length");
        let message = RateLimitQuotaUsageReports { domain: long, ..RateLimitQuotaUsageReports::default() };
        assert_eq!(error(&message.encode_to_vec()).message, "the domain exceeds grpc.limits.max_text_bytes (1024)");
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
        assert_eq!(error, RequestError::malformed("cannot decode the request: message is truncated"));
    }

    #[test]
    fn a_bucket_without_utf8_is_read_and_its_name_is_never_sent_back() {
        let message = report(&[("path", "/x?????"), ("user", "C:\\xff")], 5);
        let path = message.windows(5).position(|five| five == b"?????").unwrap();
        let mut raw = message.clone();
        raw[path] = 0xff;
        let usage = |message: &[u8]| read_owned(message).unwrap().1.remove(0);
        let pairs =
            |id: &BucketId| id.entries().map(|entry| format!("{}={}", entry.key, entry.value)).collect::<Vec<_>>();
        let Usage { bucket, descriptor, .. } = usage(&raw);
        assert_eq!((bucket.is_readable(), descriptor), (false, None));
        assert_eq!(pairs(&bucket), ["path=/x\\xff????", "user=C:\\\\xff"]);
        // A valid text that looks like an escaped byte has its own counter, and is sent back as it is.
        let Usage { bucket, descriptor, .. } = usage(&message);
        assert!(bucket.is_readable());
        assert_eq!(pairs(&bucket), ["path=/x?????", "user=C:\\xff"]);
        assert_eq!(pairs(&descriptor.unwrap()), ["path=/x?????", "user=C:\\\\xff"]);
    }

    #[test]
    fn responses_are_split_by_their_size() {
        let id: BucketId = [("path", &*"x".repeat(RESPONSE_BYTES / 3))].into_iter().collect();
        let actions: Vec<_> = (0..7).map(|_| BucketAction::Abandon(id.clone())).collect();
        let responses = write(&actions);
        let counts: Vec<usize> = responses
            .iter()
            .map(|data| RateLimitQuotaResponse::decode(&data[PREFIX..]).unwrap().bucket_action.len())
            .collect();
        assert_eq!(counts, [3, 3, 1]);
        assert!(write(&[]).is_empty());
    }

    #[test]
    fn prost_reads_responses() {
        let id: BucketId = [("", "v"), ("path", ""), ("user", &*"x".repeat(200))].into_iter().collect();
        let bucket = Quota::TokenBucket(TokenBucket { max_tokens: u32::MAX, tokens: 1, interval_secs: 3 });
        let ttl = Duration::from_secs(15);
        let assign = |quota| BucketAction::Assign(id.clone(), quota, ttl);
        let actions =
            [assign(Quota::AllowAll), assign(Quota::DenyAll), assign(bucket), BucketAction::Abandon(id.clone())];
        let [data] = &write(&actions)[..] else { panic!("the actions fit into one response") };
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
