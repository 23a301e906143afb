use std::collections::BTreeMap;

use proptest::prelude::*;
use sluicegate_algorithm::{
    MaxHits,
    fixed_window::FixedWindow,
    gcra::Gcra,
    sliding_log::SlidingLog,
    sliding_window::{SlidingWindow, WindowEdge},
};
use sluicegate_store::{Blocks, Counter, Decider, HitDecision, Memory, memory};

use super::*;

/// The beginning of a minute.
const START: u64 = 1_763_672_400_000_000;

/// The items of a server, which executes commands as memcached does.
#[derive(Default)]
struct Items {
    items: BTreeMap<String, Item>,
    last_version: u64,
    /// Number of commands that were executed.
    executed: usize,
}

struct Item {
    value: Vec<u8>,
    version: u64,
}

impl Items {
    fn execute(&mut self, commands: &Commands) -> Vec<Reply> {
        let mut rest = commands.bytes();
        let mut replies = Vec::new();
        while !rest.is_empty() {
            let end = rest.windows(2).position(|pair| pair == b"\r\n").unwrap();
            let words: Vec<&str> = str::from_utf8(&rest[..end]).unwrap().split(' ').collect();
            rest = &rest[end + 2..];
            let mut data = Vec::new();
            if words[0] == "ms" {
                let length: usize = words[2].parse().unwrap();
                data = rest[..length].to_vec();
                rest = &rest[length + 2..];
            }
            replies.push(self.execute_one(&words, data));
        }
        assert_eq!(replies.len(), commands.count());
        self.executed += replies.len();
        replies
    }

    fn execute_one(&mut self, words: &[&str], data: Vec<u8>) -> Reply {
        let key = words[1];
        let flag = |letter: char| words[2..].iter().find_map(|word| word.strip_prefix(letter)).map(str::to_owned);
        let number = |letter| flag(letter).unwrap().parse::<u64>().unwrap();
        match words[0] {
            "mg" => self.get(key),
            "ma" => {
                let value = match self.items.get(key) {
                    Some(item) => match str::from_utf8(&item.value).unwrap().parse::<u64>() {
                        Ok(value) => value.wrapping_add(number('D')),
                        Err(_) => return Reply::Rejected("CLIENT_ERROR cannot increment".into()),
                    },
                    None => number('J'),
                };
                self.set(key, value.to_string().into_bytes());
                self.get(key)
            }
            "ms" => {
                let version = flag('C').map(|version| version.parse().unwrap());
                match self.items.get(key).map(|item| item.version) {
                    None if version.is_some() => return Reply::Missing,
                    current if current != version => return Reply::Conflict,
                    _ => {}
                }
                self.set(key, data);
                Reply::Done
            }
            other => panic!("unexpected command {other}"),
        }
    }

    fn get(&self, key: &str) -> Reply {
        match self.items.get(key) {
            Some(item) => Reply::Value { value: item.value.clone(), version: item.version },
            None => Reply::Missing,
        }
    }

    fn set(&mut self, key: &str, value: Vec<u8>) {
        self.last_version += 1;
        self.items.insert(key.to_owned(), Item { value, version: self.last_version });
    }

    fn text(&self, key: &str) -> &str {
        self.items.get(key).map(|item| str::from_utf8(&item.value).unwrap()).unwrap_or_default()
    }

    /// Runs rounds until no request is left. `interfere` changes the items between the reads and the writes of a round.
    fn run(&mut self, mut requests: Vec<Request>, mut interfere: impl FnMut(&mut Self, usize)) -> u64 {
        let mut failed_rollbacks = 0;
        for number in 0.. {
            let mut round = Round::new(requests, "");
            let replies = self.execute(&round.reads());
            let writes = round.decide(replies);
            interfere(self, number);
            let replies = self.execute(&writes);
            requests = round.finish(replies, &mut failed_rollbacks);
            if requests.is_empty() {
                break;
            }
            assert!(number < 1_000, "the requests never end");
        }
        failed_rollbacks
    }

    fn decide(&mut self, hits: &[Hit], charge: Charge, now: Micros) -> StepOutcomes {
        let (request, mut answer) = request(hits, charge, now);
        self.run(vec![request], |_, _| {});
        answer.try_recv().unwrap()
    }
}

fn request(hits: &[Hit], charge: Charge, now: Micros) -> (Request, oneshot::Receiver<StepOutcomes>) {
    let (sender, answer) = oneshot::channel();
    (Request::new(hits.to_vec(), charge, now, sender), answer)
}

fn one_request(name: &str, program: Program, cost: u64) -> Request {
    request(&[take(name, program, cost)], Charge::Each, at(0)).0
}

/// Returns whether the first counter is read before anything is added to it.
fn is_read_first(round: &Round) -> bool {
    round.reads().bytes().starts_with(b"mg ")
}

fn at(seconds: u64) -> Micros {
    Micros::new(START) + Micros::from_secs(seconds)
}

fn window(limit: u64, count_denied: bool) -> Program {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(60), count_denied).unwrap().into()
}

fn bucket(limit: u32) -> Program {
    Gcra::new(limit, Micros::from_secs(60), MaxHits::hard(limit.into()), false).unwrap().into()
}

fn take(name: &str, program: Program, cost: u64) -> Hit {
    Hit::take(Counter::new(name, program), cost)
}

fn allowed(outcomes: &StepOutcomes) -> Vec<bool> {
    outcomes.iter().map(|outcome| outcome.as_ref().unwrap().allowed).collect()
}

#[test]
fn the_hits_of_a_fixed_window_are_one_command_that_adds_them() {
    let mut items = Items::default();
    for expected in 1..=3_u64 {
        let requests: Vec<_> =
            (0..10).map(|_| request(&[take("w", window(25, true), 1)], Charge::Each, at(0))).collect();
        let (requests, mut answers): (Vec<_>, Vec<_>) = requests.into_iter().unzip();
        items.run(requests, |_, _| {});
        let mut passed = 0;
        for answer in &mut answers {
            passed += usize::from(allowed(&answer.try_recv().unwrap())[0]);
        }
        assert_eq!(passed, if expected < 3 { 10 } else { 5 });
        assert_eq!(items.executed, expected as usize);
        assert!(items.text("w").ends_with(&format!("{:010}", expected * 10)), "{}", items.text("w"));
    }
}

/// In a new window, the number that the server has added to is that of the former one.
#[test]
fn the_first_hit_of_a_window_replaces_the_number() {
    let mut items = Items::default();
    let hit = [take("w", window(2, true), 2)];
    assert_eq!(allowed(&items.decide(&hit, Charge::Each, at(59))), [true]);
    assert_eq!(items.executed, 1);
    assert_eq!(allowed(&items.decide(&hit, Charge::Each, at(60))), [true]);
    assert_eq!(items.executed, 3);
    assert!(items.text("w").ends_with("0000000002"));
    assert_eq!(allowed(&items.decide(&hit, Charge::Each, at(61))), [false]);
    assert_eq!((items.executed, items.text("w").ends_with("0000000004")), (4, true));
}

/// Requests that wait at the same moment can be of two windows.
#[test]
fn hits_of_two_windows_are_not_added_up() {
    let mut together = Items::default();
    let mut alone = Items::default();
    for seconds in [59, 119] {
        let hits = [take("w", window(9, true), 4)];
        let requests = [seconds, seconds + 1, seconds + 1].map(|time| request(&hits, Charge::Each, at(time)).0);
        let round = Round::new(requests.into(), "");
        assert!(is_read_first(&round));
        together.run(round.requests, |_, _| {});
        alone.decide(&hits, Charge::Each, at(seconds));
        alone.decide(&hits, Charge::Each, at(seconds + 1));
        alone.decide(&hits, Charge::Each, at(seconds + 1));
        assert_eq!(together.text("w"), alone.text("w"), "{seconds}");
    }
}

/// Otherwise the costs of many hits could reach the digits of the window, in which the count would begin again.
#[test]
fn large_costs_are_added_after_the_number_was_read() {
    let mut items = Items::default();
    let hits = [take("w", window(u64::from(u32::MAX), true), MAX_INCREMENT)];
    let requests: Vec<_> = (0..20_000).map(|_| request(&hits, Charge::Each, at(0)).0).collect();
    let round = Round::new(requests, "");
    assert!(is_read_first(&round));
    items.run(round.requests, |_, _| {});
    assert!(items.text("w").ends_with("4999999999"), "{}", items.text("w"));
    let is_read_first = |program, cost| is_read_first(&Round::new(vec![one_request("w", program, cost)], ""));
    assert!(!is_read_first(window(9, true), MAX_INCREMENT));
    assert!(is_read_first(window(9, true), MAX_INCREMENT + 1));
    assert!(is_read_first(window(9, false), 1), "denied hits are not added");
}

/// Another instance begins the same window between the two commands of this one.
#[test]
fn two_first_hits_of_a_window_are_both_counted() {
    let mut items = Items::default();
    let hit = [take("w", window(9, true), 1)];
    items.decide(&hit, Charge::Each, at(0));
    let (request, mut answer) = request(&hit, Charge::Each, at(60));
    items.run(vec![request], |items, number| {
        if number == 0 {
            items.decide(&[take("w", window(9, true), 5)], Charge::Each, at(60));
        }
    });
    assert_eq!(allowed(&answer.try_recv().unwrap()), [true]);
    assert!(items.text("w").ends_with("0000000006"), "{}", items.text("w"));
}

/// The count stays at its maximum, so that it never reaches the digits of the window.
#[test]
fn a_count_at_its_maximum_does_not_grow() {
    let mut items = Items::default();
    items.decide(&[take("w", window(1, true), u64::MAX)], Charge::Each, at(0));
    let full = items.text("w").to_owned();
    assert!(full.ends_with("4999999999"), "{full}");
    for _ in 0..3 {
        assert_eq!(allowed(&items.decide(&[take("w", window(1, true), MAX_INCREMENT)], Charge::Each, at(1))), [false]);
        assert_eq!(items.text("w"), full);
    }
}

#[test]
fn a_counter_that_was_changed_meanwhile_is_decided_again() {
    let mut items = Items::default();
    let hit = [take("b", bucket(3), 2)];
    let (request, mut answer) = request(&hit, Charge::Each, at(0));
    items.run(vec![request], |items, number| {
        if number == 0 {
            items.decide(&[take("b", bucket(3), 2)], Charge::Each, at(0));
        }
    });
    assert_eq!(allowed(&answer.try_recv().unwrap()), [false]);
    assert_eq!(allowed(&items.decide(&[take("b", bucket(3), 1)], Charge::Each, at(0))), [true]);
}

#[test]
fn all_or_none_of_the_hits_of_a_denied_request_are_taken() {
    let mut items = Items::default();
    let hits = [take("a", bucket(5), 1), take("b", bucket(1), 2), take("w", window(5, true), 1)];
    let outcomes = items.decide(&hits, Charge::All, at(0));
    assert_eq!(allowed(&outcomes), [true, false, true]);
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().unwrap().action == Action::Peek));
    assert!(items.items.is_empty());
    let hits = [take("a", bucket(5), 1), Hit { blocks: Blocks::Never, ..take("b", bucket(1), 2) }];
    assert_eq!(allowed(&items.decide(&hits, Charge::All, at(0))), [true, false]);
    assert_eq!(items.items.len(), 1, "a hit that prevents nothing");
}

/// The first counter is written, the second one was used up by another instance meanwhile.
#[test]
fn written_hits_of_a_request_that_is_denied_later_are_rolled_back() {
    for program in [bucket(5), window(5, true)] {
        let mut items = Items::default();
        let hits = [take("a", program, 5), take("b", bucket(1), 1)];
        let (request, mut answer) = request(&hits, Charge::All, at(0));
        let failed = items.run(vec![request], |items, number| {
            if number == 0 {
                items.decide(&[take("b", bucket(1), 1)], Charge::Each, at(0));
            }
        });
        assert_eq!((allowed(&answer.try_recv().unwrap()), failed), (vec![true, false], 0));
        assert_eq!(allowed(&items.decide(&[take("a", program, 5)], Charge::Each, at(0))), [true], "{program:?}");
    }
}

/// The written hit has used up its counter, which does not prevent the other one.
#[test]
fn written_hits_count_once_if_the_request_is_allowed_later() {
    let mut items = Items::default();
    let hits = [take("a", bucket(5), 5), take("b", bucket(5), 3)];
    let (request, mut answer) = request(&hits, Charge::All, at(0));
    items.run(vec![request], |items, number| {
        if number == 0 {
            items.decide(&[take("b", bucket(5), 1)], Charge::Each, at(0));
        }
    });
    assert_eq!(allowed(&answer.try_recv().unwrap()), [true, true]);
    for (name, left) in [("a", 0), ("b", 1)] {
        assert_eq!(allowed(&items.decide(&[take(name, bucket(5), left + 1)], Charge::Each, at(0))), [false]);
        assert_eq!(allowed(&items.decide(&[take(name, bucket(5), left)], Charge::Each, at(0))), [true]);
    }
}

/// Only a denied hit that was counted is rolled back.
#[test]
fn denied_hits_that_prevent_nothing_are_rolled_back_if_they_count() {
    for counts_denied in [true, false] {
        let mut items = Items::default();
        let program = window(5, counts_denied);
        items.decide(&[take("a", program, 5)], Charge::Each, at(0));
        let before = items.text("a").to_owned();
        let hits = [Hit { blocks: Blocks::Never, ..take("a", program, 3) }, take("b", bucket(1), 1)];
        let (request, mut answer) = request(&hits, Charge::All, at(0));
        items.run(vec![request], |items, number| {
            if number == 0 {
                items.decide(&[take("b", bucket(1), 1)], Charge::Each, at(0));
            }
        });
        assert_eq!(allowed(&answer.try_recv().unwrap())[1..], [false]);
        assert_eq!(items.text("a"), before, "{counts_denied}");
    }
}

/// A caller that does not wait any more has been told that nothing was decided in time.
#[test]
fn the_written_hits_of_an_abandoned_request_stay_unless_they_are_charged_all_or_none() {
    for (charge, left) in [(Charge::All, 5), (Charge::Each, 2)] {
        let mut items = Items::default();
        let hits = [take("a", bucket(5), 3), take("b", bucket(5), 1)];
        let (request, answer) = request(&hits, charge, at(0));
        let mut answer = Some(answer);
        items.run(vec![request], |items, number| {
            if number == 0 {
                items.decide(&[take("b", bucket(5), 1)], Charge::Each, at(0));
                answer = None;
            }
        });
        assert_eq!(
            allowed(&items.decide(&[take("a", bucket(5), left + 1)], Charge::Each, at(0))),
            [false],
            "{charge:?}"
        );
        assert_eq!(allowed(&items.decide(&[take("a", bucket(5), left)], Charge::Each, at(0))), [true], "{charge:?}");
        assert_eq!(allowed(&items.decide(&[take("b", bucket(5), 4)], Charge::Each, at(0))), [true], "{charge:?}");
    }
}

#[test]
fn rollbacks_that_always_fail_end_and_are_counted() {
    let mut items = Items::default();
    let refund = Hit { action: Action::Refund, blocks: Blocks::Never, ..take("c", bucket(5), 1) };
    let hits = [take("a", bucket(5), 5), take("b", bucket(5), 1), refund];
    items.decide(&[take("c", bucket(5), 5)], Charge::Each, at(0));
    let (request, mut answer) = request(&hits, Charge::All, at(0));
    let failed = items.run(vec![request], |items, number| {
        // From the first round on, another instance uses up the second counter and then changes the others always.
        if number == 0 {
            items.decide(&[take("b", bucket(5), 5)], Charge::Each, at(0));
        } else {
            let value = items.items["a"].value.clone();
            items.set("a", value);
        }
        let value = items.items["c"].value.clone();
        items.set("c", value);
    });
    assert_eq!(failed, 1, "the refund is no rollback");
    let outcomes = answer.try_recv().unwrap();
    assert_eq!(outcomes[0].as_ref().unwrap_err(), &StoreError::Rejected);
    assert!(!outcomes[1].as_ref().unwrap().allowed);
    assert_eq!(outcomes[2].as_ref().unwrap_err(), &StoreError::Rejected);
}

#[test]
fn an_item_with_other_data_is_an_error_of_its_own_hits() {
    let mut items = Items::default();
    items.set("w", b"other data".to_vec());
    let hits = [take("w", window(5, true), 1), take("b", bucket(5), 1)];
    let outcomes = items.decide(&hits, Charge::Each, at(0));
    assert_eq!((outcomes[0].as_ref().unwrap_err(), outcomes[1].is_ok()), (&StoreError::Rejected, true));
    // Under `Charge::All`, the error prevents the other take.
    let hits = [take("w", window(5, true), 1), take("c", bucket(5), 5)];
    assert!(items.decide(&hits, Charge::All, at(0))[0].is_err());
    let mut round = Round::new(vec![request(&hits, Charge::All, at(0)).0], "");
    let replies = items.execute(&round.reads());
    round.decide(replies);
    assert!(round.has_invalid_item());
    assert_eq!(allowed(&items.decide(&[take("c", bucket(5), 5)], Charge::Each, at(0))), [true]);
}

/// The number that the server returns after an addition is at least what was added.
#[test]
fn a_number_below_the_added_cost_is_other_data() {
    let (request, mut answer) = request(&[take("w", window(9, true), 5)], Charge::Each, at(0));
    let mut round = Round::new(vec![request], "");
    assert!(!is_read_first(&round));
    let writes = round.decide(vec![Reply::Value { value: b"4".to_vec(), version: 1 }]);
    assert_eq!(writes.count(), 0);
    assert!(round.has_invalid_item());
    round.finish(Vec::new(), &mut 0);
    assert_eq!(answer.try_recv().unwrap()[0].as_ref().unwrap_err(), &StoreError::Rejected);
}

/// An item can be evicted between the two commands.
#[test]
fn a_counter_that_is_gone_meanwhile_begins_again() {
    let mut items = Items::default();
    items.decide(&[take("b", bucket(3), 1)], Charge::Each, at(0));
    let (request, mut answer) = request(&[take("b", bucket(3), 2)], Charge::Each, at(0));
    items.run(vec![request], |items, number| {
        if number == 0 {
            items.items.clear();
        }
    });
    assert_eq!(allowed(&answer.try_recv().unwrap()), [true]);
    assert_eq!(allowed(&items.decide(&[take("b", bucket(3), 1)], Charge::Each, at(0))), [true]);
    assert_eq!(allowed(&items.decide(&[take("b", bucket(3), 1)], Charge::Each, at(0))), [false]);
}

/// The server is out of memory: the hit is an error, and the other hits of the request are rolled back.
#[test]
fn a_rejected_write_is_an_error() {
    let mut items = Items::default();
    let hits = [take("a", bucket(5), 5), take("b", bucket(5), 1)];
    let (request, mut answer) = request(&hits, Charge::All, at(0));
    let mut round = Round::new(vec![request], "");
    let replies = items.execute(&round.reads());
    let writes = round.decide(replies);
    let mut replies = items.execute(&writes);
    replies[1] = Reply::Rejected("SERVER_ERROR out of memory storing object".into());
    let unfinished = round.finish(replies, &mut 0);
    items.run(unfinished, |_, _| {});
    let outcomes = answer.try_recv().unwrap();
    assert_eq!(outcomes[1].as_ref().unwrap_err(), &StoreError::Rejected);
    assert_eq!(allowed(&items.decide(&[take("a", bucket(5), 5)], Charge::Each, at(0))), [true]);
}

#[test]
fn a_failed_connection_fails_all_hits_of_the_round() {
    let (request, mut answer) = request(&[take("a", bucket(5), 1)], Charge::Each, at(0));
    Round::new(vec![request], "").fail(StoreError::Timeout);
    assert_eq!(answer.try_recv().unwrap()[0].as_ref().unwrap_err(), &StoreError::Timeout);
}

#[test]
fn items_outlive_their_content_by_the_difference_of_clocks() {
    for (lifetime, expected) in [(0, 60), (1, 61), (86_400, 86_460)] {
        assert_eq!(ttl(at(lifetime), at(0)), Ttl { secs: expected, now_secs: START / 1_000_000 });
    }
}

/// Generates requests of hits on three counters of each program.
fn requests() -> impl Strategy<Value = Vec<(Vec<Hit>, Charge, u64)>> {
    let sliding = SlidingWindow::new(MaxHits::hard(5), Micros::from_secs(60), 3, WindowEdge::Strict, false).unwrap();
    let log = SlidingLog::new(MaxHits::hard(5), Micros::from_secs(60), Micros::ZERO, true).unwrap();
    let programs = [window(5, true), window(5, false), bucket(5), sliding.into(), log.into()];
    let hit = (0..programs.len(), 0..3_u8, 0..4_u64, 0..6_u8, prop::bool::ANY).prop_map(
        move |(index, number, cost, action, blocks)| {
            let action = match action {
                0 => Action::Peek,
                1 => Action::Refund,
                _ => Action::Take,
            };
            let blocks = if blocks { Blocks::OnDenialOrError } else { Blocks::Never };
            Hit { action, blocks, ..take(&format!("{index}-{number}"), programs[index], cost) }
        },
    );
    let hits = prop::collection::vec(hit, 1..4).prop_map(|mut hits| {
        // The hits of a request name different counters.
        hits.sort_by(|one, other| one.counter.name.cmp(&other.counter.name));
        hits.dedup_by(|one, other| one.counter.name == other.counter.name);
        hits
    });
    let charge = prop::bool::ANY.prop_map(|all| if all { Charge::All } else { Charge::Each });
    prop::collection::vec((hits, charge, 0..30_u64), 1..20)
}

proptest! {
    /// All requests of a history are decided as in memory, whether they share rounds or not.
    #[test]
    fn requests_are_decided_as_in_memory(requests in requests(), shared in 1..5_usize) {
        let memory = Memory::new(&memory::Settings::default());
        let mut items = Items::default();
        let mut seconds = 0;
        for group in requests.chunks(shared) {
            let mut waiting = Vec::new();
            let mut answers = Vec::new();
            let mut expected = Vec::new();
            for (hits, charge, elapsed) in group {
                seconds += elapsed;
                let borrowed: Vec<Hit<&Counter>> = hits.iter().map(Hit::borrowed).collect();
                expected.push(memory.decide_all(&borrowed, *charge, at(seconds)));
                let (request, answer) = request(hits, *charge, at(seconds));
                waiting.push(request);
                answers.push(answer);
            }
            items.run(waiting, |_, _| {});
            for ((mut answer, (hits, ..)), expected) in answers.into_iter().zip(group).zip(expected) {
                let outcomes = answer.try_recv().unwrap();
                for ((outcome, hit), expected) in outcomes.iter().zip(hits).zip(expected) {
                    let decision = outcome.as_ref().unwrap().explain(hit);
                    let decision = HitDecision { decision, decider: Decider::Store, grant: None };
                    prop_assert_eq!(decision, expected.unwrap());
                }
            }
        }
    }
}
