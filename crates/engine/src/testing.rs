//! Tools of the tests of several modules: engines with their counters in memory, overrides and descriptors.

use std::sync::Arc;

use sluicegate_rules::{self as rules, Options, SourceFile};
use sluicegate_store::Memory;

use super::{overrides::Target, *};

/// An engine with its counters in memory.
pub(crate) type MemoryEngine = Engine<Arc<Memory>>;

pub(crate) const NOW: Micros = Micros::from_secs(1_763_672_400);

/// Returns an engine with its counters in memory.
pub(crate) fn engine_with(text: &str, options: Options, settings: Settings) -> MemoryEngine {
    let file = SourceFile { name: "api.yaml".into(), text: text.into() };
    let (rules, _) = rules::compile(&[file], options).unwrap();
    let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 700, near_limit_ratio: 0.8 });
    let engine = Engine::in_memory(rules, statistics, &Default::default());
    Engine { top: Some(TopEntities::new(1)), settings: Arc::new(settings), ..engine }
}

pub(crate) fn engine(text: &str) -> MemoryEngine {
    engine_with(text, Options::default(), Settings::default())
}

pub(crate) fn overrides(entries: &[(&str, &str)]) -> Overrides {
    let mut overrides = Overrides::default();
    for (target, value) in entries {
        let entry = Override {
            target: Target::parse(target).unwrap(),
            value: (*value).into(),
            until: None,
            author: "alice".into(),
            reason: "ticket 4711".into(),
            at: NOW,
            version: 1,
        };
        overrides.put(entry, Options::default()).unwrap();
    }
    overrides
}

pub(crate) fn descriptor<'d>(entries: &[(&'d str, &'d str)], hits: u64) -> Descriptor<'d> {
    let entries = entries.iter().map(|&(key, value)| Entry { key, value }).collect();
    Descriptor { entries, hits, refund: false, requested_limit: None }
}

pub(crate) fn refund(descriptor: Descriptor<'_>) -> Descriptor<'_> {
    Descriptor { refund: true, ..descriptor }
}

pub(crate) fn decide(engine: &MemoryEngine, descriptors: &[Descriptor<'_>]) -> Verdict {
    let request = Request { domain: "api", descriptors: descriptors.into(), feedback: Vec::new() };
    engine.decide_in(&engine.store, &request, NOW).unwrap()
}
