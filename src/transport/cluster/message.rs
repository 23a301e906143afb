//! Conversion between the messages of the exchange and their protobuf encoding. Every number is checked on arrival.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use sluicegate_calendar::Anchor;
use sluicegate_proto::sluicegate::cluster::v1 as proto;

use super::{
    calendar,
    wire::{WireError, count_fields},
};
use crate::{
    algorithm::{Algorithm, LimitSpec, Micros, State, WindowStart, sliding_window::WindowEdge},
    service::overrides::PeerOverrides,
    store::{
        overrides::{Change as OverridesChange, OverrideChange},
        peers::{Batch, Change, CounterCopy, CounterDigest, Increment},
    },
};

/// Maximum number of overrides or changes in one page.
const OVERRIDES_PER_PAGE: usize = 100;
/// Number of bytes after which a page has no further override or change.
const OVERRIDES_PAGE_BYTES: usize = 1 << 20;
/// Maximum number of changes in one batch. The backlog of an absent member has at most a million.
const MAX_BATCH_CHANGES: usize = 1_100_000;
/// Maximum number of limits in the increments of one batch.
const MAX_BATCH_LIMITS: usize = 200_000;
/// Maximum number of resets in one batch.
const MAX_BATCH_RESETS: usize = 20_000;
/// Maximum length of a copied state, in bytes. That of a sliding log has up to seven kilobytes.
const MAX_STATE_BYTES: usize = 64 << 10;
/// Maximum number of resets in one increment. Operators reset counters one by one.
const MAX_RESETS: usize = 1_000;
/// Number of bytes of a [`CounterDigest`].
const DIGEST_BYTES: usize = size_of::<CounterDigest>();

/// Error returned when a message of another instance cannot be understood.
#[derive(Debug, thiserror::Error)]
pub(super) enum MessageError {
    /// The bytes are no protobuf message.
    #[error("message is not valid protobuf")]
    Protobuf(#[from] prost::DecodeError),
    /// The bytes are no fields of protobuf.
    #[error("message is not valid protobuf")]
    Malformed,
    /// The lists of an increment have different lengths.
    #[error("increment {0} has lists of different lengths")]
    Lengths(u64),
    /// A batch has more changes, limits or resets than a member sends.
    #[error("batch has too many changes, limits or resets")]
    TooManyChanges,
}

impl From<WireError> for MessageError {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Malformed => Self::Malformed,
            WireError::TooManyItems(_) => Self::TooManyChanges,
        }
    }
}

/// Encodes an increment.
pub(super) fn encode(increment: &Increment) -> Bytes {
    let changes = &increment.changes;
    let message = proto::Increment {
        sequence: increment.sequence,
        published_at_us: increment.published_at.get(),
        limits: increment.limits.iter().map(encode_limit).collect(),
        counters: changes.iter().flat_map(|change| change.counter).collect(),
        limit: if increment.limits.len() > 1 {
            changes.iter().map(|change| change.limit).collect()
        } else {
            Vec::new()
        },
        hits: changes.iter().map(|change| change.hits).collect(),
        resets: increment.resets.iter().copied().flatten().collect(),
        age_us: changes.iter().map(|change| (increment.published_at - change.counted_at).get()).collect(),
    };
    message.encode_to_vec().into()
}

/// Decodes a batch of the instance `origin`.
///
/// Changes with a limit that this instance does not support are ignored.
pub(super) fn decode(response: &proto::PullResponse) -> Result<Batch, MessageError> {
    let mut increments = Vec::with_capacity(response.increments.len());
    let mut limits = 0;
    let mut changes = 0;
    let mut resets = 0;
    for bytes in &response.increments {
        // An empty limit has two bytes on the wire and more than a hundred in memory.
        let number = count_fields(bytes, &[3], MAX_BATCH_LIMITS - limits, |_| Ok(()))?;
        limits += number;
        let increment = decode_increment(bytes, number)?;
        changes += increment.changes.len();
        resets += increment.resets.len();
        if changes > MAX_BATCH_CHANGES || resets > MAX_BATCH_RESETS {
            return Err(MessageError::TooManyChanges);
        }
        increments.push(Arc::new(increment));
    }
    Ok(Batch {
        origin: response.origin,
        after: response.after,
        until: response.until,
        now: Micros::new(response.now_us),
        increments,
    })
}

/// Decodes an increment with this number of limits.
fn decode_increment(bytes: &Bytes, limits: usize) -> Result<Increment, MessageError> {
    // A list that grows while it is decoded takes up to three times the memory.
    let mut message = proto::Increment { limits: Vec::with_capacity(limits), ..proto::Increment::default() };
    message.merge(bytes.clone())?;
    let (digests, rest) = message.counters.as_chunks::<DIGEST_BYTES>();
    let count = digests.len();
    let has_limits = message.limit.len() == count || message.limit.is_empty();
    if !rest.is_empty() || !has_limits || message.hits.len() != count || message.age_us.len() != count {
        return Err(MessageError::Lengths(message.sequence));
    }
    // Unsupported limits keep their place in the list.
    let limits: Vec<Option<Algorithm>> = message.limits.iter().map(decode_limit).collect();
    let published_at = Micros::new(message.published_at_us);
    let mut changes = Vec::new();
    for (index, counter) in digests.iter().enumerate() {
        let limit = message.limit.get(index).copied().unwrap_or_default();
        let is_supported = limits.get(limit as usize).is_some_and(Option::is_some);
        if is_supported {
            changes.push(Change {
                counter: *counter,
                limit,
                hits: message.hits[index],
                counted_at: published_at - Micros::new(message.age_us[index]),
            });
        }
    }
    let limits = limits.into_iter().map(|limit| limit.unwrap_or(UNSUPPORTED)).collect();
    let (resets, _) = message.resets.as_chunks::<DIGEST_BYTES>();
    let resets = &resets[..resets.len().min(MAX_RESETS)];
    Ok(Increment::new(message.sequence, published_at, limits, changes).with_resets(resets.to_vec()))
}

/// Placeholder for a limit that this version does not support. No change refers to it.
const UNSUPPORTED: Algorithm = Algorithm::FixedWindow(crate::algorithm::fixed_window::FixedWindow::DENY_ALL);

fn encode_limit(algorithm: &Algorithm) -> proto::Limit {
    // Only algorithms with parameters are exchanged. Without `..`, a new parameter must be added here.
    let LimitSpec {
        requests,
        window,
        buckets,
        edge,
        burst,
        debt,
        queue,
        warm_up,
        count_denied,
        min_interval,
        soft,
        period,
        anchor,
        phase,
        // The name of the algorithm contains it.
        window_start: _,
        // The algorithms with these parameters are not exchanged.
        classes: _,
        method: _,
        floor: _,
        initial: _,
        timeout: _,
    } = algorithm.spec().unwrap_or_default();
    let is_large = requests.max(burst.unwrap_or_default()) > u32::MAX.into();
    proto::Limit {
        algorithm: algorithm.name().to_owned(),
        requests: u32::try_from(requests).unwrap_or_default(),
        large: if is_large { Some(Box::new(proto::LargeNumbers { requests, burst })) } else { None },
        window_us: window.get(),
        buckets,
        strict_edge: edge.map(|edge| edge == WindowEdge::Strict),
        burst: burst.and_then(|burst| u32::try_from(burst).ok()),
        queue,
        warm_up_us: warm_up.map(Micros::get),
        count_denied,
        min_interval_us: min_interval.map(Micros::get),
        soft_percent: soft,
        phase_us: phase.map(Micros::get),
        debt,
        calendar: period.map(|period| Box::new(calendar::encode(period, &anchor))),
    }
}

/// Decodes a limit. Returns `None` if this version does not have the algorithm, or rejects its parameters.
fn decode_limit(limit: &proto::Limit) -> Option<Algorithm> {
    let (period, anchor) = match &limit.calendar {
        Some(calendar) => calendar::decode(calendar).map(|(period, anchor)| (Some(period), anchor))?,
        None => (None, Anchor::default()),
    };
    let (requests, burst) = match &limit.large {
        Some(large) => (large.requests, large.burst),
        None => (limit.requests.into(), limit.burst.map(u64::from)),
    };
    let spec = LimitSpec {
        requests,
        window: Micros::new(limit.window_us),
        buckets: limit.buckets,
        edge: limit.strict_edge.map(|strict| if strict { WindowEdge::Strict } else { WindowEdge::Weighted }),
        burst,
        queue: limit.queue,
        warm_up: limit.warm_up_us.map(Micros::new),
        count_denied: limit.count_denied,
        min_interval: limit.min_interval_us.map(Micros::new),
        soft: limit.soft_percent,
        period,
        anchor,
        phase: limit.phase_us.map(Micros::new),
        debt: limit.debt,
        // Other windows of a schedule have a period or a phase.
        window_start: if limit.calendar.is_none() && limit.phase_us.is_none() {
            Some(WindowStart::Epoch)
        } else {
            None
        },
        classes: None,
        method: None,
        floor: None,
        initial: None,
        timeout: None,
    };
    let kind = Algorithm::KINDS.iter().find(|kind| kind.name == limit.algorithm)?;
    // Counters of algorithms without parameters are not exchanged.
    (kind.build)(&spec).ok().filter(|algorithm| algorithm.spec().is_some())
}

/// Encodes copied counters.
pub(super) fn encode_copies(copies: &[CounterCopy]) -> Vec<proto::CounterCopy> {
    let mut encoded = Vec::with_capacity(copies.len());
    for copy in copies {
        encoded.push(proto::CounterCopy {
            counter: Bytes::copy_from_slice(&copy.counter),
            state: Bytes::copy_from_slice(copy.state.as_bytes()),
            expires_s: copy.expires,
        });
    }
    encoded
}

/// Decodes copied counters. Those with an invalid digest or a state that no counter has are ignored.
pub(super) fn decode_copies(copies: &[proto::CounterCopy]) -> Vec<CounterCopy> {
    let mut decoded = Vec::new();
    for copy in copies {
        if let Ok(counter) = CounterDigest::try_from(copy.counter.as_ref())
            && copy.state.len() <= MAX_STATE_BYTES
        {
            decoded.push(CounterCopy { counter, state: State::from_bytes(&copy.state), expires: copy.expires_s });
        }
    }
    decoded
}

/// Encodes overrides in pages, with one page for each rule set. There is at least one page.
pub(super) fn encode_overrides(overrides: PeerOverrides) -> Vec<proto::OverridesPage> {
    let PeerOverrides { position, changes, overrides, rule_sets } = overrides;
    let mut pages = vec![empty_page(position)];
    for (digest, text) in rule_sets {
        let rule_sets = vec![proto::RuleSet { digest, text }];
        pages.push(proto::OverridesPage { rule_sets, ..empty_page(position) });
    }
    for changes in in_pages(changes.into_iter().map(encode_change)) {
        pages.push(proto::OverridesPage { changes, ..empty_page(position) });
    }
    let overrides =
        overrides.into_iter().map(|(target, version, text)| proto::StoredOverride { target, version, text });
    for overrides in in_pages(overrides) {
        pages.push(proto::OverridesPage { overrides, ..empty_page(position) });
    }
    pages
}

fn empty_page(position: u64) -> proto::OverridesPage {
    proto::OverridesPage { position, ..proto::OverridesPage::default() }
}

/// Divides messages into pages with a maximum number of messages, and of about [`OVERRIDES_PAGE_BYTES`].
fn in_pages<T: Message>(messages: impl Iterator<Item = T>) -> Vec<Vec<T>> {
    let mut pages: Vec<Vec<T>> = Vec::new();
    let mut bytes = 0;
    for message in messages {
        let length = message.encoded_len();
        match pages.last_mut() {
            Some(page) if page.len() < OVERRIDES_PER_PAGE && bytes + length <= OVERRIDES_PAGE_BYTES => {
                page.push(message);
                bytes += length;
            }
            _ => {
                pages.push(vec![message]);
                bytes = length;
            }
        }
    }
    pages
}

fn encode_change(change: OverridesChange) -> proto::OverridesChange {
    let OverridesChange { version, id, info, changes } = change;
    proto::OverridesChange { version, id, info, changes: changes.into_iter().map(encode_override_change).collect() }
}

fn encode_override_change(change: OverrideChange) -> proto::OverrideChange {
    let OverrideChange { target, before, after } = change;
    proto::OverrideChange { target, before, after }
}

/// Decodes a page of overrides.
pub(super) fn decode_overrides(page: proto::OverridesPage) -> PeerOverrides {
    PeerOverrides {
        position: page.position,
        changes: page.changes.into_iter().map(decode_change).collect(),
        overrides: page.overrides.into_iter().map(|entry| (entry.target, entry.version, entry.text)).collect(),
        rule_sets: page.rule_sets.into_iter().map(|set| (set.digest, set.text)).collect(),
    }
}

fn decode_change(change: proto::OverridesChange) -> OverridesChange {
    let proto::OverridesChange { version, id, info, changes } = change;
    OverridesChange { version, id, info, changes: changes.into_iter().map(decode_override_change).collect() }
}

fn decode_override_change(change: proto::OverrideChange) -> OverrideChange {
    let proto::OverrideChange { target, before, after } = change;
    OverrideChange { target, before, after }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{MAX_NUMBER, MaxHits, concurrency::Concurrency, gcra::Gcra};

    const NOW: Micros = Micros::from_secs(1_763_672_400);

    fn limit(requests: u32) -> Algorithm {
        Gcra::new(requests, Micros::from_secs(1), MaxHits::hard(requests.into()), false).unwrap().into()
    }

    fn change(counter: u8, limit: u32, hits: i64) -> Change {
        let counter = [counter; DIGEST_BYTES];
        Change { counter, limit, hits, counted_at: NOW - Micros::new(u64::from(counter[0])) }
    }

    /// Decodes an increment after a modification of its message.
    fn decode_modified(
        increment: &Increment,
        modify: impl FnOnce(&mut proto::Increment),
    ) -> Result<Increment, MessageError> {
        let mut message = proto::Increment::decode(encode(increment)).unwrap();
        modify(&mut message);
        decode_increment(&message.encode_to_vec().into(), 0)
    }

    #[test]
    fn an_increment_is_decoded_as_it_was_encoded() {
        for (limits, changes) in [
            (vec![limit(5)], vec![change(1, 0, 3), change(2, 0, -2)]),
            (vec![limit(5), limit(7)], vec![change(1, 1, i64::MAX), change(1, 0, i64::MIN)]),
            (Vec::new(), Vec::new()),
        ] {
            let resets = vec![[9; DIGEST_BYTES]];
            let sent = Increment::new(4, NOW, limits, changes).with_resets(resets);
            let received = decode_modified(&sent, |_| {}).unwrap();
            assert_eq!((received.sequence, received.published_at), (4, NOW));
            assert_eq!((received.limits, received.changes), (sent.limits, sent.changes));
            assert_eq!(received.resets, sent.resets);
        }
    }

    #[test]
    fn one_limit_takes_no_room_in_each_change() {
        let message =
            |limits: Vec<_>| proto::Increment::decode(encode(&Increment::new(1, NOW, limits, vec![change(1, 0, 3)])));
        assert_eq!(message(vec![limit(5)]).unwrap().limit, Vec::<u32>::new());
        assert_eq!(message(vec![limit(5), limit(7)]).unwrap().limit, [0]);
    }

    #[test]
    fn lists_of_different_lengths_are_rejected() {
        let sent = Increment::new(4, NOW, vec![limit(5), limit(7)], vec![change(1, 0, 3), change(2, 1, 4)]);
        let modifications: [fn(&mut proto::Increment); 8] = [
            |message| message.hits.truncate(1),
            |message| message.hits.push(1),
            |message| message.age_us.truncate(1),
            |message| message.age_us.push(1),
            |message| message.limit.truncate(1),
            |message| message.limit.push(1),
            |message| message.counters = [&message.counters[..], &[0]].concat().into(),
            |message| message.counters = message.counters.slice(..DIGEST_BYTES),
        ];
        for modify in modifications {
            assert!(matches!(decode_modified(&sent, modify), Err(MessageError::Lengths(4))));
        }
        assert!(matches!(decode_increment(&Bytes::from_static(b"garbage"), 0), Err(MessageError::Protobuf(_))));
        let garbage = proto::PullResponse { increments: vec![Bytes::from_static(b"garbage")], ..Default::default() };
        assert!(matches!(decode(&garbage), Err(MessageError::Malformed)));
    }

    #[test]
    fn changes_of_unsupported_limits_are_ignored() {
        let sent = Increment::new(4, NOW, vec![limit(5), limit(7)], vec![change(1, 0, 3), change(2, 1, 4)]);
        let slots = Concurrency::new(MaxHits::hard(5), Micros::from_secs(60)).unwrap();
        let slots = proto::Limit { algorithm: Algorithm::from(slots).name().to_owned(), ..encode_limit(&limit(5)) };
        let unknown = proto::Limit { algorithm: "unknown".into(), ..encode_limit(&limit(5)) };
        let invalid = proto::Limit { requests: 0, window_us: 0, ..encode_limit(&limit(5)) };
        for unsupported in [slots, unknown, invalid] {
            let received = decode_modified(&sent, |message| message.limits[0] = unsupported).unwrap();
            assert_eq!(received.changes, [change(2, 1, 4)]);
            assert_eq!(received.limits[1], limit(7));
        }
        let received = decode_modified(&sent, |message| message.limit[0] = 9).unwrap();
        assert_eq!(received.changes, [change(2, 1, 4)]);
    }

    #[test]
    fn resets_are_limited() {
        let sent = Increment::new(4, NOW, Vec::new(), Vec::new()).with_resets(vec![[9; DIGEST_BYTES]; 2 * MAX_RESETS]);
        assert_eq!(decode_modified(&sent, |_| {}).unwrap().resets.len(), MAX_RESETS);
    }

    #[test]
    fn a_limit_keeps_all_its_parameters() {
        let spec = LimitSpec { requests: 10, window: Micros::from_secs(60), ..LimitSpec::default() };
        let (edge, count_denied) = (Some(WindowEdge::Strict), Some(true));
        for (name, spec) in [
            ("sliding_window", LimitSpec { buckets: Some(6), edge, count_denied, soft: Some(20), ..spec }),
            ("sliding_log", LimitSpec { min_interval: Some(Micros::from_secs(1)), count_denied, ..spec }),
            ("leaky_bucket", LimitSpec { burst: Some(3), queue: Some(4), ..spec }),
            ("fixed_window", LimitSpec { requests: MAX_NUMBER, ..spec }),
            ("fixed_window", LimitSpec { window_start: Some(WindowStart::FirstRequest), ..spec }),
            ("token_bucket", LimitSpec { burst: Some(4), warm_up: Some(Micros::from_secs(30)), ..spec }),
        ] {
            let kind = Algorithm::kind(name).unwrap();
            let limit = (kind.build)(&spec).unwrap();
            let sent = encode_limit(&limit);
            let given = (sent.buckets, sent.strict_edge, sent.queue, sent.min_interval_us, sent.warm_up_us);
            let micros = |time: Option<Micros>| time.map(Micros::get);
            let strict = spec.edge.map(|_| true);
            assert_eq!(given, (spec.buckets, strict, spec.queue, micros(spec.min_interval), micros(spec.warm_up)));
            assert_eq!(decode_limit(&sent), Some(limit), "{name}");
        }
    }

    #[test]
    fn overrides_are_decoded_as_they_were_encoded() {
        let change = OverrideChange { target: "limit|d|k=v".into(), before: None, after: Some("5/day".into()) };
        let change = OverridesChange { version: 3, id: "x".into(), info: "alice".into(), changes: vec![change] };
        let stored = (0..250).map(|user| (format!("limit|d|user={user}"), user, "7/day".to_owned()));
        let sent = PeerOverrides {
            position: 9,
            changes: vec![change; 150],
            overrides: stored.collect(),
            rule_sets: vec![("digest".into(), "rules".into()), ("other".into(), "more".into())],
        };
        let mut received = PeerOverrides::default();
        for page in encode_overrides(sent.clone()) {
            assert!(page.changes.len() <= OVERRIDES_PER_PAGE && page.overrides.len() <= OVERRIDES_PER_PAGE);
            let page = decode_overrides(page);
            received.position = page.position;
            received.changes.extend(page.changes);
            received.overrides.extend(page.overrides);
            received.rule_sets.extend(page.rule_sets);
        }
        assert_eq!(received, sent);
    }

    #[test]
    fn pages_of_long_overrides_are_short_enough_to_be_received() {
        let long = "x".repeat(30_000);
        let stored = (0..200).map(|user| (format!("limit|d|user={user}"), 1, long.clone()));
        let change = OverrideChange { target: "t".into(), before: Some(long.clone()), after: Some(long.clone()) };
        let change = OverridesChange { version: 1, id: "x".into(), info: String::new(), changes: vec![change; 100] };
        let sent = PeerOverrides { changes: vec![change; 5], overrides: stored.collect(), ..PeerOverrides::default() };
        let pages = encode_overrides(sent);
        // A change is not divided.
        let longest = pages.iter().map(Message::encoded_len).max().unwrap();
        assert!(longest < super::super::MAX_MESSAGE_BYTES / 2, "{longest}");
        let (changes, overrides): (Vec<_>, Vec<_>) =
            pages.iter().skip(1).map(|page| (page.changes.len(), page.overrides.len())).unzip();
        assert_eq!((changes.iter().sum::<usize>(), overrides.iter().sum::<usize>()), (5, 200));
        assert!(*overrides.iter().max().unwrap() < 40);
    }

    #[test]
    fn batches_with_more_items_than_a_member_sends_are_rejected() {
        let response = |increments: Vec<proto::Increment>| proto::PullResponse {
            increments: increments.iter().map(|increment| increment.encode_to_vec().into()).collect(),
            ..proto::PullResponse::default()
        };
        let limits = |count| proto::Increment { limits: vec![proto::Limit::default(); count], ..Default::default() };
        let half = MAX_BATCH_LIMITS / 2;
        assert!(decode(&response(vec![limits(half), limits(half)])).is_ok());
        let error = decode(&response(vec![limits(half), limits(half + 1)])).unwrap_err();
        assert!(matches!(error, MessageError::TooManyChanges), "{error}");
        let resets = proto::Increment { resets: vec![7; MAX_RESETS * DIGEST_BYTES].into(), ..Default::default() };
        let count = MAX_BATCH_RESETS / MAX_RESETS;
        assert!(decode(&response(vec![resets.clone(); count])).is_ok());
        let error = decode(&response(vec![resets; count + 1])).unwrap_err();
        assert!(matches!(error, MessageError::TooManyChanges), "{error}");
    }

    #[test]
    fn copied_states_have_at_most_the_maximum_length() {
        let copy = |length: usize| proto::CounterCopy {
            counter: vec![1; DIGEST_BYTES].into(),
            state: vec![1; length].into(),
            expires_s: 9,
        };
        assert_eq!(decode_copies(&[copy(1), copy(MAX_STATE_BYTES), copy(MAX_STATE_BYTES + 1)]).len(), 2);
    }
}
