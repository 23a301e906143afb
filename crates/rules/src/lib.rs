//! Rule files and the immutable, lock-free [`RuleSet`] that they are compiled into.
//!
//! [`source`] reads the files of a directory. The two stages after it perform no I/O: the `spec` module parses YAML and
//! reports every mistake with its location as a [`Diagnostic`], and [`compile()`] builds the tree that [`RuleSet::find`]
//! walks. The service polls the directory (`service/reload.rs`).

mod compile;
mod cost_per_hit;
mod currency;
mod custom_limit;
mod denial;
mod diagnostic;
mod explain;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod ip_prefix;
mod limit;
mod matcher;
mod metadata;
mod options;
mod plan_assignment;
mod replaced;
mod schema;
pub mod source;
mod spec;
mod unreachable;
mod wildcard;
mod yaml;

pub use compile::{SourceFile, compile};
pub use cost_per_hit::CostPerHit;
pub use currency::{Amount, Currency};
pub use custom_limit::{Allowance, CustomLimit};
pub use denial::{Denial, DenialValues};
pub use diagnostic::{Diagnostic, Location, Severity};
pub use ip_prefix::{IpPrefix, without_port};
pub use limit::{FailurePolicy, Limit, LimitError, Measure, Unit};
pub use matcher::{
    DomainSettings, Elastic, Entry, Labels, Lookup, ModifierEntry, Node, Path, Plan, Rule, RuleEntries, RuleSet,
    Segment,
};
pub use metadata::Metadata;
pub use options::Options;
pub use plan_assignment::PlanAssignment;
pub use schema::schema;
pub use yaml::{SmallYamlError, read_small};
