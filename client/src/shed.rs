//! [`LoadShedder`]: sheds the least important requests while this host, or a group of hosts, is overloaded. No request
//! needs a call to the rate limit service.
//!
//! The algorithm is in [`sluicegate_overload::shedder`]: it sheds a growing share of the lowest class, then of the next
//! one, and restores them slowly. This module supplies the utilization once a second, measured on this host or reported
//! by a group of hosts to the service.

use std::{
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

pub use sluicegate_overload::shedder::Settings;
use sluicegate_overload::shedder::{Shedder, share};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until},
};

use crate::Client;

use crate::lock::lock;

/// Interval at which [`LoadShedder::level`] is updated.
const TICK: Duration = Duration::from_secs(1);
/// Number of measurements per [`TICK`].
const POLLS_PER_TICK: u32 = 20;
/// Lifetime of a report, long enough that the report stays valid if the next one fails.
const REPORT_TTL: Duration = Duration::from_secs(5);

/// Source of the utilization that a [`LoadShedder`] reacts to.
#[derive(Clone, Debug)]
pub enum Signal {
    /// Number of requests in flight, divided by this number of workers.
    WorkerUtilization(usize),
    /// Delay between a tokio task becoming ready and running. A delay of this length is a utilization of
    /// [`Settings::shed_above`]; with the default settings, a delay longer by a quarter is full utilization.
    SchedulingDelay(Duration),
    /// Mean utilization that the hosts of a resource report to the service, for gateways that shed requests before they
    /// reach a host. While the service is unavailable or there are no reports, the shed share does not change.
    ReportedUtilization(Client, String),
}

/// Load shedder that decides by class and current load which requests to shed.
///
/// A shedder is cheap to clone. All clones share one state.
///
/// # Examples
///
/// ```
/// use sluicegate_client::shed::{LoadShedder, Signal};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let shedder = LoadShedder::new(Signal::WorkerUtilization(64));
/// let class = shedder.class_index("get");
/// let user_id = 17;
/// match shedder.admit(class, user_id) {
///     // Serve the request. It is in flight until the guard is dropped.
///     Some(in_flight) => drop(in_flight),
///     None => println!("503 Service Unavailable"),
/// }
/// # }
/// ```
#[derive(Clone)]
pub struct LoadShedder {
    shared: Arc<Shared>,
}

struct Shared {
    classes: Vec<Class>,
    signal: Signal,
    report: Option<Report>,
    settings: Settings,
    in_flight: AtomicUsize,
    /// Bits of [`LoadShedder::level`] as `f64`.
    level: AtomicU64,
    /// Bits of the last measured utilization as `f64`.
    utilization: AtomicU64,
    started_at: Instant,
    tick_started: OnceLock<()>,
}

/// The destination and the sender of the reports about this host's utilization.
struct Report {
    client: Client,
    resource: String,
    reporter: String,
}

struct Class {
    name: String,
    admitted: AtomicU64,
    shed: AtomicU64,
    /// Time at which shedding of this class began, if it is being shed.
    shedding_since: Mutex<Option<Instant>>,
}

impl Class {
    fn new(name: String) -> Self {
        Self { name, admitted: AtomicU64::new(0), shed: AtomicU64::new(0), shedding_since: Mutex::default() }
    }

    fn count(&self) -> ClassCount {
        let shedding_since = *lock(&self.shedding_since);
        ClassCount {
            name: self.name.clone(),
            admitted: self.admitted.load(Relaxed),
            shed: self.shed.load(Relaxed),
            shedding_for: shedding_since.map(|since| since.elapsed()),
        }
    }
}

/// Number of admitted and shed requests of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassCount {
    /// Name of the class.
    pub name: String,
    /// Number of admitted requests.
    pub admitted: u64,
    /// Number of shed requests.
    pub shed: u64,
    /// Time since shedding of this class began. `None` if the class is not being shed.
    pub shedding_for: Option<Duration>,
}

/// Default classes, the most important first: those of Stripe's load shedder.
pub const DEFAULT_CLASSES: [&str; 4] = ["critical", "post", "get", "test"];

impl LoadShedder {
    /// Creates a shedder with [`DEFAULT_CLASSES`] and the default [`Settings`].
    #[must_use]
    pub fn new(signal: Signal) -> Self {
        Self::with_classes(signal, DEFAULT_CLASSES, Settings::default())
    }

    /// Creates a shedder with these classes, the most important first. The first class is never shed.
    #[must_use]
    pub fn with_classes<C: Into<String>>(
        signal: Signal,
        classes: impl IntoIterator<Item = C>,
        settings: Settings,
    ) -> Self {
        let shared = Shared {
            classes: classes.into_iter().map(|name| Class::new(name.into())).collect(),
            signal,
            report: None,
            settings,
            in_flight: AtomicUsize::new(0),
            level: AtomicU64::new(0_f64.to_bits()),
            utilization: AtomicU64::new(0_f64.to_bits()),
            started_at: Instant::now(),
            tick_started: OnceLock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Reports this host's utilization to the service once a second, as `reporter` of `resource`.
    ///
    /// This has no effect after the shedder has been cloned.
    #[must_use]
    pub fn report_to(mut self, client: Client, resource: impl Into<String>, reporter: impl Into<String>) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.report = Some(Report { client, resource: resource.into(), reporter: reporter.into() });
        }
        self
    }

    /// Returns the index of a class. An unknown name has the index of the last class.
    #[must_use]
    pub fn class_index(&self, name: &str) -> usize {
        let classes = &self.shared.classes;
        classes.iter().position(|class| class.name == name).unwrap_or(classes.len().saturating_sub(1))
    }

    /// Admits or sheds a request of the class with this index. Returns `None` if the request is shed.
    ///
    /// `key` selects which requests of a class are shed first: while the level stays the same, all requests with the
    /// same key are treated alike. The first call starts the measurement on the current tokio runtime; outside of a
    /// runtime, nothing is shed.
    pub fn admit(&self, class: usize, key: u64) -> Option<InFlight> {
        self.start_ticking();
        let shared = &self.shared;
        let shed_share = share(f64::from_bits(shared.level.load(Relaxed)), class, shared.classes.len().max(2));
        // The multiplication spreads keys over all numbers, because keys may be consecutive.
        let draw = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11) as f64 / (1_u64 << 53) as f64;
        let admitted = draw >= shed_share;
        if let Some(class) = shared.classes.get(class.min(shared.classes.len().saturating_sub(1))) {
            let counter = if admitted { &class.admitted } else { &class.shed };
            counter.fetch_add(1, Relaxed);
        }
        if !admitted {
            return None;
        }
        shared.in_flight.fetch_add(1, Relaxed);
        Some(InFlight(Arc::clone(shared)))
    }

    /// Returns how much is shed, from 0 (nothing): 1 is all of the last class, 2 all of the last two classes.
    #[must_use]
    pub fn level(&self) -> f64 {
        f64::from_bits(self.shared.level.load(Relaxed))
    }

    /// Returns the utilization of the last second; 1 is full utilization.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        f64::from_bits(self.shared.utilization.load(Relaxed))
    }

    /// Returns the number of admitted and shed requests of each class.
    #[must_use]
    pub fn counts(&self) -> Vec<ClassCount> {
        self.shared.classes.iter().map(Class::count).collect()
    }

    fn start_ticking(&self) {
        // Without a runtime, no utilization is measured and nothing is shed.
        if self.shared.tick_started.get().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            self.shared.tick_started.get_or_init(|| {
                runtime.spawn(tick(Arc::downgrade(&self.shared)));
            });
        }
    }
}

/// Guard of an admitted request, which is in flight until the guard is dropped.
pub struct InFlight(Arc<Shared>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// Measures the utilization and updates the level until the shedder is dropped.
async fn tick(shared: Weak<Shared>) {
    let Some(mut shedder) = shared.upgrade().map(|shared| Shedder::new(shared.classes.len(), shared.settings)) else {
        return;
    };
    loop {
        let mut in_flight = 0.0;
        let mut delay = Duration::ZERO;
        for _ in 0..POLLS_PER_TICK {
            let due = Instant::now() + TICK / POLLS_PER_TICK;
            sleep_until(due).await;
            delay = delay.max(due.elapsed());
            let Some(shared) = shared.upgrade() else {
                return;
            };
            in_flight += shared.in_flight.load(Relaxed) as f64 / f64::from(POLLS_PER_TICK);
        }
        let Some(shared) = shared.upgrade() else {
            return;
        };
        shared.tick(&mut shedder, in_flight, delay).await;
    }
}

impl Shared {
    /// Updates the level from the mean number of requests in flight and the longest scheduling delay of the last tick.
    async fn tick(&self, shedder: &mut Shedder, in_flight: f64, delay: Duration) {
        let utilization = match &self.signal {
            Signal::WorkerUtilization(workers) => in_flight / (*workers).max(1) as f64,
            Signal::SchedulingDelay(target) => {
                self.settings.shed_above * delay.as_secs_f64() / target.as_secs_f64().max(f64::EPSILON)
            }
            Signal::ReportedUtilization(client, resource) => match client.utilization(resource).await {
                Ok(reported) if reported.reporters > 0 => reported.mean,
                // Between the two thresholds, an unknown utilization does not change the level.
                _ => f64::midpoint(self.settings.restore_below, self.settings.shed_above),
            },
        };
        shedder.tick(self.started_at.elapsed(), utilization);
        self.level.store(shedder.level().to_bits(), Relaxed);
        self.utilization.store(utilization.to_bits(), Relaxed);
        for (index, class) in self.classes.iter().enumerate() {
            let mut since = lock(&class.shedding_since);
            if shedder.share(index) > 0.0 {
                since.get_or_insert_with(Instant::now);
            } else {
                *since = None;
            }
        }
        if let Some(Report { client, resource, reporter }) = &self.report {
            let _ = client.report_utilization(resource, reporter, utilization.clamp(0.0, 1.0), REPORT_TTL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_proto::sluicegate::v1::{
        self,
        resource_service_server::{ResourceService, ResourceServiceServer},
    };
    use tokio_stream::wrappers::TcpListenerStream;

    use super::*;

    /// Returns the percentage of keys that are admitted.
    fn admitted(shedder: &LoadShedder, class: usize) -> usize {
        (0..1_000).filter(|key| shedder.admit(class, *key).is_some()).count() / 10
    }

    #[tokio::test(start_paused = true)]
    async fn full_utilization_sheds_the_least_important_classes_first() {
        let shedder = LoadShedder::new(Signal::WorkerUtilization(10));
        let busy: Vec<_> = (0..10).map(|key| shedder.admit(0, key)).collect();
        assert_eq!([0, 1, 2, 3].map(|class| admitted(&shedder, class)), [100; 4]);
        tokio::time::sleep(Duration::from_millis(58_900)).await;
        assert_eq!(shedder.utilization(), 1.0);
        let percentages = [0, 1, 2, 3].map(|class| admitted(&shedder, class));
        assert!(percentages[..3] == [100; 3] && (44..=54).contains(&percentages[3]), "{percentages:?}");
        // The same keys are admitted again.
        let keys = |shedder: &LoadShedder| (0..100).filter(|key| shedder.admit(3, *key).is_some()).collect::<Vec<_>>();
        assert_eq!(keys(&shedder), keys(&shedder));
        let counts = shedder.counts();
        assert_eq!((counts[3].name.as_str(), counts[0].shed, counts[2].shedding_for), ("test", 0, None));
        assert!(counts[3].shed > 400 && counts[3].shedding_for > Some(Duration::from_secs(25)), "{counts:?}");
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!([0, 1, 2, 3].map(|class| admitted(&shedder, class)), [100, 0, 0, 0]);
        drop(busy);
        tokio::time::sleep(Duration::from_secs(28 + 720 + 5)).await;
        assert_eq!(([0, 1, 2, 3].map(|class| admitted(&shedder, class)), shedder.level()), ([100; 4], 0.0));
        assert_eq!((shedder.class_index("post"), shedder.class_index("nobody")), (1, 3));
    }

    #[test]
    fn without_a_runtime_nothing_is_shed() {
        let shedder = LoadShedder::with_classes(Signal::WorkerUtilization(0), ["a"], Settings::default());
        assert!((0..100).all(|key| shedder.admit(7, key).is_some()));
    }

    #[tokio::test]
    async fn the_utilization_is_the_scheduling_delay_relative_to_the_target() {
        let shedder = LoadShedder::new(Signal::SchedulingDelay(Duration::from_millis(20)));
        let mut state = Shedder::new(4, Settings::default());
        shedder.shared.tick(&mut state, 0.0, Duration::from_millis(30)).await;
        assert!((shedder.utilization() - 0.8 * 1.5).abs() < 1e-9, "{}", shedder.utilization());
    }

    /// A service that has no reports about any resource.
    struct NoReports;

    #[tonic::async_trait]
    impl ResourceService for NoReports {
        async fn report(
            &self,
            _: tonic::Request<v1::ReportRequest>,
        ) -> Result<tonic::Response<v1::Utilization>, tonic::Status> {
            Err(tonic::Status::unimplemented("report"))
        }

        async fn get(
            &self,
            _: tonic::Request<v1::GetRequest>,
        ) -> Result<tonic::Response<v1::Utilization>, tonic::Status> {
            Ok(tonic::Response::new(v1::Utilization::default()))
        }
    }

    #[tokio::test]
    async fn a_utilization_without_reports_is_between_the_thresholds() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = tonic::transport::Server::builder().add_service(ResourceServiceServer::new(NoReports));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let client = Client::builder(address).timeout(Duration::from_secs(20)).connect_lazy().unwrap();
        assert_eq!(client.utilization("hosts").await.unwrap().reporters, 0);
        let shedder = LoadShedder::new(Signal::ReportedUtilization(client, "hosts".into()));
        shedder.shared.tick(&mut Shedder::new(4, Settings::default()), 0.0, Duration::ZERO).await;
        assert_eq!(shedder.utilization(), 0.75);
    }
}
