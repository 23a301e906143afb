//! Rule files, rules from a control plane, reloads, and candidate rules.

/// Candidate rules: evaluation, promotion and rollback.
mod candidates;
/// Messages about frequent mistakes in rule files.
mod hints;
/// Rules that change while they are in use.
mod reload;
/// Rule files: accepted and rejected ones, and the diagnostics.
mod rule_files;
/// Rules from a real xDS control plane.
mod xds;
