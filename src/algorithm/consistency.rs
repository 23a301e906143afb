//! How far an answer may be from what the one shared counter would say.

/// What an answer may owe to what the shared counter has not been asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Consistency {
    /// Nothing: every hit is counted where all are.
    #[default]
    Exact,
    /// Never more than the limit, but perhaps less: instances take parts of it in advance.
    Leased,
    /// Instances count by themselves, and tell each other a little later.
    Eventual,
}

impl Consistency {
    /// Every consistency.
    pub const ALL: [Self; 3] = [Self::Exact, Self::Leased, Self::Eventual];

    /// The word in rule files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Leased => "leased",
            Self::Eventual => "eventual",
        }
    }
}
