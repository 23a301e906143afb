//! Tests for the limits and the isolation of the memory store. The tests for its decisions are in
//! `tests/redis/stores.rs`.

use sluicegate_algorithm::{MaxHits, Program, fixed_window::FixedWindow, sliding_log::SlidingLog};

use super::*;

fn program(limit: u64, seconds: u64) -> Program {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(seconds), true).unwrap().into()
}

fn take(memory: &Memory, key: &str, program: &Program, second: u64) -> bool {
    let counter = Counter::new(key, *program);
    memory.decide(&counter.take(1), Micros::from_secs(second)).decision.allowed
}

#[test]
fn never_exceeds_its_maximum_and_counts_evictions() {
    let memory = Memory::new(&Settings { max_counters: 6_400 });
    let rule = program(1, 3_600);
    for user in 0..20_000 {
        assert!(take(&memory, &format!("user{user}"), &rule, 7_200));
    }
    let usage = memory.usage();
    assert!(usage.counters <= 6_400, "{usage:?}");
    assert_eq!(usage.counters + usage.evicted, 20_000);
}

#[test]
fn long_states_count_by_their_size() {
    let memory = Memory::new(&Settings { max_counters: 4_000 });
    let day = Micros::from_secs(86_400);
    let log: Program = SlidingLog::new(MaxHits::hard(1_000), day, Micros::ZERO, false).unwrap().into();
    for user in 0..500 {
        let counter = Counter::new(format!("user{user}"), log);
        assert!(memory.decide(&counter.take(1_000), day).decision.allowed);
    }
    // Each log has 7 kB, in the memory of 4,000 counters of 36 bytes. A shard holds at least one counter.
    let usage = memory.usage();
    assert!((1..=40).contains(&usage.counters) && usage.counters + usage.evicted == 500, "{usage:?}");
    // Short counters evict the logs, and can then use the whole maximum.
    let rule = program(1, 3_600);
    for user in 0..20_000 {
        assert!(take(&memory, &format!("short{user}"), &rule, 86_400));
    }
    assert!((3_500..=4_000).contains(&memory.usage().counters), "{:?}", memory.usage());
}

#[test]
fn a_deleted_counter_starts_again() {
    let memory = Memory::new(&Settings { max_counters: 100 });
    let rule = program(1, 3_600);
    assert!(!memory.delete(b"user"));
    assert!(take(&memory, "user", &rule, 1) && take(&memory, "other", &rule, 1) && !take(&memory, "user", &rule, 2));
    assert!(memory.delete(b"user") && !memory.delete(b"user"));
    assert!(take(&memory, "user", &rule, 3) && !take(&memory, "other", &rule, 3));
}

/// Under `Charge::All`, each hit is counted once, or no hit is counted if one of them is denied.
#[test]
fn under_charge_all_every_hit_is_counted_or_none() {
    let memory = Memory::new(&Settings { max_counters: 100 });
    let (few, many) = (Counter::new("few", program(2, 3_600)), Counter::new("many", program(10, 3_600)));
    let hits = [many.take(1), few.take(1)];
    let apply = || {
        memory
            .decide_all(&hits, Charge::All, Micros::from_secs(1))
            .into_iter()
            .map(|decision| decision.unwrap().decision)
    };
    let decisions: Vec<_> =
        (0..4).flat_map(|_| apply()).map(|decision| (decision.allowed, decision.remaining)).collect();
    let denied = [(true, 8), (false, 0)];
    assert_eq!(decisions, [[(true, 9), (true, 1)], [(true, 8), (true, 0)], denied, denied].concat());
}

fn hash(number: u64) -> Hash {
    Hash::new(u128::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835))
}

fn operation(action: Action, second: u64) -> Operation {
    Operation { action, cost: 1, now: Micros::from_secs(second) }
}

#[test]
fn a_full_shard_evicts_the_counter_that_would_expire_first() {
    let mut shard = Shard::new(16, false);
    // The windows end at different times, and the earliest is neither the first nor the last counter.
    let window = |number: u64| program(1, 3_600 * (1 + (number + 11) % 16));
    for number in 0..16 {
        assert!(shard.apply(hash(number), &window(number), operation(Action::Take, 0)).allowed);
    }
    assert!(shard.apply(hash(99), &program(1, 360_000), operation(Action::Take, 0)).allowed);
    assert_eq!(shard.usage(), Usage { counters: 16, evicted: 1, expired: 0 });
    for number in 0..16 {
        let is_evicted = shard.apply(hash(number), &window(number), operation(Action::Peek, 0)).allowed;
        assert_eq!(is_evicted, number == 5, "{number}");
    }
}

/// Free slots are skipped, and the memory of removed long states is freed. Otherwise a shard could run out of memory
/// for long states.
#[test]
fn removed_long_states_free_their_memory() {
    let log: Program = SlidingLog::new(MaxHits::hard(100), Micros::from_secs(60), Micros::ZERO, false).unwrap().into();
    let fill = Operation { action: Action::Take, cost: 100, now: Micros::from_secs(0) };
    // Room for two logs of 700 bytes.
    let mut shard = Shard::new(2 * 700 / 36 + 4, false);
    // This counter must not be evicted, which shows that there is always room.
    shard.apply(hash(1_000), &program(1, 1_000_000_000), operation(Action::Take, 0));
    for round in 0..100 {
        let now = Micros::from_secs(round * 1_000);
        assert!(shard.apply(hash(round), &log, Operation { now, ..fill }).allowed);
        // The slot is free only after its counter has expired.
        shard.reclaim(100, now + Micros::from_secs(500));
        assert_eq!(shard.usage(), Usage { counters: 1, evicted: 0, expired: round + 1 });
    }
    // Five of these six short counters expire, and their slots stay free.
    let short = |number: u64| program(1, if number == 0 { 360_000 } else { 1 });
    for number in 200..206 {
        shard.apply(hash(number), &short(number - 200), operation(Action::Take, 200_000));
    }
    shard.reclaim(100, Micros::from_secs(200_500));
    assert_eq!(shard.usage().counters, 2);
    let before = shard.usage();
    // The logs exceed the memory, so counters are evicted. If eviction chose free slots, it would never end.
    let (sender, done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for number in 300..303 {
            let now = Micros::from_secs(201_000);
            assert!(shard.apply(hash(number), &log, Operation { now, ..fill }).allowed);
        }
        sender.send(shard.usage())
    });
    let usage = done.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
    assert!(usage.evicted > before.evicted, "{usage:?}");
    assert_eq!(usage.counters + (usage.evicted - before.evicted), 5, "{usage:?}");
}

/// A removed long state frees its own memory, and not the memory of other long states.
#[test]
fn a_removed_long_state_frees_only_its_own_memory() {
    let log: Program = SlidingLog::new(MaxHits::hard(100), Micros::from_secs(60), Micros::ZERO, false).unwrap().into();
    // Room for two logs of 700 or 900 bytes, and not for three.
    let mut shard = Shard::new(2 * 900 / 36, false);
    let mut fill = |number, second| {
        shard.apply(hash(number), &log, Operation { action: Action::Take, cost: 100, now: Micros::from_secs(second) });
        shard.reclaim(100, Micros::from_secs(second));
        shard.usage()
    };
    fill(0, 0);
    fill(1, 100);
    fill(2, 150);
    assert_eq!(fill(3, 151), Usage { counters: 2, evicted: 1, expired: 1 });
}

/// A state that is written again, longer or shorter, counts once and with its current size.
#[test]
fn a_long_state_counts_with_its_current_size() {
    let log: Program = SlidingLog::new(MaxHits::hard(100), Micros::from_secs(60), Micros::ZERO, false).unwrap().into();
    let take = |cost: u64, second: u64| Operation { action: Action::Take, cost, now: Micros::from_secs(second) };
    // Room for one log of 700 bytes and a few counters.
    let mut shard = Shard::new(700 / 36 + 8, false);
    for number in 0..4 {
        shard.apply(hash(number), &program(1, 1_000_000_000), take(1, 0));
    }
    for round in 0..100 {
        // The log grows by each hit. After a minute, the next hit is its only one.
        for hit in 0..100 {
            assert!(shard.apply(hash(99), &log, take(1, round * 100)).allowed, "{round}: {hit}");
        }
        assert_eq!(shard.usage(), Usage { counters: 5, evicted: 0, expired: 0 }, "{round}");
    }
    assert!(shard.apply(hash(99), &log, take(1, 100_000)).allowed);
    // The log is short now, so there is room for other counters.
    for number in 4..4 + 700 / 36 {
        shard.apply(hash(number as u64), &program(1, 1_000_000_000), take(1, 100_000));
    }
    assert_eq!(shard.usage().evicted, 0);
}

#[test]
fn new_counters_reuse_the_slots_of_expired_ones() {
    let memory = Memory::new(&Settings { max_counters: 1_000_000 });
    let rule = program(1, 1);
    for second in 0..300 {
        for user in 0..1_000 {
            assert!(take(&memory, &format!("user{user}/{second}"), &rule, 1_000 + second));
        }
    }
    // Counters stay for one minute after their expiry, because clocks can step back.
    let usage = memory.usage();
    assert!(usage.counters < 90_000, "expired counters pile up: {usage:?}");
    assert_eq!(usage.evicted, 0);
}

#[test]
fn reclaim_empties_an_idle_store_in_steps() {
    let memory = Memory::new(&Settings::default());
    let rule = program(1, 60);
    for user in 0..10_000 {
        take(&memory, &format!("user{user}"), &rule, 60);
    }
    memory.reclaim(Micros::from_secs(179));
    assert_eq!(memory.usage().counters, 10_000);
    for _ in 0..10 {
        memory.reclaim(Micros::from_secs(180));
    }
    assert_eq!(memory.usage(), Usage { counters: 0, evicted: 0, expired: 10_000 });
}

#[test]
fn peeks_and_refunds_of_unknown_counters_create_no_counter() {
    let memory = Memory::new(&Settings::default());
    let counter = Counter::new("unknown", program(1, 60));
    for action in [Action::Peek, Action::Refund] {
        let hit = Hit { action, ..counter.take(1) };
        assert!(memory.decide(&hit, Micros::from_secs(60)).decision.allowed);
    }
    assert_eq!(memory.usage().counters, 0);
}

#[test]
fn concurrent_callers_of_one_counter_share_its_limit_exactly() {
    let memory = Memory::new(&Settings::default());
    let rule = program(1_000, 3_600);
    let allowed: usize = std::thread::scope(|scope| {
        let callers: Vec<_> =
            (0..8).map(|_| scope.spawn(|| (0..1_000).filter(|_| take(&memory, "hot", &rule, 3_600)).count())).collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).sum()
    });
    assert_eq!(allowed, 1_000);
}

#[test]
fn a_denied_take_of_an_unknown_counter_creates_no_counter() {
    let memory = Memory::new(&Settings::default());
    let rule = FixedWindow::new(MaxHits::hard(1), Micros::from_secs(60), false).unwrap();
    assert!(!memory.decide(&Counter::new("unknown", rule).take(2), Micros::from_secs(60)).decision.allowed);
    assert_eq!(memory.usage().counters, 0);
}

#[test]
fn the_state_of_a_counter_contains_its_hits() {
    let memory = Memory::new(&Settings::default());
    let log = SlidingLog::new(MaxHits::hard(100), Micros::from_secs(60), Micros::ZERO, false).unwrap();
    for rule in [program(100, 60), log.into()] {
        let (key, now) = (rule.tag().as_bytes(), Micros::from_secs(60));
        assert!(memory.state(key).is_empty());
        memory.decide(&Counter::new(key, rule).take(30), now);
        let peek = Operation { action: Action::Peek, cost: 0, now };
        assert_eq!(rule.explain(&memory.state(key), peek, true).used, 30);
    }
}

#[test]
fn a_long_state_that_becomes_shorter_makes_room() {
    let log: Program = SlidingLog::new(MaxHits::hard(100), Micros::from_secs(60), Micros::ZERO, false).unwrap().into();
    let take = |cost: u64, second: u64| Operation { action: Action::Take, cost, now: Micros::from_secs(second) };
    // Room for one log of 700 bytes and a few counters.
    let mut shard = Shard::new(700 / 36 + 8, false);
    assert!(shard.apply(hash(99), &log, take(90, 0)).allowed && shard.apply(hash(99), &log, take(10, 50)).allowed);
    // 90 hits have expired, and 11 are too many for a slot.
    assert!(shard.apply(hash(99), &log, take(1, 61)).allowed);
    for number in 0..20 {
        shard.apply(hash(number), &program(1, 1_000_000_000), take(1, 61));
    }
    assert!(shard.apply(hash(99), &log, take(1, 61)).allowed);
    assert_eq!(shard.usage(), Usage { counters: 21, evicted: 0, expired: 0 });
}
