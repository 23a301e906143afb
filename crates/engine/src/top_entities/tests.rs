//! Tests of the ranking and of the sketches.

use sluicegate_rules::Entry;
use smallvec::smallvec;

use super::{
    sketch::{MAX_SAMPLES, MINUTE, Sketch},
    *,
};

const PERIOD: Duration = TopEntities::DEFAULT_PERIOD;

#[test]
fn a_minute_starts_with_the_sampling_interval_of_the_previous_one() {
    let mut sketches = Sketches::default();
    sketches.current(RankBy::Denied, Micros::ZERO).sampling_interval = 8;
    assert_eq!(sketches.current(RankBy::Denied, MINUTE).sampling_interval, 8);
}

#[test]
fn five_minutes_are_kept_by_the_minute_and_an_hour_by_five() {
    let mut sketches = Sketches::default();
    let mut starts_at = |minute: u64| {
        sketches.current(RankBy::Denied, Micros::new(minute * MINUTE.get()));
        let minutes = |sketches: &std::collections::VecDeque<Sketch>| {
            sketches.iter().map(|sketch| sketch.start.get() / MINUTE.get()).collect::<Vec<_>>()
        };
        (minutes(&sketches.minutes), minutes(&sketches.old))
    };
    for minute in 0..5 {
        starts_at(minute);
    }
    assert_eq!(starts_at(5), (vec![1, 2, 3, 4, 5], vec![0]));
    assert_eq!(starts_at(8), (vec![4, 5, 8], vec![0]));
    assert_eq!(starts_at(11), (vec![8, 11], vec![0, 5]));
    assert_eq!(starts_at(62), (vec![62], vec![5, 10]));
    (63..200).for_each(|minute| drop(starts_at(minute)));
    assert_eq!(starts_at(200), (vec![196, 197, 198, 199, 200], (145..200).step_by(5).collect()));
}

fn record(top: &TopEntities, worker: usize, user: &str, hits: u64, allowed: bool, now: u64) {
    let entries = smallvec![Entry { key: "user", value: user }];
    let descriptor = Descriptor { entries, hits, refund: false, requested_limit: None };
    top.record(WorkerId(worker), "api", &descriptor, Some(&"user".into()), allowed, Micros::from_secs(now));
}

fn ranking(top: &TopEntities, by: RankBy, now: u64) -> Vec<(String, u64, u64, u64)> {
    let ranking = top.ranking(by, 3, PERIOD, Micros::from_secs(now), |_, _| true);
    let line = |entity: TopEntity| {
        let Estimate { count, max_error } = entity.hits;
        (entity.target.to_string(), count, max_error, entity.since.floor_secs())
    };
    ranking.top.into_iter().map(line).collect()
}

#[test]
fn entities_are_ranked_by_hits_over_all_workers_and_minutes() {
    let top = TopEntities::new(2);
    for (worker, user, hits, allowed, now) in [
        (0, "a", 5, true, 10),
        (1, "a", 5, false, 70),
        (0, "b", 7, false, 80),
        (0, "b", 2, false, 90),
        (1, "c", 1, true, 100),
        (1, "c", 0, false, 100),
    ] {
        record(&top, worker, user, hits, allowed, now);
    }
    let named = |user: &str, hits, since| (format!("limit|api|user={user}"), hits, 0, since);
    assert_eq!(ranking(&top, RankBy::Requested, 100), [named("a", 10, 10), named("b", 9, 80), named("c", 1, 100)]);
    assert_eq!(ranking(&top, RankBy::Denied, 100), [named("b", 9, 80), named("a", 5, 70)]);
    // The first minute is no longer counted after five minutes.
    assert_eq!(ranking(&top, RankBy::Requested, 300), [named("b", 9, 80), named("a", 5, 70), named("c", 1, 100)]);
    let filtered = top.ranking(RankBy::Requested, 9, PERIOD, Micros::from_secs(300), |_, rule| rule == "other");
    assert_eq!((filtered.top.len(), filtered.hits, filtered.period.floor_secs()), (0, 15, 240));
}

#[test]
fn the_sampling_interval_follows_the_request_rate() {
    let mut sketch = Sketch::default();
    let mut weights_in = |second, samples: u32| -> Vec<u32> {
        let mut all: Vec<u32> = (0..samples).map(|_| sketch.next_weight(Micros::from_secs(second))).collect();
        all.dedup();
        all
    };
    assert_eq!(weights_in(1, 3 * MAX_SAMPLES), [1, 2, 4]);
    // The interval stays at 8 until a second has few samples, and then halves every second.
    assert_eq!(weights_in(2, MAX_SAMPLES / 4), [8]);
    assert_eq!(weights_in(3, MAX_SAMPLES / 4 - 1), [8]);
    // The weight of the first hit in a second is the interval of the previous second.
    assert_eq!([4, 5, 6, 7, 8].map(|second| weights_in(second, 1)), [[8], [4], [2], [1], [1]]);
}

#[test]
fn no_count_is_below_the_true_count() {
    let top = TopEntities::new(1);
    for number in 0..MAX_ENTRIES {
        record(&top, 0, &format!("crowd-{number}"), if number == 7 { 3 } else { 5 }, true, 60);
    }
    record(&top, 0, "newcomer", 4, true, 60);
    let first = ranking(&top, RankBy::Requested, 60).remove(0);
    assert_eq!(first, ("limit|api|user=newcomer".to_owned(), 7, 3, 60));
    let all = top.ranking(RankBy::Requested, MAX_ENTRIES, PERIOD, Micros::from_secs(60), |_, _| true);
    assert_eq!((all.top.len(), all.hits), (MAX_ENTRIES, 5 * MAX_ENTRIES as u64 - 2 + 4));
}

#[test]
fn an_entity_that_one_minute_does_not_list_may_have_hits_in_it() {
    let top = TopEntities::new(2);
    record(&top, 0, "a", 3, true, 60);
    record(&top, 0, "a", 1, true, 120);
    // These replace the entry of the second minute. The other worker lists few entities, so it has missed none.
    (0..MAX_ENTRIES).for_each(|number| record(&top, 0, &format!("crowd-{number}"), 2, true, 121));
    record(&top, 1, "b", 1, true, 122);
    let all = top.ranking(RankBy::Requested, usize::MAX, PERIOD, Micros::from_secs(122), |_, _| true);
    let counts = |user: &str| {
        let is_user = |entity: &&TopEntity| entity.target.to_string().ends_with(&format!("={user}"));
        all.top.iter().find(is_user).map(|entity| (entity.hits.count, entity.hits.max_error))
    };
    assert_eq!(["a", "b", "crowd-0"].map(counts), [Some((4, 1)), Some((2, 1)), Some((2, 0))]);
}

#[test]
fn a_frequent_entity_is_found_among_many_rare_ones() {
    let top = TopEntities::new(1);
    let (mut all, mut heavy) = (0_u64, 0);
    for number in 0..20_000_u64 {
        // 1,000 hits per second are few enough that each one is counted.
        let now = 60 + number / 1_000;
        record(&top, 0, &format!("crowd-{number}"), 1, true, now);
        all += 1;
        if number % 100 == 0 {
            record(&top, 0, "heavy", 1, true, now);
            (all, heavy) = (all + 1, heavy + 1);
        }
    }
    let ranking = top.ranking(RankBy::Requested, 1, PERIOD, Micros::from_secs(100), |_, _| true);
    let first = &ranking.top[0];
    assert_eq!((first.target.to_string().as_str(), ranking.hits), ("limit|api|user=heavy", all));
    assert!(first.hits.count >= heavy && first.hits.count - first.hits.max_error <= heavy, "{first:?} of {heavy}");
    assert!(first.hits.max_error <= all / MAX_ENTRIES as u64, "{first:?} of {all}");
    let stripe = top.requested.of(WorkerId(0)).sketches.lock();
    assert!(stripe.minutes.iter().all(|sketch| sketch.entries.len() <= MAX_ENTRIES));
}

#[test]
fn sampled_counts_estimate_all_hits() {
    let top = TopEntities::new(1);
    for number in 0..400_000_u64 {
        let user = if number % 4 == 0 { "a" } else { "b" };
        record(&top, 0, user, 1, true, 60 + number / 100_000);
    }
    let ranking = top.ranking(RankBy::Requested, 2, PERIOD, Micros::from_secs(100), |_, _| true);
    let off = |hits: u64, expected: f64| (hits as f64 / expected - 1.0).abs();
    assert!(off(ranking.hits, 400_000.0) < 0.1, "{ranking:?}");
    assert!(
        off(ranking.top[0].hits.count, 300_000.0) < 0.1 && off(ranking.top[1].hits.count, 100_000.0) < 0.15,
        "{ranking:?}"
    );
    let stripe = top.requested.of(WorkerId(0)).sketches.lock();
    assert!(stripe.minutes.iter().all(|sketch| sketch.samples < 2 * MAX_SAMPLES && sketch.sampling_interval > 1));
}

/// With an interval of 2, 0 to 2 hits are skipped, so that one in two hits is counted on average.
#[test]
fn less_than_twice_the_sampling_interval_is_skipped() {
    let top = TopEntities::new(1);
    let stripe = top.requested.of(WorkerId(0));
    stripe.sketches.lock().current(RankBy::Requested, Micros::ZERO).sampling_interval = 2;
    for _ in 0..MAX_SAMPLES - 1 {
        stripe.skips.store(0, Relaxed);
        record(&top, 0, "a", 1, true, 0);
        assert!(stripe.skips.load(Relaxed) <= 2);
    }
}

/// A few expensive requests must not hide many cheap ones, nor the reverse.
#[test]
fn denied_entities_are_ranked_by_requests_and_requested_ones_by_hits() {
    let top = TopEntities::new(1);
    record(&top, 0, "model", 9_000, false, 60);
    (0..3).for_each(|_| record(&top, 0, "shopper", 1, false, 61));
    let ranked = |by| {
        let ranking = top.ranking(by, 9, PERIOD, Micros::from_secs(62), |_, _| true);
        let user = |entity: &TopEntity| entity.target.to_string().replace("limit|api|user=", "");
        let counts = |entity: &TopEntity| (user(entity), entity.requests.count, entity.hits.count);
        (ranking.top.iter().map(counts).collect::<Vec<_>>(), ranking.requests, ranking.hits)
    };
    let (model, shopper) = (("model".to_owned(), 1, 9_000), ("shopper".to_owned(), 3, 3));
    assert_eq!(ranked(RankBy::Denied), (vec![shopper.clone(), model.clone()], 4, 9_003));
    assert_eq!(ranked(RankBy::Requested), (vec![model, shopper], 4, 9_003));
}

/// An entity whose entry was replaced may have had any number of hits, and the sum must allow for them.
#[test]
fn the_count_that_is_not_ranked_is_an_upper_bound_too() {
    let top = TopEntities::new(1);
    record(&top, 0, "model", 9_000, false, 60);
    for number in 0..MAX_ENTRIES {
        record(&top, 0, &format!("crowd-{number}"), 1, false, 60);
        record(&top, 0, &format!("crowd-{number}"), 1, false, 60);
    }
    record(&top, 0, "model", 7, false, 61);
    let ranking = top.ranking(RankBy::Denied, usize::MAX, PERIOD, Micros::from_secs(62), |_, _| true);
    let model = ranking.top.iter().find(|entity| entity.target.to_string().ends_with("=model")).unwrap();
    assert!((model.requests.count - model.requests.max_error..=model.requests.count).contains(&2), "{model:?}");
    assert!((model.hits.count - model.hits.max_error..=model.hits.count).contains(&9_007), "{model:?}");
}

#[test]
fn the_hour_has_all_requests_and_its_estimates_are_true() {
    let top = TopEntities::new(1);
    let mut heavy = 0;
    for minute in 0..70_u64 {
        for number in 0..2 * MAX_ENTRIES as u64 {
            record(&top, 0, &format!("crowd-{minute}-{number}"), 1, true, 60 * minute);
        }
        for _ in 0..20 {
            record(&top, 0, "heavy", 1, true, 60 * minute);
            heavy += u64::from(minute >= 10);
        }
    }
    let at = Micros::from_secs(60 * 70 - 1);
    let hour = top.ranking(RankBy::Requested, 1, TopEntities::MAX_PERIOD, at, |_, _| true);
    assert_eq!((hour.period.floor_secs(), hour.hits), (3_599, 60 * (2 * MAX_ENTRIES as u64 + 20)));
    let first = &hour.top[0];
    assert!(first.target.to_string().ends_with("=heavy"), "{first:?}");
    assert!((first.hits.count - first.hits.max_error..=first.hits.count).contains(&heavy), "{first:?} of {heavy}");
    let stripe = top.requested.of(WorkerId(0)).sketches.lock();
    assert!(stripe.old.iter().all(|sketch| sketch.entries.len() <= MAX_ENTRIES / 5));
}

/// Callers choose the lengths of names.
#[test]
fn the_memory_of_names_is_bounded() {
    let top = TopEntities::new(1);
    for number in 0..2_000_u64 {
        record(&top, 0, &format!("{number}-{}", "x".repeat(900)), 1, true, 60 + number);
    }
    record(&top, 0, "short", 5, true, 2_100);
    let stripe = top.requested.of(WorkerId(0)).sketches.lock();
    let bytes = |sketch: &Sketch| sketch.entries.iter().map(|entry| entry.key.len()).sum::<usize>();
    assert!(stripe.minutes.iter().all(|sketch| bytes(sketch) <= 256_000), "{}", stripe.minutes.len());
    assert!(stripe.old.iter().all(|sketch| bytes(sketch) <= 50_000));
    drop(stripe);
    let hour =
        top.ranking(RankBy::Requested, usize::MAX, TopEntities::MAX_PERIOD, Micros::from_secs(2_101), |_, _| true);
    let short = hour.top.iter().find(|entity| entity.target.to_string().ends_with("=short")).unwrap();
    assert!((short.hits.count - short.hits.max_error..=short.hits.count).contains(&5), "{short:?}");
}
