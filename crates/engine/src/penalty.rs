//! [`PenaltyOfLimit`]: the penalty of a charged limit. A request peeks at it in the call that charges the limit, so
//! that nothing is charged while it is in force. If the limit denies the request, a second call begins it. The penalty
//! ends when its time is over, or by a reset of the limit's counter (`Engine::reset_counter`).

use sluicegate_algorithm::{Action, Decision, Micros};
use sluicegate_store::{Hit, HitDecision, StoreError};

/// A limit's penalty: the hit on its counter, and the answer of the store.
pub(super) struct PenaltyOfLimit {
    pub(super) hit: Hit,
    /// The answer to the peek, [`StoreError::Missing`] before it is known.
    answer: Result<HitDecision, StoreError>,
}

impl PenaltyOfLimit {
    pub(super) fn new(hit: Hit) -> Self {
        Self { hit, answer: Err(StoreError::Missing) }
    }

    /// Sets the answer to the peek. A penalty in force denies the hit of the limit.
    pub(super) fn set_answer(
        &mut self,
        answer: Result<HitDecision, StoreError>,
        of_limit: &mut Result<HitDecision, StoreError>,
    ) {
        self.answer = answer;
        match answer {
            Ok(answer) if answer.decision.allowed => {}
            Ok(HitDecision { decision, decider, .. }) => {
                if let Ok(of_limit) = of_limit {
                    deny(&mut of_limit.decision, decision.reset);
                    of_limit.decider = decider;
                }
            }
            Err(error) => *of_limit = Err(error),
        }
    }

    /// Returns whether the penalty begins with a hit: its limit denies the hit, and no penalty is in force.
    pub(super) fn begins(&self, action: Action, of_limit: &Result<HitDecision, StoreError>) -> bool {
        let (Ok(penalty), Ok(of_limit)) = (&self.answer, of_limit) else {
            return false;
        };
        action == Action::Take && penalty.decision.allowed && !of_limit.decision.allowed
    }
}

/// Changes the decision of a limit to that of a penalty with this time left.
pub(super) fn deny(decision: &mut Decision, time_left: Micros) {
    let mut retry_after = Some(time_left);
    if !decision.allowed {
        // A hit that never fits has none.
        retry_after = decision.retry_after.map(|wait| wait.max(time_left));
    }
    *decision = Decision {
        allowed: false,
        soft: false,
        remaining: 0,
        reset: decision.reset.max(time_left),
        next: time_left,
        retry_after,
        delay: Micros::ZERO,
        ..*decision
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_penalty_replaces_the_numbers_of_its_limit() {
        let seconds = Micros::from_secs;
        let allowed = Decision {
            allowed: true,
            soft: true,
            remaining: 5,
            used: 7,
            reset: seconds(9),
            next: seconds(1),
            delay: seconds(2),
            ..Decision::default()
        };
        let mut decision = allowed;
        deny(&mut decision, seconds(60));
        let used = 7;
        let time_left = seconds(60);
        let denied =
            Decision { used, reset: time_left, next: time_left, retry_after: Some(time_left), ..Decision::default() };
        assert_eq!(decision, denied);
        // A denial of the limit that ends later still ends later.
        let by_limit = Decision { allowed: false, reset: seconds(90), retry_after: Some(seconds(80)), ..allowed };
        let mut decision = by_limit;
        deny(&mut decision, seconds(60));
        assert_eq!((decision.reset, decision.retry_after), (seconds(90), Some(seconds(80))));
        let mut decision = Decision { retry_after: None, ..by_limit };
        deny(&mut decision, seconds(60));
        assert_eq!(decision.retry_after, None, "the hit never fits");
    }
}
