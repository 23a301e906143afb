//! Slots of concurrency limits by Envoy's protocol, and permits of the client.

use std::time::Duration;

use sluicegate_client::{Client, OnError, descriptor};
use tokio::time::sleep;

use crate::{
    features::{DOMAIN, IN_FLIGHT},
    load::Context,
    observer::{DEADLINE, Via},
    support::{descriptor as entries, raw_client::Request},
};

/// The longest time for which a slot is held. A response arrives within [`DEADLINE`] after the slot was taken.
pub(crate) const MAX_HELD: Duration = Duration::from_secs(4);
/// Attempts per second to acquire a slot of each limit.
const RATE: u64 = 12;

pub(super) fn start(context: &Context) {
    context.every_second(RATE, slot);
    // The client has one configuration for all endpoints, so it uses those without TLS.
    let [_, second, third] = &*context.redis else { unreachable!() };
    let address = |instance: &super::Instance| format!("http://{}", instance.target.grpc);
    let client = Client::builder(address(second))
        .endpoint(address(third))
        .domain(DOMAIN)
        .timeout(DEADLINE - Duration::from_secs(1))
        .on_error(OnError::Deny)
        .connect_lazy()
        .unwrap();
    for key in ["permits", "adaptive"] {
        let client = client.clone();
        context.every_second(RATE, move |number, context| permit(client.clone(), key, number, context));
    }
}

fn index(key: &str) -> usize {
    IN_FLIGHT.iter().position(|slots| slots.key == key).unwrap()
}

/// Returns how long a holder holds its slot, from 100 ms to [`MAX_HELD`].
fn held(number: u64) -> Duration {
    Duration::from_millis(100 + number * 769 % (MAX_HELD.as_millis() as u64 - 100))
}

async fn slot(number: u64, context: Context) {
    let slots = index("slots");
    let instance = &context.redis[number as usize % context.redis.len()];
    let holder = format!("h{number}");
    let entry = || entries(&[("slots", "x"), ("holder", &holder)]);
    let via = Via::Connection(instance.target.index);
    let take = instance.client.check(Request::new(DOMAIN).descriptor(entry()));
    let Ok((answer, _)) = context.observer.call(via, "slots", take).await else { return };
    if !answer.allowed() {
        return;
    }
    context.observer.acquire(slots);
    sleep(held(number)).await;
    context.observer.release(slots);
    let release = instance.client.check(Request::new(DOMAIN).descriptor(entry().refund()));
    let _ = context.observer.call(via, "release", release).await;
}

/// When no instance answers, the client makes the verdict, so its calls are not recorded.
async fn permit(client: Client, key: &'static str, number: u64, context: Context) {
    let Ok(permit) = client.acquire([descriptor! { key => "x" }]).await else { return };
    context.observer.acquire(index(key));
    sleep(held(number)).await;
    context.observer.release(index(key));
    permit.release().await;
}
