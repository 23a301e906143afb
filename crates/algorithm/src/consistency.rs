//! [`Consistency`]: how exactly the instances share a counter.

/// The maximum difference between a decision and that of a single shared counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Consistency {
    /// No difference: every hit is counted in the shared counter.
    #[default]
    Exact,
    /// At most the limit is allowed, but possibly less: instances take leases in advance.
    Leased,
    /// More than the limit can be allowed: instances count locally and synchronise with the store at an interval.
    Eventual,
}

impl Consistency {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Exact, Self::Leased, Self::Eventual];

    /// Returns the name in rule files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Leased => "leased",
            Self::Eventual => "eventual",
        }
    }
}
