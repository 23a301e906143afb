use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use super::*;
use crate::{RateLimiter, testing};

const SECOND: Duration = Duration::from_secs(1);
const GCRA: &str = "{unit: second, requests_per_unit: 1, algorithm: gcra, burst: 1}";
const WINDOW: &str = "{unit: minute, requests_per_unit: 5}";
const SLOT: &str = "{algorithm: concurrency, limit: 1, hold: 60s, holder: id}";
/// Time after which a test fails that waits for a condition.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Rate limiter with one rule for each user, and a clock that is set by hand.
struct Fixture {
    limiter: RateLimiter,
    time: Arc<AtomicU64>,
    has_holder: bool,
    done: Sender<(u64, Verdict)>,
    served: Receiver<(u64, Verdict)>,
}

impl Fixture {
    fn new(limit: &str) -> Self {
        // The beginning of a minute.
        let time = Arc::new(AtomicU64::new(60_000_000 * 1_000_000));
        let limiter = RateLimiter::builder().clock(Clock::Manual(Arc::clone(&time))).rules(&rules(limit)).unwrap();
        let (done, served) = channel();
        Self { limiter, time, has_holder: limit.contains("holder"), done, served }
    }

    fn advance(&self, time: Duration) {
        self.time.fetch_add(time.as_micros() as u64, Relaxed);
    }

    /// Starts a thread that waits for a number of hits, and returns when it waits.
    fn start(&self, waiter: u64, hits: u64, max_wait: Duration) -> JoinHandle<()> {
        let waiting = self.waiters();
        let limiter = self.limiter.clone();
        let done = self.done.clone();
        let has_holder = self.has_holder;
        let thread = thread::spawn(move || {
            let holder = waiter.to_string();
            let request = request(if has_holder { Some(&holder) } else { None }, hits);
            let verdict = limiter.blocking_check_request(&request, max_wait);
            done.send((waiter, verdict)).unwrap();
        });
        wait_for(|| self.waiters() == waiting + 1 && self.has_denied());
        thread
    }

    fn waiters(&self) -> usize {
        self.limiter.wait_queues().waiters()
    }

    /// Returns the number and the verdict of the next waiter that returns.
    fn next(&self) -> (u64, Verdict) {
        self.served.recv_timeout(TIMEOUT).unwrap()
    }

    /// Returns whether each queue has denied a waiter, so that further ones do not overtake it.
    fn has_denied(&self) -> bool {
        self.limiter.wait_queues().table().queues.values().all(|queue| queue.is_closed)
    }

    /// Waits for the next waiter, which must be this one, allowed.
    fn expect_allowed(&self, waiter: u64) {
        let (served, verdict) = self.next();
        assert_eq!((served, verdict.is_denied()), (waiter, false), "{verdict:?}");
    }

    fn check(&self, hits: u64) -> Verdict {
        self.limiter.check_request(&request(None, hits))
    }

    /// Takes or releases the slot of a holder.
    fn hold(&self, holder: &str, refund: bool) -> Verdict {
        let mut request = request(Some(holder), 1);
        request.descriptors[0].refund = refund;
        self.limiter.check_request(&request)
    }
}

fn rules(limit: &str) -> String {
    format!("domain: api\ndescriptors:\n- key: user\n  rate_limit: {limit}\n")
}

/// Returns a request of one user, who may be the holder of a slot.
fn request(holder: Option<&str>, hits: u64) -> Request<'_> {
    let mut entries = vec![("user", "bob")];
    if let Some(holder) = holder {
        entries.push(("id", holder));
    }
    Request {
        domain: "api",
        descriptors: smallvec::smallvec![testing::descriptor(&entries, hits)],
        feedback: Vec::new(),
    }
}

fn wait_for(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "the condition is not met");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn threads_are_served_in_the_order_of_their_arrival() {
    let fixture = Fixture::new(GCRA);
    assert!(!fixture.check(1).is_denied());
    let threads: Vec<_> = (0..5).map(|waiter| fixture.start(waiter, 1, SECOND * 60)).collect();
    for waiter in 0..5 {
        assert!(fixture.served.try_recv().is_err(), "time has not passed");
        fixture.advance(SECOND);
        fixture.expect_allowed(waiter);
    }
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!((fixture.waiters(), fixture.limiter.wait_queues().table().queues.len()), (0, 0));
}

#[test]
fn a_small_request_waits_behind_a_large_one_and_a_check_does_not_wait() {
    let fixture = Fixture::new("{unit: minute, requests_per_unit: 5, algorithm: sliding_log}");
    assert!(!fixture.check(2).is_denied());
    fixture.start(0, 5, SECOND * 600);
    fixture.start(1, 1, SECOND * 600);
    assert!(!fixture.check(1).is_denied());
    fixture.advance(SECOND * 60);
    fixture.expect_allowed(0);
    assert!(fixture.served.try_recv().is_err());
    fixture.advance(SECOND * 60);
    fixture.expect_allowed(1);
}

#[test]
fn a_window_serves_all_waiters_that_it_allows() {
    let fixture = Fixture::new(WINDOW);
    assert!(!fixture.check(5).is_denied());
    for waiter in 0..7 {
        fixture.start(waiter, 1, SECOND * 600);
    }
    fixture.advance(SECOND * 60);
    let mut served: Vec<_> = (0..5).map(|_| fixture.next().0).collect();
    served.sort_unstable();
    assert_eq!(served, [0, 1, 2, 3, 4]);
    wait_for(|| fixture.waiters() == 2);
    fixture.advance(SECOND * 60);
    let mut served = [fixture.next().0, fixture.next().0];
    served.sort_unstable();
    assert_eq!(served, [5, 6]);
}

#[test]
fn a_denial_is_returned_at_once_if_waiting_has_no_purpose() {
    let fixture = Fixture::new(WINDOW);
    let never = fixture.limiter.blocking_check_request(&request(None, 6), SECOND * 600);
    assert_eq!((never.is_denied(), never.max_cost()), (true, Some(5)));
    let late = fixture.limiter.blocking_check("api", &[("user", "bob")], SECOND * 59);
    assert_eq!(late.retry_after(), Some(Micros::from_secs(60)));
    assert!(fixture.limiter.blocking_check("api", &[("user", "bob")], Duration::ZERO).is_denied());
    assert!(!fixture.limiter.blocking_check("api", &[("user", "eve")], SECOND).is_denied());
    assert!(!fixture.limiter.blocking_check("other", &[("user", "bob")], SECOND).is_denied());
    assert_eq!(fixture.waiters(), 0);
}

#[test]
fn a_waiter_whose_turn_cannot_come_in_time_is_denied_at_once() {
    let fixture = Fixture::new(WINDOW);
    assert!(!fixture.check(5).is_denied());
    fixture.start(0, 1, SECOND * 600);
    fixture.advance(SECOND * 20);
    let verdict = fixture.limiter.blocking_check("api", &[("user", "bob")], SECOND * 39);
    assert_eq!((verdict.is_denied(), verdict.retry_after()), (true, Some(Micros::from_secs(40))));
    assert_eq!(fixture.waiters(), 1);
    fixture.advance(SECOND * 40);
    fixture.expect_allowed(0);
}

/// A waiter that waits already gives up when the first one is denied for longer.
#[test]
fn a_later_denial_ends_the_wait_of_those_whose_turn_cannot_come_in_time() {
    let fixture = Fixture::new(WINDOW);
    assert!(!fixture.check(5).is_denied());
    let denied = fixture.check(1);
    let queues = fixture.limiter.wait_queues();
    let key: QueueKey = smallvec::smallvec![7];
    let request = request(None, 1);
    let now = queues.now();
    let first = queues.join(&request, key.clone(), Duration::MAX);
    let second = queues.join(&request, key.clone(), now + SECOND * 59);
    let third = queues.join(&request, key, now + SECOND * 60);
    assert!(first.deny(&denied, queues.now()) == Next::Wait);
    assert!(matches!(second.next_turn(), Turn::GiveUp(Some(_))) && matches!(third.next_turn(), Turn::ParkUntil(_)));
}

#[test]
fn a_slot_is_awaited_until_the_deadline() {
    let fixture = Fixture::new(SLOT);
    assert!(!fixture.hold("held", false).is_denied());
    fixture.start(0, 1, SECOND * 5);
    fixture.start(1, 1, SECOND * 9);
    fixture.advance(SECOND * 4);
    assert!(fixture.served.recv_timeout(Duration::from_millis(20)).is_err());
    fixture.advance(SECOND);
    let (waiter, verdict) = fixture.next();
    assert_eq!((waiter, verdict.is_denied(), verdict.retry_after()), (0, true, Some(Micros::from_secs(55))));
    fixture.advance(SECOND * 4);
    let (waiter, verdict) = fixture.next();
    assert_eq!((waiter, verdict.is_denied()), (1, true));
}

#[test]
fn a_released_slot_goes_to_the_first_waiter_at_once() {
    let fixture = Fixture::new(SLOT);
    assert!(!fixture.hold("held", false).is_denied());
    for waiter in 0..3 {
        fixture.start(waiter, 1, SECOND * 600);
    }
    fixture.hold("held", true);
    fixture.expect_allowed(0);
    fixture.hold("0", true);
    fixture.expect_allowed(1);
    // The slot of the second waiter ends.
    fixture.advance(SECOND * 60);
    fixture.expect_allowed(2);
}

#[test]
fn new_rules_wake_the_waiters() {
    let fixture = Fixture::new(WINDOW);
    assert!(!fixture.check(5).is_denied());
    fixture.start(0, 1, SECOND * 600);
    fixture.limiter.set_rules(&rules("{unit: minute, requests_per_unit: 50}")).unwrap();
    fixture.expect_allowed(0);
}

#[test]
fn a_delay_is_awaited_if_it_ends_before_the_deadline() {
    let fixture = Fixture::new("{unit: second, requests_per_unit: 1, algorithm: leaky_bucket, burst: 1, queue: 9}");
    assert!(!fixture.check(1).is_denied());
    let verdict = fixture.limiter.blocking_check("api", &[("user", "bob")], Duration::from_millis(500));
    assert_eq!((verdict.is_denied(), verdict.statuses[0].delay), (false, Micros::from_secs(1)));
    let limiter = fixture.limiter.clone();
    let thread = thread::spawn(move || limiter.blocking_check("api", &[("user", "bob")], SECOND * 9));
    let before = fixture.time.load(Relaxed);
    while !thread.is_finished() {
        fixture.advance(Duration::from_millis(100));
        thread::sleep(Duration::from_millis(2));
    }
    assert!(fixture.time.load(Relaxed) >= before + 2_000_000, "the delay is awaited");
    let verdict = thread.join().unwrap();
    assert_eq!((verdict.is_denied(), verdict.statuses[0].delay), (false, Micros::ZERO));
}

#[test]
fn the_clock_of_the_host_ends_a_wait() {
    let limit = "{unit: second, requests_per_unit: 100, algorithm: gcra, burst: 1}";
    let limiter = RateLimiter::from_rules(&rules(limit)).unwrap();
    let start = Instant::now();
    let wait = || limiter.blocking_check("api", &[("user", "bob")], TIMEOUT).is_denied();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..10).map(|_| scope.spawn(wait)).collect();
        for thread in threads {
            assert!(!thread.join().unwrap());
        }
    });
    assert!(start.elapsed() >= Duration::from_millis(85), "{:?}", start.elapsed());
    let full = RateLimiter::from_rules(&rules(SLOT)).unwrap();
    assert!(!full.check("api", &[("user", "bob"), ("id", "a")]).is_denied());
    let start = Instant::now();
    assert!(full.blocking_check("api", &[("user", "bob"), ("id", "b")], Duration::from_millis(30)).is_denied());
    assert!(start.elapsed() >= Duration::from_millis(30), "{:?}", start.elapsed());
}

/// A release between a decision and its record is not lost.
#[test]
fn hits_refunded_during_a_decision_are_decided_at_once() {
    let fixture = Fixture::new(SLOT);
    assert!(!fixture.hold("held", false).is_denied());
    let denied = fixture.hold("next", false);
    let queues = fixture.limiter.wait_queues();
    let key: QueueKey = smallvec::smallvec![7];
    let request = request(Some("next"), 1);
    let first = queues.join(&request, key.clone(), Duration::MAX);
    let second = queues.join(&request, key.clone(), Duration::MAX);
    let decides = |place: &Place<'_>| matches!(place.next_turn(), Turn::Decide);
    assert!(decides(&first) && decides(&second));
    queues.wake_first(|| key.clone());
    assert!(second.deny(&denied, queues.now()) == Next::Wait && !decides(&second));
    assert!(first.deny(&denied, queues.now()) == Next::Wait && decides(&first));
    assert!(first.deny(&denied, queues.now()) == Next::Wait && !decides(&first));
    queues.wake_first(|| smallvec::smallvec![8]);
    assert!(!decides(&first));
    drop(first);
    assert!(!decides(&second), "the denial of the first waiter applies to the second one");
    queues.wake_first(|| key.clone());
    assert!(decides(&second));
}

/// The denial of a large request that has returned is no reason for the others to give up.
#[test]
fn a_denial_of_a_large_request_does_not_apply_to_small_ones() {
    let fixture = Fixture::new(WINDOW);
    assert!(!fixture.check(5).is_denied());
    let denied = fixture.check(1);
    let queues = fixture.limiter.wait_queues();
    let key: QueueKey = smallvec::smallvec![7];
    let deadline = queues.now() + SECOND;
    let large = queues.join(&request(None, 5), key.clone(), deadline);
    let small = queues.join(&request(None, 1), key.clone(), deadline);
    let last = queues.join(&request(None, 1), key, deadline);
    assert!(large.deny(&denied, queues.now()) == Next::Return);
    assert!(matches!(last.next_turn(), Turn::ParkUntil(_)) && matches!(small.next_turn(), Turn::Decide));
}

#[test]
fn a_queue_opens_if_hits_remain_for_all() {
    let fixture = Fixture::new(WINDOW);
    assert!(!fixture.check(5).is_denied());
    let denied = fixture.check(1);
    let queues = fixture.limiter.wait_queues();
    for (hits, decide) in [(0, [true, false, false]), (1, [true, false, false]), (2, [true, true, true])] {
        let join = || queues.join(&request(None, 1), smallvec::smallvec![7], Duration::MAX);
        let decides = |place: &Place<'_>| matches!(place.next_turn(), Turn::Decide);
        let [first, second, third] = [join(), join(), join()];
        assert!(decides(&first) && decides(&second) && decides(&third), "nothing has been denied");
        assert!(first.deny(&denied, queues.now()) == Next::Wait && !decides(&second));
        first.leave(hits);
        let fourth = join();
        assert_eq!([&second, &third, &fourth].map(decides), decide, "{hits} hits remain");
    }
}

#[test]
fn the_thread_that_has_waited_longest_for_one_of_the_counters_is_woken() {
    let fixture = Fixture::new(WINDOW);
    assert!(!fixture.check(5).is_denied());
    let denied = fixture.check(1);
    let queues = fixture.limiter.wait_queues();
    let join = |key: &[u128]| queues.join(&request(None, 1), key.iter().copied().collect(), Duration::MAX);
    let places = [join(&[9]), join(&[5, 1]), join(&[1])];
    let decides = |place: &Place<'_>| matches!(place.next_turn(), Turn::Decide);
    for place in &places {
        assert!(place.deny(&denied, queues.now()) == Next::Wait);
    }
    queues.wake_first(|| smallvec::smallvec![1, 2]);
    assert_eq!(places.each_ref().map(decides), [false, true, false]);
}

/// A thread that becomes the first one notices when the slot ends, also if it was parked for longer.
#[test]
fn the_next_thread_takes_over_when_the_first_one_gives_up() {
    let limiter = RateLimiter::from_rules(&rules(&SLOT.replace("60s", "1s"))).unwrap();
    let start = Instant::now();
    assert!(!limiter.check("api", &[("user", "bob"), ("id", "held")]).is_denied());
    thread::scope(|scope| {
        let wait = |holder, max_wait| limiter.blocking_check("api", &[("user", "bob"), ("id", holder)], max_wait);
        let first = scope.spawn(move || wait("first", Duration::from_millis(100)).is_denied());
        wait_for(|| limiter.wait_queues().waiters() == 1);
        assert!(!wait("second", TIMEOUT).is_denied());
        assert!(first.join().unwrap());
    });
    assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
}
