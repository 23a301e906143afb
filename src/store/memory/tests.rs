//! Bounds and isolation of the memory store. What it decides is proven by the suite in `tests/stores.rs`.

use super::*;
use crate::algorithm::{Algorithm, MaxHits, fixed_window::FixedWindow, sliding_log::SlidingLog};

fn algorithm(limit: u64, seconds: u64) -> Algorithm {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(seconds), true).unwrap().into()
}

fn take(memory: &Memory, key: &str, algorithm: &Algorithm, second: u64) -> bool {
    let hit = Hit::take(key.as_bytes(), algorithm, 1);
    memory.apply(&[hit], Charge::Each, Micros::from_secs(second))[0].unwrap().decision.allowed
}

#[test]
fn never_holds_more_than_its_maximum_and_counts_what_it_forgets() {
    let memory = Memory::new(&Settings { max_counters: 6_400 });
    let rule = algorithm(1, 3_600);
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
    let log: Algorithm = SlidingLog::new(MaxHits::hard(1_000), day, Micros::ZERO, false).unwrap().into();
    for user in 0..500 {
        let key = format!("user{user}");
        let hit = Hit::take(key.as_bytes(), &log, 1_000);
        assert!(memory.apply(&[hit], Charge::Each, day)[0].unwrap().decision.allowed);
    }
    // 7 kB each where 4 000 counters of 36 bytes may be; a shard keeps one at least.
    let usage = memory.usage();
    assert!((1..=40).contains(&usage.counters) && usage.counters + usage.evicted == 500, "{usage:?}");
    // Short ones push them out, and have all of the maximum.
    let rule = algorithm(1, 3_600);
    for user in 0..20_000 {
        assert!(take(&memory, &format!("short{user}"), &rule, 86_400));
    }
    assert!((3_500..=4_000).contains(&memory.usage().counters), "{:?}", memory.usage());
}

#[test]
fn a_counter_that_is_forgotten_begins_anew() {
    let memory = Memory::new(&Settings { max_counters: 100 });
    let rule = algorithm(1, 3_600);
    assert!(!memory.forget(b"user"));
    assert!(take(&memory, "user", &rule, 1) && take(&memory, "other", &rule, 1) && !take(&memory, "user", &rule, 2));
    assert!(memory.forget(b"user") && !memory.forget(b"user"));
    assert!(take(&memory, "user", &rule, 3) && !take(&memory, "other", &rule, 3));
}

/// Charged together, each is counted once, and none is where one refuses.
#[test]
fn charged_together_all_are_counted_or_none_is() {
    let memory = Memory::new(&Settings { max_counters: 100 });
    let (few, many) = (algorithm(2, 3_600), algorithm(10, 3_600));
    let hits = [Hit::take(b"many", &many, 1), Hit::take(b"few", &few, 1)];
    let ask =
        || memory.apply(&hits, Charge::All, Micros::from_secs(1)).into_iter().map(|answer| answer.unwrap().decision);
    let asked: Vec<_> = (0..4).flat_map(|_| ask()).map(|decision| (decision.allowed, decision.remaining)).collect();
    let refused = [(true, 8), (false, 0)];
    assert_eq!(asked, [[(true, 9), (true, 1)], [(true, 8), (true, 0)], refused, refused].concat());
}

fn hash(number: u64) -> Hash {
    Hash::new(u128::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835))
}

fn ask(action: Action, second: u64) -> Operation {
    Operation { action, cost: 1, now: Micros::from_secs(second) }
}

#[test]
fn a_full_shard_forgets_the_counter_that_would_expire_first() {
    let mut shard = Shard::new(16);
    // Windows that end one after the other, the earliest neither first nor last.
    let window = |number: u64| algorithm(1, 3_600 * (1 + (number + 11) % 16));
    for number in 0..16 {
        assert!(shard.apply(hash(number), &window(number), ask(Action::Take, 0)).allowed);
    }
    assert!(shard.apply(hash(99), &algorithm(1, 360_000), ask(Action::Take, 0)).allowed);
    assert_eq!(shard.usage(), Usage { counters: 16, evicted: 1, expired: 0 });
    for number in 0..16 {
        let forgotten = shard.apply(hash(number), &window(number), ask(Action::Peek, 0)).allowed;
        assert_eq!(forgotten, number == 5, "{number}");
    }
}

/// Places that are free are passed over, and what long states took is given back: else a shard that has seen many
/// would have room for none.
#[test]
fn long_states_come_and_go_and_leave_all_room_behind() {
    let log: Algorithm =
        SlidingLog::new(MaxHits::hard(100), Micros::from_secs(60), Micros::ZERO, false).unwrap().into();
    let fill = Operation { action: Action::Take, cost: 100, now: Micros::from_secs(0) };
    // Room for two logs of 700 bytes.
    let mut shard = Shard::new(2 * 700 / 36 + 4);
    // One that stays, and would have to go if there were no room.
    shard.apply(hash(1_000), &algorithm(1, 1_000_000_000), ask(Action::Take, 0));
    for round in 0..100 {
        let now = Micros::from_secs(round * 1_000);
        assert!(shard.apply(hash(round), &log, Operation { now, ..fill }).allowed);
        // Given back whole, its place is free again only when it has expired.
        shard.reclaim(100, now + Micros::from_secs(500));
        assert_eq!(shard.usage(), Usage { counters: 1, evicted: 0, expired: round + 1 });
    }
    // Six short ones, of which five go: their places stay free.
    let short = |number: u64| algorithm(1, if number == 0 { 360_000 } else { 1 });
    for number in 200..206 {
        shard.apply(hash(number), &short(number - 200), ask(Action::Take, 200_000));
    }
    shard.reclaim(100, Micros::from_secs(200_500));
    assert_eq!(shard.usage().counters, 2);
    let before = shard.usage();
    // One log is too many: counters are pushed out for it, and not places that nobody has, which would never end.
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

/// What one long state leaves behind is what it took, and not what others still take.
#[test]
fn a_long_state_that_goes_makes_room_for_one() {
    let log: Algorithm =
        SlidingLog::new(MaxHits::hard(100), Micros::from_secs(60), Micros::ZERO, false).unwrap().into();
    // Room for two logs of 700 or 900 bytes, and not for three.
    let mut shard = Shard::new(2 * 900 / 36);
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

/// A state that is written anew, longer or shorter, counts once, and as what it is now.
#[test]
fn long_states_count_as_what_they_are_now() {
    let log: Algorithm =
        SlidingLog::new(MaxHits::hard(100), Micros::from_secs(60), Micros::ZERO, false).unwrap().into();
    let ask = |cost: u64, second: u64| Operation { action: Action::Take, cost, now: Micros::from_secs(second) };
    // Room for one log of 700 bytes and a few counters.
    let mut shard = Shard::new(700 / 36 + 8);
    for number in 0..4 {
        shard.apply(hash(number), &algorithm(1, 1_000_000_000), ask(1, 0));
    }
    for round in 0..100 {
        // It grows hit by hit, and a minute later is one hit.
        for hit in 0..100 {
            assert!(shard.apply(hash(99), &log, ask(1, round * 100)).allowed, "{round}: {hit}");
        }
        assert_eq!(shard.usage(), Usage { counters: 5, evicted: 0, expired: 0 }, "{round}");
    }
    assert!(shard.apply(hash(99), &log, ask(1, 100_000)).allowed);
    // As short as it is now, it leaves room for others.
    for number in 4..4 + 700 / 36 {
        shard.apply(hash(number as u64), &algorithm(1, 1_000_000_000), ask(1, 100_000));
    }
    assert_eq!(shard.usage().evicted, 0);
}

#[test]
fn newcomers_take_the_places_of_expired_counters() {
    let memory = Memory::new(&Settings { max_counters: 1_000_000 });
    let rule = algorithm(1, 1);
    for second in 0..300 {
        for user in 0..1_000 {
            assert!(take(&memory, &format!("user{user}/{second}"), &rule, 1_000 + second));
        }
    }
    // They are kept for a minute longer than they count, for clocks that step back.
    let usage = memory.usage();
    assert!(usage.counters < 90_000, "expired counters pile up: {usage:?}");
    assert_eq!(usage.evicted, 0);
}

#[test]
fn an_idle_store_is_emptied_step_by_step() {
    let memory = Memory::new(&Settings::default());
    let rule = algorithm(1, 60);
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
fn looks_and_refunds_of_unknown_counters_leave_nothing_behind() {
    let memory = Memory::new(&Settings::default());
    let rule = algorithm(1, 60);
    for action in [Action::Peek, Action::Refund] {
        let hit = Hit { action, ..Hit::take(b"nobody", &rule, 1) };
        assert!(memory.apply(&[hit], Charge::Each, Micros::from_secs(60))[0].unwrap().decision.allowed);
    }
    assert_eq!(memory.usage().counters, 0);
}

#[test]
fn concurrent_callers_of_one_counter_share_its_limit_exactly() {
    let memory = Memory::new(&Settings::default());
    let rule = algorithm(1_000, 3_600);
    let passed: usize = std::thread::scope(|scope| {
        let callers: Vec<_> =
            (0..8).map(|_| scope.spawn(|| (0..1_000).filter(|_| take(&memory, "hot", &rule, 3_600)).count())).collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).sum()
    });
    assert_eq!(passed, 1_000);
}
