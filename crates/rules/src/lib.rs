//! Rule files and the immutable, lock-free [`RuleSet`] that they are compiled into.
//!
//! There are two stages, and neither performs I/O. The `spec` module reads YAML and reports every mistake with its
//! location as a [`Diagnostic`]. [`compile()`] then builds the tree that [`RuleSet::find`] walks. `service::reload`
//! reads the directories.

mod compile;
mod custom_limit;
mod diagnostic;
mod explain;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod ip_prefix;
mod limit;
mod matcher;
mod metadata;
mod options;
mod replaced;
mod schema;
pub mod source;
mod spec;
mod unreachable;
mod wildcard;
mod yaml;

pub use compile::{SourceFile, compile};
pub use custom_limit::{Allowance, CustomLimit};
pub use diagnostic::{Diagnostic, Location, Severity};
pub use ip_prefix::{IpPrefix, without_port};
pub use limit::{FailurePolicy, Limit, LimitError, Measure, Unit};
pub use matcher::{
    DomainSettings, Elastic, Entry, Labels, Lookup, ModifierEntry, Node, Path, Plan, Rule, RuleEntries, RuleSet,
    Segment,
};
pub use metadata::Metadata;
pub use options::Options;
pub use schema::schema;
pub use yaml::{SmallYamlError, read_small};
