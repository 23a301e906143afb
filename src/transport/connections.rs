//! [`Connections`]: the open connections of a listener, and the choice of the one that makes room for another.
//!
//! If the maximum number is open, a new connection replaces one: of the address that holds more than half of them, else
//! of any address. A connection without authenticated callers goes before those with them, then one without calls in
//! progress before those with calls, and then the least recently used one. A caller with many connections therefore
//! locks out no other caller.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::{Mutex, MutexGuard};
use tokio::task::AbortHandle;

use crate::metrics::LogThrottle;

/// Number of candidates that are chosen in one search, so that a flood of connections does not repeat it for each one.
const CANDIDATES: usize = 64;
/// Number of leading bits of an IPv6 address that count as its source: one host usually has a whole network of 64 bits.
const IPV6_SOURCE_BITS: u32 = 64;

/// The open connections of a listener.
pub(super) struct Connections {
    max: usize,
    /// The name of the listener in log messages.
    listener: &'static str,
    state: Mutex<State>,
    /// The time, in a unit of the listener's choice.
    tick: AtomicU64,
    evictions: AtomicU64,
    log_full: LogThrottle,
}

#[derive(Default)]
struct State {
    /// The number of the connection that was opened last.
    last: u64,
    open: BTreeMap<u64, Arc<Entry>>,
    /// The number of connections of each source.
    sources: HashMap<IpAddr, usize>,
    /// The source that holds more than half of the maximum.
    large_source: Option<IpAddr>,
    /// The connections that make room next, in reverse order.
    candidates: Vec<(Rank, u64)>,
    /// The source that the candidates have in common, if it holds more than half of the maximum.
    candidates_of: Option<IpAddr>,
}

/// Order in which connections make room for others, from the first to the last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    is_authenticated: bool,
    has_calls: bool,
    used: u64,
}

/// State of a connection in the listener.
struct Entry {
    /// The source, or `None` for a Unix socket.
    source: Option<IpAddr>,
    /// The tick of the last use.
    used: AtomicU64,
    calls: AtomicU32,
    is_authenticated: AtomicBool,
    /// Ends the task that serves the connection.
    task: OnceLock<AbortHandle>,
}

/// The entry of an open connection, which is removed when this is dropped.
pub(super) struct OpenConnection {
    connections: Arc<Connections>,
    entry: Arc<Entry>,
    number: u64,
}

/// A call in progress on a connection.
pub(super) struct CallGuard(Arc<OpenConnection>);

// === impl Connections ===

impl Connections {
    pub(super) fn new(max: usize, listener: &'static str) -> Arc<Self> {
        Arc::new(Self {
            max: max.max(1),
            listener,
            state: Mutex::default(),
            tick: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            log_full: LogThrottle::default(),
        })
    }

    /// Adds a connection. Closes another one if the maximum is open.
    pub(super) fn open(self: &Arc<Self>, peer: Option<SocketAddr>) -> OpenConnection {
        let source = peer.map(|peer| source(peer.ip()));
        let mut state = self.state();
        if let Some(source) = source {
            let count = state.sources.entry(source).or_default();
            *count += 1;
            if *count > self.half() {
                state.large_source = Some(source);
            }
        }
        if state.open.len() >= self.max {
            self.evict_down_to(self.max - 1, &mut state);
            if self.log_full.should_log() {
                tracing::warn!(
                    listener = self.listener,
                    max = self.max,
                    "maximum number of connections reached; each new one closes another one, if possible an idle one"
                );
            }
        }
        state.last += 1;
        let number = state.last;
        let entry = Arc::new(Entry {
            source,
            used: AtomicU64::new(self.tick.load(Relaxed)),
            calls: AtomicU32::new(0),
            is_authenticated: AtomicBool::new(false),
            task: OnceLock::new(),
        });
        state.open.insert(number, Arc::clone(&entry));
        OpenConnection { connections: Arc::clone(self), entry, number }
    }

    /// Closes the connection that makes room first.
    pub(super) fn evict_one(&self) {
        self.evict(&mut self.state());
    }

    /// Advances the time.
    pub(super) fn advance(&self) {
        self.tick.fetch_add(1, Relaxed);
    }

    /// Returns the name of the listener.
    pub(super) const fn listener(&self) -> &'static str {
        self.listener
    }

    /// Returns the number of connections that made room for others.
    pub(super) fn evictions(&self) -> u64 {
        self.evictions.load(Relaxed)
    }

    /// Returns the number of connections above which an address makes room for others.
    fn half(&self) -> usize {
        (self.max / 2).max(1)
    }

    /// Closes connections until at most `max` are open. If all others are too new, [`OpenConnection::set_task`] closes them later.
    fn evict_down_to(&self, max: usize, state: &mut State) {
        while state.open.len() > max && self.evict(state) {}
    }

    /// Closes the connection that makes room first. Returns false if all that can make room are too new.
    fn evict(&self, state: &mut State) -> bool {
        let large_source = state.large_source.filter(|large| state.count(*large) > self.half());
        state.large_source = large_source;
        if state.candidates_of != large_source {
            state.candidates.clear();
            state.candidates_of = large_source;
        }
        let Some(entry) = state.next_candidate().and_then(|number| state.remove(number)) else {
            return false;
        };
        self.evictions.fetch_add(1, Relaxed);
        entry.close();
        true
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

// === impl State ===

impl State {
    fn count(&self, source: IpAddr) -> usize {
        self.sources.get(&source).copied().unwrap_or_default()
    }

    /// Returns the connection that makes room next.
    fn next_candidate(&mut self) -> Option<u64> {
        for _ in 0..2 {
            while let Some((rank, number)) = self.candidates.pop() {
                let is_unchanged = self.open.get(&number).is_some_and(|entry| entry.rank() == rank);
                if is_unchanged {
                    return Some(number);
                }
            }
            self.choose_candidates();
        }
        None
    }

    fn choose_candidates(&mut self) {
        let mut ranked = Vec::with_capacity(self.open.len());
        for (number, entry) in &self.open {
            let is_of_source = self.candidates_of.is_none() || entry.source == self.candidates_of;
            // A connection that no task serves yet is new.
            if is_of_source && entry.task.get().is_some() {
                ranked.push((entry.rank(), *number));
            }
        }
        if ranked.len() > CANDIDATES {
            ranked.select_nth_unstable(CANDIDATES);
            ranked.truncate(CANDIDATES);
        }
        ranked.sort_unstable_by_key(|candidate| Reverse(*candidate));
        // Of other classes, only the first is a candidate: a connection without calls that is opened later goes before
        // the others.
        let others = ranked.partition_point(|(rank, _)| rank.is_authenticated || rank.has_calls);
        let first = ranked.len().saturating_sub(1);
        self.candidates = ranked.split_off(others.min(first));
    }

    fn remove(&mut self, number: u64) -> Option<Arc<Entry>> {
        let entry = self.open.remove(&number)?;
        if let Some(source) = entry.source
            && let Some(count) = self.sources.get_mut(&source)
        {
            *count -= 1;
            if *count == 0 {
                self.sources.remove(&source);
            }
        }
        Some(entry)
    }
}

// === impl Entry ===

impl Entry {
    fn rank(&self) -> Rank {
        Rank {
            is_authenticated: self.is_authenticated.load(Relaxed),
            has_calls: self.calls.load(Relaxed) > 0,
            used: self.used.load(Relaxed),
        }
    }

    fn close(&self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

// === impl OpenConnection ===

impl OpenConnection {
    /// Records the task that serves the connection. Closes others if more than the maximum are open.
    pub(super) fn set_task(&self, task: AbortHandle) {
        // Before it has a task, so that it does not make room itself.
        self.connections.evict_down_to(self.connections.max, &mut self.connections.state());
        // A connection has one task.
        let _ = self.entry.task.set(task);
    }

    /// Records that the connection was used now.
    pub(super) fn record_use(&self) {
        self.entry.used.store(self.connections.tick.load(Relaxed), Relaxed);
    }

    /// Records whether calls are in progress.
    pub(super) fn set_has_calls(&self, has_calls: bool) {
        self.entry.calls.store(u32::from(has_calls), Relaxed);
    }

    /// Records that a caller of the connection has authenticated.
    pub(super) fn set_authenticated(&self) {
        self.entry.is_authenticated.store(true, Relaxed);
    }

    /// Records a call that is in progress until the guard is dropped.
    pub(super) fn begin_call(self: &Arc<Self>) -> CallGuard {
        self.entry.calls.fetch_add(1, Relaxed);
        CallGuard(Arc::clone(self))
    }

    /// Closes the connection.
    pub(super) fn close(&self) {
        self.entry.close();
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.connections.state().remove(self.number);
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        let open_connection = &self.0;
        open_connection.entry.calls.fetch_sub(1, Relaxed);
        open_connection.connections.advance();
        open_connection.record_use();
    }
}

/// Returns the source of an address: an IPv4 address itself, or the network of an IPv6 address.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - IPV6_SOURCE_BITS))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A listener with connections that are served by tasks that wait for ever.
    struct Listener(Arc<Connections>);

    impl Listener {
        fn new(max: usize) -> Self {
            Self(Connections::new(max, "test"))
        }

        fn connect(&self, peer: &str) -> Arc<OpenConnection> {
            let peer = (!peer.is_empty()).then(|| SocketAddr::new(peer.parse().unwrap(), 1));
            self.0.advance();
            let open_connection = self.0.open(peer);
            open_connection.set_task(tokio::spawn(std::future::pending::<()>()).abort_handle());
            Arc::new(open_connection)
        }
    }

    fn use_now(open_connection: &OpenConnection) {
        open_connection.connections.advance();
        open_connection.record_use();
    }

    /// Returns whether each connection is open.
    fn are_open<const N: usize>(open_connections: [&Arc<OpenConnection>; N]) -> [bool; N] {
        open_connections
            .map(|open_connection| open_connection.connections.state().open.contains_key(&open_connection.number))
    }

    #[tokio::test]
    async fn the_connection_that_was_not_used_for_the_longest_time_makes_room() {
        let listener = Listener::new(2);
        let (first, second) = (listener.connect("10.0.0.1"), listener.connect("10.0.0.2"));
        use_now(&first);
        let third = listener.connect("10.0.0.3");
        assert_eq!(are_open([&first, &second, &third]), [true, false, true]);
        drop(third);
        let fourth = listener.connect("10.0.0.4");
        assert_eq!(are_open([&first, &fourth]), [true, true], "a closed entry makes room by itself");
        assert_eq!(listener.0.evictions(), 1);
    }

    #[tokio::test]
    async fn the_task_of_an_evicted_connection_ends() {
        let listener = Listener::new(1);
        let open_connection = Arc::new(listener.0.open(None));
        let task = tokio::spawn(std::future::pending::<()>());
        open_connection.set_task(task.abort_handle());
        let _other = listener.connect("10.0.0.1");
        assert!(task.await.unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn one_connection_is_replaced_by_that_of_another_address() {
        let listener = Listener::new(1);
        let first = listener.connect("10.0.0.1");
        let second = listener.connect("10.0.0.2");
        assert_eq!(are_open([&first, &second]), [false, true]);
    }

    #[tokio::test]
    async fn idle_connections_go_before_busy_ones_and_public_ones_before_authenticated_ones() {
        let listener = Listener::new(4);
        let idle_operator = listener.connect("10.0.0.1");
        idle_operator.set_authenticated();
        let busy_operator = listener.connect("10.0.0.2");
        busy_operator.set_authenticated();
        let _call = busy_operator.begin_call();
        let busy = listener.connect("10.0.0.3");
        let call = busy.begin_call();
        let idle = listener.connect("10.0.0.4");
        let new = listener.connect("10.0.0.5");
        assert_eq!(are_open([&idle_operator, &busy_operator, &busy, &idle, &new]), [true, true, true, false, true]);
        let newer = listener.connect("10.0.0.6");
        assert_eq!(are_open([&idle_operator, &busy_operator, &busy, &new, &newer]), [true, true, true, false, true]);
        newer.set_has_calls(true);
        let newest = listener.connect("10.0.0.7");
        assert_eq!(are_open([&idle_operator, &busy_operator, &busy, &newer, &newest]), [true, true, false, true, true]);
        drop(call);
    }

    #[tokio::test]
    async fn an_address_with_more_than_half_of_the_connections_makes_room_for_others() {
        let listener = Listener::new(4);
        let honest = listener.connect("10.0.0.1");
        let flood: Vec<_> = (0..3).map(|_| listener.connect("6.6.6.6")).collect();
        // Its own connections are closed, although another one is older.
        let more = listener.connect("6.6.6.6");
        assert_eq!(are_open([&honest, &flood[0], &flood[1], &flood[2], &more]), [true, false, true, true, true]);
        let other = listener.connect("10.0.0.2");
        assert_eq!(are_open([&honest, &flood[1], &flood[2], &more, &other]), [true, false, true, true, true]);
        // With half of them, it has its share.
        let third = listener.connect("10.0.0.3");
        assert_eq!(are_open([&honest, &flood[2], &more, &other, &third]), [false, true, true, true, true]);
    }

    #[tokio::test]
    async fn connections_that_were_too_new_to_make_room_do_so_when_they_are_served() {
        let listener = Listener::new(2);
        let honest = listener.connect("10.0.0.1");
        let peer = SocketAddr::from(([6, 6, 6, 6], 1));
        let flood: Vec<_> = (0..4).map(|_| listener.0.open(Some(peer))).collect();
        assert_eq!(listener.0.evictions(), 0, "none of the large address is served yet");
        for open_connection in &flood {
            open_connection.set_task(tokio::spawn(std::future::pending::<()>()).abort_handle());
        }
        assert_eq!((are_open([&honest]), listener.0.evictions()), ([true], 3));
        let newest = flood.last().map(|open_connection| open_connection.number).unwrap();
        assert!(listener.0.state().open.contains_key(&newest));
    }

    #[tokio::test]
    async fn busy_connections_of_an_address_above_its_share_make_room() {
        let listener = Listener::new(2);
        let flood: Vec<_> = (0..2).map(|_| listener.connect("6.6.6.6")).collect();
        flood.iter().for_each(|open_connection| open_connection.set_has_calls(true));
        let honest = listener.connect("10.0.0.1");
        assert_eq!(are_open([&flood[0], &flood[1], &honest]), [false, true, true]);
    }

    #[tokio::test]
    async fn callers_on_a_unix_socket_share_no_address() {
        let listener = Listener::new(3);
        let tcp = listener.connect("10.0.0.1");
        let unix: Vec<_> = (0..2).map(|_| listener.connect("")).collect();
        let third = listener.connect("");
        assert_eq!(are_open([&tcp, &unix[0], &unix[1], &third]), [false, true, true, true]);
    }

    #[tokio::test]
    async fn a_flood_closes_the_oldest_first_and_never_a_connection_that_was_used_since() {
        let listener = Listener::new(CANDIDATES * 4);
        let mut open_connections: Vec<_> = (0..CANDIDATES * 4)
            .map(|number| listener.connect(&format!("10.0.{}.{}", number / 250, number % 250)))
            .collect();
        let _first = listener.connect("11.0.0.1");
        // The second one is a candidate by now.
        use_now(&open_connections[1]);
        for number in 0..CANDIDATES * 2 {
            open_connections.push(listener.connect(&format!("12.0.{}.{}", number / 250, number % 250)));
        }
        let open: Vec<bool> = open_connections.iter().map(|open_connection| are_open([open_connection])[0]).collect();
        let evicted = CANDIDATES * 2 + 1;
        assert!(open[1] && !open[0], "{open:?}");
        assert!(open[2..=evicted].iter().all(|is_open| !is_open), "{open:?}");
        assert!(open[evicted + 1..].iter().all(|is_open| *is_open), "{open:?}");
    }

    #[test]
    fn the_hosts_of_an_ipv6_network_are_one_source() {
        let source = |address: &str| source(address.parse().unwrap());
        assert_eq!(source("2001:db8:1:2:3::1"), source("2001:db8:1:2:ffff::2"));
        assert_ne!(source("2001:db8:1:2::1"), source("2001:db8:1:3::1"));
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
        assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
    }
}
