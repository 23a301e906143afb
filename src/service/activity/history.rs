//! [`History`]: the decisions of each period of the last hour, in a ring of fixed size.

use std::{collections::VecDeque, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    algorithm::Micros,
    engine::{ClassTotals, HitTotals},
    metrics::Cells,
};

/// Length of a period.
pub const PERIOD: Micros = Micros::from_secs(5);
/// Number of periods in the ring: an hour.
pub const MAX_PERIODS: usize = 720;
/// Time that [`History::current`] covers.
const CURRENT: Micros = Micros::from_secs(10);
/// Maximum number of classes in a period. Hits of further classes are omitted.
const MAX_CLASSES: usize = 16;

/// All counts since the start of the process, at one time.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub(super) at: Micros,
    /// Requests, denied requests, and requests without a decision.
    pub(super) requests: u64,
    pub(super) denied_requests: u64,
    pub(super) errors: u64,
    pub(super) hits: HitTotals,
    /// Calls to the store, and failed ones.
    pub(super) store_calls: u64,
    pub(super) store_errors: u64,
    /// Counter operations decided from a lease, from an eventual counter and from the deny cache.
    pub(super) local: [u64; 3],
    pub(super) classes: Vec<ClassTotals>,
    /// Distribution of the times to decide a request.
    pub(super) latency: Cells,
}

/// The decisions of a period.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Period {
    /// Start in microseconds since the Unix epoch.
    pub start: u64,
    /// Length in microseconds.
    pub length: u64,
    /// Number of requests for which a decision was made or attempted.
    pub requests: u64,
    /// Number of denied requests.
    #[serde(default)]
    pub denied_requests: u64,
    /// Number of requests without a decision.
    pub errors: u64,
    /// Requested hits.
    pub requested: u64,
    /// Denied hits.
    pub denied: u64,
    /// Hits within a limit, but near it.
    pub near: u64,
    /// Hits over a limit that were allowed because of shadow mode.
    pub shadow: u64,
    /// Number of calls to the store.
    pub store_calls: u64,
    /// Number of failed calls to the store.
    pub store_errors: u64,
    /// Number of counter operations decided from a lease, from an eventual counter and from the deny cache.
    pub local: [u64; 3],
    /// Hits of each class.
    pub classes: Vec<ClassHits>,
    /// Time in microseconds in which 50% and 99% of the requests were decided.
    pub latency: [u64; 2],
}

/// The hits of one class in a period.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassHits {
    /// Name of the class.
    pub class: String,
    /// Allowed hits, denied hits, and hits denied because of overload.
    pub hits: [u64; 3],
}

impl Period {
    fn between(before: &Totals, now: &Totals) -> Self {
        let latency = now.latency.since(&before.latency);
        Self {
            start: before.at.get(),
            length: (now.at - before.at).get(),
            requests: now.requests.saturating_sub(before.requests),
            denied_requests: now.denied_requests.saturating_sub(before.denied_requests),
            errors: now.errors.saturating_sub(before.errors),
            requested: now.hits.requested.saturating_sub(before.hits.requested),
            denied: now.hits.denied.saturating_sub(before.hits.denied),
            near: now.hits.near.saturating_sub(before.hits.near),
            shadow: now.hits.shadow.saturating_sub(before.hits.shadow),
            store_calls: now.store_calls.saturating_sub(before.store_calls),
            store_errors: now.store_errors.saturating_sub(before.store_errors),
            local: std::array::from_fn(|index| now.local[index].saturating_sub(before.local[index])),
            classes: class_hits(before, now),
            latency: [micros(latency.quantile(0.5)), micros(latency.quantile(0.99))],
        }
    }

    /// Adds the counts of another period, such as that of another instance. Latencies become the higher of both.
    pub fn add(&mut self, other: &Self) {
        self.length = self.length.max(other.length);
        for (sum, count) in [
            (&mut self.requests, other.requests),
            (&mut self.denied_requests, other.denied_requests),
            (&mut self.errors, other.errors),
            (&mut self.requested, other.requested),
            (&mut self.denied, other.denied),
            (&mut self.near, other.near),
            (&mut self.shadow, other.shadow),
            (&mut self.store_calls, other.store_calls),
            (&mut self.store_errors, other.store_errors),
        ] {
            *sum = sum.saturating_add(count);
        }
        add_each(&mut self.local, &other.local);
        for (max, micros) in self.latency.iter_mut().zip(other.latency) {
            *max = micros.max(*max);
        }
        for ClassHits { class, hits } in &other.classes {
            add_class(&mut self.classes, class, *hits);
        }
    }
}

/// Returns a duration in microseconds, rounded up.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX)
}

fn add_each<const N: usize>(sums: &mut [u64; N], counts: &[u64; N]) {
    for (sum, count) in sums.iter_mut().zip(counts) {
        *sum = sum.saturating_add(*count);
    }
}

/// Sums the hits by the name of the class: rules can have classes of the same name.
fn class_hits(before: &Totals, now: &Totals) -> Vec<ClassHits> {
    let mut sums = Vec::new();
    for class in &now.classes {
        let earlier = before.classes.iter().find(|other| other.rule == class.rule && other.class == class.class);
        let hits = match earlier {
            Some(earlier) => [
                class.allowed.saturating_sub(earlier.allowed),
                class.denied.saturating_sub(earlier.denied),
                class.shed.saturating_sub(earlier.shed),
            ],
            None => [class.allowed, class.denied, class.shed],
        };
        if hits != [0; 3] {
            add_class(&mut sums, &class.class, hits);
        }
    }
    sums
}

fn add_class(classes: &mut Vec<ClassHits>, class: &str, hits: [u64; 3]) {
    if let Some(known) = classes.iter_mut().find(|known| known.class == class) {
        add_each(&mut known.hits, &hits);
    } else if classes.len() < MAX_CLASSES {
        classes.push(ClassHits { class: class.to_owned(), hits });
    }
}

/// Returns the start of the period that contains a time.
fn period_start(at: Micros) -> Micros {
    Micros::new(at.get() / PERIOD.get() * PERIOD.get())
}

/// The periods of the last hour.
#[derive(Default)]
pub(super) struct History {
    periods: VecDeque<Period>,
    /// Totals at the end of the last period.
    last: Option<Totals>,
    /// Totals of the last [`CURRENT`], the oldest first.
    recent: VecDeque<Totals>,
}

impl History {
    /// Records totals. A period ends at the first totals after its time.
    pub(super) fn record(&mut self, totals: Totals) {
        match &self.last {
            None => self.last = Some(totals.clone()),
            Some(last) if period_start(totals.at) > last.at => {
                let mut period = Period::between(last, &totals);
                // The periods of every instance start at the same times, so that they can be added.
                period.start = period_start(last.at).get();
                if self.periods.len() == MAX_PERIODS {
                    self.periods.pop_front();
                }
                self.periods.push_back(period);
                self.last = Some(totals.clone());
            }
            Some(_) => {}
        }
        let now = totals.at.get();
        self.recent.push_back(totals);
        while self.recent.get(1).is_some_and(|oldest| now.saturating_sub(oldest.at.get()) >= CURRENT.get()) {
            self.recent.pop_front();
        }
    }

    /// Returns whether a period ends at this time.
    pub(super) fn is_due(&self, now: Micros) -> bool {
        self.last.as_ref().is_none_or(|last| now.get() / PERIOD.get() > last.at.get() / PERIOD.get())
    }

    /// Returns the periods that start after `start`, the oldest first.
    pub(super) fn periods_after(&self, start: u64) -> impl Iterator<Item = &Period> {
        self.periods.iter().skip_while(move |period| period.start <= start)
    }

    /// Returns the last hour in longer periods. The last one may not have ended yet.
    pub(super) fn steps(&self, length: Micros) -> Vec<Period> {
        let mut steps: Vec<Period> = Vec::new();
        for period in &self.periods {
            let start = period.start / length.get() * length.get();
            match steps.last_mut().filter(|step| step.start == start) {
                Some(step) => {
                    let length = step.length + period.length;
                    step.add(period);
                    step.length = length;
                }
                None => steps.push(Period { start, ..period.clone() }),
            }
        }
        steps
    }

    /// Returns the decisions of the last 10 seconds.
    pub(super) fn current(&self) -> Period {
        match (self.recent.front(), self.recent.back()) {
            (Some(first), Some(last)) => Period::between(first, last),
            _ => Period::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(second: u64, requests: u64) -> Totals {
        let class = |name: &str| ClassTotals {
            rule: vec!["api".into()],
            class: name.into(),
            allowed: requests,
            denied: 0,
            shed: 0,
            shed_since: None,
        };
        let hits = HitTotals { requested: 2 * requests, ..HitTotals::default() };
        let classes = vec![class("gold"), class("gold")];
        Totals { at: Micros::from_secs(second), requests, hits, classes, ..Totals::default() }
    }

    fn list(history: &History) -> Vec<(u64, u64, u64)> {
        let second = |micros| Micros::new(micros).floor_secs();
        history.periods_after(0).map(|period| (second(period.start), second(period.length), period.requests)).collect()
    }

    #[test]
    fn a_period_contains_what_was_decided_since_the_previous_one() {
        let mut history = History::default();
        for (second, requests) in [(102, 10), (103, 11), (105, 14), (110, 14), (118, 20)] {
            assert_eq!(history.is_due(Micros::from_secs(second)), second != 103);
            history.record(totals(second, requests));
        }
        assert_eq!(list(&history), [(100, 3, 4), (105, 5, 0), (110, 8, 6)]);
        assert_eq!(history.periods_after(105_000_000).count(), 1);
        let last = history.periods_after(105_000_000).next().unwrap();
        assert_eq!((last.requested, last.classes[0].hits), (12, [12, 0, 0]));
        assert_eq!(last.classes.len(), 1);
    }

    #[test]
    fn the_current_rate_covers_the_last_ten_seconds() {
        let mut history = History::default();
        assert_eq!(history.current(), Period::default());
        (100..=130).for_each(|second| history.record(totals(second, second * second)));
        let current = history.current();
        assert_eq!((current.start, current.length, current.requests), (120_000_000, 10_000_000, 130 * 130 - 120 * 120));
        // Without viewers there are totals only at the end of a period.
        history.record(totals(160, 130 * 130 + 7));
        assert_eq!((history.current().length, history.current().requests), (30_000_000, 7));
    }

    #[test]
    fn periods_are_joined_to_longer_ones() {
        let mut history = History::default();
        [100, 105, 110, 120, 125, 130].into_iter().for_each(|second| history.record(totals(second, second)));
        let steps = history.steps(Micros::from_secs(30));
        let steps = steps.iter().map(|step| (step.start / 1_000_000, step.length / 1_000_000, step.requests));
        assert_eq!(steps.collect::<Vec<_>>(), [(90, 20, 20), (120, 10, 10)]);
    }

    #[test]
    fn the_ring_has_an_hour_and_at_most_ten_megabytes() {
        let mut history = History::default();
        (0..2_000).for_each(|period| history.record(totals(5 * period, period)));
        let periods: Vec<_> = history.periods_after(0).collect();
        assert_eq!((periods.len(), periods[0].start), (MAX_PERIODS, (2_000 - 721) * 5_000_000));
        let classes = MAX_CLASSES * (size_of::<ClassHits>() + 64);
        assert!(MAX_PERIODS * (size_of::<Period>() + classes) < 3 << 20);
    }

    #[test]
    fn periods_of_instances_are_added() {
        let class = |class: &str, allowed| ClassHits { class: class.into(), hits: [allowed, 0, 0] };
        let period = |requests, latency, classes| Period { requests, latency, classes, length: 5, ..Period::default() };
        let mut sum = period(3, [10, 20], vec![class("gold", 1)]);
        sum.add(&period(4, [5, 30], vec![class("gold", 2), class("free", 1)]));
        assert_eq!(sum, period(7, [10, 30], vec![class("gold", 3), class("free", 1)]));
        (0..50).for_each(|number| sum.add(&period(0, [0, 0], vec![class(&number.to_string(), 1)])));
        assert_eq!(sum.classes.len(), MAX_CLASSES);
    }

    #[test]
    fn hits_of_different_classes_of_a_rule_are_not_mixed() {
        let class = |name: &str, allowed| ClassTotals {
            rule: vec!["api".into()],
            class: name.into(),
            allowed,
            denied: 0,
            shed: 0,
            shed_since: None,
        };
        let totals = |classes| Totals { classes, ..Totals::default() };
        let (before, now) = (vec![class("gold", 100), class("free", 10)], vec![class("gold", 103), class("free", 14)]);
        let hits = |class: &str, allowed| ClassHits { class: class.into(), hits: [allowed, 0, 0] };
        assert_eq!(class_hits(&totals(before), &totals(now)), [hits("gold", 3), hits("free", 4)]);
    }

    #[test]
    fn a_period_that_starts_exactly_at_its_time_has_its_full_length() {
        let mut history = History::default();
        [100, 102, 104].into_iter().for_each(|second| history.record(totals(second, second)));
        assert_eq!(list(&history), []);
        history.record(totals(105, 107));
        assert_eq!(list(&history), [(100, 5, 7)]);
    }
}
