//! What is said over a stream, in both variants of the protocol.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use futures_util::{Stream, stream};
use prost::Message;
use prost_types::Any;
use sha2::{Digest, Sha256};
use sluicegate_proto::{
    envoy::service::discovery::v3::{
        DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Status as Refusal,
        aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
    },
    ratelimit::config::ratelimit::v3::RateLimitConfig,
};
use tokio::{sync::mpsc, time::sleep};
use tonic::{Code, transport::Channel};

use super::{
    client::{Client, Disconnect},
    convert,
};
use crate::rules::SourceFile;

/// The type of all that is asked for.
const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";
/// Of a resource that another stream has brought.
const SOME_VERSION: &str = "of another stream";

/// Between two refusals of the same: at first, and at most. A control plane may not send what would be better before it has
/// heard the refusal.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// What the delta variant knows, by the resources' names; over the streams.
pub(super) type Known = BTreeMap<String, SourceFile>;
type Ads = AggregatedDiscoveryServiceClient<Channel>;

/// Every response is all there is.
///
/// A new stream begins without a version, whatever the last one had: a control plane that has begun its count again could
/// have another state under the same version, and would say nothing.
pub(super) async fn state_of_the_world(client: &Client, mut ads: Ads) -> Result<Infallible, Disconnect> {
    let (requests, outgoing) = outgoing();
    let first = DiscoveryRequest {
        node: Some(client.node().clone()),
        type_url: TYPE_URL.into(),
        ..DiscoveryRequest::default()
    };
    say(&requests, first).await?;
    let mut responses = ads.stream_aggregated_resources(client.request(outgoing)).await?.into_inner();
    let mut version = String::new();
    let mut refused = RejectedUpdate::default();
    loop {
        let response = responses.message().await?.ok_or(Disconnect::Ended)?;
        client.heard();
        let DiscoveryResponse { version_info, mut resources, type_url, nonce } = response;
        // The same state may come in any order.
        resources.sort_unstable_by(|one, other| one.value.cmp(&other.value));
        let digest = digest(&resources);
        let taken = match refused.again(digest).await {
            Some(complaint) => Err(complaint),
            None => client.offer(resources, move |news| Ok((files(&type_url, news)?, ()))).await,
        };
        refused.note(digest, &taken);
        if taken.is_ok() {
            version = version_info;
        }
        let answer = DiscoveryRequest {
            version_info: version.clone(),
            type_url: TYPE_URL.into(),
            response_nonce: nonce,
            error_detail: refusal(taken),
            ..DiscoveryRequest::default()
        };
        say(&requests, answer).await?;
    }
}

/// Every response is a change.
///
/// A new stream begins with the names of what is known, but under no version that there could be, for the reason above: so all
/// there is comes anew, and what is gone is named.
pub(super) async fn delta(client: &Client, mut ads: Ads, known: &mut Known) -> Result<Infallible, Disconnect> {
    let (requests, outgoing) = outgoing();
    let first = DeltaDiscoveryRequest {
        node: Some(client.node().clone()),
        type_url: TYPE_URL.into(),
        resource_names_subscribe: vec!["*".into()],
        initial_resource_versions: known.keys().map(|name| (name.clone(), SOME_VERSION.to_owned())).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    say(&requests, first).await?;
    let mut responses = ads.delta_aggregated_resources(client.request(outgoing)).await?.into_inner();
    let mut refused = RejectedUpdate::default();
    loop {
        let response = responses.message().await?.ok_or(Disconnect::Ended)?;
        client.heard();
        let DeltaDiscoveryResponse { resources, type_url, nonce, removed_resources, .. } = response;
        let (names, resources): (Vec<_>, Vec<_>) =
            resources.into_iter().map(|it| (it.name, it.resource.unwrap_or_default())).unzip();
        let digest = digest(&resources);
        // Only the pause: beside other resources it may be right by now.
        let _ = refused.again(digest).await;
        let mut next = known.clone();
        let read = move |news: &[Any]| {
            removed_resources.iter().for_each(|name| drop(next.remove(name)));
            next.extend(names.into_iter().zip(files(&type_url, news)?));
            Ok((next.values().cloned().collect(), next))
        };
        let taken = client.offer(resources, read).await.map(|next| *known = next);
        refused.note(digest, &taken);
        let answer = DeltaDiscoveryRequest {
            type_url: TYPE_URL.into(),
            response_nonce: nonce,
            error_detail: refusal(taken),
            ..DeltaDiscoveryRequest::default()
        };
        say(&requests, answer).await?;
    }
}

/// What was refused last. Control planes that keep the state of the world send it again as soon as they hear so, for ever.
#[derive(Default)]
struct RejectedUpdate {
    last: Option<([u8; 32], String)>,
    pause: Duration,
}

impl RejectedUpdate {
    /// The complaint, where this is the same again: after a pause, each longer than the one before.
    async fn again(&mut self, digest: [u8; 32]) -> Option<String> {
        let (_, complaint) = self.last.as_ref().filter(|(last, _)| *last == digest)?;
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Some(complaint.clone())
    }

    fn note(&mut self, digest: [u8; 32], taken: &Result<(), String>) {
        let refused = taken.as_ref().err().map(|complaint| (digest, complaint.clone()));
        if refused != self.last {
            *self = Self { last: refused, pause: SHORTEST_PAUSE };
        }
    }
}

fn digest(resources: &[Any]) -> [u8; 32] {
    let mut digest = Sha256::new();
    for Any { type_url, value } in resources {
        for part in [type_url.as_bytes(), value] {
            digest.update(part.len().to_le_bytes());
            digest.update(part);
        }
    }
    digest.finalize().into()
}

/// What goes out on a stream.
fn outgoing<T>() -> (mpsc::Sender<T>, impl Stream<Item = T>) {
    let (sender, receiver) = mpsc::channel(1);
    let next = |mut receiver: mpsc::Receiver<T>| async { receiver.recv().await.map(|item| (item, receiver)) };
    (sender, stream::unfold(receiver, next))
}

async fn say<T>(requests: &mpsc::Sender<T>, request: T) -> Result<(), Disconnect> {
    requests.send(request).await.map_err(|_| Disconnect::Ended)
}

/// All resources of a response, or what is wrong with one of them.
fn files(type_url: &str, resources: &[Any]) -> Result<Vec<SourceFile>, String> {
    if type_url != TYPE_URL {
        return Err(format!("the response is of the type {type_url:?}; {TYPE_URL:?} was asked for"));
    }
    let read = |(index, resource): (usize, &Any)| {
        if resource.type_url != TYPE_URL {
            return Err(format!("resource {index} is of the type {:?}, not {TYPE_URL:?}", resource.type_url));
        }
        let config = RateLimitConfig::decode(&*resource.value);
        config.map(|it| convert::file(&it)).map_err(|error| format!("resource {index} cannot be read: {error}"))
    };
    resources.iter().enumerate().map(read).collect()
}

fn refusal(taken: Result<(), String>) -> Option<Refusal> {
    taken.err().map(|message| Refusal { code: Code::InvalidArgument as i32, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_of_another_type_is_refused() {
        let resource = |type_url: &str, value: &[u8]| Any { type_url: type_url.into(), value: value.to_vec() };
        let named = RateLimitConfig { domain: "d".into(), ..RateLimitConfig::default() }.encode_to_vec();
        let good = resource(TYPE_URL, &named);
        assert_eq!(files(TYPE_URL, std::slice::from_ref(&good)).unwrap()[0].name, "d");
        for (type_url, resources, complaint) in [
            ("other", vec![good.clone()], "the response is of the type \"other\""),
            (TYPE_URL, vec![good.clone(), resource("other", &named)], "resource 1 is of the type \"other\""),
            (TYPE_URL, vec![resource(TYPE_URL, &[0xff])], "resource 0 cannot be read"),
            (TYPE_URL, vec![Any::default()], "resource 0 is of the type \"\""),
        ] {
            let told = files(type_url, &resources).unwrap_err();
            assert!(told.starts_with(complaint), "{told}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_refused_again_waits_longer_each_time() {
        let mut refused = RejectedUpdate::default();
        let (one, other) = ([1; 32], [2; 32]);
        assert_eq!(refused.again(one).await, None);
        refused.note(one, &Err("bad".into()));
        let mut waits = Vec::new();
        for _ in 0..7 {
            let start = tokio::time::Instant::now();
            assert_eq!(refused.again(one).await.as_deref(), Some("bad"));
            refused.note(one, &Err("bad".into()));
            waits.push(start.elapsed().as_millis());
        }
        assert_eq!(waits, [100, 200, 400, 800, 1_600, 2_000, 2_000]);
        assert_eq!(refused.again(other).await, None);
        refused.note(other, &Ok(()));
        assert_eq!(refused.again(one).await, None);
    }
}
