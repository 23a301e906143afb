//! Properties of merging increments, with random histories and deliveries.

use proptest::{prelude::*, sample::select};

use super::*;

/// One operation of an origin: the number of the origin, a cost, and whether the origin publishes afterwards.
type Step = (usize, u64, bool);

/// Delivery of the next batch of an origin: not at all, once, twice, or a former batch instead.
#[derive(Clone, Copy, Debug)]
enum Delivery {
    Lost,
    Once,
    Twice,
    Former(usize),
}

fn deliveries() -> impl Strategy<Value = Vec<(usize, Delivery)>> {
    let delivery = prop_oneof![
        Just(Delivery::Lost),
        Just(Delivery::Once),
        Just(Delivery::Twice),
        (0_usize..20).prop_map(Delivery::Former)
    ];
    prop::collection::vec((0_usize..3, delivery), 0..40)
}

/// Returns the time of a step. Hits of windows are apart within one window, hits of buckets are not, because they drain.
fn time_of(limit: &Algorithm, step: usize) -> Micros {
    let is_window = matches!(limit, Algorithm::FixedWindow(_) | Algorithm::SlidingWindow(_) | Algorithm::SlidingLog(_));
    at(if is_window { 400 + step as u64 } else { 450 })
}

/// Executes all steps on three origins, and returns the origins and the number of allowed hits.
fn count(limit: &Algorithm, steps: &[Step], publishes: impl Fn(bool) -> bool) -> (Vec<Instance>, u64) {
    let origins: Vec<_> = (1..=3).map(Instance::new).collect();
    let mut allowed = 0;
    for (number, (origin, cost, published)) in steps.iter().enumerate() {
        allowed += if origins[*origin].take(limit, *cost, time_of(limit, number)) { *cost } else { 0 };
        if publishes(*published) {
            origins[*origin].peers.publish(at(450));
        }
    }
    origins.iter().for_each(|origin| origin.peers.publish(at(450)));
    (origins, allowed)
}

fn receive(receiver: &Instance, origins: &[Instance], deliveries: &[(usize, Delivery)]) {
    let mut former: Vec<Batch> = Vec::new();
    for (origin, delivery) in deliveries {
        let Pull::Batch(batch) = receiver.pull(&origins[*origin], at(450)) else {
            continue;
        };
        match *delivery {
            Delivery::Lost => {}
            Delivery::Once => assert!(receiver.peers.apply(&batch, at(450))),
            Delivery::Twice => {
                assert!(receiver.peers.apply(&batch, at(450)) && !receiver.peers.apply(&batch, at(450)));
            }
            Delivery::Former(index) => {
                // The former batch is the next one if it was lost.
                if let Some(batch) = former.get(index) {
                    let position = receiver.peers.position(batch.origin);
                    assert_eq!(receiver.peers.apply(batch, at(450)), batch.after == position);
                }
            }
        }
        former.push(batch);
    }
    for origin in origins {
        receiver.follow(origin, at(450));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Merging is commutative over origins, associative over increments, and idempotent over deliveries.
    #[test]
    fn the_order_of_deliveries_does_not_matter_and_no_hit_is_forgotten(
        limit in select(all_algorithms(12)),
        steps in prop::collection::vec((0_usize..3, 1_u64..6, any::<bool>()), 0..40),
        deliveries in [deliveries(), deliveries()],
        own in 0_u64..12,
    ) {
        let receivers = [4, 5, 6].map(Instance::new);
        receivers.iter().for_each(|receiver| assert!(receiver.take(&limit, own, time_of(&limit, 0))));
        let (origins, allowed) = count(&limit, &steps, |published| published);
        receive(&receivers[0], &origins, &deliveries[0]);
        receive(&receivers[1], &origins, &deliveries[1]);
        let (unsplit, _) = count(&limit, &steps, |_| false);
        receive(&receivers[2], &unsplit, &[]);
        let most = if matches!(limit, Algorithm::SlidingLog(_)) { 12 } else { u64::MAX };
        for receiver in &receivers {
            prop_assert_eq!(receiver.used(&limit, at(450)), (allowed + own).min(most), "{:?}", limit);
        }
    }

    /// All instances agree when each has received the increments of the others.
    #[test]
    fn instances_agree_when_nothing_is_in_transit(
        limit in select(all_algorithms(12)),
        steps in prop::collection::vec((0_usize..3, 1_u64..4, any::<bool>()), 0..40),
        copied_after in 0_usize..40,
    ) {
        let mut instances: Vec<_> = (1..=3).map(Instance::new).collect();
        let follow_all = |instances: &[Instance]| {
            instances.iter().for_each(|instance| instance.peers.publish(at(450)));
            for receiver in instances {
                let others = instances.iter().filter(|origin| origin.peers.epoch() != receiver.peers.epoch());
                for origin in others {
                    receiver.follow(origin, at(450));
                }
            }
        };
        for (number, (instance, cost, exchanged)) in steps.iter().enumerate() {
            instances[*instance].take(&limit, *cost, at(450));
            if *exchanged {
                follow_all(&instances);
            }
            if number == copied_after {
                let joined = Instance::new(4);
                joined.copy(&instances[*instance], at(450));
                instances.push(joined);
            }
        }
        follow_all(&instances);
        let used = instances[0].used(&limit, at(450));
        for instance in &instances {
            prop_assert_eq!(instance.used(&limit, at(450)), used, "{:?}", limit);
        }
    }
}
