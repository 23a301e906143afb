//! Checks by Envoy's protocol and over `/json`.

use crate::{
    features::{ALWAYS_NEW, DOMAIN, FEATURES, Feature, Sharing},
    load::{Context, http},
    observer::{Failure, Via},
    support::{descriptor, raw_client::Request},
};

/// Classes of the rule with shares. The last one is not listed.
const CLASSES: [&str; 3] = ["gold", "free", "guest"];

pub(super) fn start(context: &Context) {
    for (index, feature) in FEATURES.iter().enumerate() {
        match feature.key {
            "stream" => {}
            "json" => context.every_second(feature.rate, move |number, context| json(feature, index, number, context)),
            _ => context.every_second(feature.rate, move |number, context| check(feature, index, number, context)),
        }
    }
}

async fn check(feature: &'static Feature, index: usize, number: u64, context: Context) {
    let instances = if matches!(feature.sharing, Sharing::Peers { .. }) { &context.peers } else { &context.redis };
    // Each entity calls all instances in turn.
    let turn = if feature.entities == ALWAYS_NEW { number } else { number / feature.entities };
    let instance = &instances[turn as usize % instances.len()];
    let entity = number % feature.entities;
    let name = format!("e{entity}");
    let entries = match feature.key {
        "shares" => vec![(feature.key, name.as_str()), ("tenant", CLASSES[number as usize % CLASSES.len()])],
        _ => vec![(feature.key, name.as_str())],
    };
    let request = Request::new(DOMAIN).descriptor(descriptor(&entries));
    let call = instance.client.check(request);
    let answer = context.observer.call(Via::Connection(instance.target.index), feature.key, call).await;
    if let Ok((answer, span)) = answer
        && answer.allowed()
    {
        context.observer.admit(index, entity, span);
    }
}

async fn json(feature: &'static Feature, index: usize, number: u64, context: Context) {
    let instance = &context.redis[number as usize % context.redis.len()];
    let entity = number % feature.entities;
    let body = format!(
        r#"{{"domain": "{DOMAIN}", "descriptors": [{{"entries": [{{"key": "json", "value": "e{entity}"}}]}}]}}"#
    );
    let call = async {
        match http(instance.target.http, "/json", None, Some(&body)).await? {
            (200, _) => Ok(true),
            (429, _) => Ok(false),
            (status, _) => Err(Failure::Status(format!("HTTP {status}"))),
        }
    };
    if let Ok((true, span)) = context.observer.call(Via::NewConnection(instance.target.index), "json", call).await {
        context.observer.admit(index, entity, span);
    }
}
