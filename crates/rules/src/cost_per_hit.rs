//! [`CostPerHit`]: the factor by which the hits of a request count against a limit.

use std::collections::HashMap;

/// The factor by which the hits of a request count, such as the price of a token in micro-units of a currency.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CostPerHit {
    /// Key of the entry that selects the factor; `None` if all requests have the same one.
    pub(crate) key: Option<Box<str>>,
    /// Factors by the value of the entry.
    pub(crate) values: HashMap<Box<str>, u64>,
    /// Factor of other values, and of requests without the entry.
    pub(crate) default: u64,
}

impl CostPerHit {
    /// Returns the factor for `value`, the value of the entry, which is `None` for a request without the entry.
    #[must_use]
    pub fn of(&self, value: Option<&str>) -> u64 {
        let known = value.and_then(|value| self.values.get(value));
        known.copied().unwrap_or(self.default)
    }
}
