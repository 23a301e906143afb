//! [`Consistency`]: how exactly the instances share a counter.

/// How far a decision may differ from that of a single shared counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Consistency {
    /// Not at all: every hit is counted in the shared counter.
    #[default]
    Exact,
    /// Never more than the limit is allowed, but possibly less: instances take leases in advance.
    Leased,
    /// Instances count locally and synchronise with the store at an interval.
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
