//! [`lock`]: locks a mutex of the standard library and ignores that it is poisoned.
//!
//! The locks of other crates are not `UnwindSafe`, and the public types that contain them would not be either.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a panic of a thread that held it. The values in this crate's mutexes are consistent
/// between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
