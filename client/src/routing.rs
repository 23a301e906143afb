//! Which instance is asked.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use sluicegate_common::Ring;

use crate::{check_request::CheckRequest, endpoint::Endpoint};

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
        ask: &CheckRequest<'_>,
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

    /// One that is worth it, for what any of them can answer.
    pub(crate) fn any(&self, now: Duration) -> Option<&Arc<Endpoint>> {
        self.next(|place| self.all[place].breaker.may_admit(now)).map(|place| &self.all[place])
    }

    fn next(&self, among: impl Fn(usize) -> bool) -> Option<usize> {
        let turn = self.turn.fetch_add(1, Relaxed);
        (0..self.all.len()).map(|step| turn.wrapping_add(step) % self.all.len()).find(|place| among(*place))
    }
}

#[cfg(test)]
mod tests {
    use tonic::{metadata::MetadataMap, transport::Channel};

    use super::*;
    use crate::descriptor;

    const NOW: Duration = Duration::from_secs(1);

    /// Three that nobody calls, with so much to do.
    fn endpoints(loads: [usize; 3]) -> Endpoints {
        let endpoint = |(place, load): (usize, usize)| {
            let channel = Channel::from_static("http://127.0.0.1:1").connect_lazy();
            let endpoint = Endpoint::new(format!("e{place}").into(), channel, MetadataMap::new(), false);
            endpoint.burden(load);
            Arc::new(endpoint)
        };
        Endpoints::new(loads.into_iter().enumerate().map(endpoint).collect())
    }

    /// How many of a thousand users each has.
    fn spread(endpoints: &Endpoints, routing: &Routing, but: Option<&Arc<Endpoint>>) -> [usize; 3] {
        let mut counts = [0; 3];
        for user in 0..1_000 {
            let descriptors = std::iter::once(descriptor! { "user" => user.to_string() }).collect();
            let ask = CheckRequest { domain: "d".into(), descriptors, hits: 1, traceparent: None, holds: Vec::new() };
            if let Some(chosen) = endpoints.choose(routing, &ask, NOW, but) {
                counts[endpoints.all.iter().position(|endpoint| Arc::ptr_eq(endpoint, chosen)).unwrap_or_default()] +=
                    1;
            }
        }
        counts
    }

    fn break_down(endpoint: &Endpoint) {
        (0..5).for_each(|_| {
            endpoint.breaker.failed(NOW);
        });
    }

    #[tokio::test]
    async fn who_has_far_more_to_do_than_the_others_gets_nothing_new() {
        let even = spread(&endpoints([0; 3]), &Routing::ByDescriptor, None);
        assert!(even.iter().all(|users| (250..=420).contains(users)), "{even:?}");
        // A quarter more than the mean of 200 is still even.
        assert_eq!(spread(&endpoints([250, 175, 175]), &Routing::ByDescriptor, None), even);
        let uneven = spread(&endpoints([252, 174, 174]), &Routing::ByDescriptor, None);
        assert!(uneven[0] == 0 && uneven[1] > even[1] && uneven[2] > even[2], "{uneven:?}");
        // And of little nobody has too much.
        assert_eq!(spread(&endpoints([64, 0, 0]), &Routing::ByDescriptor, None), even);
        assert_eq!(spread(&endpoints([65, 0, 0]), &Routing::ByDescriptor, None)[0], 0);
    }

    #[tokio::test]
    async fn who_is_down_is_asked_by_one_probe_only() {
        for routing in [Routing::ByDescriptor, Routing::RoundRobin] {
            let endpoints = endpoints([0; 3]);
            break_down(&endpoints.all[0]);
            let users = spread(&endpoints, &routing, None);
            assert!(users[0] == 0 && users[1] + users[2] == 1_000, "{users:?}");
            break_down(&endpoints.all[1]);
            break_down(&endpoints.all[2]);
            assert_eq!(spread(&endpoints, &routing, None), [0; 3]);
        }
    }

    #[tokio::test]
    async fn the_second_is_never_the_first() {
        let endpoints = endpoints([0; 3]);
        for routing in [Routing::ByDescriptor, Routing::RoundRobin] {
            let users = spread(&endpoints, &routing, Some(&endpoints.all[1]));
            assert!(users[1] == 0 && users[0] + users[2] == 1_000, "{users:?}");
        }
        let turns = spread(&endpoints, &Routing::RoundRobin, None);
        assert!(turns.iter().all(|turns| (333..=334).contains(turns)), "{turns:?}");
        let alone = Endpoints::new(vec![Arc::clone(&endpoints.all[0])]);
        assert_eq!(spread(&alone, &Routing::ByDescriptor, Some(&alone.all[0])), [0; 3]);
    }
}
