//! [`Routing`]: selects the endpoint of a check.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use sluicegate_placement::Ring;

use crate::{check_request::CheckRequest, endpoint::Endpoint};

/// Distribution of checks among several endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// Consistent hashing of the first descriptor. All checks with the same first descriptor go to the same endpoint,
    /// which makes its caches most effective.
    #[default]
    ByDescriptor,
    /// Consistent hashing of the named entries of the first descriptor, like the service's `shard_by`. All entries are
    /// used if the descriptor has none of these.
    ByEntries(Vec<String>),
    /// Round robin: each endpoint in turn.
    RoundRobin,
}

/// Maximum number of checks in progress of an endpoint, relative to the mean of all. Beyond it, the next endpoint is
/// chosen.
const MAX_LOAD_RATIO: f64 = 1.25;
/// Number of checks in progress that an endpoint may always have.
const MIN_MAX_LOAD: usize = 64;

/// Endpoints in use.
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

    pub(crate) fn contains(&self, endpoint: &Arc<Endpoint>) -> bool {
        self.all.iter().any(|other| Arc::ptr_eq(endpoint, other))
    }

    /// Chooses the endpoint for a check, and admits the call in its breaker.
    ///
    /// This is the first available endpoint in the order of the routing, unless it has far more checks in progress than
    /// the others. `excluded` is not chosen. Returns `None` if no endpoint is available.
    pub(crate) fn choose(
        &self,
        routing: &Routing,
        request: &CheckRequest<'_>,
        now: Duration,
        excluded: Option<&Arc<Endpoint>>,
    ) -> Option<&Arc<Endpoint>> {
        if self.all.len() == 1 {
            return if excluded.is_none() { self.admit(0, now) } else { None };
        }
        let total: usize = self.all.iter().map(|endpoint| endpoint.load()).sum();
        let max_load = ((total as f64 / self.all.len() as f64 * MAX_LOAD_RATIO) as usize).max(MIN_MAX_LOAD);
        let with_room = self.first_among(routing, request, |index| {
            self.is_available(index, now, excluded) && self.all[index].load() <= max_load
        });
        let index = match with_room {
            Some(index) => index,
            None => self.first_among(routing, request, |index| self.is_available(index, now, excluded))?,
        };
        if let Some(endpoint) = self.admit(index, now) {
            return Some(endpoint);
        }
        // Another check has just become the probe of this endpoint.
        let index =
            self.first_among(routing, request, |other| other != index && self.is_available(other, now, excluded))?;
        self.admit(index, now)
    }

    /// Returns whether the endpoint is not `excluded` and its breaker would admit a call.
    fn is_available(&self, index: usize, now: Duration, excluded: Option<&Arc<Endpoint>>) -> bool {
        let endpoint = &self.all[index];
        excluded.is_none_or(|excluded| !Arc::ptr_eq(excluded, endpoint)) && endpoint.breaker.would_admit(now)
    }

    /// Admits the call in the breaker of the endpoint. Returns `None` if the breaker rejects it.
    fn admit(&self, index: usize, now: Duration) -> Option<&Arc<Endpoint>> {
        let endpoint = &self.all[index];
        if endpoint.breaker.try_admit(now) { Some(endpoint) } else { None }
    }

    /// Returns the first endpoint in the order of the routing for which `among` returns `true`.
    fn first_among(
        &self,
        routing: &Routing,
        request: &CheckRequest<'_>,
        among: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        match routing {
            Routing::RoundRobin => self.next_in_turn(among),
            Routing::ByDescriptor => self.ring.node_among(&request.shard_key(&[]), among),
            Routing::ByEntries(entries) => self.ring.node_among(&request.shard_key(entries), among),
        }
    }

    /// Returns any available endpoint, for calls that all endpoints can answer.
    pub(crate) fn any(&self, now: Duration) -> Option<&Arc<Endpoint>> {
        self.next_in_turn(|index| self.all[index].breaker.would_admit(now)).map(|index| &self.all[index])
    }

    fn next_in_turn(&self, among: impl Fn(usize) -> bool) -> Option<usize> {
        let turn = self.turn.fetch_add(1, Relaxed);
        for step in 0..self.all.len() {
            let index = turn.wrapping_add(step) % self.all.len();
            if among(index) {
                return Some(index);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use tonic::{metadata::MetadataMap, transport::Channel};

    use super::*;
    use crate::descriptor;

    const NOW: Duration = Duration::from_secs(1);

    /// Returns three endpoints with the given numbers of checks in progress.
    fn endpoints(loads: [usize; 3]) -> Endpoints {
        let endpoint = |(index, load): (usize, usize)| {
            let channel = Channel::from_static("http://127.0.0.1:1").connect_lazy();
            let endpoint = Endpoint::new(format!("e{index}").into(), channel, MetadataMap::new(), false);
            endpoint.add_load(load);
            Arc::new(endpoint)
        };
        Endpoints::new(loads.into_iter().enumerate().map(endpoint).collect())
    }

    /// Returns how many of a thousand users each endpoint gets.
    fn spread(endpoints: &Endpoints, routing: &Routing, excluded: Option<&Arc<Endpoint>>) -> [usize; 3] {
        let mut counts = [0; 3];
        for user in 0..1_000 {
            let descriptors = std::iter::once(descriptor! { "user" => user.to_string() }).collect();
            let request =
                CheckRequest { domain: "d".into(), descriptors, hits: 1, traceparent: None, feedback: Vec::new() };
            if let Some(chosen) = endpoints.choose(routing, &request, NOW, excluded) {
                counts[endpoints.all.iter().position(|endpoint| Arc::ptr_eq(endpoint, chosen)).unwrap_or_default()] +=
                    1;
            }
        }
        counts
    }

    fn break_down(endpoint: &Endpoint) {
        (0..5).for_each(|_| {
            endpoint.breaker.record_failure(NOW);
        });
    }

    #[tokio::test]
    async fn an_endpoint_with_far_more_load_than_the_others_is_not_chosen() {
        let even = spread(&endpoints([0; 3]), &Routing::ByDescriptor, None);
        assert!(even.iter().all(|users| (250..=420).contains(users)), "{even:?}");
        // A quarter more than the mean of 200 is permitted.
        assert_eq!(spread(&endpoints([250, 175, 175]), &Routing::ByDescriptor, None), even);
        let uneven = spread(&endpoints([252, 174, 174]), &Routing::ByDescriptor, None);
        assert!(uneven[0] == 0 && uneven[1] > even[1] && uneven[2] > even[2], "{uneven:?}");
        // Up to 64 checks are always permitted.
        assert_eq!(spread(&endpoints([64, 0, 0]), &Routing::ByDescriptor, None), even);
        assert_eq!(spread(&endpoints([65, 0, 0]), &Routing::ByDescriptor, None)[0], 0);
    }

    #[tokio::test]
    async fn an_endpoint_with_an_open_breaker_is_not_chosen() {
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
    async fn an_excluded_endpoint_is_not_chosen() {
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
