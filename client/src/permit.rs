//! [`Permit`]: a slot of a concurrency limit, renewed while the permit exists and released when it is dropped.

use std::{
    borrow::Cow,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use crate::{
    check_request::{Descriptor, Identities, Outcome, Sample},
    client::Client,
    verdict::{DecidedBy, Verdict},
    wait_queue::{Costs, Next, Place, QueueKey, wait_for_delay},
};

/// Default key of the entry that identifies the holder of a slot.
pub(crate) const DEFAULT_HOLDER_KEY: &str = "holder";
/// Fraction of the hold duration after which a slot is renewed.
const RENEWAL_FRACTION: f64 = 1.0 / 3.0;
/// Pause before the second attempt to release a slot. Each further pause is twice as long.
const RELEASE_BACKOFF: Duration = Duration::from_millis(50);
/// Maximum number of attempts to release a slot.
const RELEASE_ATTEMPTS: u32 = 6;

/// Request for a [`Permit`], sent when it is awaited. Created by [`Client::acquire`].
#[must_use = "nothing is acquired unless this is awaited"]
pub struct Acquire<'c> {
    client: &'c Client,
    descriptors: Vec<Descriptor<'static>>,
    holder_key: Cow<'c, str>,
    domain: Option<String>,
    timeout: Option<Duration>,
    max_wait: Duration,
}

impl Client {
    /// Acquires a slot of concurrency limits (`algorithm: concurrency` or `adaptive`, with a `holder`) and holds it
    /// until the [`Permit`] is dropped.
    ///
    /// A random holder id is appended to each descriptor as an entry ([`Acquire::holder_key`]). While the permit
    /// exists, the slot is renewed in the background. The slot is released when the permit is dropped, also if its task
    /// is cancelled or panics. If the whole process dies, the slot ends after the rule's `hold`.
    ///
    /// # Errors
    ///
    /// Awaiting the returned [`Acquire`] returns the [`Verdict`] as an error if the request is denied: because all
    /// slots are in use, or because the service did not answer and [`Builder::on_error`](crate::Builder::on_error) is
    /// [`OnError::Deny`](crate::OnError::Deny).
    ///
    /// # Panics
    ///
    /// Awaiting the returned [`Acquire`] panics outside of a tokio runtime.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use sluicegate_client::{Client, descriptor};
    ///
    /// # async fn example(client: Client) {
    /// match client.acquire([descriptor! { "user" => "alice" }]).await {
    ///     Ok(permit) => {
    ///         // Do the work. Dropping the permit releases the slot.
    ///         drop(permit);
    ///     }
    ///     Err(verdict) => println!("retry after {:?}", verdict.retry_after()),
    /// }
    /// # }
    /// ```
    pub fn acquire<'d>(&self, descriptors: impl IntoIterator<Item = Descriptor<'d>>) -> Acquire<'_> {
        let descriptors = descriptors.into_iter().map(|descriptor| descriptor.owned()).collect();
        Acquire {
            client: self,
            descriptors,
            holder_key: DEFAULT_HOLDER_KEY.into(),
            domain: None,
            timeout: None,
            max_wait: Duration::ZERO,
        }
    }
}

impl<'c> Acquire<'c> {
    /// Sets the key of the entry that identifies the holder, as in the rule's `holder`; `holder` by default.
    pub fn holder_key(mut self, key: impl Into<Cow<'c, str>>) -> Self {
        self.holder_key = key.into();
        self
    }

    /// Sets the domain of the limits, instead of [`Builder::domain`](crate::Builder::domain).
    pub fn domain(mut self, domain: impl Into<String>) -> Self {
        self.domain = Some(domain.into());
        self
    }

    /// Sets a shorter timeout than [`Builder::timeout`](crate::Builder::timeout).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Waits at most `max_wait` until a slot is free, instead of returning a denial immediately. Zero, the default, does not
    /// wait.
    ///
    /// Slots that this client (with its clones) releases wake the waiter of the same descriptors that has waited longest.
    /// Slots that other processes release are noticed by repeated checks, at intervals from 10 ms to 1 s.
    /// [`Check::max_wait`](crate::Check::max_wait) describes the order, limits that are not concurrency limits,
    /// failures and the number of waiters.
    ///
    /// A future that is dropped leaves the queue. If its call is in progress then, its slot is released in case it was
    /// taken.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use sluicegate_client::{Client, descriptor};
    ///
    /// # async fn example(client: Client) {
    /// if let Ok(permit) = client.acquire([descriptor! { "job" => "export" }]).max_wait(Duration::from_secs(30)).await {
    ///     // Export. Dropping the permit releases the slot.
    ///     drop(permit);
    /// }
    /// # }
    /// ```
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        self.max_wait = max_wait;
        self
    }

    /// Returns the key of the wait queue of the descriptors without the holder, and their costs.
    fn queue_key(&self) -> (QueueKey, Costs) {
        let mut check = self.client.check(self.descriptors.iter().map(Descriptor::borrowed));
        if let Some(domain) = &self.domain {
            check = check.domain(domain.as_str());
        }
        (check.queue_key(true), check.costs())
    }

    async fn send(self) -> Result<Permit, Box<Verdict>> {
        let client = self.client.clone();
        let (key, costs) = self.queue_key();
        let waited_for = key.identities.clone();
        let Some(place) = client.inner.wait_queues.join(key, costs, self.max_wait) else {
            return self.take(waited_for, None).await;
        };
        let waiter = client.inner.telemetry.waiter();
        let acquired = self.take(waited_for, Some(place)).await;
        waiter.finish(acquired.is_ok());
        acquired
    }

    /// Takes the slots. With a `place`, waits for the turn of this waiter first.
    async fn take(self, waited_for: Identities, place: Option<Place<'_>>) -> Result<Permit, Box<Verdict>> {
        let holder = format!("{:032x}", rand::random::<u128>());
        let with_holder =
            |descriptor: Descriptor<'static>| descriptor.entry(self.holder_key.clone().into_owned(), holder.clone());
        let mut slot = Slot {
            client: self.client.clone(),
            domain: self.domain,
            descriptors: self.descriptors.into_iter().map(with_holder).collect(),
            waited_for,
            runtime: Handle::current(),
            is_taken: false,
        };
        let (verdict, acquired_at) = loop {
            if let Some(place) = &place
                && let Some(denial) = place.turn().await
            {
                self.client.inner.telemetry.record_check(&denial, || Duration::ZERO);
                return Err(denial);
            }
            let acquired_at = Instant::now();
            // If this future is dropped during the call, the slot is released in case it was taken.
            slot.is_taken = true;
            let verdict = slot.take(self.timeout).await;
            // Without an answer of the service, the slot may have been taken.
            slot.is_taken = verdict.allowed() || verdict.decided_by() == DecidedBy::Fallback;
            let next = match &place {
                Some(place) => place.record(&verdict),
                None => Next::Return,
            };
            if verdict.allowed() {
                break (verdict, acquired_at);
            }
            if next == Next::Return {
                return Err(Box::new(verdict));
            }
        };
        let lost = Arc::new(AtomicBool::new(false));
        let (release, released) = oneshot::channel();
        let renewal = tokio::spawn(slot.renew_until_released(hold_duration(&verdict), released, Arc::clone(&lost)));
        let mut permit = Permit {
            verdict,
            acquired_at,
            latency: None,
            outcome: Outcome::Success,
            lost,
            release: Some(release),
            renewal: Some(renewal),
        };
        if let Some(place) = place {
            wait_for_delay(&mut permit.verdict, place.deadline()).await;
        }
        Ok(permit)
    }
}

impl<'c> IntoFuture for Acquire<'c> {
    type Output = Result<Permit, Box<Verdict>>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'c>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.send())
    }
}

/// Returns the time until a slot that has just been taken or renewed expires.
///
/// The slot is the last one of its limit to expire, so this is the reset of the limit, and with several limits the
/// shortest reset. Returns `None` if no limit applied or the service did not answer.
fn hold_duration(verdict: &Verdict) -> Option<Duration> {
    verdict.statuses().iter().filter_map(|status| status.reset).filter(|reset| !reset.is_zero()).min()
}

/// Slot of one holder, released when it is dropped.
struct Slot {
    client: Client,
    domain: Option<String>,
    descriptors: Vec<Descriptor<'static>>,
    /// Identities of the descriptors without the holder, for which other callers may wait.
    waited_for: Identities,
    runtime: Handle,
    is_taken: bool,
}

impl Slot {
    /// Takes the slot, or renews it if this holder already has it.
    async fn take(&self, timeout: Option<Duration>) -> Verdict {
        let mut check = self.client.check(self.descriptors.iter().map(Descriptor::borrowed));
        if let Some(domain) = &self.domain {
            check = check.domain(domain.as_str());
        }
        if let Some(timeout) = timeout {
            check = check.timeout(timeout);
        }
        check.await
    }

    /// Renews the slot until its permit is dropped, and then releases it.
    ///
    /// One task does both in sequence: a renewal that arrived after the release would take the slot again.
    async fn renew_until_released(
        mut self,
        mut hold: Option<Duration>,
        mut released: oneshot::Receiver<Sample>,
        lost: Arc<AtomicBool>,
    ) {
        let mut renew_within = hold;
        loop {
            let renewal = async {
                match renew_within {
                    Some(duration) => sleep(duration.mul_f64(RENEWAL_FRACTION)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                sample = &mut released => {
                    self.is_taken = false;
                    return self.release(sample.ok()).await;
                }
                () = renewal => {}
            }
            let verdict = self.take(None).await;
            match verdict.decided_by() {
                // The service did not answer, so the renewal is repeated sooner, before the slot expires.
                DecidedBy::Fallback => renew_within = hold.map(|hold| hold / 4),
                _ => {
                    lost.store(!verdict.allowed(), Relaxed);
                    hold = hold_duration(&verdict).or(hold);
                    renew_within = hold;
                }
            }
        }
    }

    /// Releases the slot, with at most [`RELEASE_ATTEMPTS`] calls until the service confirms it. The holder id makes
    /// the release idempotent.
    async fn release(&self, sample: Option<Sample>) {
        for attempt in 0..RELEASE_ATTEMPTS {
            if attempt > 0 {
                sleep(RELEASE_BACKOFF * 2_u32.pow(attempt - 1)).await;
            }
            let refunds = self.descriptors.iter().map(|descriptor| descriptor.borrowed().refund());
            let mut check = self.client.check(refunds);
            if let Some(domain) = &self.domain {
                check = check.domain(domain.as_str());
            }
            if check.sample(sample).without_fallback().await.is_ok() {
                self.client.inner.wait_queues.wake_first(&self.waited_for);
                return;
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if std::mem::take(&mut self.is_taken) {
            let slot = Self {
                client: self.client.clone(),
                domain: self.domain.take(),
                descriptors: std::mem::take(&mut self.descriptors),
                waited_for: std::mem::take(&mut self.waited_for),
                runtime: self.runtime.clone(),
                is_taken: false,
            };
            // If the runtime has been shut down, this task does not run and the slot expires.
            self.runtime.spawn(async move { slot.release(None).await });
        }
    }
}

/// Slot of a concurrency limit, acquired with [`Client::acquire`]. It is released when the permit is dropped.
#[must_use = "the slot is released when the permit is dropped"]
#[derive(Debug)]
pub struct Permit {
    verdict: Verdict,
    acquired_at: Instant,
    latency: Option<Duration>,
    outcome: Outcome,
    lost: Arc<AtomicBool>,
    release: Option<oneshot::Sender<Sample>>,
    renewal: Option<JoinHandle<()>>,
}

impl Permit {
    /// Returns the verdict that acquired the slot.
    #[must_use]
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// Returns `true` if the service denied the last renewal, for instance because the slot expired while the service
    /// was unavailable, and another holder has taken it.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// Sets the outcome of the work, from which adaptive limits learn; [`Outcome::Success`] by default. If the permit
    /// is dropped by a panic, the outcome is [`Outcome::Failed`].
    pub fn set_outcome(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// Records the latency from acquiring the permit until now. Without this call, the latency extends until the permit
    /// is dropped.
    ///
    /// This is useful if the response starts long before the permit is dropped, as with streamed bodies.
    pub fn record_latency(&mut self) {
        self.latency.get_or_insert_with(|| self.acquired_at.elapsed());
    }

    /// Releases the slot and waits until the service has confirmed it, or until all attempts have failed.
    ///
    /// Dropping the permit releases the slot in the background.
    pub async fn release(mut self) {
        self.finish();
        if let Some(renewal) = self.renewal.take() {
            let _ = timeout(RELEASE_BACKOFF * 2_u32.pow(RELEASE_ATTEMPTS + 1), renewal).await;
        }
    }

    /// Sends the sample to the renewal task, which then releases the slot.
    fn finish(&mut self) {
        let outcome = if std::thread::panicking() { Outcome::Failed } else { self.outcome };
        let latency = self.latency.unwrap_or_else(|| self.acquired_at.elapsed());
        if let Some(release) = self.release.take() {
            let _ = release.send(Sample { latency, outcome });
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;
    use crate::{OnError, Status, descriptor};

    fn slot(client: &Client) -> Slot {
        Slot {
            client: client.clone(),
            domain: None,
            descriptors: vec![descriptor! { "user" => "alice" }],
            waited_for: Identities::new(),
            runtime: Handle::current(),
            is_taken: false,
        }
    }

    fn permit(lost: bool, release: Option<oneshot::Sender<Sample>>, renewal: Option<JoinHandle<()>>) -> Permit {
        Permit {
            verdict: Verdict::empty(true, DecidedBy::Server),
            acquired_at: Instant::now(),
            latency: None,
            outcome: Outcome::Success,
            lost: Arc::new(AtomicBool::new(lost)),
            release,
            renewal,
        }
    }

    #[test]
    fn a_slot_is_held_for_the_shortest_known_reset() {
        let hold = |resets: &[Option<u64>]| {
            let status = |reset: &Option<u64>| Status { reset: reset.map(Duration::from_secs), ..Status::default() };
            let statuses = resets.iter().map(status).collect();
            hold_duration(&Verdict { statuses, ..Verdict::empty(true, DecidedBy::Server) })
        };
        assert_eq!(hold(&[Some(5), None, Some(0), Some(3)]), Some(Duration::from_secs(3)));
        assert_eq!((hold(&[]), hold(&[None, Some(0)])), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_response_a_renewal_is_repeated_sooner_and_the_slot_is_not_lost() {
        let client = Client::builder("http://127.0.0.1:1").on_error(OnError::Deny).connect_lazy().unwrap();
        let (_release, released) = oneshot::channel();
        let lost = Arc::new(AtomicBool::new(false));
        tokio::spawn(slot(&client).renew_until_released(Some(Duration::from_secs(12)), released, Arc::clone(&lost)));
        sleep(Duration::from_secs(10)).await;
        // The renewals after 4, 5, 6, 7 and 8 seconds have opened the circuit breaker.
        let breaker_was_open = client.inner.endpoints().all()[0].breaker.record_success();
        assert!(breaker_was_open && !lost.load(Relaxed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_waits_until_all_attempts_have_failed() {
        // The listener never accepts the connection, so each attempt ends a millisecond before its timeout.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let client = Client::builder(address).timeout(Duration::from_millis(300)).connect_lazy().unwrap();
        let (release, released) = oneshot::channel();
        let renewal = tokio::spawn(slot(&client).renew_until_released(None, released, Arc::default()));
        let start = Instant::now();
        permit(false, Some(release), Some(renewal)).release().await;
        let expected = 6 * 299 + 50 + 100 + 200 + 400 + 800;
        let took = start.elapsed().as_millis();
        assert!((expected..expected + 50).contains(&took), "{took} ms");
    }

    #[tokio::test(start_paused = true)]
    async fn the_latency_of_a_permit_extends_until_it_is_recorded() {
        let (release, mut released) = oneshot::channel();
        let mut permit = permit(false, Some(release), None);
        advance(Duration::from_secs(2)).await;
        permit.record_latency();
        advance(Duration::from_secs(3)).await;
        drop(permit);
        let expected = Sample { latency: Duration::from_secs(2), outcome: Outcome::Success };
        assert_eq!(released.try_recv().unwrap(), expected);
    }

    #[test]
    fn a_permit_reports_the_loss_of_its_slot() {
        assert!(permit(true, None, None).is_lost() && !permit(false, None, None).is_lost());
    }
}
