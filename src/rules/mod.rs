//! Which limits apply: rule files become an immutable, lock-free [`RuleSet`].
//!
//! Two stages, no I/O in either: `spec` reads what a person wrote, with every mistake and its place ([`Problem`]);
//! [`compile()`] turns it into what [`RuleSet::find`] walks. Reading directories is `service::reload`'s.

mod compile;
mod custom_limit;
mod diagnostic;
mod explain;
mod ip_prefix;
mod limit;
mod matcher;
mod metadata;
mod schema;
mod spec;
mod wildcard;
mod yaml;

pub use compile::{Options, SourceFile, compile};
pub use custom_limit::{Allowance, CustomLimit};
pub use diagnostic::{Diagnostic, Location, Severity};
pub use ip_prefix::IpPrefix;
pub use limit::{FailurePolicy, Limit, LimitError, Measure, Unit};
pub use matcher::{
    DomainSettings, Elastic, Entry, Labels, Lookup, ModifierEntry, Node, Path, Plan, Rule, RuleSet, Segment,
};
pub use metadata::Metadata;
pub use schema::schema;
