//! Classes that share a capacity: what is always there for each, and the most it may have.

/// A table of classes. Small and `Copy`, as all that an algorithm is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classes {
    len: u8,
    min: [u32; Self::MAX_CLASSES],
    max: [u32; Self::MAX_CLASSES],
}

/// Why there is no such table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidClasses {
    /// Nobody is in it, or too many are.
    #[error("a capacity is shared by 1 to {} classes", Classes::MAX_CLASSES)]
    Many,
    /// More than can be counted.
    #[error("a capacity that is shared is {} at most", Classes::MAX_HITS)]
    Large,
    /// What is promised is not there.
    #[error("the minima add up to more than the capacity")]
    Promised,
    /// A class may have less than what is always there for it.
    #[error("a class has a maximum below its minimum, or of 0, or above the capacity")]
    Crossed,
}

impl Classes {
    /// So many at most: each costs some twenty bytes of every counter.
    pub const MAX_CLASSES: usize = 16;

    /// No capacity is larger: both numbers of a class are one double in a script.
    pub const MAX_HITS: u32 = (1 << 26) - 1;

    /// Of each class the hits that are always there for it, and the most it may have, of a capacity.
    pub fn new(shares: &[(u32, u32)], capacity: u32) -> Result<Self, InvalidClasses> {
        let mut classes = Self { len: shares.len() as u8, min: [0; Self::MAX_CLASSES], max: [0; Self::MAX_CLASSES] };
        if !(1..=Self::MAX_CLASSES).contains(&shares.len()) {
            return Err(InvalidClasses::Many);
        }
        if capacity > Self::MAX_HITS {
            return Err(InvalidClasses::Large);
        }
        for (place, (least, most)) in shares.iter().enumerate() {
            if least > most || *most == 0 || *most > capacity {
                return Err(InvalidClasses::Crossed);
            }
            (classes.min[place], classes.max[place]) = (*least, *most);
        }
        if classes.guaranteed() > capacity.into() { Err(InvalidClasses::Promised) } else { Ok(classes) }
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> usize {
        self.len.into()
    }

    /// What is always there for this class.
    #[must_use]
    pub fn min(&self, class: usize) -> u64 {
        self.min[class % Self::MAX_CLASSES].into()
    }

    /// The most that this class may have.
    #[must_use]
    pub fn max(&self, class: usize) -> u64 {
        self.max[class % Self::MAX_CLASSES].into()
    }

    /// What is always there for anybody.
    #[must_use]
    pub fn guaranteed(&self) -> u64 {
        self.min.iter().copied().map(u64::from).sum()
    }

    /// One of so many equal parts: of the minima no more than the part of the capacity can keep.
    #[must_use]
    pub(super) fn divided(&self, parts: u32) -> Self {
        let parts = parts.max(1);
        Self { min: self.min.map(|it| it / parts), max: self.max.map(|it| it.div_ceil(parts)), ..*self }
    }

    /// So many times as much of everything.
    #[cfg(test)]
    pub(super) fn times(&self, factor: u32) -> Self {
        Self { min: self.min.map(|it| it * factor), max: self.max.map(|it| it * factor), ..*self }
    }

    /// The table as a script gets it, a number for each class.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        (0..self.count()).map(|class| (self.min(class) << 27) + self.max(class))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_no_more_than_there_is() {
        assert!(Classes::new(&[(400, 1_000), (600, 600)], 1_000).is_ok());
        assert_eq!(Classes::new(&[(400, 1_000), (601, 1_000)], 1_000), Err(InvalidClasses::Promised));
        assert_eq!(Classes::new(&[(0, 1_001)], 1_000), Err(InvalidClasses::Crossed));
        assert_eq!(Classes::new(&[(3, 2)], 1_000), Err(InvalidClasses::Crossed));
        assert_eq!(Classes::new(&[(0, 0)], 1_000), Err(InvalidClasses::Crossed));
        assert_eq!(Classes::new(&[], 1_000), Err(InvalidClasses::Many));
        assert_eq!(Classes::new(&[(0, 1); Classes::MAX_CLASSES + 1], 1_000), Err(InvalidClasses::Many));
        assert_eq!(Classes::new(&[(0, 1)], Classes::MAX_HITS + 1), Err(InvalidClasses::Large));
        let all = (Classes::MAX_HITS, Classes::MAX_HITS);
        assert_eq!(Classes::new(&[all, all], Classes::MAX_HITS), Err(InvalidClasses::Promised));
    }
}
