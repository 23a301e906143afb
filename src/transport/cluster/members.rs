//! [`Members`]: the addresses of other instances, and the state of the exchange with each.
//!
//! Addresses come from the settings, in which DNS names are resolved repeatedly, and from calls of other instances: a
//! new instance is called back at once, before DNS contains it.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Notify, futures::Notified},
    time::Instant,
};

/// Time without a call after which an address that only calls have named is removed.
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of addresses. Calls cannot add more.
const MAX_MEMBERS: usize = 1_000;

/// State of the exchange with the instance at one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberState {
    /// No response yet.
    New,
    /// The address is this instance's own.
    Own,
    /// The instance is also at another address, which is used.
    Duplicate,
    /// The instance has responded, and waits until this one has joined.
    Contacted,
    /// The instance responds, and everything it has sent is applied.
    Connected,
    /// The instance has announced that it stops.
    Left,
    /// The instance does not respond.
    Unavailable,
}

/// One address.
struct Member {
    /// Host in the settings, for the verification of the certificate.
    host: Option<String>,
    /// When a call named the address.
    called_at: Option<Instant>,
    state: MemberState,
    /// Epoch of the instance that responded last.
    epoch: u64,
    /// Whether that instance has announced that it stops.
    has_left: bool,
    heard_at: Instant,
}

/// The table of addresses.
pub(super) struct Members {
    table: Mutex<BTreeMap<SocketAddr, Member>>,
    changed: Notify,
}

impl Members {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { table: Mutex::default(), changed: Notify::new() })
    }

    /// Adds an address from which another instance called.
    pub(super) fn discover(&self, address: SocketAddr) {
        let mut table = self.lock();
        if let Some(member) = table.get_mut(&address) {
            member.called_at = Some(Instant::now());
        } else if table.len() < MAX_MEMBERS {
            table.insert(address, Member { called_at: Some(Instant::now()), ..Member::new(None) });
            drop(table);
            self.changed.notify_waiters();
        }
    }

    /// Replaces the addresses of the settings: each with its host. Returns the addresses that were removed.
    pub(super) fn set_resolved(&self, resolved: &BTreeMap<SocketAddr, String>) -> Vec<SocketAddr> {
        let mut table = self.lock();
        for (address, host) in resolved {
            table.entry(*address).or_insert_with(|| Member::new(None)).host = Some(host.clone());
        }
        let is_called = |member: &Member| member.called_at.is_some_and(|called_at| called_at.elapsed() < FORGET_AFTER);
        let (kept, removed) = std::mem::take(&mut *table)
            .into_iter()
            .partition(|(address, member)| resolved.contains_key(address) || is_called(member));
        *table = kept;
        drop(table);
        self.changed.notify_waiters();
        removed.into_keys().collect()
    }

    /// Returns all addresses with their hosts.
    pub(super) fn addresses(&self) -> Vec<(SocketAddr, Option<String>)> {
        self.lock().iter().map(|(address, member)| (*address, member.host.clone())).collect()
    }

    /// Records a response. Returns `false` if another address of the same instance is connected.
    pub(super) fn claim(&self, address: SocketAddr, epoch: u64) -> bool {
        let mut table = self.lock();
        let is_taken = table.iter().any(|(other, member)| {
            let is_used = matches!(member.state, MemberState::Contacted | MemberState::Connected);
            *other != address && member.epoch == epoch && is_used
        });
        if let Some(member) = table.get_mut(&address) {
            member.has_left &= member.epoch == epoch;
            (member.epoch, member.heard_at) = (epoch, Instant::now());
        }
        !is_taken
    }

    /// Sets the state of an address.
    pub(super) fn set_state(&self, address: SocketAddr, state: MemberState) {
        let mut table = self.lock();
        if let Some(member) = table.get_mut(&address) {
            if state == MemberState::Connected && member.has_left {
                return;
            }
            if state == MemberState::Connected {
                member.heard_at = Instant::now();
            }
            if std::mem::replace(&mut member.state, state) != state {
                drop(table);
                self.changed.notify_waiters();
            }
        }
    }

    /// Records that the instance with this epoch stops.
    pub(super) fn set_left(&self, epoch: u64) {
        let mut table = self.lock();
        for member in table.values_mut().filter(|member| member.epoch == epoch) {
            (member.state, member.has_left) = (MemberState::Left, true);
        }
    }

    /// Returns the host of an address; `None` if only calls have named it.
    pub(super) fn host(&self, address: SocketAddr) -> Option<String> {
        self.lock().get(&address).and_then(|member| member.host.clone())
    }

    /// Returns the state of an address.
    pub(super) fn state(&self, address: SocketAddr) -> MemberState {
        self.lock().get(&address).map_or(MemberState::New, |member| member.state)
    }

    /// Waits until every address has responded or failed.
    pub(super) async fn settled(&self) {
        loop {
            let changed = self.changed.notified();
            if self.lock().values().all(|member| member.state != MemberState::New) {
                return;
            }
            changed.await;
        }
    }

    /// Returns a future that waits for a change of the addresses or states after this call.
    pub(super) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Returns the number of addresses in a state.
    pub(super) fn count(&self, state: MemberState) -> usize {
        self.lock().values().filter(|member| member.state == state).count()
    }

    /// Returns the time since the last response of each other instance.
    pub(super) fn lags(&self) -> Vec<(SocketAddr, Duration)> {
        let table = self.lock();
        let others = table.iter().filter(|(_, member)| {
            !matches!(member.state, MemberState::Own | MemberState::Duplicate | MemberState::Left)
        });
        others.map(|(address, member)| (*address, member.heard_at.elapsed())).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Member>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    fn new(host: Option<String>) -> Self {
        Self { host, called_at: None, state: MemberState::New, epoch: 0, has_left: false, heard_at: Instant::now() }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn address(number: u32) -> SocketAddr {
        SocketAddr::new(std::net::Ipv4Addr::from(0x0a00_0000 + number).into(), 8083)
    }

    fn addresses(members: &Members) -> Vec<SocketAddr> {
        members.addresses().into_iter().map(|(address, _)| address).collect()
    }

    #[test]
    fn calls_add_a_limited_number_of_addresses_and_settings_all() {
        let members = Members::new();
        for number in 0..2_000 {
            members.discover(address(number));
        }
        assert_eq!(addresses(&members).len(), MAX_MEMBERS);
        members.set_resolved(&(2_000..3_500).map(|number| (address(number), "peers".to_owned())).collect());
        assert_eq!(addresses(&members).len(), MAX_MEMBERS + 1_500);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_only_calls_name_is_removed_a_minute_after_the_last_one() {
        let members = Members::new();
        let resolved = BTreeMap::from([(address(1), "peers".to_owned())]);
        members.discover(address(2));
        tokio::time::advance(FORGET_AFTER / 2).await;
        members.discover(address(2));
        tokio::time::advance(FORGET_AFTER - Duration::from_millis(1)).await;
        assert_eq!(members.set_resolved(&resolved), []);
        assert_eq!(addresses(&members), [address(1), address(2)]);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(members.set_resolved(&resolved), [address(2)]);
        // DNS no longer contains the other one, which never called.
        assert_eq!(members.set_resolved(&BTreeMap::new()), [address(1)]);
    }

    #[test]
    fn one_address_of_an_instance_is_used() {
        let members = Members::new();
        members.discover(address(1));
        members.discover(address(2));
        assert!(members.claim(address(1), 7) && members.claim(address(2), 7), "neither is connected");
        members.set_state(address(1), MemberState::Connected);
        assert!(members.claim(address(1), 7) && !members.claim(address(2), 7));
        members.set_state(address(1), MemberState::Unavailable);
        assert!(members.claim(address(2), 7));
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_that_has_left_is_not_connected_until_it_restarts() {
        let members = Members::new();
        members.discover(address(1));
        members.claim(address(1), 7);
        members.set_state(address(1), MemberState::Connected);
        tokio::time::advance(Duration::from_secs(5)).await;
        members.set_state(address(1), MemberState::Connected);
        assert_eq!(members.lags(), [(address(1), Duration::ZERO)]);
        members.set_left(7);
        // The response to an earlier pull arrives late.
        members.claim(address(1), 7);
        members.set_state(address(1), MemberState::Connected);
        assert_eq!((members.state(address(1)), members.lags()), (MemberState::Left, Vec::new()));
        members.claim(address(1), 8);
        members.set_state(address(1), MemberState::Connected);
        assert_eq!(members.count(MemberState::Connected), 1);
    }

    #[test]
    fn a_waiter_is_woken_when_a_state_has_changed() {
        let members = Members::new();
        members.discover(address(1));
        let wakes = |state| {
            let changed = members.changed();
            members.set_state(address(1), state);
            changed.now_or_never().is_some()
        };
        assert!(wakes(MemberState::Contacted) && wakes(MemberState::Connected));
        assert!(!wakes(MemberState::Connected));
    }

    #[test]
    fn an_address_has_the_host_of_the_settings() {
        let members = Members::new();
        members.discover(address(2));
        members.set_resolved(&BTreeMap::from([(address(1), "peers".to_owned())]));
        assert_eq!((members.host(address(1)), members.host(address(2))), (Some("peers".to_owned()), None));
    }
}
