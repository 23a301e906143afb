//! [`Debounce`]: detects when a polled value has changed and is stable again.

/// A filter for a polled value, such as a file's fingerprint, that may be read in the middle of a change.
///
/// A new value is due once two consecutive polls agree on it and it differs from the value applied last.
pub(crate) struct Debounce<T> {
    applied: T,
    last_seen: T,
}

impl<T: Clone + PartialEq> Debounce<T> {
    /// Creates a filter for a value that is `applied` already.
    pub(crate) fn new(applied: T) -> Self {
        Self { last_seen: applied.clone(), applied }
    }

    /// Records the polled value and returns whether to apply it now.
    pub(crate) fn poll(&mut self, value: T) -> bool {
        let is_due = value == self.last_seen && value != self.applied;
        if is_due {
            self.applied.clone_from(&value);
        }
        self.last_seen = value;
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::Debounce;

    #[test]
    fn applies_a_stable_value_once() {
        let mut debounce = Debounce::new(1);
        let values = [1, 2, 3, 3, 3, 1, 3, 3, 1, 1];
        let is_due = values.map(|value| debounce.poll(value));
        assert_eq!(is_due, [false, false, false, true, false, false, false, false, false, true]);
    }
}
