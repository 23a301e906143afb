//! Which instance is asked.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use sluicegate_common::Ring;

use crate::{ask::Ask, endpoint::Endpoint};

/// How checks are spread over several instances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// By consistent hashing of the descriptor: one user's checks meet in one instance, which makes its caches worth most.
    #[default]
    ByDescriptor,
    /// The same by these entries of the first descriptor, as the service's `shard_by` has it; by all where it has none.
    ByEntries(Vec<String>),
    /// In turn.
    RoundRobin,
}

/// An instance may have so much more than the mean of all before the next one is asked instead.
const UNEVEN: f64 = 1.25;
/// So few checks under way are no load.
const NO_LOAD: usize = 64;

/// The instances that are known now.
pub(crate) struct Endpoints {
    all: Vec<Arc<Endpoint>>,
    ring: Ring,
    turn: AtomicUsize,
}

impl Endpoints {
    pub(crate) fn new(all: Vec<Arc<Endpoint>>) -> Self {
        let ring = Ring::new(all.iter().map(|endpoint| (&*endpoint.name, 1)));
        Self { all, ring, turn: AtomicUsize::new(0) }
    }

    pub(crate) fn all(&self) -> &[Arc<Endpoint>] {
        &self.all
    }

    /// The one to ask, of those that are worth it: first among equals is the placement's, unless it has far more to do than
    /// the others.
    pub(crate) fn choose(
        &self,
        routing: &Routing,
        ask: &Ask<'_>,
        now: Duration,
        but: Option<&Arc<Endpoint>>,
    ) -> Option<&Arc<Endpoint>> {
        if let [only] = self.all.as_slice() {
            return (but.is_none() && only.breaker.admits(now)).then_some(only);
        }
        let total: usize = self.all.iter().map(|endpoint| endpoint.load()).sum();
        let most = ((total as f64 / self.all.len() as f64 * UNEVEN) as usize).max(NO_LOAD);
        let is_other = |place: usize| but.is_none_or(|but| !Arc::ptr_eq(but, &self.all[place]));
        let may = |place: usize| is_other(place) && self.all[place].breaker.may_admit(now);
        let has_room = |place: usize| may(place) && self.all[place].load() <= most;
        let first = |among: &dyn Fn(usize) -> bool| match routing {
            Routing::RoundRobin => self.next(among),
            Routing::ByDescriptor => self.ring.node_among(&ask.shard(&[]), among),
            Routing::ByEntries(entries) => self.ring.node_among(&ask.shard(entries), among),
        };
        let place = first(&has_room).or_else(|| first(&may))?;
        if self.all[place].breaker.admits(now) {
            return Some(&self.all[place]);
        }
        // Somebody else probes it just now.
        let place = first(&|other| other != place && may(other))?;
        Some(&self.all[place]).filter(|endpoint| endpoint.breaker.admits(now))
    }

    fn next(&self, among: impl Fn(usize) -> bool) -> Option<usize> {
        let turn = self.turn.fetch_add(1, Relaxed);
        (0..self.all.len()).map(|step| turn.wrapping_add(step) % self.all.len()).find(|place| among(*place))
    }
}
