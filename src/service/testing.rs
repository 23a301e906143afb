//! Tools of the tests of several modules: the admin API of an instance with counters in memory.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use parking_lot::Mutex;

use super::{
    Clock,
    activity::{self, Activity},
    admin::Admin,
    candidates::Candidates,
    decisions,
    overrides::{self, OverrideSync},
    reload::RulesInForce,
    simulation::Simulator,
};
use crate::{
    engine::{Engine, Statistics, StatisticsSettings, TopEntities},
    metrics::WorkerId,
    rules::{Options, SourceFile, source::Source},
    store::{
        self, AnyStore, Memory, memory,
        overrides::{Journal, OverrideStore},
    },
};

/// Returns the actions of an instance named `here:1` with counters in memory and a clock that is set by hand.
pub(super) fn admin(rules: &str) -> Admin {
    let clock = Clock::Manual(Arc::new(AtomicU64::new(1_763_672_400_000_000)));
    let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 70, near_limit_ratio: 0.8 });
    let source = Source::BuiltIn(vec![SourceFile { name: "a.yaml".into(), text: rules.into() }]);
    let options = Options::default();
    let in_force =
        RulesInForce::start(source, options, clock.clone(), Arc::clone(&statistics), Arc::default()).unwrap();
    let memory = || Arc::new(Memory::new(&memory::Settings { max_counters: 10_000 }));
    let engine = Engine {
        worker: WorkerId(0),
        scope: "",
        store: AnyStore::Memory(memory()),
        local: memory(),
        rules: Arc::clone(in_force.snapshot()),
        statistics: Arc::clone(&statistics),
        top: Some(TopEntities::new(1)),
        settings: Arc::default(),
    };
    let journal = OverrideStore::Journal(Arc::new(Mutex::new(Journal::new(None))));
    let settings = overrides::Settings::default();
    let overrides = OverrideSync::new(journal, settings, options, clock.clone(), Arc::clone(&in_force), None);
    let (reloaded, synced) = (Arc::clone(&in_force), Arc::clone(&overrides));
    let candidates = Candidates::new(synced, reloaded, Arc::default(), clock.clone(), 1, (None, 0.0));
    let sources = activity::Sources {
        decision_metrics: decisions::Metrics::new(1),
        store_metrics: store::Metrics::new(1),
        statistics,
        top: engine.top.clone().unwrap(),
        store: engine.store.clone(),
        overrides: Arc::clone(&overrides),
        in_force: Arc::clone(&in_force),
        clock: clock.clone(),
    };
    let activity = Activity::new(sources, "here:1");
    let simulator = Simulator::new(Arc::clone(&in_force), Arc::clone(&overrides), clock.clone(), options, None);
    Admin { engine, overrides, in_force, candidates, activity, simulator, clock }
}

/// Advances the clock.
pub(super) fn advance(admin: &Admin, seconds: u64) {
    let Clock::Manual(micros) = &admin.clock else { panic!("the clock is set by hand") };
    micros.fetch_add(seconds * 1_000_000, Relaxed);
}
