//! Overload protection: shedding, elastic limits, and plans.

/// Shedding and its reports, elastic limits, and plans.
mod shedding;
