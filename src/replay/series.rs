//! What happened when, in steps that grow with the time that is covered.

use crate::engine::Micros;

/// Steps at most; then two become one.
const STEPS: usize = 600;

/// Admitted and refused, over time.
#[derive(Clone, Debug)]
pub(super) struct Series {
    start: Option<u64>,
    /// Microseconds.
    pub(super) step: u64,
    pub(super) sums: Vec<[u64; 2]>,
}

impl Default for Series {
    fn default() -> Self {
        Self { start: None, step: 1_000_000, sums: Vec::new() }
    }
}

impl Series {
    pub(super) fn add(&mut self, at: Micros, hits: u64, refused: bool) {
        let start = *self.start.get_or_insert(at.get());
        // What is a little out of order belongs to the first step.
        let mut place = (at.get().saturating_sub(start) / self.step) as usize;
        while place >= STEPS {
            self.sums = self.sums.chunks(2).map(|two| two.iter().fold([0; 2], sum)).collect();
            self.step *= 2;
            place = (at.get().saturating_sub(start) / self.step) as usize;
        }
        if place >= self.sums.len() {
            self.sums.resize(place + 1, [0; 2]);
        }
        self.sums[place][usize::from(refused)] += hits;
    }
}

fn sum(one: [u64; 2], other: &[u64; 2]) -> [u64; 2] {
    [one[0] + other[0], one[1] + other[1]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_however_long_it_takes() {
        let mut series = Series::default();
        for second in 0..5_000 {
            series.add(Micros::from_secs(1_000_000 + second), 2, second % 10 == 0);
        }
        series.add(Micros::from_secs(5), 1, false);
        assert!(series.sums.len() <= STEPS && series.step == 16_000_000, "{}", series.step);
        assert_eq!(series.sums.iter().fold([0; 2], sum), [9_001, 1_000]);
        assert_eq!(series.sums[1], [2 * 14, 2 * 2]);
    }
}
