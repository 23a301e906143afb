//! Turning away what is least important when this box, or all of them, are too busy: no call to the service for a request.
//!
//! [`sluicegate_common::shedder`] has the law: the lowest class first, more and more of it, then the next; back slowly. Here is
//! what feeds it: a look once a second at how busy the box is, or at what boxes report to the service.

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

pub use sluicegate_common::shedder::Settings;
use sluicegate_common::shedder::{Shedder, share};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until},
};

use crate::Client;

/// Between two decisions of how much to shed.
const TICK: Duration = Duration::from_secs(1);
/// Looks at the box between two ticks.
const LOOKS: u32 = 20;
/// A report holds a few ticks longer than until the next one.
const LIFE: Duration = Duration::from_secs(5);

/// By what a box knows that it is too busy.
#[derive(Clone, Debug)]
pub enum Signal {
    /// The share of its workers that have a request: so many there are.
    Busy(usize),
    /// For how long what is ready waits until it runs: with this delay the box is as busy as [`Settings::busy`] says, and with a
    /// quarter more it has nothing to spare.
    Delay(Duration),
    /// What the boxes of a resource report to the service, on average: for gateways that shed before a box is reached. While
    /// nobody can be asked, or nobody reports, what is shed stays as it is.
    Reported(Client, String),
}

/// How much is shed, and of what. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct LoadShedder {
    shared: Arc<Shared>,
}

struct Shared {
    classes: Vec<Class>,
    signal: Signal,
    report: Option<(Client, String, String)>,
    settings: Settings,
    in_flight: AtomicUsize,
    /// The bits of the shedder's level, and of the utilization that it was told last.
    level: AtomicU64,
    utilization: AtomicU64,
    began: Instant,
    ticking: OnceLock<()>,
}

struct Class {
    name: String,
    passed: AtomicU64,
    shed: AtomicU64,
    /// Since when some of it is shed.
    since: Mutex<Option<Instant>>,
}

/// What has become of the requests of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassCount {
    /// Its name.
    pub name: String,
    /// Requests that passed.
    pub passed: u64,
    /// Those that were turned away.
    pub shed: u64,
    /// For how long some of it have been shed, if any are now.
    pub shedding_for: Option<Duration>,
}

/// Stripe's classes.
pub const CLASSES: [&str; 4] = ["critical", "post", "get", "test"];

impl LoadShedder {
    /// Of [`CLASSES`], by the defaults.
    #[must_use]
    pub fn new(signal: Signal) -> Self {
        Self::of(signal, CLASSES, Settings::default())
    }

    /// Of these classes, the most important first, which is never shed.
    #[must_use]
    pub fn of<C: Into<String>>(signal: Signal, classes: impl IntoIterator<Item = C>, settings: Settings) -> Self {
        let class = |name: C| Class {
            name: name.into(),
            passed: AtomicU64::new(0),
            shed: AtomicU64::new(0),
            since: Mutex::default(),
        };
        let shared = Shared {
            classes: classes.into_iter().map(class).collect(),
            signal,
            report: None,
            settings,
            in_flight: AtomicUsize::new(0),
            level: AtomicU64::new(0_f64.to_bits()),
            utilization: AtomicU64::new(0_f64.to_bits()),
            began: Instant::now(),
            ticking: OnceLock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Reports to the service how busy this box is, once a second, as this reporter of a resource. Before it is used.
    #[must_use]
    pub fn reporting(mut self, client: Client, resource: impl Into<String>, reporter: impl Into<String>) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.report = Some((client, resource.into(), reporter.into()));
        }
        self
    }

    /// The place of a class; of a name that is not there, the last one's.
    #[must_use]
    pub fn class(&self, name: &str) -> usize {
        let classes = &self.shared.classes;
        classes.iter().position(|class| class.name == name).unwrap_or(classes.len().saturating_sub(1))
    }

    /// Whether a request of this class may pass, which is then in flight. `key` chooses who is shed first: the same key is
    /// treated alike for as long as the level stays. Begins to look at the box, on the tokio runtime that this is called on.
    pub fn admit(&self, class: usize, key: u64) -> Option<InFlight> {
        self.begin();
        let shared = &self.shared;
        let part = share(f64::from_bits(shared.level.load(Relaxed)), class, shared.classes.len().max(2));
        // Spread over all numbers: keys may be counted up.
        let draw = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11) as f64 / (1_u64 << 53) as f64;
        let passes = draw >= part;
        if let Some(class) = shared.classes.get(class.min(shared.classes.len().saturating_sub(1))) {
            let counter = if passes { &class.passed } else { &class.shed };
            counter.fetch_add(1, Relaxed);
        }
        passes.then(|| {
            shared.in_flight.fetch_add(1, Relaxed);
            InFlight(Arc::clone(shared))
        })
    }

    /// How much is shed: 1 is all of the last class, 2 all of the last two.
    #[must_use]
    pub fn level(&self) -> f64 {
        f64::from_bits(self.shared.level.load(Relaxed))
    }

    /// How busy the box was, or all of them, in the last second.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        f64::from_bits(self.shared.utilization.load(Relaxed))
    }

    /// What has become of the requests of each class.
    #[must_use]
    pub fn counts(&self) -> Vec<ClassCount> {
        let count = |class: &Class| ClassCount {
            name: class.name.clone(),
            passed: class.passed.load(Relaxed),
            shed: class.shed.load(Relaxed),
            shedding_for: class.since.lock().unwrap_or_else(PoisonError::into_inner).map(|since| since.elapsed()),
        };
        self.shared.classes.iter().map(count).collect()
    }

    fn begin(&self) {
        // Where there is no runtime nothing is shed.
        if self.shared.ticking.get().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            self.shared.ticking.get_or_init(|| {
                runtime.spawn(tick(Arc::downgrade(&self.shared)));
            });
        }
    }
}

/// A request that is being served.
pub struct InFlight(Arc<Shared>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// Looks at the box for as long as somebody asks it.
async fn tick(shared: Weak<Shared>) {
    let Some(mut shedder) = shared.upgrade().map(|shared| Shedder::new(shared.classes.len(), shared.settings)) else {
        return;
    };
    loop {
        let (mut busy, mut late) = (0.0, Duration::ZERO);
        for _ in 0..LOOKS {
            let due = Instant::now() + TICK / LOOKS;
            sleep_until(due).await;
            late = late.max(due.elapsed());
            let Some(shared) = shared.upgrade() else {
                return;
            };
            busy += shared.in_flight.load(Relaxed) as f64 / f64::from(LOOKS);
        }
        let Some(shared) = shared.upgrade() else {
            return;
        };
        shared.tick(&mut shedder, busy, late).await;
    }
}

impl Shared {
    async fn tick(&self, shedder: &mut Shedder, busy: f64, late: Duration) {
        let utilization = match &self.signal {
            Signal::Busy(workers) => busy / (*workers).max(1) as f64,
            Signal::Delay(target) => self.settings.busy * late.as_secs_f64() / target.as_secs_f64().max(f64::EPSILON),
            Signal::Reported(client, resource) => {
                let said = client.utilization(resource).await.ok().filter(|said| said.reporters > 0);
                // What nobody knows is no reason for more, nor for less.
                said.map_or(f64::midpoint(self.settings.calm, self.settings.busy), |said| said.mean)
            }
        };
        shedder.tick(self.began.elapsed(), utilization);
        self.level.store(shedder.level().to_bits(), Relaxed);
        self.utilization.store(utilization.to_bits(), Relaxed);
        for (place, class) in self.classes.iter().enumerate() {
            let mut since = class.since.lock().unwrap_or_else(PoisonError::into_inner);
            *since = (shedder.share(place) > 0.0).then(|| since.unwrap_or_else(Instant::now));
        }
        if let Some((client, resource, reporter)) = &self.report {
            let _ = client.report(resource, reporter, utilization.clamp(0.0, 1.0), LIFE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many of a hundred keys pass.
    fn passing(shedding: &LoadShedder, class: usize) -> usize {
        (0..1_000).filter(|key| shedding.admit(class, *key).is_some()).count() / 10
    }

    #[tokio::test(start_paused = true)]
    async fn a_box_that_is_full_sheds_the_least_important_first() {
        let shedding = LoadShedder::new(Signal::Busy(10));
        let busy: Vec<_> = (0..10).map(|key| shedding.admit(0, key)).collect();
        assert_eq!([0, 1, 2, 3].map(|class| passing(&shedding, class)), [100; 4]);
        tokio::time::sleep(Duration::from_millis(58_900)).await;
        assert_eq!(shedding.utilization(), 1.0);
        let passed = [0, 1, 2, 3].map(|class| passing(&shedding, class));
        assert!(passed[..3] == [100; 3] && (44..=54).contains(&passed[3]), "{passed:?}");
        // Who passes, passes again.
        let of = |shedding: &LoadShedder| (0..100).filter(|key| shedding.admit(3, *key).is_some()).collect::<Vec<_>>();
        assert_eq!(of(&shedding), of(&shedding));
        let counts = shedding.counts();
        assert_eq!((counts[3].name.as_str(), counts[0].shed, counts[2].shedding_for), ("test", 0, None));
        assert!(counts[3].shed > 400 && counts[3].shedding_for > Some(Duration::from_secs(25)), "{counts:?}");
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!([0, 1, 2, 3].map(|class| passing(&shedding, class)), [100, 0, 0, 0]);
        drop(busy);
        tokio::time::sleep(Duration::from_secs(28 + 720 + 5)).await;
        assert_eq!(([0, 1, 2, 3].map(|class| passing(&shedding, class)), shedding.level()), ([100; 4], 0.0));
        assert_eq!((shedding.class("post"), shedding.class("nobody")), (1, 3));
    }

    #[test]
    fn without_a_runtime_nothing_is_shed() {
        let shedding = LoadShedder::of(Signal::Busy(0), ["a"], Settings::default());
        assert!((0..100).all(|key| shedding.admit(7, key).is_some()));
    }
}
