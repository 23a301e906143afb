//! [`CounterProgram`]: the code that a store runs on the state of a counter, and [`Program`], which is any of them.

use smallvec::SmallVec;

use super::{
    Algorithm, Decision, MAX_PERIOD, Micros, Operation, State, assignments::Assignments, leased_bucket::LeasedBucket,
    penalty::Penalty, reports::UtilizationReports,
};

/// Numbers that a script receives for one operation, in the order of [`CounterProgram::ARGUMENTS`].
pub type Arguments = SmallVec<[u64; 12]>;

/// A program for the state of a counter. Implementors are small values.
pub trait CounterProgram: Copy + Into<Program> {
    /// Short prefix for keys, which separates the counters of different programs.
    const TAG: &'static str;

    /// Lua equivalent of [`CounterProgram::step`]: the body of a function that returns `allowed` (1 or 0) and the new state.
    ///
    /// The script can use everything in `prelude.lua`, the [`CounterProgram::ARGUMENTS`] by their names, and:
    ///
    /// - `key`, and `jitter`: the maximum time in milliseconds by which the key outlives its state
    /// - `action`: `TAKE`, `PEEK`, `REFUND` or `ROLL_BACK`, and `taken`: the instant of the take to roll back
    /// - `now` in microseconds
    /// - `more`: the byte position in the text `records` of the arguments without a name
    ///
    /// The state is a string of the same bytes as [`State`], or an integer, which stands for its eight bytes.
    const SCRIPT: &'static str;

    /// Names that the script uses for the first numbers of [`CounterProgram::arguments`].
    const ARGUMENTS: &'static [&'static str];

    /// Returns the numbers that the script receives for one operation.
    fn arguments(&self, operation: Operation) -> Arguments;

    /// Changes the state and returns whether the cost is allowed. A peek takes nothing.
    fn step(&self, state: &mut State, operation: Operation) -> bool;

    /// Computes the decision from the state after a step.
    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision;

    /// Returns whether a denied take counts as well.
    fn counts_denied(&self) -> bool {
        false
    }

    /// Returns whether a denial by this state must not be cached, because it changes later decisions or may end at any
    /// moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        self.counts_denied()
    }

    /// Returns the end of a lease that was taken at `counted`, and that is counted in `state`.
    ///
    /// If the instance with the lease dies, others cannot use the leased hits until this end. The end is `counted` if
    /// the state does not count hits of that time. Only meaningful for the result of
    /// [`Limiter::leasing`](super::Limiter::leasing).
    fn lease_ends(&self, _state: &State, counted: Micros) -> Micros {
        counted
    }

    /// Returns the minimum lifetime of a lease; [`MAX_PERIOD`] if it depends on the time at which the lease is taken.
    fn lease_lifetime(&self) -> Micros {
        MAX_PERIOD
    }

    /// Returns the instant from which the state has the same meaning as a new one.
    fn expires(&self, state: &State, now: Micros) -> Micros;
}

/// The Lua equivalent of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Script {
    /// See [`CounterProgram::ARGUMENTS`].
    pub arguments: &'static [&'static str],
    /// See [`CounterProgram::SCRIPT`].
    pub body: &'static str,
}

impl Script {
    /// Returns the script of a program.
    pub(super) const fn of<P: CounterProgram>() -> Self {
        Self { arguments: P::ARGUMENTS, body: P::SCRIPT }
    }
}

macro_rules! programs {
    ($($program:ident),+ $(,)?) => {
        /// A program with its parameters. An enum instead of a boxed trait, so that the hot path calls it directly.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Program {
            /// The algorithm of a limit.
            Limit(Algorithm),
            $(
                #[doc = concat!("See [`", stringify!($program), "`].")]
                $program($program),
            )+
        }

        $(
            impl From<$program> for Program {
                fn from(program: $program) -> Self {
                    Self::$program(program)
                }
            }
        )+

        impl Program {
            /// Returns the scripts of all programs, in the order of [`Program::index`].
            pub fn scripts() -> impl Iterator<Item = Script> {
                Algorithm::SCRIPTS.iter().copied().chain([$(Script::of::<$program>()),+])
            }

            /// Returns the index among all programs, which selects the script.
            #[must_use]
            pub fn index(&self) -> usize {
                if let Self::Limit(algorithm) = self {
                    return algorithm.index();
                }
                let index = [$(matches!(self, Self::$program(_))),+].iter().position(|is| *is).unwrap_or_default();
                Algorithm::SCRIPTS.len() + index
            }

            /// See [`CounterProgram::TAG`].
            #[must_use]
            pub fn tag(&self) -> &'static str {
                match self {
                    Self::Limit(algorithm) => algorithm.tag(),
                    $(Self::$program(_) => $program::TAG),+
                }
            }

            /// See [`CounterProgram::arguments`].
            #[must_use]
            pub fn arguments(&self, operation: Operation) -> Arguments {
                match self {
                    Self::Limit(algorithm) => algorithm.arguments(operation),
                    $(Self::$program(program) => program.arguments(operation)),+
                }
            }

            /// See [`CounterProgram::step`].
            #[inline]
            pub fn step(&self, state: &mut State, operation: Operation) -> bool {
                match self {
                    Self::Limit(algorithm) => algorithm.step(state, operation),
                    $(Self::$program(program) => program.step(state, operation)),+
                }
            }

            /// See [`CounterProgram::explain`].
            #[inline]
            #[must_use]
            pub fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
                match self {
                    Self::Limit(algorithm) => algorithm.explain(state, operation, allowed),
                    $(Self::$program(program) => program.explain(state, operation, allowed)),+
                }
            }

            /// See [`CounterProgram::counts_denied`].
            #[must_use]
            pub fn counts_denied(&self) -> bool {
                match self {
                    Self::Limit(algorithm) => algorithm.counts_denied(),
                    $(Self::$program(program) => program.counts_denied()),+
                }
            }

            /// See [`CounterProgram::denial_counts`].
            #[must_use]
            pub fn denial_counts(&self, state: &State, now: Micros) -> bool {
                match self {
                    Self::Limit(algorithm) => algorithm.denial_counts(state, now),
                    $(Self::$program(program) => program.denial_counts(state, now)),+
                }
            }

            /// See [`CounterProgram::lease_ends`].
            #[must_use]
            pub fn lease_ends(&self, state: &State, counted: Micros) -> Micros {
                match self {
                    Self::Limit(algorithm) => algorithm.lease_ends(state, counted),
                    $(Self::$program(program) => program.lease_ends(state, counted)),+
                }
            }

            /// See [`CounterProgram::lease_lifetime`].
            #[must_use]
            pub fn lease_lifetime(&self) -> Micros {
                match self {
                    Self::Limit(algorithm) => algorithm.lease_lifetime(),
                    $(Self::$program(program) => program.lease_lifetime()),+
                }
            }

            /// See [`CounterProgram::expires`].
            #[inline]
            #[must_use]
            pub fn expires(&self, state: &State, now: Micros) -> Micros {
                match self {
                    Self::Limit(algorithm) => algorithm.expires(state, now),
                    $(Self::$program(program) => program.expires(state, now)),+
                }
            }
        }
    };
}

programs![LeasedBucket, UtilizationReports, Assignments, Penalty];

impl<A: Into<Algorithm>> From<A> for Program {
    fn from(algorithm: A) -> Self {
        Self::Limit(algorithm.into())
    }
}

impl Program {
    /// Returns the algorithm, if this is the program of a limit.
    #[must_use]
    pub fn algorithm(&self) -> Option<&Algorithm> {
        if let Self::Limit(algorithm) = self { Some(algorithm) } else { None }
    }

    /// Executes an operation: [`Program::step`], then [`Program::explain`].
    pub fn apply(&self, state: &mut State, operation: Operation) -> Decision {
        let allowed = self.step(state, operation);
        self.explain(state, operation, allowed)
    }
}
