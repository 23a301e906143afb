//! A slot of a concurrency limit that is held for as long as its permit lives, and not longer.

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
    check_request::{Descriptor, Outcome, Sample},
    client::Client,
    verdict::{DecidedBy, Verdict},
};

/// The entry that names who has a slot, if nothing else is said.
pub(crate) const HOLDER: &str = "holder";
/// Of the time that a slot is held, so much passes until it is renewed.
const RENEWED_AFTER: f64 = 1.0 / 3.0;
/// Between two attempts, when an attempt to renew or to give back was not heard.
const PAUSE: Duration = Duration::from_millis(50);
/// So many attempts, each pause twice as long as the one before.
const ATTEMPTS: u32 = 6;

/// Asks for a permit when it is awaited. See [`Client::acquire`].
#[must_use = "nothing is asked before it is awaited"]
pub struct Acquire<'c> {
    client: &'c Client,
    descriptors: Vec<Descriptor<'static>>,
    holder: Cow<'c, str>,
    domain: Option<String>,
    deadline: Option<Duration>,
}

impl Client {
    /// Takes a slot of limits that say how much may be in flight at once (`algorithm: concurrency` or `adaptive`, with a
    /// `holder`), and holds it until the permit is dropped.
    ///
    /// The slot has a name that nobody else has, in an entry behind those of each descriptor; it is renewed for as long as the
    /// permit lives, and given back when it is dropped: at the end of its scope, when its task is cancelled, when it panics. If
    /// all of this process dies, it ends by itself.
    ///
    /// ```no_run
    /// # async fn example(limiter: sluicegate_client::Client) {
    /// use sluicegate_client::descriptor;
    ///
    /// match limiter.acquire([descriptor! { "user" => "alice" }]).await {
    ///     Ok(permit) => {
    ///         // Here it runs.
    ///         drop(permit);
    ///     }
    ///     Err(verdict) => println!("come back in {:?}", verdict.retry_after()),
    /// }
    /// # }
    /// ```
    pub fn acquire<'d>(&self, descriptors: impl IntoIterator<Item = Descriptor<'d>>) -> Acquire<'_> {
        let descriptors = descriptors.into_iter().map(|descriptor| descriptor.owned()).collect();
        Acquire { client: self, descriptors, holder: HOLDER.into(), domain: None, deadline: None }
    }
}

impl<'c> Acquire<'c> {
    /// The key of the entry that names who has the slot, as the rule's `holder` has it; `holder` if this is not called.
    pub fn holder(mut self, key: impl Into<Cow<'c, str>>) -> Self {
        self.holder = key.into();
        self
    }

    /// By other rules than the client's.
    pub fn domain(mut self, domain: impl Into<String>) -> Self {
        self.domain = Some(domain.into());
        self
    }

    /// The answer is wanted sooner than the client's deadline.
    pub fn within(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    async fn ask(self) -> Result<Permit, Box<Verdict>> {
        let name = format!("{:032x}", rand::random::<u128>());
        let named = |descriptor: Descriptor<'static>| descriptor.entry(self.holder.clone().into_owned(), name.clone());
        let slot = Slot {
            client: self.client.clone(),
            domain: self.domain,
            descriptors: self.descriptors.into_iter().map(named).collect(),
            runtime: Handle::current(),
            is_taken: true,
        };
        let began = Instant::now();
        let verdict = slot.take(self.deadline).await;
        if !verdict.allowed() {
            return Err(Box::new(slot.refused(verdict)));
        }
        let lost = Arc::new(AtomicBool::new(false));
        let (end, ended) = oneshot::channel();
        let overrides = tokio::spawn(slot.keep(hold(&verdict), ended, Arc::clone(&lost)));
        Ok(Permit {
            verdict,
            began,
            latency: None,
            outcome: Outcome::Success,
            lost,
            end: Some(end),
            overrides: Some(overrides),
        })
    }
}

impl<'c> IntoFuture for Acquire<'c> {
    type Output = Result<Permit, Box<Verdict>>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'c>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.ask())
    }
}

/// For how long a slot that has just been taken, or renewed, is held: it is the one that ends last. `None` when nobody
/// said, because there is no such limit or nobody could be asked.
fn hold(verdict: &Verdict) -> Option<Duration> {
    verdict.statuses().iter().filter_map(|status| status.reset).filter(|reset| !reset.is_zero()).min()
}

/// A slot in somebody's hands: given back when it is dropped.
struct Slot {
    client: Client,
    domain: Option<String>,
    descriptors: Vec<Descriptor<'static>>,
    runtime: Handle,
    is_taken: bool,
}

impl Slot {
    /// Takes it, or renews it: whoever has it keeps it.
    async fn take(&self, deadline: Option<Duration>) -> Verdict {
        let mut check = self.client.check(self.descriptors.iter().map(Descriptor::borrowed));
        if let Some(domain) = &self.domain {
            check = check.domain(domain.as_str());
        }
        if let Some(deadline) = deadline {
            check = check.within(deadline);
        }
        check.await
    }

    /// The service says that it has not been taken. When nobody could be asked, nobody knows: then it is given back.
    fn refused(mut self, verdict: Verdict) -> Verdict {
        self.is_taken = verdict.decided_by() == DecidedBy::Fallback;
        verdict
    }

    /// Renews it until its permit has gone, and gives it back. One after the other: a renewal that is under way when the permit
    /// goes would take the slot anew if it came later.
    async fn keep(mut self, mut hold: Option<Duration>, mut ended: oneshot::Receiver<Sample>, lost: Arc<AtomicBool>) {
        let mut wait = hold;
        loop {
            let renewal = async {
                match wait {
                    Some(wait) => sleep(wait.mul_f64(RENEWED_AFTER)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                sample = &mut ended => {
                    self.is_taken = false;
                    return self.give_back(sample.ok()).await;
                }
                () = renewal => {}
            }
            let verdict = self.take(None).await;
            match verdict.decided_by() {
                // Nobody heard it: again soon, while there is time.
                DecidedBy::Fallback => wait = hold.map(|hold| hold / 4),
                _ => {
                    lost.store(!verdict.allowed(), Relaxed);
                    hold = self::hold(&verdict).or(hold);
                    wait = hold;
                }
            }
        }
    }

    /// Until the service has heard it: by its name it is given back once, however often it is said.
    async fn give_back(&self, sample: Option<Sample>) {
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                sleep(PAUSE * 2_u32.pow(attempt - 1)).await;
            }
            let back = self.descriptors.iter().map(|descriptor| descriptor.borrowed().refund());
            let mut check = self.client.check(back);
            if let Some(domain) = &self.domain {
                check = check.domain(domain.as_str());
            }
            if check.sample(sample).strict().await.is_ok() {
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
                runtime: self.runtime.clone(),
                is_taken: false,
            };
            // Where the runtime is gone nobody runs it, and the slot ends by itself.
            self.runtime.spawn(async move { slot.give_back(None).await });
        }
    }
}

/// A slot that is held. Dropped, it is given back.
#[must_use = "dropped, it gives its slot back"]
#[derive(Debug)]
pub struct Permit {
    verdict: Verdict,
    began: Instant,
    latency: Option<Duration>,
    outcome: Outcome,
    lost: Arc<AtomicBool>,
    end: Option<oneshot::Sender<Sample>>,
    overrides: Option<JoinHandle<()>>,
}

impl Permit {
    /// What the service said.
    #[must_use]
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// Whether the slot has ended meanwhile and somebody else has taken it: nobody could be asked for as long as it was held.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// How what it was held for has ended, for limits that follow latency; [`Outcome::Success`] if nobody says otherwise. A
    /// permit that is dropped by a panic has failed.
    pub fn ended(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// It has taken from the permit's beginning until now, and not until the permit is dropped: for what answers first and
    /// goes on for a while then.
    pub fn answered(&mut self) {
        self.latency.get_or_insert_with(|| self.began.elapsed());
    }

    /// Gives it back, and waits until the service has heard that, or cannot be reached.
    pub async fn give_back(mut self) {
        self.end();
        if let Some(overrides) = self.overrides.take() {
            let _ = timeout(PAUSE * 2_u32.pow(ATTEMPTS + 1), overrides).await;
        }
    }

    fn end(&mut self) {
        let outcome = if std::thread::panicking() { Outcome::Failed } else { self.outcome };
        let latency = self.latency.unwrap_or_else(|| self.began.elapsed());
        if let Some(end) = self.end.take() {
            let _ = end.send(Sample { latency, outcome });
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.end();
    }
}
