//! [`Observer`]: records every call from the caller's side, and reports violations of the laws.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::Mutex,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crate::{
    features::{FEATURES, IN_FLIGHT},
    law::{Apart, Disturbance, Ledger, Loss, slots_bound},
    support::raw_client::Error,
};

/// Time in which every call of an endurance run must have an answer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(3);
/// The deadline is divided into this number of parts. If the machine does not run the observer for a while, at most one
/// part passes.
const PARTS: u32 = 30;
/// Length in milliseconds of the periods in which errors are counted.
pub(crate) const PERIOD: u64 = 100;
/// `hold` of the slots in milliseconds.
const HOLD: u64 = 30_000;
/// Time in milliseconds after a window ended until its admissions are checked: all its calls are answered by then.
const CLOSING: u64 = 5_000;

/// Why a call has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The service responded with this status.
    Status(String),
    /// The connection failed.
    Connection,
    /// No response arrived before the deadline.
    Unanswered,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match &error {
            // A status with a source was made by the client, not received.
            Error::Call(status) if std::error::Error::source(&**status).is_none() => {
                Self::Status(format!("{:?}", status.code()))
            }
            _ => Self::Connection,
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(_: std::io::Error) -> Self {
        Self::Connection
    }
}

/// The instance that is called, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    Connection(usize),
    NewConnection(usize),
}

impl Via {
    fn instance(self) -> usize {
        match self {
            Self::Connection(instance) | Self::NewConnection(instance) => instance,
        }
    }
}

/// The begin and the end of a call, in milliseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// Time in which an instance cannot be expected to answer, because it is killed or frozen, or cannot be expected to
/// answer on new connections.
struct Silence {
    via: Via,
    from: u64,
    until: Option<u64>,
}

/// Numbers since the previous sample.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interval {
    pub(crate) answered: u64,
    pub(crate) errors: u64,
    pub(crate) latencies: Vec<u32>,
}

/// The highest admissions of a feature, relative to their bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Highest {
    pub(crate) admitted: u64,
    pub(crate) bound: u64,
    pub(crate) windows: u64,
    pub(crate) total: u64,
}

#[derive(Default)]
struct State {
    ledger: Ledger,
    silences: Vec<Silence>,
    interval: Interval,
    in_flight: [u64; IN_FLIGHT.len()],
    record: Record,
}

/// Records all calls of a run.
pub(crate) struct Observer {
    /// Whether laws about times are checked. `cargo test` does not, because the machine may be busy with other tests.
    is_timed: bool,
    start: Instant,
    /// Begin of the run in milliseconds since 1970.
    pub(crate) epoch: u64,
    state: Mutex<State>,
}

/// Everything that the observer recorded.
#[derive(Default)]
pub(crate) struct Record {
    /// Calls by result.
    pub(crate) results: BTreeMap<String, u64>,
    /// Failed calls by the period in which they began.
    pub(crate) errors: Vec<u64>,
    pub(crate) highest: [Highest; FEATURES.len()],
    pub(crate) highest_in_flight: [u64; IN_FLIGHT.len()],
    pub(crate) in_force: Vec<Duration>,
    pub(crate) disturbances: Vec<Disturbance>,
    /// Lengths in milliseconds of the times in which the machine did not run the observer.
    pub(crate) stalls: Vec<u64>,
    pub(crate) violations: Vec<String>,
}

/// Returns the time in milliseconds since 1970.
#[allow(clippy::disallowed_methods, reason = "windows are aligned to the wall clock")]
pub(crate) fn wall_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

impl Observer {
    pub(crate) fn new(is_timed: bool) -> Self {
        let this = Self { is_timed, start: Instant::now(), epoch: wall_clock(), state: Mutex::default() };
        if !is_timed {
            // Instances may be too slow to exchange their hits in time.
            this.disturb(Loss::None, Apart::RedisInstances);
            this.disturb(Loss::None, Apart::Peers);
        }
        this
    }

    fn deadline(&self) -> Duration {
        if self.is_timed { DEADLINE } else { crate::support::DEADLINE }
    }

    /// Returns the time in milliseconds since 1970.
    pub(crate) fn now(&self) -> u64 {
        wall_clock().max(self.epoch)
    }

    /// Returns the time since the begin in seconds.
    pub(crate) fn second(&self) -> u64 {
        self.start.elapsed().as_secs()
    }

    /// Waits for the result of a call to an instance, until the deadline, and records it.
    pub(crate) async fn call<T, E: Into<Failure>>(
        &self,
        via: Via,
        what: &str,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<(T, Span), Failure> {
        let (sent, started) = (self.now(), Instant::now());
        let mut call = pin!(call);
        let mut result = Err(Failure::Unanswered);
        for _ in 0..PARTS {
            if let Ok(answer) = tokio::time::timeout(self.deadline() / PARTS, &mut call).await {
                result = answer.map_err(Into::into);
                break;
            }
        }
        let span = Span { sent, received: self.now() };
        self.record(via, what, span, started.elapsed(), result.as_ref().err());
        result.map(|value| (value, span))
    }

    /// Records the result of a call. A call without an answer is a violation unless the instance was silent.
    pub(crate) fn record(&self, via: Via, what: &str, span: Span, latency: Duration, failure: Option<&Failure>) {
        let mut state = self.state.lock().unwrap();
        let name = match failure {
            None => "answered".to_owned(),
            Some(Failure::Status(code)) => format!("status {code}"),
            Some(Failure::Connection) => "connection failed".to_owned(),
            Some(Failure::Unanswered) => "no answer".to_owned(),
        };
        *state.record.results.entry(name).or_default() += 1;
        if failure.is_none() {
            state.interval.answered += 1;
            state.interval.latencies.push(latency.as_micros().try_into().unwrap_or(u32::MAX));
            return;
        }
        state.interval.errors += 1;
        let period = ((span.sent - self.epoch) / PERIOD) as usize;
        let periods = state.record.errors.len().max(period + 1);
        state.record.errors.resize(periods, 0);
        state.record.errors[period] += 1;
        let is_silent = |silence: &Silence| {
            (silence.via == via || silence.via == Via::Connection(via.instance()))
                && silence.from <= span.received
                && silence.until.is_none_or(|until| until >= span.sent)
        };
        if failure == Some(&Failure::Unanswered) && !state.silences.iter().any(is_silent) {
            let second = (span.sent - self.epoch) / 1_000;
            state.record.violations.push(format!("second {second}: {what} of {via:?} was not answered"));
        }
    }

    /// Counts an admitted hit.
    pub(crate) fn admit(&self, feature: usize, entity: u64, span: Span) {
        self.state.lock().unwrap().ledger.admit(feature, entity, span.sent, span.received);
    }

    /// Counts a slot that is in use from now on.
    pub(crate) fn acquire(&self, slots: usize) {
        let mut state = self.state.lock().unwrap();
        state.in_flight[slots] += 1;
        let used = state.in_flight[slots];
        state.record.highest_in_flight[slots] = state.record.highest_in_flight[slots].max(used);
        let allowed = slots_bound(IN_FLIGHT[slots].bound, self.now(), HOLD, &state.record.disturbances);
        if used > allowed {
            let (second, key) = (self.second(), IN_FLIGHT[slots].key);
            state
                .record
                .violations
                .push(format!("second {second}: {used} slots of {key} are in use, {allowed} are allowed"));
        }
    }

    /// Must be called before the release is sent.
    pub(crate) fn release(&self, slots: usize) {
        self.state.lock().unwrap().in_flight[slots] -= 1;
    }

    /// Records the time after which a change by an operator was in force on all instances.
    pub(crate) fn in_force_after(&self, time: Duration, stated: Duration) {
        let now = self.now();
        let mut state = self.state.lock().unwrap();
        let is_disturbed =
            state.record.disturbances.iter().any(|disturbance| {
                disturbance.until.is_none_or(|until| until + 10_000 > now - time.as_millis() as u64)
            });
        if is_disturbed {
            return;
        }
        state.record.in_force.push(time);
        if self.is_timed && time > stated {
            let second = self.second();
            state.record.violations.push(format!("second {second}: an override was in force after {time:?}"));
        }
    }

    /// Adds a violation that another module found.
    pub(crate) fn report(&self, violation: &str) {
        let text = format!("second {}: {violation}", self.second());
        self.state.lock().unwrap().record.violations.push(text);
    }

    /// Begins a disturbance and returns its index.
    pub(crate) fn disturb(&self, loss: Loss, apart: Apart) -> usize {
        let mut state = self.state.lock().unwrap();
        state.record.disturbances.push(Disturbance { from: self.now(), until: None, loss, apart });
        state.record.disturbances.len() - 1
    }

    pub(crate) fn settle(&self, disturbance: usize) {
        self.state.lock().unwrap().record.disturbances[disturbance].until = Some(self.now());
    }

    /// Declares that an instance cannot answer from now on, at all or on new connections.
    pub(crate) fn silence(&self, via: Via) {
        let from = self.now();
        self.state.lock().unwrap().silences.push(Silence { via, from, until: None });
    }

    /// Declares that an instance must answer again.
    pub(crate) fn answers_again(&self, instance: usize) {
        let now = self.now();
        let mut state = self.state.lock().unwrap();
        let all =
            state.silences.iter_mut().filter(|silence| silence.via.instance() == instance && silence.until.is_none());
        all.for_each(|silence| silence.until = Some(now));
    }

    /// Records that the machine did not run the observer, and probably not the service, since `from`.
    pub(crate) fn stalled(&self, from: u64) {
        let until = self.now();
        let mut state = self.state.lock().unwrap();
        state.record.stalls.push(until - from);
        for apart in [Apart::RedisInstances, Apart::Peers] {
            state.record.disturbances.push(Disturbance { from, until: Some(until), loss: Loss::RecentHits, apart });
        }
    }

    /// Reports failed calls that did not end within the stated time after the end of a fault, unless the machine stalled.
    pub(crate) fn recovered_after(&self, fault: &str, end: u64, time: Option<Duration>, stated: Duration) {
        let has_stalled =
            self.state.lock().unwrap().record.disturbances.iter().any(|disturbance| disturbance.from >= end);
        if self.is_timed && !has_stalled && time.is_none_or(|time| time > stated) {
            self.report(&format!("{fault}: recovery after {time:?}"));
        }
    }

    /// Checks the windows that have ended, and returns the numbers since the previous sample.
    pub(crate) fn sample(&self) -> Interval {
        self.check_windows(self.now() - CLOSING);
        std::mem::take(&mut self.state.lock().unwrap().interval)
    }

    fn check_windows(&self, before: u64) {
        let mut state = self.state.lock().unwrap();
        for window in state.ledger.close(before) {
            let (bound, key) = (window.bound(&state.record.disturbances), FEATURES[window.feature].key);
            let highest = &mut state.record.highest[window.feature];
            highest.windows += 1;
            highest.total += window.admitted;
            if highest.bound == 0 || window.admitted * highest.bound > highest.admitted * bound {
                (highest.admitted, highest.bound) = (window.admitted, bound);
            }
            if window.admitted > bound {
                let second = window.from.saturating_sub(self.epoch) / 1_000;
                let (entity, admitted) = (window.entity, window.admitted);
                state.record.violations.push(format!(
                    "window from second {second}: {admitted} hits of {key} {entity} were admitted, {bound} are allowed"
                ));
            }
        }
    }

    /// Returns the number of errors of calls that began in these milliseconds since 1970.
    pub(crate) fn errors_between(&self, from: u64, until: u64) -> u64 {
        let state = self.state.lock().unwrap();
        let period = |time: u64| (time.saturating_sub(self.epoch) / PERIOD) as usize;
        state.record.errors.iter().take(period(until)).skip(period(from)).sum()
    }

    /// Checks the remaining windows and returns everything.
    pub(crate) fn finish(&self) -> Record {
        self.check_windows(u64::MAX);
        std::mem::take(&mut self.state.lock().unwrap().record)
    }
}
