use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{task::JoinHandle, time::advance};

use super::*;
use crate::{
    Client, Descriptor, Failure, Limit, OnError, descriptor,
    testing::{Answer, FakeService, RecordedCheck},
};

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn user<'d>() -> Descriptor<'d> {
    descriptor! { "user" => "bob" }
}

fn client(service: &FakeService) -> Client {
    Client::builder("http://unused").domain("d").on_error(OnError::Deny).connect_fake(service)
}

/// Returns the answers of a limit of `requests` per window.
fn window(requests: u32, window: Duration) -> impl FnMut(&RecordedCheck) -> Answer + Send + 'static {
    let start = Instant::now();
    let mut current = 0;
    let mut used = 0;
    move |check| {
        let elapsed = start.elapsed();
        let index = elapsed.as_nanos() / window.as_nanos();
        if index != current {
            current = index;
            used = 0;
        }
        if used + check.hits > requests {
            return Answer::denied(window * (index as u32 + 1) - elapsed);
        }
        used += check.hits;
        Answer::allowed(requests - used)
    }
}

/// Slots that the test can also release by itself.
#[derive(Clone, Default)]
struct Slots {
    held: Arc<AtomicU32>,
}

impl Slots {
    /// Returns the answers of a limit of `slots` that are held for a minute.
    fn answers(&self, slots: u32) -> impl FnMut(&RecordedCheck) -> Answer + Send + 'static {
        let held = Arc::clone(&self.held);
        move |check| {
            if is_release(check) {
                held.fetch_sub(1, Relaxed);
                return Answer::allowed(0);
            }
            if held.load(Relaxed) == slots {
                return Answer::denied(secs(60)).limit(slots, Duration::ZERO);
            }
            let remaining = slots - 1 - held.fetch_add(1, Relaxed);
            Answer::allowed(remaining).limit(slots, Duration::ZERO)
        }
    }
}

fn is_release(check: &RecordedCheck) -> bool {
    check.descriptors.iter().any(|descriptor| *descriptor == descriptor.clone().refund())
}

/// Verdicts of waiters in the order of their completion, with the time since the start.
#[derive(Clone)]
struct Log {
    start: Instant,
    entries: Arc<Mutex<Vec<(usize, bool, Duration)>>>,
}

impl Log {
    fn new() -> Self {
        Self { start: Instant::now(), entries: Arc::default() }
    }

    fn add(&self, waiter: usize, allowed: bool) {
        lock(&self.entries).push((waiter, allowed, self.start.elapsed()));
    }

    fn entries(&self) -> Vec<(usize, bool, Duration)> {
        lock(&self.entries).clone()
    }

    fn order(&self) -> Vec<usize> {
        self.entries().iter().map(|(waiter, ..)| *waiter).collect()
    }
}

/// Starts a waiter with this cost, and lets it run until it waits.
async fn start(client: &Client, log: &Log, waiter: usize, cost: u32, max_wait: Duration) -> JoinHandle<()> {
    let client = client.clone();
    let log = log.clone();
    let task = tokio::spawn(async move {
        let verdict = client.check([user()]).hits(cost).max_wait(max_wait).await;
        log.add(waiter, verdict.allowed());
    });
    settle().await;
    task
}

/// Starts a waiter for a permit that it holds for some time.
async fn start_permit(client: &Client, log: &Log, waiter: usize, max_wait: Duration, hold: Duration) -> JoinHandle<()> {
    let client = client.clone();
    let log = log.clone();
    let task = tokio::spawn(async move {
        let acquired = client.acquire([user()]).max_wait(max_wait).await;
        log.add(waiter, acquired.is_ok());
        sleep(hold).await;
    });
    settle().await;
    task
}

/// Lets all tasks run until they wait for time.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

async fn join_all(tasks: Vec<JoinHandle<()>>) {
    for task in tasks {
        let _ = task.await;
    }
}

fn assert_no_waiters(client: &Client) {
    let table = client.inner.wait_queues.table();
    assert_eq!((table.queues.len(), table.waiters), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn waiters_are_served_in_the_order_of_their_arrival() {
    let service = FakeService::new();
    service.answer_by(window(1, secs(1)));
    let client = client(&service);
    let log = Log::new();
    let mut tasks = Vec::new();
    for waiter in 0..8 {
        tasks.push(start(&client, &log, waiter, 1, secs(60)).await);
    }
    join_all(tasks).await;
    let entries = log.entries();
    for (position, (waiter, allowed, at)) in entries.iter().enumerate() {
        assert!(*waiter == position && *allowed && *at < secs(position as u64) + millis(50), "{entries:?}");
    }
    assert_no_waiters(&client);
}

/// Answers that are on their way at the same time do not change the order.
#[tokio::test(start_paused = true)]
async fn waiters_that_arrive_together_are_served_in_their_order() {
    let service = FakeService::new();
    service.answer_by(window(3, secs(1)));
    service.set_latency(millis(10));
    let client = client(&service);
    let log = Log::new();
    let mut tasks = Vec::new();
    for waiter in 0..200 {
        tasks.push(start(&client, &log, waiter, 1, secs(600)).await);
    }
    join_all(tasks).await;
    let expected: Vec<_> = (0..200).collect();
    assert_eq!(log.order(), expected);
    assert_no_waiters(&client);
}

#[tokio::test(start_paused = true)]
async fn a_small_request_waits_behind_a_large_one() {
    let service = FakeService::new();
    service.answer_by(window(5, secs(1)));
    let client = client(&service);
    assert!(client.check([user()]).hits(2).await.allowed());
    let log = Log::new();
    let large = start(&client, &log, 0, 5, secs(9)).await;
    let small = start(&client, &log, 1, 1, secs(9)).await;
    assert!(client.check([user()]).hits(1).await.allowed(), "a check that does not wait");
    join_all(vec![large, small]).await;
    let entries = log.entries();
    assert_eq!(log.order(), [0, 1]);
    assert!(entries[0].2 < millis(1_050) && entries[1].2 >= secs(2), "{entries:?}");
}

#[tokio::test(start_paused = true)]
async fn many_waiters_cause_few_requests_and_use_each_window_fully() {
    let service = FakeService::new();
    service.answer_by(window(100, secs(1)));
    service.set_latency(millis(5));
    let client = client(&service);
    let log = Log::new();
    let mut tasks = Vec::new();
    for waiter in 0..1_000 {
        tasks.push(start(&client, &log, waiter, 1, secs(60)).await);
    }
    join_all(tasks).await;
    let expected: Vec<_> = (0..1_000).collect();
    assert_eq!(log.order(), expected);
    let took = log.start.elapsed();
    assert!(took >= secs(9) && took < millis(9_050), "{took:?}");
    // 1,000 allowed ones, and one denial for each window.
    let checks = service.checks().len();
    assert!(checks <= 1_020, "{checks}");
    assert_no_waiters(&client);
}

#[tokio::test(start_paused = true)]
async fn a_denial_is_returned_at_once_if_waiting_has_no_purpose() {
    let service = FakeService::new();
    let client = client(&service);
    let start = Instant::now();
    let never = Answer::denied(secs(1)).change(|status| status.retry_after = None);
    let failure = Answer::failure(Failure::Unreachable);
    for (answer, by) in
        [(Answer::denied(secs(3)), DecidedBy::Server), (never, DecidedBy::Server), (failure, DecidedBy::Fallback)]
    {
        service.answer_next(answer);
        let verdict = client.check([user()]).max_wait(secs(2)).await;
        assert_eq!((verdict.allowed(), verdict.decided_by(), start.elapsed()), (false, by, Duration::ZERO));
    }
    assert_eq!(service.checks().len(), 3);
    assert_no_waiters(&client);
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_decided_by_on_error() {
    let service = FakeService::new();
    let client = Client::builder("http://unused").domain("d").on_error(OnError::Allow).connect_fake(&service);
    service.answer_next(Answer::denied(secs(1)));
    service.answer_next(Answer::failure(Failure::Unreachable));
    let log = Log::new();
    let tasks = vec![start(&client, &log, 0, 1, secs(9)).await, start(&client, &log, 1, 1, secs(9)).await];
    join_all(tasks).await;
    assert_eq!(log.order(), [0, 1]);
    // The second waiter does not take over the failure of the first one.
    assert_eq!(service.checks().len(), 3);
    service.answer_next(Answer::failure(Failure::Unreachable));
    let result = client.check([user()]).max_wait(secs(9)).without_fallback().await;
    assert_eq!(result, Err(Failure::Unreachable));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_turn_cannot_come_in_time_is_denied_without_a_call() {
    let service = FakeService::new();
    service.answer_next(Answer::denied(secs(3)));
    let client = client(&service);
    let log = Log::new();
    let first = start(&client, &log, 0, 1, secs(60)).await;
    advance(secs(1)).await;
    let begin = Instant::now();
    let verdict = client.check([user()]).max_wait(secs(1)).await;
    assert_eq!((verdict.decided_by(), verdict.retry_after()), (DecidedBy::DenyCache, Some(secs(2))));
    assert_eq!((begin.elapsed(), service.checks().len()), (Duration::ZERO, 1));
    // These two wait with hope, until the first waiter learns more.
    let hopeless = start(&client, &log, 1, 1, secs(9)).await;
    let patient = start(&client, &log, 2, 1, secs(60)).await;
    service.answer_next(Answer::denied(secs(20)));
    join_all(vec![first, hopeless, patient]).await;
    let entries = log.entries();
    assert_eq!(log.order(), [1, 0, 2]);
    assert!(!entries[0].1 && entries[0].2 < millis(3_050), "{entries:?}");
    assert!(entries[1].1 && entries[1].2 >= secs(23), "{entries:?}");
    assert_eq!(service.checks().len(), 4);
    assert_no_waiters(&client);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gives_up_at_its_deadline() {
    let service = FakeService::new();
    service.answer_by(window(1, secs(1)));
    let client = client(&service);
    let log = Log::new();
    let mut tasks = Vec::new();
    for waiter in 0..5 {
        tasks.push(start(&client, &log, waiter, 1, millis(2_500)).await);
    }
    join_all(tasks).await;
    let allowed: Vec<_> = log.entries().iter().map(|(_, allowed, _)| *allowed).collect();
    assert_eq!(allowed, [true, true, true, false, false]);
    assert!(log.start.elapsed() <= millis(2_510), "{:?}", log.start.elapsed());
    assert_no_waiters(&client);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_waiter_leaves_the_order_of_the_others() {
    for cancelled in 0..3 {
        let service = FakeService::new();
        service.answer_by(window(1, secs(1)));
        let client = client(&service);
        assert!(client.check([user()]).await.allowed());
        let log = Log::new();
        let mut tasks = Vec::new();
        for waiter in 0..3 {
            tasks.push(start(&client, &log, waiter, 1, secs(60)).await);
        }
        advance(millis(500)).await;
        tasks[cancelled].abort();
        join_all(tasks).await;
        let others: Vec<_> = (0..3).filter(|waiter| *waiter != cancelled).collect();
        assert_eq!(log.order(), others);
        let entries = log.entries();
        assert!(entries[0].2 < millis(1_050) && entries[1].2 < millis(2_050), "{entries:?}");
        // The plain check, the first denial, and for each allowed one at most one denial of the next waiter.
        assert!(service.checks().len() <= 5, "{}", service.checks().len());
        assert_no_waiters(&client);
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_cancelled_during_its_call_wakes_the_next_one() {
    let service = FakeService::new();
    service.answer_next(Answer::denied(secs(1)));
    service.answer_next(Answer::denied(secs(1)));
    let client = client(&service);
    let log = Log::new();
    let first = start(&client, &log, 0, 1, secs(60)).await;
    let second = start(&client, &log, 1, 1, secs(60)).await;
    service.set_latency(millis(100));
    sleep(millis(1_050)).await;
    assert_eq!(service.checks().len(), 2, "the first waiter asks for the second time");
    first.abort();
    settle().await;
    assert_eq!(service.checks().len(), 3, "the second waiter asks");
    join_all(vec![second]).await;
    assert_eq!(log.order(), [1]);
    assert_no_waiters(&client);
}

#[tokio::test(start_paused = true)]
async fn the_number_of_waiters_is_bounded() {
    let service = FakeService::new();
    service.answer_always(Answer::denied(secs(5)));
    let builder = Client::builder("http://unused").domain("d").max_waiters(2);
    let client = builder.connect_fake(&service);
    let log = Log::new();
    let mut tasks = Vec::new();
    for waiter in 0..3 {
        tasks.push(start(&client, &log, waiter, 1, secs(60)).await);
    }
    assert_eq!(log.entries(), [(2, false, Duration::ZERO)]);
    assert_eq!(service.checks().len(), 2, "the first waiter, and the one that does not wait");
    tasks[0].abort();
    settle().await;
    assert_eq!(client.inner.wait_queues.table().waiters, 1);
    service.answer_always(Answer::allowed(1));
    tasks.push(start(&client, &log, 3, 1, secs(60)).await);
    join_all(tasks).await;
    assert_eq!(log.order(), [2, 1, 3]);
    let disabled = Client::builder("http://unused").domain("d").max_waiters(0).connect_fake(&service);
    service.answer_always(Answer::denied(secs(5)));
    assert!(!disabled.check([user()]).max_wait(secs(60)).await.allowed());
    assert_eq!(log.start.elapsed(), log.entries()[2].2);
}

#[tokio::test(start_paused = true)]
async fn queues_are_separate() {
    let service = FakeService::new();
    service.answer_next(Answer::denied(secs(5)));
    let client = client(&service);
    let log = Log::new();
    let task = start(&client, &log, 0, 1, secs(60)).await;
    let begin = Instant::now();
    assert!(client.check([descriptor! { "user" => "eve" }]).max_wait(secs(60)).await.allowed());
    assert!(client.check([user()]).domain("other").max_wait(secs(60)).await.allowed());
    let permit = client.acquire([user()]).max_wait(secs(60)).await.unwrap();
    assert_eq!(begin.elapsed(), Duration::ZERO);
    join_all(vec![task]).await;
    drop(permit);
    assert!(log.start.elapsed() >= secs(5));
}

#[tokio::test(start_paused = true)]
async fn a_delay_is_awaited_if_it_ends_before_the_deadline() {
    let service = FakeService::new();
    service.answer_always(Answer::allowed(1).delay(secs(2)));
    let client = client(&service);
    let begin = Instant::now();
    let verdict = client.check([user()]).max_wait(secs(1)).await;
    assert_eq!((verdict.allowed(), verdict.delay(), begin.elapsed()), (true, secs(2), Duration::ZERO));
    let verdict = client.check([user()]).max_wait(secs(3)).await;
    assert!(verdict.allowed() && begin.elapsed() >= secs(2) && begin.elapsed() < millis(2_010));
    assert_eq!(verdict.delay(), Duration::ZERO);
    let permit = client.acquire([user()]).max_wait(secs(3)).await.unwrap();
    assert_eq!((permit.verdict().delay(), begin.elapsed() >= secs(4)), (Duration::ZERO, true));
}

/// Others wait for their own delays at the same time.
#[tokio::test(start_paused = true)]
async fn a_waiter_leaves_its_queue_before_its_delay() {
    let service = FakeService::new();
    service.answer_next(Answer::allowed(5).delay(secs(2)));
    service.answer_next(Answer::allowed(4).delay(secs(3)));
    let client = client(&service);
    let log = Log::new();
    let tasks = vec![start(&client, &log, 0, 1, secs(9)).await, start(&client, &log, 1, 1, secs(9)).await];
    assert_no_waiters(&client);
    join_all(tasks).await;
    assert!(log.start.elapsed() < millis(3_010));
}

#[tokio::test(start_paused = true)]
async fn a_refund_by_the_same_client_wakes_the_first_waiter() {
    let service = FakeService::new();
    service.answer_next(Answer::denied(secs(60)));
    let client = client(&service);
    let log = Log::new();
    let task = start(&client, &log, 0, 1, secs(90)).await;
    sleep(secs(3)).await;
    assert_eq!(service.checks().len(), 1);
    client.check([descriptor! { "user" => "eve" }.refund()]).await;
    settle().await;
    assert_eq!(service.checks().len(), 2, "the refund of another descriptor");
    client.check([user().refund()]).await;
    join_all(vec![task]).await;
    assert!(log.entries()[0].1, "allowed");
    assert!(log.start.elapsed() < millis(3_010));
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_the_same_client_releases_goes_to_the_first_waiter_at_once() {
    let service = FakeService::new();
    let slots = Slots::default();
    service.answer_by(slots.answers(1));
    let client = client(&service);
    let log = Log::new();
    // Pauses have grown to half a second and more when the slot is released.
    let mut tasks = Vec::new();
    for waiter in 0..4 {
        tasks.push(start_permit(&client, &log, waiter, secs(60), millis(7_300)).await);
    }
    join_all(tasks).await;
    let entries = log.entries();
    assert_eq!(log.order(), [0, 1, 2, 3]);
    for (position, (_, allowed, at)) in entries.iter().enumerate() {
        let expected = millis(7_300) * position as u32;
        assert!(*allowed && *at >= expected && *at < expected + millis(10), "{entries:?}");
    }
    assert_no_waiters(&client);
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_others_release_is_noticed_with_few_requests() {
    let service = FakeService::new();
    let slots = Slots::default();
    slots.held.store(1, Relaxed);
    service.answer_by(slots.answers(1));
    let client = client(&service);
    let log = Log::new();
    let mut tasks = Vec::new();
    for waiter in 0..100 {
        tasks.push(start_permit(&client, &log, waiter, secs(60), secs(60)).await);
    }
    sleep(secs(10)).await;
    let checks = service.checks().len();
    // Six pauses of up to 640 ms, and then one from half a second to a second.
    assert!((12..=30).contains(&checks), "{checks}");
    slots.held.store(0, Relaxed);
    sleep(millis(1_002)).await;
    assert_eq!(log.order(), [0]);
    for task in tasks {
        task.abort();
    }
    settle().await;
    assert_no_waiters(&client);
}

/// The time at which the held slots end is no reason to give up: they can be released before.
#[tokio::test(start_paused = true)]
async fn a_slot_is_awaited_until_the_deadline_and_not_longer() {
    let service = FakeService::new();
    let slots = Slots::default();
    slots.held.store(1, Relaxed);
    service.answer_by(slots.answers(1));
    let client = client(&service);
    let begin = Instant::now();
    let denied = client.acquire([user()]).max_wait(millis(500)).await.unwrap_err();
    assert!(begin.elapsed() >= millis(500) && begin.elapsed() <= millis(502), "{:?}", begin.elapsed());
    assert_eq!((denied.decided_by(), denied.retry_after()), (DecidedBy::Server, Some(secs(60))));
    let verdict = client.check([user()]).max_wait(millis(500)).await;
    assert!(!verdict.allowed() && begin.elapsed() >= secs(1), "also without a permit");
    assert!(client.acquire([user()]).await.is_err());
    assert!(begin.elapsed() <= millis(1_004), "an acquire without waiting");
    // No slot was taken, so none is released.
    settle().await;
    assert!(!service.checks().iter().any(is_release));
}

#[tokio::test(start_paused = true)]
async fn a_waiting_permit_that_is_cancelled_during_its_call_releases_its_slot() {
    let service = FakeService::new();
    let slots = Slots::default();
    service.answer_by(slots.answers(1));
    service.set_latency(millis(100));
    let client = client(&service);
    let log = Log::new();
    let first = start_permit(&client, &log, 0, secs(60), secs(60)).await;
    let second = start_permit(&client, &log, 1, secs(60), secs(60)).await;
    assert_eq!(slots.held.load(Relaxed), 1);
    sleep(millis(50)).await;
    first.abort();
    sleep(secs(1)).await;
    assert_eq!(log.order(), [1]);
    assert_eq!((slots.held.load(Relaxed), service.checks().iter().filter(|check| is_release(check)).count()), (1, 1));
    second.abort();
    settle().await;
}

fn costs() -> Costs {
    std::iter::once(1).collect()
}

fn key(identities: &[u128]) -> QueueKey {
    QueueKey { identities: identities.iter().copied().collect(), is_permit: true }
}

fn no_slot() -> Verdict {
    let limit = Some(Limit { requests_per_unit: 1, window: Duration::ZERO, name: None });
    let status = crate::Status { limit, retry_after: Some(secs(60)), ..crate::Status::default() };
    Verdict { statuses: std::iter::once(status).collect(), ..Verdict::empty(false, DecidedBy::Server) }
}

#[tokio::test(start_paused = true)]
async fn a_slot_released_during_a_call_is_asked_for_at_once() {
    let queues = WaitQueues::new(9);
    let place = queues.join(key(&[1]), costs(), secs(60)).unwrap();
    let begin = Instant::now();
    assert!(place.turn().await.is_none());
    queues.wake_first(&key(&[1]).identities);
    assert_eq!(place.record(&no_slot()), Next::Wait);
    assert!(place.turn().await.is_none());
    assert_eq!(begin.elapsed(), Duration::ZERO);
    assert_eq!(place.record(&no_slot()), Next::Wait);
    assert!(place.turn().await.is_none());
    assert!(begin.elapsed() >= FIRST_POLL / 2, "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_waiter_that_has_waited_longest_for_one_of_the_descriptors_is_woken() {
    let queues = WaitQueues::new(9);
    let other = queues.join(key(&[9]), costs(), secs(60)).unwrap();
    let older = queues.join(key(&[5, 1]), costs(), secs(60)).unwrap();
    let newer = queues.join(key(&[1]), costs(), secs(60)).unwrap();
    for place in [&other, &older, &newer] {
        assert!(place.turn().await.is_none());
        assert_eq!(place.record(&no_slot()), Next::Wait);
    }
    queues.wake_first(&key(&[1, 2]).identities);
    let asks_now = |place: &Place<'_>| matches!(place.step(), Step::Ask);
    assert_eq!((asks_now(&other), asks_now(&older), asks_now(&newer)), (false, true, false));
    drop(older);
    queues.wake_first(&key(&[1, 2]).identities);
    assert!(asks_now(&newer) && !asks_now(&other));
}

#[test]
fn the_retry_of_a_denial_is_known_for_rates_and_unknown_for_slots() {
    let status = |allowed, window: Option<u64>, retry: Option<u64>| crate::Status {
        allowed,
        limit: window.map(|window| Limit { requests_per_unit: 1, window: secs(window), name: None }),
        retry_after: retry.map(secs),
        ..crate::Status::default()
    };
    let retry = |statuses: &[crate::Status], is_permit| {
        let statuses = statuses.iter().cloned().collect();
        Retry::of(&Verdict { statuses, ..Verdict::empty(false, DecidedBy::Server) }, is_permit)
    };
    let expected =
        |certain, slot_ends: Option<u64>| Some(Retry { certain: secs(certain), slot_ends: slot_ends.map(secs) });
    assert_eq!(retry(&[status(false, Some(1), Some(3)), status(false, Some(1), Some(7))], false), expected(7, None));
    assert_eq!(retry(&[status(false, Some(0), Some(3)), status(false, Some(1), Some(2))], false), expected(2, Some(3)));
    assert_eq!(retry(&[status(false, None, Some(3)), status(true, Some(1), Some(9))], false), expected(3, None));
    assert_eq!(retry(&[status(false, None, Some(3))], true), expected(0, Some(3)));
    assert_eq!(retry(&[status(false, Some(1), Some(3)), status(false, Some(1), None)], false), None);
    assert_eq!((retry(&[], false), retry(&[status(true, Some(1), None)], false)), (None, None));
}

/// Large requests that nobody waits for any more do not block small ones.
#[tokio::test(start_paused = true)]
async fn a_small_request_asks_at_once_when_the_large_one_before_it_is_cancelled() {
    let service = FakeService::new();
    service.answer_by(window(5, secs(60)));
    let client = client(&service);
    assert!(client.check([user()]).hits(2).await.allowed());
    let log = Log::new();
    let large = start(&client, &log, 0, 5, secs(90)).await;
    let small = start(&client, &log, 1, 1, secs(90)).await;
    assert_eq!(service.checks().len(), 2);
    large.abort();
    join_all(vec![small]).await;
    assert_eq!(log.entries(), [(1, true, Duration::ZERO)]);
}

/// Every waiter returns in time, whatever others do, and without cancellations in the order of arrival.
#[tokio::test(start_paused = true)]
async fn random_waiters_return_in_time_and_leave_nothing() {
    for seed in 0..300 {
        let mut random = StdRng::seed_from_u64(seed);
        let is_simple = random.random_bool(0.3);
        let latency = if is_simple { Duration::ZERO } else { millis(random.random_range(0..30)) };
        let service = FakeService::new();
        service.answer_by(window(random.random_range(3..9), millis(random.random_range(50..900))));
        service.set_latency(latency);
        let client = Client::builder("http://unused").domain("d").max_waiters(40).connect_fake(&service);
        let log = Log::new();
        let mut tasks = Vec::new();
        let mut deadlines = Vec::new();
        for waiter in 0..random.random_range(1..60) {
            let cost = if is_simple { 1 } else { random.random_range(1..4) };
            let max_wait = if is_simple { secs(60) } else { millis(random.random_range(1..3_000)) };
            deadlines.push(log.start.elapsed() + max_wait + latency + millis(3));
            tasks.push(start(&client, &log, waiter, cost, max_wait).await);
            if random.random_bool(0.3) {
                sleep(millis(random.random_range(0..100))).await;
            }
            if !is_simple && random.random_bool(0.2) {
                tasks[random.random_range(0..=waiter)].abort();
            }
            if !is_simple && random.random_bool(0.1) {
                client.check([user().refund()]).await;
            }
        }
        join_all(tasks).await;
        let mut last = None;
        for (waiter, allowed, at) in log.entries() {
            assert!(at <= deadlines[waiter], "seed {seed}: {waiter} returned at {at:?}, not {:?}", deadlines[waiter]);
            if is_simple && allowed {
                assert!(last < Some(waiter), "seed {seed}: {:?}", log.order());
                last = Some(waiter);
            }
        }
        assert_no_waiters(&client);
    }
}

/// Returns an allowed verdict with this number of remaining hits.
fn allowed(remaining: u64) -> Verdict {
    let limit = Some(Limit { requests_per_unit: 9, window: secs(1), name: None });
    let status = crate::Status { allowed: true, limit, remaining, ..crate::Status::default() };
    Verdict { statuses: std::iter::once(status).collect(), ..Verdict::empty(true, DecidedBy::Server) }
}

#[tokio::test(start_paused = true)]
async fn new_waiters_ask_at_once_if_hits_remain_for_them() {
    for (remaining, asks) in [(0, [true, false, false]), (1, [true, false, false]), (9, [true, true, true])] {
        let queues = WaitQueues::new(9);
        let join = || queues.join(key(&[1]), costs(), secs(60)).unwrap();
        let asks_now = |place: &Place<'_>| matches!(place.step(), Step::Ask);
        let first = join();
        assert!(asks_now(&first));
        assert_eq!(first.record(&no_slot()), Next::Wait);
        let [second, third] = [join(), join()];
        assert!(!asks_now(&second) && !asks_now(&third));
        assert_eq!(first.record(&allowed(remaining)), Next::Return);
        let fourth = join();
        assert_eq!([&second, &third, &fourth].map(asks_now), asks, "{remaining} hits remain");
    }
}

/// The denial of a large request that has returned is no reason for the others to give up.
#[tokio::test(start_paused = true)]
async fn a_denial_of_a_large_request_does_not_apply_to_small_ones() {
    let rate = |retry_after| {
        let limit = Some(Limit { requests_per_unit: 9, window: secs(1), name: None });
        let status = crate::Status { limit, retry_after: Some(retry_after), ..crate::Status::default() };
        Verdict { statuses: std::iter::once(status).collect(), ..Verdict::empty(false, DecidedBy::Server) }
    };
    for large_leads in [true, false] {
        let queues = WaitQueues::new(9);
        let join = |cost: u64| queues.join(key(&[1]), std::iter::once(cost).collect(), secs(10)).unwrap();
        let mut places = if large_leads { vec![join(5), join(1)] } else { vec![join(1), join(5)] };
        let large = if large_leads { 0 } else { 1 };
        for place in &places {
            assert!(place.turn().await.is_none());
        }
        places.push(join(1));
        assert_eq!(places[large].record(&rate(secs(60))), Next::Return);
        let small = places[1 - large].step();
        assert!(matches!(small, Step::Ask), "the large one leads: {large_leads}");
        assert!(!matches!(places[2].step(), Step::GiveUp(_)), "the large one leads: {large_leads}");
        assert_eq!(places[1 - large].record(&rate(secs(1))), Next::Wait);
        assert!(matches!(places[2].step(), Step::SleepUntil(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_denial_and_a_failure_take_back_that_others_may_ask() {
    let failure = Verdict::fallback(true, Failure::Unreachable);
    for last in [allowed(0), failure] {
        let queues = WaitQueues::new(9);
        let [first, second, third] = [(); 3].map(|()| queues.join(key(&[1]), costs(), secs(60)).unwrap());
        let asks_now = |place: &Place<'_>| matches!(place.step(), Step::Ask);
        assert!(asks_now(&first) && asks_now(&second) && asks_now(&third));
        assert_eq!(first.record(&no_slot()), Next::Wait);
        assert!(!asks_now(&second) && !asks_now(&third));
        assert_eq!(first.record(&last), Next::Return);
        assert!(asks_now(&second) && !asks_now(&third), "{last:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn pauses_begin_again_when_a_slot_was_free() {
    let queues = WaitQueues::new(9);
    let [first, second] = [(); 2].map(|()| queues.join(key(&[1]), costs(), secs(60)).unwrap());
    for _ in 0..8 {
        assert!(first.turn().await.is_none());
        assert_eq!(first.record(&no_slot()), Next::Wait);
    }
    assert_eq!(first.record(&allowed(0)), Next::Return);
    assert!(second.turn().await.is_none());
    assert_eq!(second.record(&no_slot()), Next::Wait);
    let begin = Instant::now();
    assert!(second.turn().await.is_none());
    assert!(begin.elapsed() <= FIRST_POLL + millis(1), "{:?}", begin.elapsed());
}
