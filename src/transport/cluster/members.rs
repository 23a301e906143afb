//! [`Members`]: the addresses of other instances, and the state of the exchange with each.
//!
//! Addresses come from the settings, in which DNS names are resolved repeatedly, and from calls of other instances: a
//! new instance is called back immediately, before DNS contains it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use tokio::{
    sync::{Notify, futures::Notified},
    time::Instant,
};

/// Time without a call after which an address that only calls have named is removed.
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of addresses. Calls cannot add more.
const MAX_MEMBERS: usize = 1_000;
/// Maximum number of addresses that calls from one network can add to those of the settings.
const MAX_CALLERS_PER_NETWORK: usize = 8;
/// Time without a call after which an address that does not respond makes room for another one.
const REPLACE_AFTER: Duration = Duration::from_secs(10);
/// Time for which a member is excluded after its first violation. It doubles with each further one.
const FIRST_EXCLUSION: Duration = Duration::from_secs(30);
/// Maximum time for which a member is excluded.
const MAX_EXCLUSION: Duration = Duration::from_secs(600);
/// Time without violations after which former ones are forgotten.
const FORGIVE_AFTER: Duration = Duration::from_secs(3_600);

/// State of the exchange with the instance at one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberState {
    /// No response yet.
    New,
    /// The address is this instance's own.
    Own,
    /// The instance is also at another address, which is used.
    Duplicate,
    /// The instance has responded. Its increments are applied after this one has joined.
    Contacted,
    /// The instance responds, and everything it has sent is applied.
    Connected,
    /// The instance has announced that it stops.
    Left,
    /// The instance does not respond.
    Unavailable,
}

/// One address of the table.
struct Member {
    /// Host in the settings, for the verification of the certificate.
    host: Option<String>,
    /// Time of the last call that named the address.
    called_at: Option<Instant>,
    state: MemberState,
    /// Epoch of the instance that responded last.
    epoch: u64,
    /// Whether that instance has announced that it stops.
    has_left: bool,
    heard_at: Instant,
    /// The violations of the protocol that are not forgotten yet.
    violations: u32,
    violated_at: Option<Instant>,
    /// When the address is called again after a violation.
    excluded_until: Option<Instant>,
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
    ///
    /// Returns `false` if the address is ignored: calls from its network have named too many, or the table is full.
    pub(super) fn discover(&self, address: SocketAddr) -> bool {
        let mut table = self.lock();
        if let Some(member) = table.get_mut(&address) {
            member.called_at = Some(Instant::now());
            return true;
        }
        if !make_room(&mut table, address) {
            return false;
        }
        table.insert(address, Member { called_at: Some(Instant::now()), ..Member::new(None) });
        drop(table);
        self.changed.notify_waiters();
        true
    }

    /// Sets the addresses of the settings, each with its host. Removes former ones, unless they call this member or are
    /// excluded, and returns those.
    pub(super) fn set_resolved(&self, resolved: &BTreeMap<SocketAddr, String>) -> Vec<SocketAddr> {
        let mut table = self.lock();
        for (address, host) in resolved {
            table.entry(*address).or_insert_with(|| Member::new(None)).host = Some(host.clone());
        }
        let (kept, removed) = std::mem::take(&mut *table).into_iter().partition(|(address, member)| {
            resolved.contains_key(address) || member.is_called() || member.is_excluded()
        });
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

    /// Records that the instance with this epoch stops. Returns `false` if the caller's host is not that of the
    /// instance. The epoch alone proves nothing, because every member knows it.
    pub(super) fn set_left(&self, epoch: u64, caller: IpAddr) -> bool {
        let mut table = self.lock();
        let mut is_known = false;
        for (address, member) in table.iter_mut() {
            if member.epoch == epoch && address.ip().to_canonical() == caller {
                (member.state, member.has_left) = (MemberState::Left, true);
                is_known = true;
            }
        }
        is_known
    }

    /// Records a violation of the protocol. Returns the time for which the member is excluded.
    pub(super) fn exclude(&self, address: SocketAddr) -> Duration {
        let mut table = self.lock();
        let Some(member) = table.get_mut(&address) else {
            return FIRST_EXCLUSION;
        };
        if member.violated_at.is_some_and(|at| at.elapsed() >= FORGIVE_AFTER) {
            member.violations = 0;
        }
        let pause = FIRST_EXCLUSION.saturating_mul(1 << member.violations.min(10)).min(MAX_EXCLUSION);
        member.violations += 1;
        member.violated_at = Some(Instant::now());
        member.excluded_until = Some(Instant::now() + pause);
        pause
    }

    /// Returns the end of the exclusion of a member, or `None` if it is not excluded.
    pub(super) fn excluded_until(&self, address: SocketAddr) -> Option<Instant> {
        self.lock().get(&address).filter(|member| member.is_excluded())?.excluded_until
    }

    /// Returns the host of an address; `None` if only calls have named it.
    pub(super) fn host(&self, address: SocketAddr) -> Option<String> {
        self.lock().get(&address).and_then(|member| member.host.clone())
    }

    /// Returns the state of an address.
    pub(super) fn state(&self, address: SocketAddr) -> MemberState {
        match self.lock().get(&address) {
            Some(member) => member.state,
            None => MemberState::New,
        }
    }

    /// Waits until every address of the settings has responded or failed. Addresses that only calls have named are not
    /// waited for: there could always be another one.
    pub(super) async fn settled(&self) {
        loop {
            let changed = self.changed.notified();
            if self.lock().values().all(|member| member.host.is_none() || member.state != MemberState::New) {
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
        self.table.lock()
    }
}

impl Member {
    fn new(host: Option<String>) -> Self {
        Self {
            host,
            called_at: None,
            state: MemberState::New,
            epoch: 0,
            has_left: false,
            heard_at: Instant::now(),
            violations: 0,
            violated_at: None,
            excluded_until: None,
        }
    }

    fn is_called(&self) -> bool {
        self.called_at.is_some_and(|called_at| called_at.elapsed() < FORGET_AFTER)
    }

    fn is_excluded(&self) -> bool {
        self.excluded_until.is_some_and(|until| until > Instant::now())
    }

    /// Returns whether the member is known only from calls, and its address is in this network.
    fn is_caller_in(&self, network: IpAddr, address: &SocketAddr) -> bool {
        self.host.is_none() && network_of(address.ip()) == network
    }

    /// Returns whether the address can make room for another one.
    fn is_replaceable(&self) -> bool {
        let is_silent = self.called_at.is_none_or(|called_at| called_at.elapsed() >= REPLACE_AFTER);
        self.host.is_none() && self.state == MemberState::Unavailable && is_silent && !self.is_excluded()
    }
}

/// Returns whether a call can add an address. Removes another one that does not respond if there are too many.
fn make_room(table: &mut BTreeMap<SocketAddr, Member>, address: SocketAddr) -> bool {
    let network = network_of(address.ip());
    let near = table.iter().filter(|(other, member)| member.is_caller_in(network, other)).count();
    let is_full_near = near >= MAX_CALLERS_PER_NETWORK;
    if !is_full_near && table.len() < MAX_MEMBERS {
        return true;
    }
    let replaced = table
        .iter()
        .filter(|(other, member)| member.is_replaceable() && (!is_full_near || member.is_caller_in(network, other)))
        .min_by_key(|(_, member)| member.called_at)
        .map(|(other, _)| *other);
    replaced.is_some_and(|replaced| table.remove(&replaced).is_some())
}

/// Returns the network of an address, which one caller can have as a whole: an IPv4 address itself, or the first 64
/// bits of an IPv6 address.
pub(super) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) >> 64 << 64).into(),
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
            assert_eq!(members.discover(address(number)), number < MAX_MEMBERS as u32);
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

    /// An instance waits until it has joined. Its other address must not be used meanwhile.
    #[test]
    fn one_address_of_an_instance_that_is_only_contacted_is_used() {
        let members = Members::new();
        members.discover(address(1));
        members.discover(address(2));
        assert!(members.claim(address(1), 7));
        members.set_state(address(1), MemberState::Contacted);
        assert!(!members.claim(address(2), 7) && members.claim(address(1), 7));
        assert!(members.claim(address(2), 8), "another instance");
        members.set_state(address(1), MemberState::Duplicate);
        assert!(members.claim(address(2), 7));
    }

    #[tokio::test(start_paused = true)]
    async fn callers_of_one_network_cannot_fill_the_table() {
        for (one, other) in [
            (|port| SocketAddr::new([10, 0, 0, 1].into(), port), |port| SocketAddr::new([10, 0, 0, 2].into(), port)),
            (
                // Addresses of one network of IPv6.
                |port: u16| SocketAddr::new([1, 2, 3, 4, port, 6, 7, 8].into(), 1),
                |port: u16| SocketAddr::new([1, 2, 3, 5, port, 6, 7, 8].into(), 1),
            ),
        ] as [(fn(u16) -> SocketAddr, fn(u16) -> SocketAddr); 2]
        {
            let members = Members::new();
            let first = MAX_CALLERS_PER_NETWORK as u16;
            let discovered: Vec<bool> = (1..=first + 1).map(|port| members.discover(one(port))).collect();
            assert_eq!(discovered, [vec![true; first.into()], vec![false]].concat());
            assert!(members.discover(other(1)), "another network");
            // Addresses of the settings do not count.
            members.set_resolved(&BTreeMap::from([(one(1), "peers".to_owned())]));
            assert!(members.discover(one(first + 1)) && !members.discover(one(first + 2)));
            // An address that does not respond makes room, but not immediately.
            members.set_state(one(3), MemberState::Unavailable);
            assert!(!members.discover(one(first + 2)));
            tokio::time::advance(REPLACE_AFTER).await;
            assert!(members.discover(one(first + 2)) && !members.discover(one(first + 3)));
            assert!(!addresses(&members).contains(&one(3)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_that_breaks_the_protocol_is_left_alone_longer_each_time() {
        let members = Members::new();
        members.discover(address(1));
        assert_eq!(members.excluded_until(address(1)), None);
        for seconds in [30, 60, 120, 240, 480, 600, 600] {
            let pause = Duration::from_secs(seconds);
            assert_eq!(members.exclude(address(1)), pause);
            assert_eq!(members.excluded_until(address(1)), Some(Instant::now() + pause));
            // It is not forgotten meanwhile.
            tokio::time::advance(pause - Duration::from_millis(1)).await;
            assert_eq!(members.set_resolved(&BTreeMap::new()), []);
            tokio::time::advance(Duration::from_millis(1)).await;
            assert_eq!(members.excluded_until(address(1)), None);
        }
        tokio::time::advance(FORGIVE_AFTER).await;
        assert_eq!(members.exclude(address(1)), FIRST_EXCLUSION);
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_that_only_calls_name_are_not_waited_for() {
        let members = Members::new();
        members.set_resolved(&BTreeMap::from([(address(1), "peers".to_owned())]));
        members.discover(address(2));
        assert!(members.settled().now_or_never().is_none());
        members.set_state(address(1), MemberState::Contacted);
        assert!(members.settled().now_or_never().is_some());
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
        assert!(!members.set_left(7, address(2).ip()), "another member");
        assert_eq!(members.state(address(1)), MemberState::Connected);
        assert!(members.set_left(7, address(1).ip()));
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
