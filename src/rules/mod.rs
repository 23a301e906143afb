//! Which limits apply: rule files become an immutable, lock-free [`RuleSet`].
//!
//! Two stages, no I/O in either: `spec` reads what a person wrote, with every mistake and its place ([`Problem`]);
//! [`compile()`] turns it into what [`RuleSet::find`] walks. Reading directories is `service::reload`'s.

mod compile;
mod explain;
mod ip_prefix;
mod limit;
mod matcher;
mod metadata;
mod problem;
mod schema;
mod spec;
mod terms;
mod wildcard;
mod yaml;

pub use compile::{Options, SourceFile, compile};
pub use ip_prefix::IpPrefix;
pub use limit::{FailurePolicy, Limit, LimitError, Measure, Unit};
pub use matcher::{Aside, DomainSettings, Elastic, Entry, Found, Labels, Node, Path, Plan, Rule, RuleSet, Segment};
pub use metadata::Metadata;
pub use problem::{Place, Problem, Severity};
pub use schema::schema;
pub use terms::{Allowance, Terms};
