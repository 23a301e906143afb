//! Fuzz target: the report of an instance, which other instances read from Redis.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use super::{
    instances::{self, Sums},
    tables, unmatched,
};
use crate::engine::{RankBy, Ranking, TopEntities};

/// Reads a report and adds it up with itself.
pub fn activity_report(input: &[u8]) {
    if let Some(report) = instances::decode(input) {
        let own = Sums { steps: report.steps.clone(), current: report.current.clone() };
        let _ = instances::sum(own, [&report, &report].into_iter());
        let ranking = tables::add_rankings(
            Ranking::default(),
            [&report.tables, &report.tables].into_iter(),
            RankBy::Denied,
            TopEntities::DEFAULT_PERIOD,
            10,
            |_, _| true,
        );
        assert!(ranking.top.len() <= 10);
        let _ = unmatched::add(&report.tables.unmatched, report.tables.unmatched.iter());
    }
}
