//! The list of algorithms, and the code that is generated from it.

use super::{
    AlgorithmKind, Arguments, CounterPart, CounterProgram, Decision, LimitSpec, Limiter, Micros, Operation, Program,
    RequestContext, State, adaptive::Adaptive, concurrency::Concurrency, debt_bucket::DebtBucket,
    first_request::FirstRequestWindow, fixed_window::FixedWindow, gcra::Gcra, large_bucket::LargeBucket,
    leaky_bucket::LeakyBucket, program::Script, scheduled_window::ScheduledWindow, shares::Shares,
    sliding_log::SlidingLog, sliding_window::SlidingWindow, token_bucket::TokenBucket, warm_up::WarmUp,
};

macro_rules! algorithms {
    ($($limiter:ident),+ $(,)?) => {
        /// An algorithm with its parameters. An enum instead of a boxed trait, so that the hot path calls it directly.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Algorithm {
            $(
                #[doc = concat!("See [`", stringify!($limiter), "`].")]
                $limiter($limiter),
            )+
        }

        $(
            impl From<$limiter> for Algorithm {
                fn from(limiter: $limiter) -> Self {
                    Self::$limiter(limiter)
                }
            }
        )+

        impl Algorithm {
            /// Scripts of the algorithms, in the order of [`Algorithm::index`].
            pub(super) const SCRIPTS: &'static [Script] = &[$(Script::of::<$limiter>()),+];

            /// Kinds of the algorithms, in the order of [`Algorithm::index`].
            pub const KINDS: &'static [AlgorithmKind] =
                &[$(AlgorithmKind { name: $limiter::NAME, keywords: $limiter::KEYWORDS, build: $limiter::build }),+];

            /// Returns the index in the list of algorithms.
            #[must_use]
            pub fn index(&self) -> usize {
                [$(matches!(self, Self::$limiter(_))),+].iter().position(|is| *is).unwrap_or_default()
            }

            /// Returns the prefix that separates its counters from those of other programs ([`CounterProgram::TAG`]).
            #[must_use]
            pub fn tag(&self) -> &'static str {
                match self { $(Self::$limiter(_) => $limiter::TAG),+ }
            }

            /// Returns the name of the algorithm ([`Limiter::NAME`]).
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self { $(Self::$limiter(_) => $limiter::NAME),+ }
            }

            /// Returns the parameters from which it is built again ([`Limiter::spec`]).
            #[must_use]
            pub fn spec(&self) -> Option<LimitSpec> {
                match self { $(Self::$limiter(limiter) => limiter.spec()),+ }
            }

            /// Returns the numbers that its script receives ([`CounterProgram::arguments`]).
            #[must_use]
            pub fn arguments(&self, operation: Operation) -> Arguments {
                match self { $(Self::$limiter(limiter) => limiter.arguments(operation)),+ }
            }

            /// Returns a further part of its counters' names ([`Limiter::scope`]).
            #[must_use]
            pub fn scope(&self) -> Option<u64> {
                match self { $(Self::$limiter(limiter) => limiter.scope()),+ }
            }

            /// Returns the algorithm for one caller ([`Limiter::with_context`]).
            #[must_use]
            pub fn with_context(self, context: RequestContext) -> Self {
                match self { $(Self::$limiter(limiter) => limiter.with_context(context).into()),+ }
            }

            /// Returns whether windows of different entities begin at different times ([`Limiter::depends_on_entity`]).
            #[must_use]
            pub fn depends_on_entity(&self) -> bool {
                match self { $(Self::$limiter(limiter) => limiter.depends_on_entity()),+ }
            }

            /// Changes the state, and returns whether the cost is allowed ([`CounterProgram::step`]).
            pub fn step(&self, state: &mut State, operation: Operation) -> bool {
                match self { $(Self::$limiter(limiter) => limiter.step(state, operation)),+ }
            }

            /// Computes the decision from the state after a step ([`CounterProgram::explain`]).
            #[must_use]
            pub fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
                match self { $(Self::$limiter(limiter) => limiter.explain(state, operation, allowed)),+ }
            }

            /// Returns whether a denied take counts as well ([`CounterProgram::counts_denied`]).
            #[must_use]
            pub fn counts_denied(&self) -> bool {
                match self { $(Self::$limiter(limiter) => limiter.counts_denied()),+ }
            }

            /// Returns whether a denial must not be cached ([`CounterProgram::denial_counts`]).
            #[must_use]
            pub fn denial_counts(&self, state: &State, now: Micros) -> bool {
                match self { $(Self::$limiter(limiter) => limiter.denial_counts(state, now)),+ }
            }

            /// Returns the program that takes leases ([`Limiter::leasing`]).
            #[must_use]
            pub fn leasing(&self) -> Option<Program> {
                match self { $(Self::$limiter(limiter) => limiter.leasing()),+ }
            }

            /// Returns the end of the lease that was taken at `counted` ([`CounterProgram::lease_ends`]).
            #[must_use]
            pub fn lease_ends(&self, state: &State, counted: Micros) -> Micros {
                match self { $(Self::$limiter(limiter) => limiter.lease_ends(state, counted)),+ }
            }

            /// Returns the minimum lifetime of a lease ([`CounterProgram::lease_lifetime`]).
            #[must_use]
            pub fn lease_lifetime(&self) -> Micros {
                match self { $(Self::$limiter(limiter) => limiter.lease_lifetime()),+ }
            }

            /// Returns the algorithm that counts hits which were allowed elsewhere ([`Limiter::recording`]).
            #[must_use]
            pub fn recording(&self) -> Algorithm {
                match self { $(Self::$limiter(limiter) => limiter.recording()),+ }
            }

            /// Returns whether hits counted at `counted` no longer count ([`Limiter::has_expired`]).
            #[must_use]
            pub fn has_expired(&self, counted: Micros, now: Micros) -> bool {
                match self { $(Self::$limiter(limiter) => limiter.has_expired(counted, now)),+ }
            }

            /// Returns whether the state contains hits of times after `now` ([`Limiter::is_ahead`]).
            #[must_use]
            pub fn is_ahead(&self, state: &State, now: Micros) -> bool {
                match self { $(Self::$limiter(limiter) => limiter.is_ahead(state, now)),+ }
            }

            /// Returns the hits that the state contains, with their times ([`Limiter::parts`]).
            #[must_use]
            pub fn parts(&self, state: &State, now: Micros) -> Vec<CounterPart> {
                match self { $(Self::$limiter(limiter) => limiter.parts(state, now)),+ }
            }

            /// Returns the instant from which the state has the same meaning as a new one
            /// ([`CounterProgram::expires`]).
            #[must_use]
            pub fn expires(&self, state: &State, now: Micros) -> Micros {
                match self { $(Self::$limiter(limiter) => limiter.expires(state, now)),+ }
            }
        }
    };
}

algorithms![
    FixedWindow,
    FirstRequestWindow,
    ScheduledWindow,
    SlidingWindow,
    SlidingLog,
    TokenBucket,
    DebtBucket,
    LargeBucket,
    WarmUp,
    LeakyBucket,
    Gcra,
    Concurrency,
    Shares,
    Adaptive,
];

impl Algorithm {
    /// Algorithm of rules that do not name one.
    pub const DEFAULT: AlgorithmKind = Self::KINDS[0];

    /// Returns the algorithms that a rule can name.
    ///
    /// The names of variants that a keyword selects contain spaces, and rules cannot use them.
    pub fn named() -> impl Iterator<Item = AlgorithmKind> {
        Self::KINDS.iter().copied().filter(|kind| !kind.name.contains(' '))
    }

    /// Returns the algorithm with this name in rule files.
    #[must_use]
    pub fn kind(name: &str) -> Option<AlgorithmKind> {
        Self::named().find(|kind| kind.name == name)
    }

    /// Executes an operation: [`Algorithm::step`], then [`Algorithm::explain`].
    pub fn apply(&self, state: &mut State, operation: Operation) -> Decision {
        let allowed = self.step(state, operation);
        self.explain(state, operation, allowed)
    }
}
