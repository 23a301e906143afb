//! Overload protection: shedding, elastic limits, plans.

/// Shedding, how denials report it, elastic limits, and plans.
mod shedding;
