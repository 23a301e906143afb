//! When to act on something that is looked at now and then, and may be in the middle of a change.

/// Acts when two looks agree, and are not what was acted on before.
pub(crate) struct Debounce<T> {
    taken: T,
    seen: T,
}

impl<T: Clone + PartialEq> Debounce<T> {
    /// What has been acted on.
    pub(crate) fn new(taken: T) -> Self {
        Self { seen: taken.clone(), taken }
    }

    /// Whether to act on what this look shows.
    pub(crate) fn poll(&mut self, now: T) -> bool {
        let acts = now == self.seen && now != self.taken;
        if acts {
            self.taken.clone_from(&now);
        }
        self.seen = now;
        acts
    }
}

#[cfg(test)]
mod tests {
    use super::Debounce;

    #[test]
    fn a_change_is_acted_on_once_and_when_it_is_over() {
        let mut settled = Debounce::new(1);
        let looks = [1, 2, 3, 3, 3, 1, 3, 3, 1, 1];
        let acts = looks.map(|look| settled.poll(look));
        assert_eq!(acts, [false, false, false, true, false, false, false, false, false, true]);
    }
}
