//! Bounds and isolation of the memory store. What it decides is proven by the suite in `tests/stores.rs`.

use super::*;
use crate::algorithm::{Algorithm, Quota, fixed_window::FixedWindow, sliding_log::SlidingLog};

fn algorithm(limit: u64, seconds: u64) -> Algorithm {
    FixedWindow::new(Quota::hard(limit), Micros::from_secs(seconds), true).unwrap().into()
}

fn take(memory: &Memory, key: &str, algorithm: &Algorithm, second: u64) -> bool {
    let hit = Hit::take(key.as_bytes(), algorithm, 1);
    memory.apply(&[hit], Charge::Each, Micros::from_secs(second))[0].unwrap().allowed
}

#[test]
fn never_holds_more_than_its_maximum_and_counts_what_it_forgets() {
    let memory = Memory::new(&Settings { max_entities: 6_400 });
    let rule = algorithm(1, 3_600);
    for user in 0..20_000 {
        assert!(take(&memory, &format!("user{user}"), &rule, 7_200));
    }
    let usage = memory.usage();
    assert!(usage.entities <= 6_400, "{usage:?}");
    assert_eq!(usage.entities + usage.evicted, 20_000);
}

#[test]
fn long_states_count_by_their_size() {
    let memory = Memory::new(&Settings { max_entities: 4_000 });
    let day = Micros::from_secs(86_400);
    let log: Algorithm = SlidingLog::new(Quota::hard(1_000), day, Micros::ZERO, false).unwrap().into();
    for user in 0..500 {
        let key = format!("user{user}");
        let hit = Hit::take(key.as_bytes(), &log, 1_000);
        assert!(memory.apply(&[hit], Charge::Each, day)[0].unwrap().allowed);
    }
    // 7 kB each where 4 000 counters of 36 bytes may be; a shard keeps one at least.
    let usage = memory.usage();
    assert!((1..=40).contains(&usage.entities) && usage.entities + usage.evicted == 500, "{usage:?}");
    // Short ones push them out, and have all of the maximum.
    let rule = algorithm(1, 3_600);
    for user in 0..20_000 {
        assert!(take(&memory, &format!("short{user}"), &rule, 86_400));
    }
    assert!((3_500..=4_000).contains(&memory.usage().entities), "{:?}", memory.usage());
}

#[test]
fn newcomers_take_the_places_of_expired_counters() {
    let memory = Memory::new(&Settings { max_entities: 1_000_000 });
    let rule = algorithm(1, 1);
    for second in 0..300 {
        for user in 0..1_000 {
            assert!(take(&memory, &format!("user{user}/{second}"), &rule, 1_000 + second));
        }
    }
    // They are kept for a minute longer than they count, for clocks that step back.
    let usage = memory.usage();
    assert!(usage.entities < 90_000, "expired counters pile up: {usage:?}");
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
    assert_eq!(memory.usage().entities, 10_000);
    for _ in 0..10 {
        memory.reclaim(Micros::from_secs(180));
    }
    assert_eq!(memory.usage(), Usage { entities: 0, evicted: 0, expired: 10_000 });
}

#[test]
fn looks_and_refunds_of_unknown_counters_leave_nothing_behind() {
    let memory = Memory::new(&Settings::default());
    let rule = algorithm(1, 60);
    for action in [Action::Peek, Action::Return] {
        let hit = Hit { action, ..Hit::take(b"nobody", &rule, 1) };
        assert!(memory.apply(&[hit], Charge::Each, Micros::from_secs(60))[0].unwrap().allowed);
    }
    assert_eq!(memory.usage().entities, 0);
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
