//! [`TimeSource`]: whether a component reads its own clock.

/// Where a component takes the time from: from its own clock, or from its caller.
///
/// `now`, the service's time, is an argument of each call. It is the wall clock of the host, which an operator can set
/// back, and differs between hosts. Where that matters, a component has its own clock: Redis decides by the server's
/// clock, so that all instances agree, and this instance measures ages by a monotonic one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeSource {
    /// The component's own clock, used everywhere except in tests.
    Own,
    /// The `now` of each call, for tests that set the time.
    Caller,
}
