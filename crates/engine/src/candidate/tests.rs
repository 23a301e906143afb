use sluicegate_metrics::WorkerId;
use sluicegate_rules::{self as rules, Options, SourceFile};
use smallvec::smallvec;

use super::*;
use crate::{
    Code, RankBy, Status,
    testing::{NOW, decide, descriptor, overrides, refund},
};

fn candidate(share: f64) -> Arc<Candidate> {
    let text = "domain: api\ndescriptors:\n- key: user\n  rate_limit: {unit: second, requests_per_unit: 1}\n\
                - key: job\n  rate_limit: {algorithm: concurrency, limit: 5, hold: 60s, holder: id}\n\
                - key: free\n  rate_limit: {unlimited: true}\n";
    let file = SourceFile { name: "api.yaml".into(), text: text.into() };
    let (rules, _) = rules::compile(&[file], Options::default()).unwrap();
    Candidate::new(rules, share, Micros::ZERO, 1, &Resources::default())
}

/// Returns the rule under which a request with this verdict is counted, if its counter is sampled.
fn sampled_rule(candidate: &Candidate, entries: &[(&str, &str)], code: Code) -> Option<usize> {
    let entries = entries.iter().map(|(key, value)| Entry { key, value }).collect();
    let descriptors = smallvec![Descriptor::new(entries)];
    let status = Status { code, ..Status::NO_LIMIT };
    let verdict = Verdict { overall: code, statuses: smallvec![status], metadata: None };
    let request = Request { domain: "api", descriptors, feedback: Vec::new() };
    candidate.sample_descriptors(&request, &verdict).first().map(|sampled| sampled.rule)
}

#[test]
fn requests_are_skipped_while_too_many_wait() {
    let candidate = candidate(1.0);
    candidate.waiting.store(MAX_WAITING - 1, Relaxed);
    let entries = smallvec![Entry { key: "user", value: "x" }];
    let descriptors = smallvec![Descriptor::new(entries)];
    let status = Status { code: Code::Ok, ..Status::NO_LIMIT };
    let verdict = Verdict { overall: Code::Ok, statuses: smallvec![status], metadata: None };
    let request = Request { domain: "api", descriptors, feedback: Vec::new() };
    for (skipped, delay) in [(0, Some(MAX_BATCH_DELAY)), (1, None), (2, None)] {
        assert_eq!(candidate.queue(WorkerId(0), &request, &verdict, Micros::ZERO), delay);
        assert_eq!((candidate.skipped(), candidate.waiting.load(Relaxed)), (skipped, MAX_WAITING));
    }
}

/// The holder of a slot is not part of the counter's name, so it does not influence the sampling.
#[test]
fn all_hits_of_a_counter_are_sampled_or_none() {
    let candidate = candidate(0.5);
    let is_sampled = |job: &str, id: &str| sampled_rule(&candidate, &[("job", job), ("id", id)], Code::Ok).is_some();
    let jobs: Vec<String> = (0..100).map(|job| job.to_string()).collect();
    let sampled: Vec<&String> = jobs.iter().filter(|job| is_sampled(job, "x")).collect();
    assert!((20..80).contains(&sampled.len()), "{}", sampled.len());
    for job in &jobs {
        assert!(["y", "z"].into_iter().all(|id| is_sampled(job, id) == sampled.contains(&job)), "{job}");
    }
}

/// A descriptor that is denied now is counted under the unlimited candidate rule, or under no rule.
#[test]
fn an_unlimited_descriptor_is_sampled_only_if_it_is_denied_now() {
    let candidate = candidate(1.0);
    let rule = |key, code| sampled_rule(&candidate, &[(key, "x")], code);
    assert_eq!((rule("free", Code::Ok), rule("other", Code::Ok)), (None, None));
    assert_eq!((rule("free", Code::OverLimit), rule("other", Code::OverLimit)), (Some(2), Some(3)));
}

#[test]
fn outcomes_distinguish_changed_from_unchanged_decisions() {
    let mut all = Outcomes::default();
    for (hits, would_deny, denied) in [(1, false, false), (10, true, false), (100, false, true), (1_000, true, true)] {
        all.add(Outcomes::new(hits, would_deny, denied));
    }
    let expected = Outcomes { requested: 1_111, denied: 1_010, newly_denied: 10, newly_allowed: 100 };
    assert_eq!(all, expected);
    all.add(expected);
    assert_eq!(all.newly_allowed, 200);
}

#[test]
fn each_of_the_first_newly_denied_entities_is_listed_once() {
    let candidate = candidate(1.0);
    let deny = |user: &str| {
        let entries = smallvec![Entry { key: "user", value: user }];
        let descriptor = Descriptor::new(entries);
        let sampled = SampledDescriptor { index: 0, rule: 0, denied: false };
        candidate.record_newly_denied(WorkerId(0), "api", &descriptor, &sampled, Micros::from_secs(1));
    };
    ["a", "b", "a"].into_iter().for_each(deny);
    let names = || {
        candidate
            .first_newly_denied()
            .into_iter()
            .map(|newly_denied| newly_denied.target.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(), ["limit|api|user=a", "limit|api|user=b"]);
    (0..2 * MAX_FIRST_DENIED).for_each(|user| deny(&user.to_string()));
    assert_eq!(names().len(), MAX_FIRST_DENIED);
}

#[test]
fn the_last_three_hours_are_counted_by_minute() {
    let candidate = candidate(1.0);
    let one = Outcomes::new(1, true, false);
    for minute in 0..MAX_MINUTES as u64 + 20 {
        candidate.record(0, one, Micros::from_secs(60 * minute));
        candidate.record(0, one, Micros::from_secs(60 * minute + 59));
    }
    let minutes = candidate.minutes();
    let two = Outcomes { requested: 2, denied: 2, newly_denied: 2, newly_allowed: 0 };
    assert_eq!((minutes.len(), minutes[0]), (MAX_MINUTES, (Micros::from_secs(60 * 20), two)));
    assert_eq!(candidate.outcomes().next().unwrap().requested, 2 * (MAX_MINUTES as u64 + 20));
}

#[test]
fn a_candidate_is_evaluated_with_counters_and_statistics_of_its_own() {
    let text = "domain: api\ndescriptors:\n- {key: user, rate_limit: {unit: second, requests_per_unit: 4}}\n";
    let (candidate, engine) = (candidate(1.0), crate::testing::engine(text));
    let snapshot = engine.rules.load().with(Overrides::default(), Some(Arc::clone(&candidate)), NOW);
    assert!(snapshot.candidate().is_some_and(|current| Arc::ptr_eq(current, &candidate)));
    engine.rules.store(Arc::new(snapshot));
    let remaining: Vec<_> =
        (0..5).map(|_| decide(&engine, &[descriptor(&[("user", "x")], 1)]).statuses[0].remaining).collect();
    assert_eq!(remaining, [3, 2, 1, 0, 0]);
    let requested_limit = Some(Box::new(rules::Limit::new(7, rules::Unit::Second, 1).unwrap()));
    decide(&engine, &[Descriptor { requested_limit, ..descriptor(&[("user", "own")], 1) }]);
    // Of the five hits of x, the candidate allows only the first.
    let outcomes = |requested, denied| Some(Outcomes { requested, denied, newly_denied: 3, newly_allowed: 0 });
    assert_eq!(candidate.outcomes().next(), outcomes(6, 4));
    let ranking = |top: &TopEntities, by| top.ranking(by, 9, TopEntities::DEFAULT_PERIOD, NOW, |_, _| true).hits;
    assert_eq!(ranking(&candidate.newly_denied, RankBy::Denied), 3);
    assert_eq!(candidate.first_newly_denied().len(), 1);
    let hits = engine.statistics.hit_totals().requested;
    assert_eq!((hits, ranking(engine.top.as_ref().unwrap(), RankBy::Requested)), (6, 6));
    // Refunds and peeks have no outcome.
    decide(&engine, &[refund(descriptor(&[("user", "y")], 1))]);
    decide(&engine, &[descriptor(&[("user", "y")], 0)]);
    assert_eq!(candidate.outcomes().next(), outcomes(6, 4));
    candidate.set_overrides(&overrides(&[("limit|api|user=z", "9/second"), ("switch|everything", "deny")]));
    decide(&engine, &[descriptor(&[("user", "z")], 4)]);
    assert_eq!(candidate.outcomes().next(), outcomes(10, 4));
}

#[test]
fn the_share_is_returned_as_it_was_set() {
    for share in [0.0, 0.25, 1.0] {
        assert_eq!(candidate(share).share(), share);
    }
    assert_eq!((candidate(-1.0).share(), candidate(2.0).share()), (0.0, 1.0));
}
