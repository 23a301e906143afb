//! [`lock`]: locks of the standard library without their poison.
//!
//! The locks of other crates are not `UnwindSafe`, and the public types that contain them would not be either.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. What it protects is consistent between any two statements, also after a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
