//! [`FakeService`]: a rate limit service for the tests of your own code, without a network.
//!
//! ```
//! use std::time::Duration;
//!
//! use sluicegate_client::{
//!     Client, descriptor,
//!     testing::{Answer, FakeService},
//! };
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let service = FakeService::new();
//! service.answer_next(Answer::denied(Duration::from_secs(30)));
//! let client = Client::builder("http://ratelimit.internal:8081").domain("api").connect_fake(&service);
//!
//! // Your own code would receive the client. The first check is denied, and all others are allowed.
//! assert!(!client.check([descriptor! { "user" => "bob" }]).await.allowed());
//! assert!(client.check([descriptor! { "user" => "bob" }]).hits(3).await.allowed());
//!
//! let checks = service.checks();
//! assert_eq!(checks[1].descriptors, [descriptor! { "user" => "bob" }]);
//! assert_eq!((checks[1].domain.as_str(), checks[1].hits), ("api", 3));
//! # }
//! ```

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use crate::{DecidedBy, Descriptor, Failure, Limit, Status, Verdict, check_request::CheckRequest, lock::lock};

/// Rate limit service for tests: it returns prepared answers, and records the checks.
///
/// It does not evaluate rules. Clones share answers and records. Each check of a client with this service is recorded,
/// because the client's deny cache is disabled. [`Builder::connect_fake`](crate::Builder::connect_fake) creates the
/// client.
#[derive(Clone, Debug, Default)]
pub struct FakeService {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    always: Answer,
    next: VecDeque<Answer>,
    checks: Vec<RecordedCheck>,
    /// Time that each answer takes.
    #[cfg(test)]
    latency: Duration,
    #[cfg(test)]
    script: Option<Script>,
}

/// Check that a [`FakeService`] received, in the order of arrival.
///
/// A refund and the release of a permit are checks, too. The descriptors of a permit end with the entry of its holder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedCheck {
    /// Domain of the check.
    pub domain: String,
    /// Descriptors of the check.
    pub descriptors: Vec<Descriptor<'static>>,
    /// Cost of descriptors without their own [`Descriptor::hits`].
    pub hits: u32,
}

/// Closure that computes answers.
#[cfg(test)]
struct Script(Box<dyn FnMut(&RecordedCheck) -> Answer + Send>);

#[cfg(test)]
impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Script")
    }
}

/// Answer of a [`FakeService`] to one check. It applies to each of the check's descriptors.
#[derive(Clone, Debug)]
pub struct Answer(Result<Status, Failure>);

impl FakeService {
    /// Creates a service that allows every check, as [`Answer::default`] does.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an answer for the next check that has none yet. Each call prepares one further check.
    pub fn answer_next(&self, answer: Answer) {
        self.state().next.push_back(answer);
    }

    /// Sets the answer to all checks for which [`answer_next`](Self::answer_next) has prepared none.
    pub fn answer_always(&self, answer: Answer) {
        self.state().always = answer;
    }

    /// Returns all checks so far.
    #[must_use]
    pub fn checks(&self) -> Vec<RecordedCheck> {
        self.state().checks.clone()
    }

    /// Computes the answers to all checks, instead of the prepared ones.
    #[cfg(test)]
    pub(crate) fn answer_by(&self, script: impl FnMut(&RecordedCheck) -> Answer + Send + 'static) {
        self.state().script = Some(Script(Box::new(script)));
    }

    /// Sets the time that each answer takes.
    #[cfg(test)]
    pub(crate) fn set_latency(&self, latency: Duration) {
        self.state().latency = latency;
    }

    /// Records a check and returns its answer.
    #[allow(clippy::unused_async, reason = "only the answers in the tests of this crate take time")]
    pub(crate) async fn check(&self, request: &CheckRequest<'_>) -> Result<Box<Verdict>, Failure> {
        let answer = self.record(request);
        #[cfg(test)]
        {
            let latency = self.state().latency;
            if !latency.is_zero() {
                tokio::time::sleep(latency).await;
            }
        }
        let status = answer?;
        let statuses = request.descriptors.iter().map(|_| status.clone()).collect();
        Ok(Box::new(Verdict { statuses, ..Verdict::empty(status.allowed, DecidedBy::Server) }))
    }

    /// Records a check and returns its status.
    fn record(&self, request: &CheckRequest<'_>) -> Result<Status, Failure> {
        let check = RecordedCheck {
            domain: request.domain.to_string(),
            descriptors: request.descriptors.iter().map(Descriptor::owned).collect(),
            hits: request.hits.max(1),
        };
        let mut state = self.state();
        state.checks.push(check);
        #[cfg(test)]
        {
            let State { script, checks, .. } = &mut *state;
            if let (Some(Script(script)), Some(check)) = (script, checks.last()) {
                return script(check).0;
            }
        }
        let Answer(answer) = state.next.pop_front().unwrap_or_else(|| state.always.clone());
        answer
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Default for Answer {
    /// Allows the check, with 999 of 1,000 hits per minute remaining.
    fn default() -> Self {
        Self::allowed(999)
    }
}

impl Answer {
    /// Allows the check, with `remaining` hits of a limit per minute.
    #[must_use]
    pub fn allowed(remaining: u32) -> Self {
        let limit = limit(remaining.saturating_add(1), Duration::from_secs(60));
        let reset = Some(Duration::from_secs(60));
        Self(Ok(Status { allowed: true, limit: Some(limit), remaining: remaining.into(), reset, ..Status::default() }))
    }

    /// Denies the check by a limit of one request per minute.
    #[must_use]
    pub fn denied(retry_after: Duration) -> Self {
        let limit = Some(limit(1, Duration::from_secs(60)));
        Self(Ok(Status { limit, reset: Some(retry_after), retry_after: Some(retry_after), ..Status::default() }))
    }

    /// Denies the check because of overload: see [`Verdict::shed`].
    #[must_use]
    pub fn shed(retry_after: Duration) -> Self {
        Self::denied(retry_after).change(|status| status.shed = true)
    }

    /// Allows the check because no rule matches its descriptors: see [`Verdict::matched`].
    #[must_use]
    pub fn unmatched() -> Self {
        Self(Ok(Status { allowed: true, ..Status::default() }))
    }

    /// Fails the check, so that [`Builder::on_error`](crate::Builder::on_error) decides. The failure is immediate, also
    /// if it is a timeout.
    #[must_use]
    pub fn failure(failure: Failure) -> Self {
        Self(Err(failure))
    }

    /// Sets the limit that applied. A `window` of zero means requests in flight.
    #[must_use]
    pub fn limit(self, requests_per_unit: u32, window: Duration) -> Self {
        self.change(|status| status.limit = Some(limit(requests_per_unit, window)))
    }

    /// Sets how long an allowed request must wait: see [`Verdict::delay`].
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        self.change(|status| status.delay = delay)
    }

    /// Changes the status. A failure stays as it is.
    pub(crate) fn change(mut self, change: impl FnOnce(&mut Status)) -> Self {
        if let Ok(status) = &mut self.0 {
            change(status);
        }
        self
    }
}

fn limit(requests_per_unit: u32, window: Duration) -> Limit {
    Limit { requests_per_unit, window, name: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Client, OnError, descriptor};

    fn client(service: &FakeService) -> Client {
        Client::builder("http://unused").domain("d").on_error(OnError::Deny).connect_fake(service)
    }

    #[tokio::test]
    async fn prepared_answers_are_used_in_their_order_and_then_the_usual_one() {
        let service = FakeService::new();
        let client = client(&service);
        service.answer_next(Answer::denied(Duration::from_secs(5)).limit(3, Duration::ZERO));
        service.answer_next(Answer::shed(Duration::from_secs(1)));
        service.answer_next(Answer::allowed(4).delay(Duration::from_secs(2)));
        service.answer_next(Answer::unmatched());
        service.answer_always(Answer::failure(Failure::Timeout(Duration::from_secs(9))));
        let check = async || client.check([descriptor! { "user" => "bob" }, descriptor! { "ip" => "::1" }]).await;
        let denied = check().await;
        assert_eq!((denied.allowed(), denied.retry_after()), (false, Some(Duration::from_secs(5))));
        assert_eq!(denied.statuses().len(), 2);
        assert_eq!(denied.tightest().and_then(|status| status.limit.as_ref()), Some(&limit(3, Duration::ZERO)));
        assert!(check().await.shed(), "the denial was not cached");
        let delayed = check().await;
        assert_eq!((delayed.remaining(), delayed.delay(), delayed.matched()), (Some(4), Duration::from_secs(2), true));
        let unmatched = check().await;
        assert_eq!((unmatched.allowed(), unmatched.matched()), (true, false));
        for _ in 0..10 {
            let failed = check().await;
            assert_eq!((failed.allowed(), failed.decided_by()), (false, DecidedBy::Fallback));
            assert_eq!(failed.failure(), Some(&Failure::Timeout(Duration::from_secs(9))));
        }
        assert_eq!(service.checks().len(), 14);
    }

    #[tokio::test]
    async fn checks_are_recorded_with_domain_descriptors_and_cost() {
        let service = FakeService::new();
        let client = client(&service);
        client.check([descriptor! { "user" => "bob" }]).await;
        client.clone().check([descriptor! { "user" => "eve" }.hits(7).refund()]).domain("other").hits(2).await;
        let recorded = |domain: &str, descriptor, hits| RecordedCheck {
            domain: domain.to_owned(),
            descriptors: vec![descriptor],
            hits,
        };
        let expected = [
            recorded("d", descriptor! { "user" => "bob" }, 1),
            recorded("other", descriptor! { "user" => "eve" }.hits(7).refund(), 2),
        ];
        assert_eq!(service.checks(), expected);
    }

    #[tokio::test]
    async fn a_permit_is_recorded_with_its_holder() {
        let service = FakeService::new();
        let permit = client(&service).acquire([descriptor! { "user" => "bob" }]).await.unwrap();
        permit.release().await;
        let checks = service.checks();
        let [acquired, released] = checks.as_slice() else { panic!("{checks:?}") };
        let entries: Vec<_> = acquired.descriptors[0].entries().collect();
        assert_eq!((entries[0], entries[1].0), (("user", "bob"), "holder"));
        assert_eq!(released.descriptors, [acquired.descriptors[0].clone().refund()]);
    }
}
