//! [`RateLimiter`]: rate limits in the process that uses them, without a service.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use arc_swap::ArcSwap;
use sluicegate_metrics::{Meter, WorkerId};
use sluicegate_rules::{
    Diagnostic, Entry, Options, RuleSet, SourceFile,
    source::{Contents, LoadError, Source},
};
use sluicegate_store::{Memory, memory};
use smallvec::smallvec;

use super::{
    Clock, Descriptor, Engine, Request, Resources, Settings, Snapshot, Statistics, StatisticsSettings, Verdict,
    wait_queue::{QueueKey, WaitQueues, queue_key},
};

/// Maximum number of stripes of the statistics. More threads share stripes.
const MAX_STRIPES: usize = 64;

/// Rate limits by rules, with counters in the memory of this process. Clones share rules and counters.
///
/// A decision is a plain function that takes one or two microseconds, and waits for nothing but the lock of a counter.
/// All algorithms and keywords of rule files are available, except that no other process knows the counters.
///
/// This interface is unstable: it can change in each minor version.
///
/// ```
/// use sluicegate_engine::RateLimiter;
///
/// let limiter = RateLimiter::from_rules(
///     "domain: api
/// descriptors:
/// - key: user
///   rate_limit: {unit: minute, requests_per_unit: 2}",
/// )?;
/// assert!(!limiter.check("api", &[("user", "bob")]).is_denied());
/// assert!(!limiter.check("api", &[("user", "bob")]).is_denied());
/// let verdict = limiter.check("api", &[("user", "bob")]);
/// assert!(verdict.is_denied() && verdict.retry_after().is_some());
/// assert!(!limiter.check("api", &[("user", "eve")]).is_denied());
/// # Ok::<(), sluicegate_engine::LoadError>(())
/// ```
#[derive(Clone)]
pub struct RateLimiter(Arc<Shared>);

struct Shared {
    /// One engine for each stripe of the statistics.
    engines: Vec<Engine<()>>,
    memory: Arc<Memory>,
    rules: Arc<ArcSwap<Snapshot>>,
    statistics: Arc<Statistics>,
    resources: Resources,
    clock: Clock,
    wait_queues: WaitQueues,
    options: Options,
    folder: Option<PathBuf>,
}

/// Options of a [`RateLimiter`].
#[derive(Clone, Debug)]
pub struct Builder {
    clock: Clock,
    max_counters: usize,
    settings: Settings,
    options: Options,
}

impl Builder {
    /// Sets the clock. A test sets the time of a [`Clock::Manual`] by hand.
    #[must_use]
    pub fn clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Sets the maximum number of counters, of about 45 bytes each. If all are in use, a new one replaces one of those that
    /// expire first.
    #[must_use]
    pub fn max_counters(self, max_counters: usize) -> Self {
        Self { max_counters, ..self }
    }

    /// Sets the settings that apply to all rules, such as shadow mode.
    #[must_use]
    pub fn settings(self, settings: Settings) -> Self {
        Self { settings, ..self }
    }

    /// Sets how rule files are compiled.
    #[must_use]
    pub fn options(self, options: Options) -> Self {
        Self { options, ..self }
    }

    /// Creates a rate limiter by the files `*.yaml` and `*.yml` of a folder.
    ///
    /// # Errors
    ///
    /// Returns an error if the folder cannot be read, or all errors and warnings of the files if there is an error.
    pub fn folder(self, folder: impl Into<PathBuf>) -> Result<RateLimiter, LoadError> {
        let folder = folder.into();
        let (rules, _) = compile_folder(&folder, self.options)?;
        Ok(self.build(rules, Some(folder)))
    }

    /// Creates a rate limiter by the text of a rule file.
    ///
    /// # Errors
    ///
    /// Returns all errors and warnings of the text if there is an error.
    pub fn rules(self, text: &str) -> Result<RateLimiter, LoadError> {
        let (rules, _) = compile_text(text, self.options)?;
        Ok(self.build(rules, None))
    }

    fn build(self, rules: RuleSet, folder: Option<PathBuf>) -> RateLimiter {
        let stripes = match thread::available_parallelism() {
            Ok(threads) => threads.get().min(MAX_STRIPES),
            Err(_) => 1,
        };
        let near_limit_ratio = self.settings.near_limit_ratio;
        let statistics = Statistics::new(stripes, StatisticsSettings { max_dynamic_series: 0, near_limit_ratio });
        let resources = Resources::default();
        let snapshot = Snapshot::new(rules, &statistics, &resources);
        let memory = Arc::new(Memory::new(&memory::Settings { max_counters: self.max_counters }));
        let engine = Engine {
            worker: WorkerId(0),
            scope: "",
            store: (),
            local: Arc::clone(&memory),
            rules: Arc::new(ArcSwap::from_pointee(snapshot)),
            statistics: Arc::clone(&statistics),
            top: None,
            settings: Arc::new(self.settings),
        };
        let engines = (0..stripes).map(|stripe| Engine { worker: WorkerId(stripe), ..engine.clone() }).collect();
        RateLimiter(Arc::new(Shared {
            engines,
            memory,
            rules: engine.rules,
            statistics,
            resources,
            wait_queues: WaitQueues::new(self.clock.clone()),
            clock: self.clock,
            options: self.options,
            folder,
        }))
    }
}

impl RateLimiter {
    /// Returns options for a rate limiter: the system's clock, ten million counters, and verdicts with the metadata and the
    /// policies of rules.
    #[must_use]
    pub fn builder() -> Builder {
        let settings = Settings { metadata: true, policies: true, ..Settings::default() };
        let max_counters = memory::Settings::default().max_counters;
        Builder { clock: Clock::System, max_counters, settings, options: Options::default() }
    }

    /// Creates a rate limiter by the files `*.yaml` and `*.yml` of a folder.
    ///
    /// # Errors
    ///
    /// Returns an error if the folder cannot be read, or all errors and warnings of the files if there is an error.
    pub fn from_folder(folder: impl Into<PathBuf>) -> Result<Self, LoadError> {
        Self::builder().folder(folder)
    }

    /// Creates a rate limiter by the text of a rule file.
    ///
    /// # Errors
    ///
    /// Returns all errors and warnings of the text if there is an error.
    pub fn from_rules(text: &str) -> Result<Self, LoadError> {
        Self::builder().rules(text)
    }

    /// Takes one hit of a descriptor, given as its keys and values, and returns the verdict.
    ///
    /// A descriptor without a rule is allowed.
    #[must_use]
    pub fn check(&self, domain: &str, entries: &[(&str, &str)]) -> Verdict {
        self.check_hits(domain, entries, 1)
    }

    /// Takes some hits of a descriptor, and returns the verdict. 0 hits take nothing.
    #[must_use]
    pub fn check_hits(&self, domain: &str, entries: &[(&str, &str)], hits: u64) -> Verdict {
        self.check_request(&request(domain, entries, hits))
    }

    /// Decides a request, which can have several descriptors, refunds and limits of its own. The number of hits must be
    /// [bounded](crate::bound_hits).
    #[must_use]
    pub fn check_request(&self, request: &Request<'_>) -> Verdict {
        let verdict = self.decide(request);
        if request.descriptors.iter().any(|descriptor| descriptor.refund) {
            self.0.wait_queues.wake_first(|| self.queue_key(request));
        }
        verdict
    }

    /// Takes one hit of a descriptor, and blocks the thread at most `max_wait` until the limit allows it.
    ///
    /// - **When**: a denied request is decided again when its retry-after has passed, or when a request refunds hits of
    ///   its counters, for instance a slot of a concurrency limit. A denial is returned immediately if its retry-after ends
    ///   after the maximum wait, or if the limit never allows the request.
    /// - **Order**: threads that wait for the same counters are served in the order of their arrival, also if their costs
    ///   differ: a small request waits behind a large one. Other requests can overtake them.
    /// - **Delay**: the delay of an allowed request is awaited, too, and is zero afterwards. If it ends after the maximum
    ///   wait, the verdict is returned immediately, and contains the delay.
    /// - **Clock**: a clock that is set by hand is read every millisecond.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use sluicegate_engine::RateLimiter;
    ///
    /// let rules = "domain: mail
    /// descriptors:
    /// - key: host
    ///   rate_limit: {unit: second, requests_per_unit: 100, algorithm: gcra, burst: 1}";
    /// let limiter = RateLimiter::from_rules(rules)?;
    /// for _ in 0..3 {
    ///     assert!(!limiter.blocking_check("mail", &[("host", "example.com")], Duration::from_secs(5)).is_denied());
    /// }
    /// # Ok::<(), sluicegate_engine::LoadError>(())
    /// ```
    #[must_use]
    pub fn blocking_check(&self, domain: &str, entries: &[(&str, &str)], max_wait: Duration) -> Verdict {
        self.blocking_check_request(&request(domain, entries, 1), max_wait)
    }

    /// Decides a request as [`check_request`](Self::check_request) does, and blocks the thread at most `max_wait` until it
    /// is allowed. See [`blocking_check`](Self::blocking_check).
    #[must_use]
    pub fn blocking_check_request(&self, request: &Request<'_>, max_wait: Duration) -> Verdict {
        if max_wait.is_zero() {
            return self.check_request(request);
        }
        self.0.wait_queues.wait(request, self.queue_key(request), max_wait, || self.check_request(request))
    }

    #[cfg(test)]
    pub(crate) fn wait_queues(&self) -> &WaitQueues {
        &self.0.wait_queues
    }

    /// Returns the key of a request's wait queue.
    fn queue_key(&self, request: &Request<'_>) -> QueueKey {
        queue_key(request, &self.0.rules.load().compiled.rules)
    }

    fn decide(&self, request: &Request<'_>) -> Verdict {
        let shared = &*self.0;
        let engine = &shared.engines[stripe() % shared.engines.len()];
        let verdict = engine.decide_in(&shared.memory, request, shared.clock.now());
        // There are rules from the beginning, and memory does not fail.
        debug_assert!(verdict.is_ok(), "{verdict:?}");
        verdict.unwrap_or_else(|_| Verdict::without_limits(request))
    }

    /// Reads the folder again, and puts its rules in force. Counters stay as they are. Returns the warnings.
    ///
    /// Without a folder, nothing changes.
    ///
    /// # Errors
    ///
    /// Returns an error if the folder cannot be read, or all errors and warnings of the files if there is an error. The
    /// former rules then stay in force.
    pub fn reload(&self) -> Result<Vec<Diagnostic>, LoadError> {
        let Some(folder) = &self.0.folder else {
            return Ok(Vec::new());
        };
        let (rules, warnings) = compile_folder(folder, self.0.options)?;
        self.set(rules);
        Ok(warnings)
    }

    /// Puts the rules of a text in force. Counters stay as they are. Returns the warnings.
    ///
    /// # Errors
    ///
    /// Returns all errors and warnings of the text if there is an error. The former rules then stay in force.
    pub fn set_rules(&self, text: &str) -> Result<Vec<Diagnostic>, LoadError> {
        let (rules, warnings) = compile_text(text, self.0.options)?;
        self.set(rules);
        Ok(warnings)
    }

    fn set(&self, rules: RuleSet) {
        let snapshot = Snapshot::new(rules, &self.0.statistics, &self.0.resources);
        self.0.rules.store(Arc::new(snapshot));
        self.0.wait_queues.wake_all();
    }

    /// Frees the memory of some expired counters. New counters do so, too; a process that takes no more hits can call this
    /// periodically.
    pub fn reclaim(&self) {
        self.0.memory.reclaim(self.0.clock.now());
    }

    /// Returns the number of counters, and how many of them were evicted.
    #[must_use]
    pub fn usage(&self) -> memory::Usage {
        self.0.memory.usage()
    }

    /// Registers the metrics of rules, under the names of the service.
    pub fn observe(&self, meter: &dyn Meter) {
        let clock = self.0.clock.clone();
        self.0.statistics.observe(meter, move || clock.now());
    }
}

/// Returns a request that takes some hits of one descriptor.
fn request<'a>(domain: &'a str, entries: &[(&'a str, &'a str)], hits: u64) -> Request<'a> {
    let entries = entries.iter().map(|&(key, value)| Entry { key, value }).collect();
    let descriptor = Descriptor { hits: crate::bound_hits(hits), ..Descriptor::new(entries) };
    Request { domain, descriptors: smallvec![descriptor], feedback: Vec::new() }
}

fn compile_folder(folder: &Path, options: Options) -> Result<(RuleSet, Vec<Diagnostic>), LoadError> {
    let contents = Source::directory(folder.to_owned()).read_contents()?;
    contents.compile(options).map_err(LoadError::Invalid)
}

fn compile_text(text: &str, options: Options) -> Result<(RuleSet, Vec<Diagnostic>), LoadError> {
    let file = SourceFile { name: "rules".to_owned(), text: text.to_owned() };
    let contents = Contents { files: vec![file], diagnostics: Vec::new() };
    contents.compile(options).map_err(LoadError::Invalid)
}

/// Returns the number of the current thread, which selects its stripe of the statistics.
fn stripe() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static STRIPE: usize = THREADS.fetch_add(1, Relaxed);
    }
    STRIPE.with(|stripe| *stripe)
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::atomic::AtomicU64};

    use super::*;
    use crate::headers;

    const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: {unit: minute, requests_per_unit: 2}\n";

    fn is_allowed(limiter: &RateLimiter) -> bool {
        !limiter.check("api", &[("user", "bob")]).is_denied()
    }

    #[test]
    fn a_denial_says_when_to_come_back() {
        let time = Arc::new(AtomicU64::new(60_000_000 * 1_000_000 + 15_000_000));
        let clock = Clock::Manual(Arc::clone(&time));
        let limiter = RateLimiter::builder().clock(clock).rules(RULES).unwrap();
        assert!(is_allowed(&limiter) && is_allowed(&limiter));
        let verdict = limiter.check("api", &[("user", "bob")]);
        let expected =
            [("RateLimit-Policy", "\"user\";q=2;w=60"), ("RateLimit", "\"user\";r=0;t=45"), ("Retry-After", "45")];
        assert_eq!(headers::all(&verdict), expected.map(|(name, value)| (name, value.to_owned())));
        time.fetch_add(verdict.retry_after().unwrap().get(), Relaxed);
        assert!(is_allowed(&limiter));
    }

    #[test]
    fn a_reload_keeps_the_counters_and_an_invalid_file_keeps_the_rules() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.yaml");
        fs::write(&path, RULES).unwrap();
        let limiter = RateLimiter::from_folder(folder.path()).unwrap();
        assert!(is_allowed(&limiter) && is_allowed(&limiter) && !is_allowed(&limiter));
        fs::write(&path, RULES.replace("unit: 2", "unit: 5")).unwrap();
        assert!(limiter.reload().unwrap().is_empty());
        assert!(is_allowed(&limiter), "three of five hits are counted, with the denied one");
        fs::write(&path, "domain: api\ndescriptors: 7\n").unwrap();
        assert!(matches!(limiter.reload(), Err(LoadError::Invalid(errors)) if errors.len() == 1));
        assert!(is_allowed(&limiter) && !is_allowed(&limiter), "the former rules stay in force");
        limiter.set_rules(RULES).unwrap();
        assert!(!is_allowed(&limiter));
        assert_eq!(limiter.usage().counters, 1);
    }

    #[test]
    fn several_threads_share_a_limit_exactly() {
        let limiter =
            RateLimiter::from_rules(&RULES.replace("unit: 2", "unit: 1000").replace("minute", "year")).unwrap();
        let allowed: usize = thread::scope(|scope| {
            let take = || (0..500).filter(|_| is_allowed(&limiter)).count();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(allowed, 1_000);
    }

    #[test]
    fn unknown_descriptors_and_empty_requests_are_allowed() {
        let limiter = RateLimiter::from_rules(RULES).unwrap();
        assert!(!limiter.check("other", &[("user", "bob")]).is_denied());
        assert!(!limiter.check("", &[]).is_denied());
        assert!(limiter.check_hits("api", &[("user", "bob")], u64::MAX).is_denied());
    }
}
