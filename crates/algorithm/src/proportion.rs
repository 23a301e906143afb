//! Exact proportions, computed in 128 bits. `share` in prelude.lua is the Lua equivalent.

/// Returns `count · part / whole`, rounded up; 0 if `whole` is 0.
pub(super) fn ceil(count: u64, part: u64, whole: u64) -> u64 {
    if whole == 0 { 0 } else { narrow((u128::from(count) * u128::from(part)).div_ceil(whole.into())) }
}

/// Returns `count · part / whole`, rounded down; 0 if `whole` is 0.
pub(super) fn floor(count: u64, part: u64, whole: u64) -> u64 {
    if whole == 0 { 0 } else { narrow(u128::from(count) * u128::from(part) / u128::from(whole)) }
}

/// Returns the number, or the largest one of 64 bits if it is larger.
pub(super) fn narrow(wide: u128) -> u64 {
    u64::try_from(wide).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn is_exact_however_large(count: u64, part: u64, whole in 1..u64::MAX) {
            let product = u128::from(count) * u128::from(part);
            let (floor, ceil) = (u128::from(super::floor(count, part, whole)), u128::from(super::ceil(count, part, whole)));
            prop_assume!(product.div_ceil(whole.into()) <= u64::MAX.into());
            prop_assert!(floor * u128::from(whole) <= product && product - floor * u128::from(whole) < whole.into());
            prop_assert_eq!(ceil, product.div_ceil(whole.into()));
        }
    }
}
