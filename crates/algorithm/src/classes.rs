//! [`Classes`]: classes that share a capacity, each with a guaranteed minimum and a maximum.

/// A table of classes with their minimums and maximums. It is small and `Copy`, like every part of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classes {
    len: u8,
    min: [u32; Self::MAX_CLASSES],
    max: [u32; Self::MAX_CLASSES],
}

/// Error returned when a table of classes is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidClasses {
    /// There are no classes, or too many.
    #[error("a capacity must be shared by 1 to {} classes", Classes::MAX_CLASSES)]
    ClassCount,
    /// The capacity is larger than a script can count.
    #[error("a shared capacity must be at most {}", Classes::MAX_HITS)]
    CapacityTooLarge,
    /// The minimums add up to more than the capacity.
    #[error("the minimums of the classes add up to more than the capacity")]
    MinimumsExceedCapacity,
    /// A maximum is 0, below the minimum of its class or above the capacity.
    #[error("the maximum of a class must be at least 1, at least its minimum and at most the capacity")]
    MaximumOutOfRange,
}

impl Classes {
    /// Maximum number of classes: each costs about twenty bytes of every counter.
    pub const MAX_CLASSES: usize = 16;

    /// Largest capacity: a script receives the minimum and the maximum of a class in one double.
    pub const MAX_HITS: u32 = (1 << 26) - 1;

    /// Creates a table from the minimum and maximum of each class.
    ///
    /// # Errors
    ///
    /// Returns an error if the number of classes, the capacity, a maximum or the sum of the minimums is out of range.
    pub fn new(shares: &[(u32, u32)], capacity: u32) -> Result<Self, InvalidClasses> {
        let mut classes = Self { len: shares.len() as u8, min: [0; Self::MAX_CLASSES], max: [0; Self::MAX_CLASSES] };
        if !(1..=Self::MAX_CLASSES).contains(&shares.len()) {
            return Err(InvalidClasses::ClassCount);
        }
        if capacity > Self::MAX_HITS {
            return Err(InvalidClasses::CapacityTooLarge);
        }
        for (index, (min, max)) in shares.iter().enumerate() {
            if min > max || *max == 0 || *max > capacity {
                return Err(InvalidClasses::MaximumOutOfRange);
            }
            classes.min[index] = *min;
            classes.max[index] = *max;
        }
        if classes.guaranteed() > capacity.into() { Err(InvalidClasses::MinimumsExceedCapacity) } else { Ok(classes) }
    }

    /// Returns the number of classes.
    #[must_use]
    pub fn count(&self) -> usize {
        self.len.into()
    }

    /// Returns the guaranteed minimum of a class.
    #[must_use]
    pub fn min(&self, class: usize) -> u64 {
        self.min[class % Self::MAX_CLASSES].into()
    }

    /// Returns the maximum of a class.
    #[must_use]
    pub fn max(&self, class: usize) -> u64 {
        self.max[class % Self::MAX_CLASSES].into()
    }

    /// Returns the sum of the minimums.
    #[must_use]
    pub fn guaranteed(&self) -> u64 {
        self.min.iter().copied().map(u64::from).sum()
    }

    /// Returns one of `parts` equal parts. Minimums are rounded down, so that they fit into the part of the capacity.
    #[must_use]
    pub(super) fn divided(&self, parts: u32) -> Self {
        let parts = parts.max(1);
        Self { min: self.min.map(|min| min / parts), max: self.max.map(|max| max.div_ceil(parts)), ..*self }
    }

    /// Returns a table with all numbers multiplied by `factor`.
    #[cfg(test)]
    pub(super) fn times(&self, factor: u32) -> Self {
        Self { min: self.min.map(|min| min * factor), max: self.max.map(|max| max * factor), ..*self }
    }

    /// Returns one number for each class, which contains its minimum and its maximum, as scripts receive them.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        (0..self.count()).map(|class| (self.min(class) << 27) + self.max(class))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_classes_that_do_not_fit_into_the_capacity() {
        assert!(Classes::new(&[(400, 1_000), (600, 600)], 1_000).is_ok());
        assert_eq!(Classes::new(&[(400, 1_000), (601, 1_000)], 1_000), Err(InvalidClasses::MinimumsExceedCapacity));
        assert_eq!(Classes::new(&[(0, 1_001)], 1_000), Err(InvalidClasses::MaximumOutOfRange));
        assert_eq!(Classes::new(&[(3, 2)], 1_000), Err(InvalidClasses::MaximumOutOfRange));
        assert_eq!(Classes::new(&[(0, 0)], 1_000), Err(InvalidClasses::MaximumOutOfRange));
        assert_eq!(Classes::new(&[], 1_000), Err(InvalidClasses::ClassCount));
        assert_eq!(Classes::new(&[(0, 1); Classes::MAX_CLASSES + 1], 1_000), Err(InvalidClasses::ClassCount));
        assert_eq!(Classes::new(&[(0, 1)], Classes::MAX_HITS + 1), Err(InvalidClasses::CapacityTooLarge));
        let whole = (Classes::MAX_HITS, Classes::MAX_HITS);
        assert_eq!(Classes::new(&[whole, whole], Classes::MAX_HITS), Err(InvalidClasses::MinimumsExceedCapacity));
    }

    #[test]
    fn the_minimums_of_a_part_are_rounded_down_and_the_maximums_up() {
        let part = Classes::new(&[(5, 10), (0, 1)], 10).unwrap().divided(3);
        assert_eq!([0, 1].map(|class| (part.min(class), part.max(class))), [(1, 4), (0, 1)]);
    }
}
