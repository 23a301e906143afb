//! Fuzz targets: the counts of top entities, and the texts of overrides' targets.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::collections::HashMap;

use sluicegate_metrics::WorkerId;
use sluicegate_rules::Entry;

use super::{Descriptor, Estimate, Micros, RankBy, TopEntities, overrides::Target, top_entities::MAX_ENTRIES};

/// Number of hits in a second, below the number at which hits are sampled. Fuzzing, with its few entries, covers more
/// than one minute with short inputs.
const HITS_PER_SECOND: usize = if cfg!(fuzzing) { 2 } else { 1_000 };
/// Number of hits that are read from the input, of less than five minutes.
const MAX_HITS: usize = 200 * HITS_PER_SECOND;

/// Counts hits of entities: three bytes are the number of an entity and the number of its hits.
///
/// The counts must be upper bounds with the stated error, and each entity with more hits than that error must be listed.
pub fn top_entities(input: &[u8]) {
    let top = TopEntities::new(1);
    let mut exact = HashMap::<String, u64>::new();
    let mut total = 0;
    let start = 1_763_672_400;
    let mut now = Micros::from_secs(start);
    for (index, bytes) in input.chunks_exact(3).take(MAX_HITS).enumerate() {
        now = Micros::from_secs(start + (index / HITS_PER_SECOND) as u64);
        let number = u16::from_le_bytes([bytes[0], bytes[1]]) % (4 * MAX_ENTRIES as u16);
        let name = number.to_string();
        let hits = u64::from(bytes[2]);
        let entry = Entry { key: "user", value: &name };
        let entries = std::iter::once(entry).collect();
        let descriptor = Descriptor { entries, hits, refund: false, requested_limit: None };
        top.record(WorkerId(0), "api", &descriptor, None, true, now);
        drop(descriptor);
        *exact.entry(name).or_default() += hits;
        total += hits;
    }
    let ranking = top.ranking(RankBy::Requested, usize::MAX, TopEntities::DEFAULT_PERIOD, now, |_, _| true);
    assert_eq!(ranking.hits, total);
    let max_error = total / MAX_ENTRIES as u64;
    for entity in &ranking.top {
        let Target::Limit { entries, .. } = &entity.target else {
            panic!("the ranking contains {:?}", entity.target);
        };
        let hits = exact.remove(&entries[0].1).unwrap_or_default();
        let Estimate { count, max_error: error } = entity.hits;
        assert!((count - error..=count).contains(&hits), "{entity:?} has {hits} hits");
        assert!(error <= max_error, "{entity:?} of {total} hits");
    }
    // Those that are not listed.
    for (name, hits) in exact {
        assert!(hits <= max_error, "{name} with {hits} of {total} hits is not listed");
    }
}

/// Parses the text of a target. Its text must be parsed to the same target.
pub fn override_target(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    if let Ok(target) = Target::parse(&text) {
        let written = target.to_string();
        assert_eq!(Target::parse(&written).as_ref(), Ok(&target), "{written}");
        let _ = target.check();
    }
}
