//! The list of algorithms: one line each, and all that follows from it.

use super::{
    AlgorithmKind, Arguments, Decision, Limiter, Micros, Operation, RequestContext, State, adaptive::Adaptive,
    concurrency::Concurrency, fixed_window::FixedWindow, gcra::Gcra, leaky_bucket::LeakyBucket,
    leased_bucket::LeasedBucket, reports::UtilizationReports, shares::Shares, sliding_log::SlidingLog,
    sliding_window::SlidingWindow, token_bucket::TokenBucket, warm_up::WarmUp,
};

macro_rules! algorithms {
    ($($rule:ident),+ $(,)?) => {
        /// A limit's algorithm with its numbers. An enum and not a boxed trait: the hot path calls it directly.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Algorithm {
            $(
                #[doc = concat!("See [`", stringify!($rule), "`].")]
                $rule($rule),
            )+
        }

        $(
            impl From<$rule> for Algorithm {
                fn from(rule: $rule) -> Self {
                    Self::$rule(rule)
                }
            }
        )+

        impl Algorithm {
            /// Of each algorithm the names of its script's arguments and its Lua body, in the order of
            /// [`Algorithm::index`].
            pub const SCRIPTS: &'static [(&'static [&'static str], &'static str)] =
                &[$(($rule::ARGUMENTS, $rule::SCRIPT)),+];

            /// What is known of each algorithm before there is one, in the same order.
            pub const KINDS: &'static [AlgorithmKind] =
                &[$(AlgorithmKind { name: $rule::NAME, keywords: $rule::KEYWORDS, build: $rule::build }),+];

            /// The place in the list, by which a script is called.
            #[must_use]
            pub fn index(&self) -> usize {
                [$(matches!(self, Self::$rule(_))),+].iter().position(|is| *is).unwrap_or_default()
            }

            /// See [`Limiter::TAG`].
            #[must_use]
            pub fn tag(&self) -> &'static str {
                match self { $(Self::$rule(_) => $rule::TAG),+ }
            }

            /// See [`Limiter::NAME`].
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self { $(Self::$rule(_) => $rule::NAME),+ }
            }

            /// See [`Limiter::arguments`].
            #[must_use]
            pub fn arguments(&self, ask: Operation) -> Arguments {
                match self { $(Self::$rule(rule) => rule.arguments(ask)),+ }
            }

            /// See [`Limiter::scope`].
            #[must_use]
            pub fn scope(&self) -> Option<u64> {
                match self { $(Self::$rule(rule) => rule.scope()),+ }
            }

            /// See [`Limiter::with_context`].
            #[must_use]
            pub fn with_context(self, asker: RequestContext) -> Self {
                match self { $(Self::$rule(rule) => rule.with_context(asker).into()),+ }
            }

            /// See [`Limiter::step`].
            pub fn step(&self, state: &mut State, ask: Operation) -> bool {
                match self { $(Self::$rule(rule) => rule.step(state, ask)),+ }
            }

            /// See [`Limiter::explain`].
            #[must_use]
            pub fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
                match self { $(Self::$rule(rule) => rule.explain(state, ask, allowed)),+ }
            }

            /// See [`Limiter::counts_denied`].
            #[must_use]
            pub fn counts_denied(&self) -> bool {
                match self { $(Self::$rule(rule) => rule.counts_denied()),+ }
            }

            /// See [`Limiter::denial_counts`].
            #[must_use]
            pub fn denial_counts(&self, state: &State, now: Micros) -> bool {
                match self { $(Self::$rule(rule) => rule.denial_counts(state, now)),+ }
            }

            /// See [`Limiter::leasing`].
            #[must_use]
            pub fn leasing(&self) -> Option<Algorithm> {
                match self { $(Self::$rule(rule) => rule.leasing()),+ }
            }

            /// See [`Limiter::lease_ends`].
            #[must_use]
            pub fn lease_ends(&self, counted: Micros) -> Micros {
                match self { $(Self::$rule(rule) => rule.lease_ends(counted)),+ }
            }

            /// See [`Limiter::lease_lifetime`].
            #[must_use]
            pub fn lease_lifetime(&self) -> Micros {
                match self { $(Self::$rule(rule) => rule.lease_lifetime()),+ }
            }

            /// See [`Limiter::counting`].
            #[must_use]
            pub fn counting(&self) -> Algorithm {
                match self { $(Self::$rule(rule) => rule.counting()),+ }
            }

            /// See [`Limiter::is_over`].
            #[must_use]
            pub fn is_over(&self, counted: Micros, now: Micros) -> bool {
                match self { $(Self::$rule(rule) => rule.is_over(counted, now)),+ }
            }

            /// See [`Limiter::expires`].
            #[must_use]
            pub fn expires(&self, state: &State, now: Micros) -> Micros {
                match self { $(Self::$rule(rule) => rule.expires(state, now)),+ }
            }
        }
    };
}

algorithms![
    FixedWindow,
    SlidingWindow,
    SlidingLog,
    TokenBucket,
    WarmUp,
    LeakyBucket,
    Gcra,
    LeasedBucket,
    Concurrency,
    Shares,
    UtilizationReports,
    Adaptive,
];

impl Algorithm {
    /// What counts where a rule does not say.
    pub const DEFAULT: AlgorithmKind = Self::KINDS[0];

    /// Those that a rule can name. What another becomes by a word of its own, or on lease, has a name of several words.
    pub fn named() -> impl Iterator<Item = AlgorithmKind> {
        Self::KINDS.iter().copied().filter(|kind| !kind.name.contains(' '))
    }

    /// The one of this name.
    #[must_use]
    pub fn kind(name: &str) -> Option<AlgorithmKind> {
        Self::named().find(|kind| kind.name == name)
    }

    /// One whole turn: [`Algorithm::step`], then [`Algorithm::explain`].
    pub fn apply(&self, state: &mut State, ask: Operation) -> Decision {
        let allowed = self.step(state, ask);
        self.explain(state, ask, allowed)
    }
}
