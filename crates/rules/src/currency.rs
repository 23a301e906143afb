//! [`Currency`]: the unit in which the hits of a budget are displayed.

use std::fmt;

/// The unit in which the hits of a budget are displayed, such as US dollars of which each has 1,000,000 hits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Currency {
    /// Name of the unit, such as `USD`.
    pub code: Box<str>,
    /// Number of hits in one unit, at least 1.
    pub hits: u64,
}

/// Minimum number of decimals of an amount, unless its hits have fewer.
const MIN_DECIMALS: usize = 2;

impl Currency {
    /// Hits in a unit by default: a hit is a millionth.
    pub const DEFAULT_HITS: u64 = 1_000_000;

    /// Returns hits as an amount, such as `12.50 USD`. If a hit is not a decimal fraction of the unit, the amount is
    /// rounded down.
    #[must_use]
    pub fn amount(&self, hits: u64) -> Amount<'_> {
        Amount { currency: self, hits }
    }
}

/// Hits of a [`Currency`], which are displayed as an amount.
#[derive(Clone, Copy, Debug)]
pub struct Amount<'c> {
    currency: &'c Currency,
    hits: u64,
}

impl fmt::Display for Amount<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Currency { code, hits: hits_per_unit } = self.currency;
        let hits_per_unit = (*hits_per_unit).max(1);
        let whole = self.hits / hits_per_unit;
        let rest = self.hits % hits_per_unit;
        // 1,000,000 hits have 6 decimals, and so have 999,999 or 100,001.
        let decimals = match (hits_per_unit - 1).checked_ilog10() {
            Some(digits) => digits as usize + 1,
            None => 0,
        };
        if decimals == 0 {
            return write!(f, "{whole} {code}");
        }
        let fraction = u128::from(rest) * 10_u128.pow(decimals as u32) / u128::from(hits_per_unit);
        let digits = format!("{fraction:0decimals$}");
        let (required, optional) = digits.split_at(decimals.min(MIN_DECIMALS));
        write!(f, "{whole}.{required}{} {code}", optional.trim_end_matches('0'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_amount_has_the_decimals_of_its_hits() {
        for (hits_per_unit, hits, expected) in [
            (1_000_000, 12_500_000, "12.50 USD"),
            (1_000_000, 0, "0.00 USD"),
            (1_000_000, 3, "0.000003 USD"),
            (1_000_000, 44_895_000, "44.895 USD"),
            (20_000_000, 1_000_000_003, "50.00000015 USD"),
            (100, 999, "9.99 USD"),
            (10, 15, "1.5 USD"),
            (1, 50, "50 USD"),
            (3, 5, "1.6 USD"),
            (1_001, 1_000, "0.999 USD"),
            (9_007_199_254_740_991, 9_007_199_254_740_990, "0.9999999999999998 USD"),
            (1_000_000, u64::MAX, "18446744073709.551615 USD"),
            (0, 7, "7 USD"),
        ] {
            let currency = Currency { code: "USD".into(), hits: hits_per_unit };
            assert_eq!(currency.amount(hits).to_string(), expected, "{hits} of {hits_per_unit}");
        }
    }
}
