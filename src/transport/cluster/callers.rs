//! [`Callers`]: the instances that pull from this one, by the network from which they call.

use std::{collections::HashMap, net::IpAddr};

use foldhash::fast::RandomState;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::members::network_of;

/// Maximum number of subscribers that call from one network. Each can have a backlog.
const MAX_SUBSCRIBERS: usize = 32;
/// Maximum number of networks with subscribers.
const MAX_NETWORKS: usize = 1_000;

/// An instance that pulls from this one.
struct Subscriber {
    id: u64,
    /// Time of the last pull.
    pulled_at: Instant,
}

/// The subscribers of each network.
#[derive(Default)]
pub(super) struct Callers {
    networks: Mutex<HashMap<IpAddr, Vec<Subscriber>, RandomState>>,
}

impl Callers {
    /// Records a pull. Returns the subscribers that are forgotten to make room for this one.
    pub(super) fn record(&self, caller: IpAddr, id: u64) -> Vec<u64> {
        let now = Instant::now();
        let network = network_of(caller);
        let mut networks = self.networks.lock();
        let mut forgotten = Vec::new();
        if !networks.contains_key(&network) && networks.len() >= MAX_NETWORKS {
            let oldest = networks.iter().min_by_key(|(_, subscribers)| last_pull(subscribers));
            let oldest = oldest.map(|(network, _)| *network);
            if let Some(removed) = oldest.and_then(|oldest| networks.remove(&oldest)) {
                forgotten.extend(removed.iter().map(|subscriber| subscriber.id));
            }
        }
        let subscribers = networks.entry(network).or_default();
        if let Some(known) = subscribers.iter_mut().find(|known| known.id == id) {
            known.pulled_at = now;
            return forgotten;
        }
        if subscribers.len() >= MAX_SUBSCRIBERS
            && let Some(oldest) = (0..subscribers.len()).min_by_key(|index| subscribers[*index].pulled_at)
        {
            forgotten.push(subscribers.swap_remove(oldest).id);
        }
        subscribers.push(Subscriber { id, pulled_at: now });
        forgotten
    }
}

/// Returns the time of the last pull from one network.
fn last_pull(subscribers: &[Subscriber]) -> Option<Instant> {
    subscribers.iter().map(|subscriber| subscriber.pulled_at).max()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_subscribers_of_one_network_are_limited() {
        let callers = Callers::default();
        let (one, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let pull = async |caller, subscriber| {
            tokio::time::advance(Duration::from_millis(1)).await;
            callers.record(caller, subscriber)
        };
        let max = MAX_SUBSCRIBERS as u64;
        for subscriber in 1..=max {
            assert!(pull(one, subscriber).await.is_empty());
        }
        assert!(pull(other, 1_000).await.is_empty());
        // The one that has not pulled for the longest time is forgotten.
        assert!(pull(one, 1).await.is_empty());
        assert_eq!(pull(one, max + 1).await, [2]);
        assert_eq!(pull(one, max + 2).await, [3]);
        assert_eq!(pull(one, 2).await, [4]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_networks_is_limited() {
        let callers = Callers::default();
        for network in 0..2 * MAX_NETWORKS {
            let caller = IpAddr::from([10, 0, (network >> 8) as u8, network as u8]);
            tokio::time::advance(Duration::from_millis(1)).await;
            let forgotten = callers.record(caller, network as u64);
            assert_eq!(forgotten, network.checked_sub(MAX_NETWORKS).map(|oldest| oldest as u64).as_slice());
        }
    }
}
