//! [`Series`]: allowed and denied hits over time, in steps that become longer with the time covered.

use sluicegate_engine::Micros;

/// Maximum number of steps. When it is reached, adjacent steps are merged.
const MAX_STEPS: usize = 600;

/// Allowed and denied hits per step.
#[derive(Clone, Debug)]
pub struct Series {
    /// Start of the first step in microseconds since the Unix epoch; `None` without hits.
    pub start: Option<u64>,
    /// Length of a step in microseconds.
    pub step: u64,
    /// Allowed and denied hits of each step.
    pub sums: Vec<[u64; 2]>,
}

impl Default for Series {
    fn default() -> Self {
        Self { start: None, step: 1_000_000, sums: Vec::new() }
    }
}

impl Series {
    pub(super) fn add(&mut self, at: Micros, hits: u64, denied: bool) {
        let start = *self.start.get_or_insert(at.get());
        // Hits before the start, from requests slightly out of order, are counted in the first step.
        let mut index = (at.get().saturating_sub(start) / self.step) as usize;
        while index >= MAX_STEPS {
            self.sums = self.sums.chunks(2).map(|two| two.iter().fold([0; 2], sum)).collect();
            self.step *= 2;
            index = (at.get().saturating_sub(start) / self.step) as usize;
        }
        if index >= self.sums.len() {
            self.sums.resize(index + 1, [0; 2]);
        }
        self.sums[index][usize::from(denied)] += hits;
    }
}

fn sum(one: [u64; 2], other: &[u64; 2]) -> [u64; 2] {
    [one[0] + other[0], one[1] + other[1]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_steps_keeps_all_hits() {
        let mut series = Series::default();
        for second in 0..5_000 {
            series.add(Micros::from_secs(1_000_000 + second), 2, second % 10 == 0);
        }
        series.add(Micros::from_secs(5), 1, false);
        assert!(series.sums.len() <= MAX_STEPS && series.step == 16_000_000, "{}", series.step);
        assert_eq!(series.sums.iter().fold([0; 2], sum), [9_001, 1_000]);
        assert_eq!(series.sums[1], [2 * 14, 2 * 2]);
    }

    #[test]
    fn a_hit_for_which_steps_are_merged_is_counted_in_its_own_step() {
        let mut series = Series::default();
        series.add(Micros::from_secs(1_000), 1, false);
        series.add(Micros::from_secs(1_601), 5, true);
        let mut expected = vec![[0, 0]; 301];
        (expected[0], expected[300]) = ([1, 0], [0, 5]);
        assert_eq!((series.step, series.sums), (2_000_000, expected));
    }
}
