//! [`Activity`]: the decisions of the last hour, of this instance, or of it and those that share its Redis or are its
//! peers.
//!
//! Counts are read from existing metrics every five seconds, and every second while there are viewers. A
//! decision therefore costs the same with and without viewers. The last hour is in memory of fixed size (module
//! `history`), so that operators see it without Prometheus; longer periods are the task of a metrics system.

mod events;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod history;
mod instance;
mod instances;
mod minutes;
mod query;
mod rules;
mod tables;
mod tree;
mod unmatched;

pub use events::{Event, EventKind};
pub use history::{ClassHits, MAX_PERIODS, PERIOD, Period};
pub use instance::{Instance, instance_name};
pub use instances::INTERVAL;
pub use minutes::Minute;
pub use query::{RuleOrder, RuleQuery, TopQuery};
pub use rules::{RuleList, RuleRow};
pub use tree::Hits;
pub use unmatched::Unmatched;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    time::{interval, sleep},
};

use self::{
    events::{Detector, EventLog, Observed},
    history::{History, Totals},
    instances::{InstanceActivity, Instances, Others, STEP, Sums},
    rules::RuleTable,
    tables::{MAX_UNMATCHED, Tables},
    unmatched::UnmatchedTable,
};
use super::{Clock, OverrideSync, decisions, reload::RulesInForce};
use crate::{
    algorithm::Micros,
    engine::{
        Ranking, Snapshot, Statistics, TopEntities,
        overrides::{Origin, Target},
    },
    store::{self, AnyStore},
};

/// Interval between two polls for events. With viewers, every second poll also reads counts.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of viewers at the same time.
const MAX_VIEWERS: usize = 64;
/// Maximum number of viewers that have not authenticated. The other places are reserved for those that have.
const MAX_PUBLIC_VIEWERS: usize = MAX_VIEWERS / 4 * 3;

/// The components from which the activity is read.
pub struct Sources {
    /// Metrics of requests.
    pub decision_metrics: Arc<decisions::Metrics>,
    /// Metrics of the store.
    pub store_metrics: Arc<store::Metrics>,
    /// Hits by rule.
    pub statistics: Arc<Statistics>,
    /// The entities with the most denied requests and with the most hits.
    pub top: Arc<TopEntities>,
    /// The store.
    pub store: AnyStore,
    /// The overrides.
    pub overrides: Arc<OverrideSync>,
    /// The rules in force.
    pub in_force: Arc<RulesInForce>,
    /// The clock.
    pub clock: Clock,
}

/// Records the activity of this instance, and streams it to viewers.
pub struct Activity {
    sources: Sources,
    instance: Instance,
    state: Mutex<State>,
    rules: Mutex<RuleTable>,
    unmatched: Mutex<UnmatchedTable>,
    /// The reports of the other instances.
    others: Mutex<Others>,
    /// The last encoded report, and when it was made.
    recent_report: Mutex<Option<(Instant, Bytes)>>,
    /// Whether this instance exchanges reports with its peers.
    has_peers: AtomicBool,
    /// Number of viewers, and of those who watch all instances.
    viewers: AtomicUsize,
    viewers_of_all: AtomicUsize,
    /// Number of viewers that have not authenticated.
    public_viewers: AtomicUsize,
    /// Wakes the exchange with other instances when the first viewer of all instances connects.
    wake: Notify,
    ticks: watch::Sender<()>,
}

#[derive(Default)]
struct State {
    history: History,
    events: EventLog,
    detector: Detector,
    /// Version of the last change of overrides that was reported as an event.
    changes_version: u64,
    /// The last snapshot. Weak, because it must not delay the release of replaced rules.
    snapshot: Weak<Snapshot>,
    /// A number that increases with each snapshot.
    rules_version: u64,
}

/// Error returned when the maximum number of viewers is connected.
#[derive(Debug, thiserror::Error)]
#[error("{0} viewers are connected, which is the maximum; try again later, or with a token")]
pub struct TooManyViewers(usize);

/// The changes since the previous update of a viewer.
#[derive(Clone, Debug, Default)]
pub struct Update {
    /// Time of the update.
    pub at: Micros,
    /// Periods that are new or have changed, the oldest first.
    pub periods: Vec<Period>,
    /// The decisions of about the last 10 seconds.
    pub current: Period,
    /// The servers of the store, and whether all workers are connected to them.
    pub servers: Vec<(Arc<str>, bool)>,
    /// New events of `instances`, the oldest first.
    pub events: Vec<Event>,
    /// The instances that the update is about.
    pub instances: Vec<Instance>,
    /// A number that increases with each new set of rules, and with each change of overrides or candidate rules.
    pub rules_version: u64,
}

impl Activity {
    /// Creates an empty record. `name` is the name of this instance.
    #[must_use]
    pub fn new(sources: Sources, name: &str) -> Arc<Self> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let instance = Instance { name: name.to_owned(), version, since: sources.clock.now().get() };
        let mut state = State { changes_version: sources.overrides.status().version, ..State::default() };
        state.events.push(events::started(sources.clock.now(), &instance));
        Arc::new(Self {
            sources,
            instance,
            state: Mutex::new(state),
            rules: Mutex::default(),
            unmatched: Mutex::default(),
            others: Mutex::default(),
            recent_report: Mutex::default(),
            has_peers: AtomicBool::new(false),
            viewers: AtomicUsize::new(0),
            viewers_of_all: AtomicUsize::new(0),
            public_viewers: AtomicUsize::new(0),
            wake: Notify::new(),
            ticks: watch::Sender::new(()),
        })
    }

    /// Records events and periods. Never returns.
    pub async fn follow(self: Arc<Self>) {
        let mut tick = interval(POLL_INTERVAL);
        let mut polls = 0_u64;
        loop {
            tick.tick().await;
            polls += 1;
            let is_watched = self.viewers.load(Relaxed) > 0;
            if self.poll(is_watched && polls.is_multiple_of(2)) && is_watched {
                self.ticks.send_replace(());
            }
        }
    }

    /// Exchanges the activity with the other instances through Redis. Never returns, unless the store is not Redis.
    pub async fn follow_instances(self: Arc<Self>) {
        let Some(mut instances) = Instances::new(&self.sources.store) else {
            return;
        };
        loop {
            let read = self.is_watched_by_all();
            instances.exchange(|| instances::encode(&self.report()), read, &self.instance.name, &self.others).await;
            tokio::select! {
                () = sleep(INTERVAL) => {}
                () = self.wake.notified() => {}
            }
        }
    }

    /// Detects events, and reads the counts if `read_counts` is set or a period has ended. Returns whether viewers
    /// need an update.
    fn poll(&self, read_counts: bool) -> bool {
        let now = self.sources.clock.now();
        let snapshot = self.sources.in_force.snapshot().load_full();
        // A query of the rules may hold this lock for a while; the next poll tries again.
        if let Some(mut rules) = self.rules.try_lock() {
            rules.tick(&snapshot, now);
        }
        if let Some(mut unmatched) = self.unmatched.try_lock() {
            unmatched.update(self.sources.statistics.unmatched(), &snapshot);
        }
        let mut state = self.state.lock();
        let period_ended = state.history.is_due(now);
        let totals = if read_counts || period_ended { Some(self.totals(now)) } else { None };
        let new_events = self.detect(&mut state, &snapshot, totals.as_ref(), now);
        if state.snapshot.as_ptr() != Arc::as_ptr(&snapshot) {
            state.snapshot = Arc::downgrade(&snapshot);
            state.rules_version += 1;
        }
        if let Some(totals) = totals {
            state.history.record(totals);
        }
        new_events || read_counts
    }

    fn detect(&self, state: &mut State, snapshot: &Snapshot, totals: Option<&Totals>, now: Micros) -> bool {
        let changes = self.sources.overrides.changes_after(state.changes_version).unwrap_or_default();
        if let Some(last) = changes.last() {
            state.changes_version = last.version;
        }
        let own_switches =
            [Origin::File, Origin::Instance].into_iter().flat_map(|origin| snapshot.overrides().switches(origin));
        let rules = snapshot.rule_set();
        let observed = Observed {
            now,
            rules: self.sources.in_force.status(),
            rule_counts: (rules.rules().len(), rules.domains()),
            servers: self.sources.store.servers(),
            changes,
            own_switches: own_switches.cloned().collect(),
            classes: totals.map(|totals| totals.classes.as_slice()),
        };
        let events = state.detector.detect(&observed);
        let any = !events.is_empty();
        events.into_iter().for_each(|event| state.events.push(event));
        any
    }

    fn totals(&self, at: Micros) -> Totals {
        let Sources { decision_metrics, store_metrics, statistics, store, .. } = &self.sources;
        let is_memory = store.memory().is_some();
        let errors = decision_metrics.errors();
        Totals {
            at,
            requests: decision_metrics.latency().count(),
            denied_requests: decision_metrics.denied(),
            errors,
            hits: statistics.hit_totals(),
            store_calls: if is_memory { 0 } else { store_metrics.calls.latency().count() },
            store_errors: store_metrics.calls.errors(),
            local: store.local_decisions(),
            classes: statistics.class_totals(at),
            latency: decision_metrics.latency().cells(),
        }
    }

    /// Returns the activity of this instance for other instances.
    fn report(&self) -> InstanceActivity {
        let now = self.sources.clock.now();
        let snapshot = self.sources.in_force.snapshot().load_full();
        let rules = self.rules.lock().report(&snapshot, now);
        let unmatched = self.unmatched.lock().list(self.sources.statistics.unmatched(), MAX_UNMATCHED, now);
        let state = self.state.lock();
        let tables = Tables::new(&self.sources.top, rules, state.events.after(0).cloned(), unmatched, now);
        InstanceActivity {
            instance: self.instance.clone(),
            at: now.get(),
            steps: state.history.steps(STEP),
            current: state.history.current(),
            tables,
        }
    }

    /// Returns an encoded report that is at most half as old as [`INTERVAL`], for peers that call often.
    #[must_use]
    pub fn recent_report(&self) -> Bytes {
        let mut recent = self.recent_report.lock();
        match &*recent {
            Some((made_at, report)) if made_at.elapsed() < INTERVAL / 2 => report.clone(),
            _ => {
                let report = Bytes::from(instances::encode(&self.report()));
                *recent = Some((Instant::now(), report.clone()));
                report
            }
        }
    }

    /// Adds the report of a peer.
    pub fn add_report(&self, address: SocketAddr, report: &[u8]) {
        self.others.lock().add(address.to_string(), report, &self.instance.name);
    }

    /// Returns whether a viewer watches all instances.
    fn is_watched_by_all(&self) -> bool {
        self.viewers_of_all.load(Relaxed) > 0
    }

    /// Returns whether the reports of peers are needed: a viewer watches all instances, which do not share Redis.
    #[must_use]
    pub fn reads_from_peers(&self) -> bool {
        self.is_watched_by_all() && self.sources.store.redis().is_none()
    }

    /// Makes the sum over all instances available without Redis, because the peers exchange reports.
    pub fn set_has_peers(&self) {
        self.has_peers.store(true, Relaxed);
    }

    /// Returns whether the sum over all instances is available.
    #[must_use]
    pub fn has_others(&self) -> bool {
        self.has_peers.load(Relaxed) || self.sources.store.redis().is_some()
    }

    /// Returns the reports of the other instances, or none if `all_instances` is not set.
    fn others(&self, all_instances: bool) -> Vec<Arc<InstanceActivity>> {
        if all_instances { self.others.lock().current() } else { Vec::new() }
    }

    /// Returns the names of this instance and of those with reports.
    fn names(&self, others: &[Arc<InstanceActivity>]) -> Vec<String> {
        let others = others.iter().map(|report| report.instance.name.clone());
        std::iter::once(self.instance.name.clone()).chain(others).collect()
    }

    /// Returns the entities with the most denied requests or the most hits, among those that `filter` accepts, and the
    /// names of the instances that were counted.
    #[must_use]
    pub fn top(&self, query: &TopQuery, filter: impl Fn(&Target, &str) -> bool) -> (Ranking, Vec<String>) {
        let others = self.others(query.all_instances);
        let period = query.period();
        // An entity that is in the last place on every instance may be the first one in the sum.
        let max_entities = if others.is_empty() { query.max_entities } else { usize::MAX };
        let now = self.sources.clock.now();
        let own = self.sources.top.ranking(query.rank_by, max_entities, period, now, &filter);
        let names = self.names(&others);
        if others.is_empty() {
            return (own, names);
        }
        let tables = others.iter().map(|report| &report.tables);
        (tables::add_rankings(own, tables, query.rank_by, period, query.max_entities, filter), names)
    }

    /// Returns the descriptors that no rule matches, the most frequent ones first.
    #[must_use]
    pub fn unmatched(&self, all_instances: bool) -> Vec<Unmatched> {
        let others = self.others(all_instances);
        let now = self.sources.clock.now();
        let own = self.unmatched.lock().list(self.sources.statistics.unmatched(), MAX_UNMATCHED, now);
        unmatched::add(&own, others.iter().flat_map(|report| &report.tables.unmatched))
    }

    /// Starts to watch the activity of this instance, or the sum over all instances. Viewers that have not
    /// authenticated can take at most three quarters of the places.
    ///
    /// # Errors
    ///
    /// Returns an error if there are too many viewers.
    pub fn watch(self: &Arc<Self>, all_instances: bool, is_authenticated: bool) -> Result<Viewer, TooManyViewers> {
        let all_instances = all_instances && self.has_others();
        let viewer = Viewer {
            activity: Arc::clone(self),
            all_instances,
            is_authenticated,
            ticks: self.ticks.subscribe(),
            is_first: true,
            last_event: 0,
            last_events: BTreeMap::new(),
            last_start: 0,
            sent: BTreeMap::new(),
        };
        // From here on, dropping the viewer reduces the numbers again.
        let viewers = self.viewers.fetch_add(1, Relaxed);
        if all_instances {
            self.viewers_of_all.fetch_add(1, Relaxed);
            self.wake.notify_one();
        }
        if !is_authenticated && self.public_viewers.fetch_add(1, Relaxed) >= MAX_PUBLIC_VIEWERS {
            return Err(TooManyViewers(MAX_PUBLIC_VIEWERS));
        }
        if viewers >= MAX_VIEWERS {
            return Err(TooManyViewers(MAX_VIEWERS));
        }
        // The first update must be complete, and counts were not read recently without viewers.
        self.poll(true);
        Ok(viewer)
    }

    /// Returns this instance: its name, version and start.
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// Returns rows of the tree of rules with the activity of each rule. May take some milliseconds per 10,000 rules.
    #[must_use]
    pub fn list_rules(&self, query: &RuleQuery) -> RuleList {
        let snapshot = self.sources.in_force.snapshot().load_full();
        let others = self.others(query.all_instances);
        let instances = self.names(&others);
        let reports = others.iter().flat_map(|report| &report.tables.rules);
        let list = self.rules.lock().list(&snapshot, query, reports, self.sources.clock.now());
        RuleList { instances, ..list }
    }
}

/// The last event of another instance that a viewer has received.
#[derive(Default)]
struct LastEvent {
    /// Start of the instance, in microseconds since the Unix epoch.
    since: u64,
    id: u64,
}

/// Receives the activity of the last hour, and then an update every second.
pub struct Viewer {
    activity: Arc<Activity>,
    all_instances: bool,
    is_authenticated: bool,
    ticks: watch::Receiver<()>,
    is_first: bool,
    /// Id of the last event of this instance that was sent.
    last_event: u64,
    /// The last events of the other instances that were sent.
    last_events: BTreeMap<String, LastEvent>,
    /// Start of the last period that was sent.
    last_start: u64,
    /// The summed periods as they were sent.
    sent: BTreeMap<u64, Period>,
}

impl Viewer {
    /// Waits for the next update. The first one is returned immediately.
    pub async fn next(&mut self) -> Update {
        if !std::mem::take(&mut self.is_first) {
            // The sender exists for as long as `activity`.
            let _ = self.ticks.changed().await;
        } else {
            self.ticks.mark_unchanged();
        }
        let activity = Arc::clone(&self.activity);
        let others = activity.others(self.all_instances);
        let state = activity.state.lock();
        let mut instances = vec![activity.instance.clone()];
        instances.extend(others.iter().map(|report| report.instance.clone()));
        let (periods, current) = if self.all_instances {
            let own = Sums { steps: state.history.steps(STEP), current: state.history.current() };
            let sums = instances::sum(own, others.iter().map(|report| &**report));
            (self.changed(sums.steps), sums.current)
        } else {
            (self.own_periods(&state), state.history.current())
        };
        let mut events: Vec<Event> = state.events.after(self.last_event).cloned().collect();
        if let Some(last) = events.last() {
            self.last_event = last.id;
        }
        self.add_events_of(&others, &mut events, &state);
        Update {
            at: activity.sources.clock.now(),
            periods,
            current,
            servers: activity.sources.store.servers(),
            events,
            instances,
            rules_version: state.rules_version,
        }
    }

    /// Returns the name of the instance that sends the updates.
    #[must_use]
    pub fn instance_name(&self) -> &str {
        &self.activity.instance.name
    }

    /// Adds the events of other instances that were not sent before, in the order of time.
    fn add_events_of(&mut self, others: &[Arc<InstanceActivity>], events: &mut Vec<Event>, state: &State) {
        for report in others {
            let name = &report.instance.name;
            let last = self.last_events.entry(name.clone()).or_default();
            // An instance that was restarted counts its events from 1 again.
            if last.since != report.instance.since {
                *last = LastEvent { since: report.instance.since, id: 0 };
            }
            for event in report.tables.events_after(last.id, name) {
                last.id = event.id;
                // Every instance reports the changes of shared overrides and rules.
                let mut own_events = state.events.after(0);
                if !own_events.any(|own| own.kind == event.kind && own.at == event.at && own.text == event.text) {
                    events.push(event);
                }
            }
        }
        events.sort_by_key(|event| event.at);
    }

    fn own_periods(&mut self, state: &State) -> Vec<Period> {
        let periods: Vec<Period> = state.history.periods_after(self.last_start).cloned().collect();
        if let Some(last) = periods.last() {
            self.last_start = last.start;
        }
        periods
    }

    /// Returns the periods that differ from those sent before.
    fn changed(&mut self, steps: Vec<Period>) -> Vec<Period> {
        let changed = steps.iter().filter(|step| self.sent.get(&step.start) != Some(step)).cloned().collect();
        self.sent = steps.into_iter().map(|step| (step.start, step)).collect();
        changed
    }
}

impl Drop for Viewer {
    fn drop(&mut self) {
        self.activity.viewers.fetch_sub(1, Relaxed);
        if self.all_instances {
            self.activity.viewers_of_all.fetch_sub(1, Relaxed);
        }
        if !self.is_authenticated {
            self.activity.public_viewers.fetch_sub(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::{
        engine::overrides::Scope,
        metrics::WorkerId,
        service::{
            overrides::ChangeInfo,
            testing::{admin, advance},
        },
    };

    const RULES: &str =
        "domain: api\ndescriptors:\n- { key: user, rate_limit: { unit: hour, requests_per_unit: 1 } }\n";

    #[tokio::test]
    async fn a_viewer_receives_events_counts_and_finished_periods() {
        let admin = admin(RULES);
        let activity = &admin.activity;
        // With counters in memory, there are no other instances.
        let mut viewer = activity.watch(true, true).unwrap();
        assert_eq!((viewer.all_instances, activity.viewers_of_all.load(Relaxed)), (false, 0));
        assert_eq!((activity.instance().name.as_str(), viewer.instance_name()), ("here:1", "here:1"));
        let first = viewer.next().now_or_never().expect("the first update is available immediately");
        let kinds: Vec<_> = first.events.iter().map(|event| event.kind).collect();
        assert_eq!(kinds, [EventKind::Start, EventKind::Rules]);
        assert_eq!((first.rules_version, first.current.requests), (1, 0));
        assert!(viewer.next().now_or_never().is_none());
        let metrics = &activity.sources.decision_metrics;
        (0..3).for_each(|_| metrics.latency().record(WorkerId(0), Duration::from_millis(1)));
        advance(&admin, 1);
        assert!(!activity.poll(false) && activity.poll(true));
        activity.ticks.send_replace(());
        let update = viewer.next().now_or_never().expect("an update");
        assert_eq!((update.periods.len(), update.events.len(), update.current.requests), (0, 0, 3));
        advance(&admin, 4);
        assert!(!activity.poll(false));
        let info = ChangeInfo { author: "alice".into(), ..ChangeInfo::default() };
        admin.overrides.switch_this_instance(&Scope::Everything, Some("off"), None, info).await.unwrap();
        assert!(activity.poll(false));
        activity.ticks.send_replace(());
        let update = viewer.next().now_or_never().expect("an update");
        assert_eq!((update.periods.len(), update.periods[0].requests, update.rules_version), (1, 3, 2));
        assert_eq!((update.events.len(), update.events[0].kind), (1, EventKind::Switch));
    }

    #[tokio::test(start_paused = true)]
    async fn viewers_are_updated_every_second() {
        let admin = admin(RULES);
        let ticks = admin.activity.ticks.subscribe();
        tokio::spawn(Arc::clone(&admin.activity).follow());
        sleep(Duration::from_secs(3)).await;
        assert!(!ticks.has_changed().unwrap(), "an update without viewers");
        let mut viewer = admin.activity.watch(false, true).unwrap();
        viewer.next().await;
        let mut times = Vec::new();
        for _ in 0..3 {
            timeout(Duration::from_secs(5), viewer.next()).await.expect("an update");
            times.push(Instant::now());
        }
        let difference = (times[2] - times[0]).abs_diff(Duration::from_secs(2));
        assert!(difference < Duration::from_millis(100), "{times:?}");
    }

    #[test]
    fn a_viewer_that_leaves_makes_room_for_another() {
        let admin = admin(RULES);
        let mut viewers: Vec<_> = (0..MAX_VIEWERS).map(|_| admin.activity.watch(false, true).unwrap()).collect();
        assert!(admin.activity.watch(false, true).is_err());
        drop(viewers.pop());
        assert!(admin.activity.watch(false, true).is_ok());
    }

    #[test]
    fn places_are_kept_for_viewers_that_have_authenticated() {
        let admin = admin(RULES);
        let mut public: Vec<_> = (0..MAX_PUBLIC_VIEWERS).map(|_| admin.activity.watch(false, false).unwrap()).collect();
        assert!(admin.activity.watch(false, false).is_err());
        assert!(admin.activity.watch(false, false).is_err(), "a rejected viewer takes no place");
        let operators = MAX_VIEWERS - MAX_PUBLIC_VIEWERS;
        let viewers: Vec<_> = (0..operators).map(|_| admin.activity.watch(true, true).unwrap()).collect();
        assert!(admin.activity.watch(false, true).is_err());
        drop(public.pop());
        assert!(admin.activity.watch(false, false).is_ok());
        drop(viewers);
    }

    #[test]
    fn only_summed_periods_that_changed_are_sent_again() {
        let mut viewer = admin(RULES).activity.watch(false, true).unwrap();
        let mut sent = |requests: [u64; 2]| {
            let period = |(start, requests): (u64, u64)| Period { start, requests, ..Period::default() };
            let steps = [(30, requests[0]), (60, requests[1])].map(period).into();
            let changed = viewer.changed(steps);
            changed.iter().map(|period| period.start).collect::<Vec<_>>()
        };
        assert_eq!((sent([1, 2]), sent([1, 2]), sent([1, 3])), (vec![30, 60], vec![], vec![60]));
    }
}
