//! Fuzz target: the state of a counter that another program has written.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use arbitrary::{Result, Unstructured};
use sluicegate_calendar::{Anchor, Period};

use super::{
    Action, Algorithm, CLOCK_SLACK, LimitSpec, MAX_NUMBER, MAX_PERIOD, Micros, Operation, RequestContext, Sample,
    State, sliding_window::WindowEdge,
};

/// The time of the first operation.
const START: u64 = 1_763_672_400_000_000;

/// Size of the largest entry of a state: a slot.
const MAX_BYTES_PER_HIT: usize = 14;
/// Size of the count of a bucket.
const MAX_BUCKET_BYTES: usize = 8;
/// Maximum number of hits that a log or slots contain.
const MAX_COUNTED: u64 = 1_000;

/// Applies operations to a counter whose state consists of arbitrary bytes.
///
/// The counts in a decision must fit into a double, a state must not grow by more than its new entries, and the state must
/// expire: broken bytes in Redis must not deny a caller for ever.
pub fn counter_state(input: &[u8]) {
    // Inputs that are too short for a limit test nothing.
    let _ = apply_all(&mut Unstructured::new(input));
}

fn apply_all(input: &mut Unstructured<'_>) -> Result<()> {
    let kind = *input.choose(Algorithm::KINDS)?;
    let spec = limit(kind.keywords, input)?;
    let Ok(algorithm) = (kind.build)(&spec) else {
        return Ok(());
    };
    // A sliding window also stores the buckets between two hits.
    let buckets = spec.buckets.unwrap_or_default() as usize;
    let leasing = if input.ratio(1, 4)? { algorithm.leasing() } else { None };
    let length = input.int_in_range(0..=200)?;
    let mut state = State::from_bytes(input.bytes(length)?);
    let mut now = Micros::new(START);
    for _ in 0..8 {
        let algorithm = algorithm.with_context(context(input)?);
        let program = leasing.unwrap_or(algorithm.into());
        let operation = Operation { action: action(input)?, cost: input.int_in_range(0..=u64::MAX)?, now };
        let length = state.as_bytes().len();
        let decision = program.apply(&mut state, operation);
        let added = MAX_BYTES_PER_HIT * operation.cost.min(MAX_COUNTED) as usize;
        assert!(
            state.as_bytes().len() <= length + added + MAX_BUCKET_BYTES * buckets + 64,
            "{program:?} {operation:?}: {length} bytes, {state:?}"
        );
        let count = decision.remaining.max(decision.used);
        assert!(count <= MAX_NUMBER, "{program:?} {operation:?}: {decision:?} of {state:?}");
        let wait = decision.retry_after.unwrap_or_default().max(decision.delay);
        assert!(wait <= MAX_PERIOD + MAX_PERIOD, "{program:?} {operation:?}: {decision:?} of {state:?}");
        if operation.action == Action::Take {
            let latest = now + MAX_PERIOD + MAX_PERIOD + CLOCK_SLACK;
            let expires = program.expires(&state, now);
            assert!(expires <= latest, "{program:?}: the state {state:?} expires at {expires:?}");
        }
        let _ = (algorithm.parts(&state, now), program.denial_counts(&state, now));
        now = Micros::new(now.get().saturating_add_signed(input.int_in_range(-100_000_000..=10_000_000_000)?));
    }
    Ok(())
}

/// Reads a limit with the keywords that its algorithm accepts.
fn limit(keywords: &[&str], input: &mut Unstructured<'_>) -> Result<LimitSpec> {
    let burst = large_number("burst", keywords, input)?;
    let debt = large_number("debt", keywords, input)?;
    let queue = number("queue", u32::MAX, keywords, input)?;
    let buckets = number("buckets", 4_000, keywords, input)?;
    let soft = number("soft", 1_000, keywords, input)?;
    let floor = number("floor", 1_000, keywords, input)?;
    let initial = number("initial", 1_000, keywords, input)?;
    let window = *input.choose(&[1, 60, 3_600, 86_400, 366 * 86_400, MAX_PERIOD.get() / 1_000_000])?;
    Ok(LimitSpec {
        requests: requests(input)?,
        window: Micros::from_secs(window),
        buckets,
        edge: if input.arbitrary()? { Some(WindowEdge::Strict) } else { None },
        burst,
        debt,
        queue,
        warm_up: if input.arbitrary()? { Some(Micros::new(input.int_in_range(0..=MAX_PERIOD.get())?)) } else { None },
        count_denied: input.arbitrary()?,
        min_interval: if input.arbitrary()? { Some(Micros::new(u64::from(input.arbitrary::<u32>()?))) } else { None },
        soft,
        phase: if input.ratio(1, 8)? { Some(Micros::new(input.arbitrary()?)) } else { None },
        period: if input.ratio(1, 8)? {
            Some(*input.choose(&[Period::Hour, Period::Week, Period::Months(12)])?)
        } else {
            None
        },
        floor,
        initial,
        ..LimitSpec::default()
    })
}

/// Reads a limit: a small one, one of 32 bits, or a larger one.
fn requests(input: &mut Unstructured<'_>) -> Result<u64> {
    if input.arbitrary()? {
        return input.int_in_range(1..=20);
    }
    let requests = u64::from(input.arbitrary::<u32>()?);
    Ok(if input.ratio(1, 4)? { requests << 21 } else { requests })
}

/// Reads the number of a keyword that may have more than 32 bits.
fn large_number(keyword: &str, keywords: &[&str], input: &mut Unstructured<'_>) -> Result<Option<u64>> {
    let Some(small) = number(keyword, u32::MAX, keywords, input)?.map(u64::from) else {
        return Ok(None);
    };
    Ok(Some(if input.ratio(1, 4)? { small << 21 } else { small }))
}

/// Reads the number of a keyword, or `None` if the algorithm does not accept the keyword.
fn number(keyword: &str, max: u32, keywords: &[&str], input: &mut Unstructured<'_>) -> Result<Option<u32>> {
    if keywords.contains(&keyword) && input.arbitrary()? { Ok(Some(input.int_in_range(0..=max)?)) } else { Ok(None) }
}

fn context(input: &mut Unstructured<'_>) -> Result<RequestContext> {
    let sample = Sample { latency: Micros::new(input.arbitrary()?), dropped: input.arbitrary()? };
    Ok(RequestContext {
        holder: input.int_in_range(0..=3)?,
        class: input.int_in_range(0..=3)?,
        entity: input.arbitrary()?,
        anchor: Anchor { day: Some(input.int_in_range(1..=31)?), ..Anchor::default() },
        sample: Some(sample),
    })
}

fn action(input: &mut Unstructured<'_>) -> Result<Action> {
    Ok(match input.int_in_range(0..=5)? {
        0..=2 => Action::Take,
        3 => Action::Peek,
        4 => Action::Refund,
        _ => Action::RollBack(Micros::new(START.saturating_add_signed(i64::from(input.arbitrary::<i32>()?)))),
    })
}
