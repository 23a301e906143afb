//! Fuzz targets: replies of memcached, and addresses of memcached servers.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::io;

use futures_util::FutureExt;
use sluicegate_algorithm::{Action, Algorithm, LimitSpec, Micros, Operation, Program};
use sluicegate_store::{Charge, Counter, Hit, StepOutcomes};
use tokio::sync::oneshot;

use super::{
    address,
    failure::Failure,
    protocol::{Commands, Reply},
    round::{Request, Round},
};

/// Time of the requests.
const NOW: Micros = Micros::from_secs(1_763_672_400);

/// A request that waits for its answer.
struct Waiting {
    hits: Vec<Hit>,
    answer: oneshot::Receiver<StepOutcomes>,
}

/// Decides requests on counters of every kind with bytes that a server might send as its replies, until the bytes end.
/// Then every hit has an answer, and the states in the answers are explained.
pub fn memcached_reply(input: &[u8]) {
    let mut requests = Vec::new();
    let mut waiting = Vec::new();
    for charge in [Charge::Each, Charge::All] {
        let hits = hits();
        let (sender, answer) = oneshot::channel();
        requests.push(Request::new(hits.clone(), charge, NOW, sender));
        waiting.push(Waiting { hits, answer });
    }
    decide(requests, input);
    for Waiting { hits, mut answer } in waiting {
        let outcomes = answer.try_recv().unwrap_or_else(|_| panic!("a request has no answer"));
        assert_eq!(outcomes.len(), hits.len());
        for (hit, outcome) in hits.iter().zip(outcomes) {
            let Program::Limit(algorithm) = &hit.counter.program else {
                continue;
            };
            if let Ok(step) = outcome {
                let operation = Operation { action: step.action, cost: hit.cost, now: step.at };
                let _ = algorithm.explain(&step.state, operation, step.allowed);
            }
        }
    }
}

/// Returns a take on a counter of every kind, and a rollback of it.
fn hits() -> Vec<Hit> {
    let spec = LimitSpec { requests: 10, window: Micros::from_secs(60), ..LimitSpec::default() };
    let mut hits = Vec::new();
    for (index, kind) in Algorithm::KINDS.iter().enumerate() {
        let Ok(algorithm) = (kind.build)(&spec) else {
            continue;
        };
        let name = index.to_string();
        let take = Hit::take(Counter::new(name.as_bytes(), Program::Limit(algorithm)), 1);
        let rollback = Hit { action: Action::RollBack(NOW), ..take.clone() };
        hits.extend([take, rollback]);
    }
    hits
}

/// Decides the requests in rounds until every hit has an answer. When the replies end, the connection fails.
fn decide(mut requests: Vec<Request>, mut bytes: &[u8]) {
    let mut failed_rollbacks = 0;
    while !requests.is_empty() {
        let mut round = Round::new(requests, "");
        let replies = read_all(&mut bytes, &round.reads()).and_then(|replies| {
            let writes = round.decide(replies);
            read_all(&mut bytes, &writes)
        });
        match replies {
            Ok(replies) => requests = round.finish(replies, &mut failed_rollbacks),
            Err(error) => {
                round.fail(Failure::of(&error).error());
                return;
            }
        }
    }
}

/// Reads the replies to the commands.
fn read_all(bytes: &mut &[u8], commands: &Commands) -> io::Result<Vec<Reply>> {
    let mut replies = Vec::with_capacity(commands.count());
    for _ in 0..commands.count() {
        let reply = Reply::read(bytes).now_or_never();
        replies.push(reply.unwrap_or_else(|| panic!("a reply in memory was awaited"))?);
    }
    Ok(replies)
}

/// Parses the address of a store. The error does not depend on what is before an `@`, where other stores have a password.
pub fn memcached_address(input: &[u8]) {
    let url = String::from_utf8_lossy(input);
    let address = address::parse(&url);
    let Some((before, servers)) = url.rsplit_once('@') else {
        return;
    };
    let other = match before.split_once("://") {
        Some((scheme, _)) => format!("{scheme}://other@{servers}"),
        None => format!("other@{servers}"),
    };
    assert_eq!(address, address::parse(&other));
}
