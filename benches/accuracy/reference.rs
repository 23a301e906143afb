//! [`Reference`]: an exact sliding log, which counts the wrong decisions of an algorithm.

use std::{collections::VecDeque, fmt};

use sluicegate::algorithm::Micros;

pub(crate) struct Reference {
    limit: usize,
    window: Micros,
    /// Instants of the hits of each user that count: allowed hits, or with `count_denied` all hits.
    counted: Vec<VecDeque<u64>>,
    count_denied: bool,
    outcome: Outcome,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Outcome {
    requests: u64,
    wrongly_allowed: u64,
    wrongly_denied: u64,
}

impl Reference {
    pub(crate) fn new(limit: usize, window: Micros, users: usize, count_denied: bool) -> Self {
        Self { limit, window, counted: vec![VecDeque::new(); users], count_denied, outcome: Outcome::default() }
    }

    pub(crate) fn record(&mut self, user: usize, at: u64, allowed: bool) {
        let counted = &mut self.counted[user];
        while counted.front().is_some_and(|oldest| oldest + self.window.get() <= at) {
            counted.pop_front();
        }
        let fits = counted.len() < self.limit;
        if allowed || self.count_denied {
            counted.push_back(at);
        }
        self.outcome.requests += 1;
        self.outcome.wrongly_allowed += u64::from(allowed && !fits);
        self.outcome.wrongly_denied += u64::from(!allowed && fits);
    }

    pub(crate) fn outcome(&self) -> Outcome {
        self.outcome
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |wrong: u64| match wrong {
            0 => "0".to_owned(),
            wrong => {
                let percent = wrong as f64 * 100.0 / self.requests as f64;
                format!("{percent:.*}", if percent < 0.1 { 4 } else { 2 })
            }
        };
        write!(f, "{} / {}", percent(self.wrongly_allowed), percent(self.wrongly_denied))
    }
}
