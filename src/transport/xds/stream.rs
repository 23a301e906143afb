//! The stream to the control plane, in both variants of the protocol.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use futures_util::{Stream, stream};
use prost::Message;
use prost_types::Any;
use sha2::{Digest, Sha256};
use sluicegate_proto::{
    envoy::service::discovery::v3::{
        DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Status as RpcStatus,
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

/// Type of the resources that the client subscribes to.
const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";
/// Version that a new stream states for resources of an earlier stream. No control plane uses it.
const UNKNOWN_VERSION: &str = "of another stream";

/// First pause before the same update is rejected again. The pauses are short, because a control plane may wait for the
/// NACK before it sends a better update.
const MIN_PAUSE: Duration = Duration::from_millis(100);
/// Maximum pause before the same update is rejected again.
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// The accepted resources of the delta variant by name. They outlive a stream.
pub(super) type KnownResources = BTreeMap<String, SourceFile>;
type Ads = AggregatedDiscoveryServiceClient<Channel>;

/// Runs a stream of the state-of-the-world variant: every response contains all resources.
///
/// A new stream states no version, even if an earlier stream had one. A restarted control plane may count versions
/// again and have another state under the same version, and would then send nothing.
pub(super) async fn state_of_the_world(client: &Client, mut ads: Ads) -> Result<Infallible, Disconnect> {
    let (requests, outgoing) = outgoing();
    let first = DiscoveryRequest {
        node: Some(client.node().clone()),
        type_url: TYPE_URL.into(),
        ..DiscoveryRequest::default()
    };
    send(&requests, first).await?;
    let mut responses = ads.stream_aggregated_resources(client.request(outgoing)).await?.into_inner();
    let mut version = String::new();
    let mut rejected = RejectedUpdate::default();
    loop {
        let response = responses.message().await?.ok_or(Disconnect::Ended)?;
        client.note_response();
        let DiscoveryResponse { version_info, mut resources, type_url, nonce } = response;
        // A control plane may send the same resources in any order.
        resources.sort_unstable_by(|one, other| one.value.cmp(&other.value));
        let digest = digest(&resources);
        let result = match rejected.error_if_repeated(digest).await {
            Some(error) => Err(error),
            None => client.apply_update(resources, move |resources| Ok((files(&type_url, resources)?, ()))).await,
        };
        rejected.record(digest, &result);
        if result.is_ok() {
            version = version_info;
        }
        let reply = DiscoveryRequest {
            version_info: version.clone(),
            type_url: TYPE_URL.into(),
            response_nonce: nonce,
            error_detail: error_detail(result),
            ..DiscoveryRequest::default()
        };
        send(&requests, reply).await?;
    }
}

/// Runs a stream of the delta variant: every response contains the changed resources and the names of removed ones.
///
/// A new stream states the names of the known resources under a version that no control plane uses, for the reason
/// given at [`state_of_the_world`]. The control plane therefore sends all resources again and names those that were
/// removed.
pub(super) async fn delta(client: &Client, mut ads: Ads, known: &mut KnownResources) -> Result<Infallible, Disconnect> {
    let (requests, outgoing) = outgoing();
    let first = DeltaDiscoveryRequest {
        node: Some(client.node().clone()),
        type_url: TYPE_URL.into(),
        resource_names_subscribe: vec!["*".into()],
        initial_resource_versions: known.keys().map(|name| (name.clone(), UNKNOWN_VERSION.to_owned())).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    send(&requests, first).await?;
    let mut responses = ads.delta_aggregated_resources(client.request(outgoing)).await?.into_inner();
    let mut rejected = RejectedUpdate::default();
    loop {
        let response = responses.message().await?.ok_or(Disconnect::Ended)?;
        client.note_response();
        let DeltaDiscoveryResponse { resources, type_url, nonce, removed_resources, .. } = response;
        let (names, resources): (Vec<_>, Vec<_>) =
            resources.into_iter().map(|named| (named.name, named.resource.unwrap_or_default())).unzip();
        let digest = digest(&resources);
        // Only the pause matters: together with other resources, the same update may be valid now.
        let _ = rejected.error_if_repeated(digest).await;
        let mut next = known.clone();
        let applying = client.apply_update(resources, move |resources| {
            for name in &removed_resources {
                next.remove(name);
            }
            next.extend(names.into_iter().zip(files(&type_url, resources)?));
            Ok((next.values().cloned().collect(), next))
        });
        let result = applying.await.map(|next| *known = next);
        rejected.record(digest, &result);
        let reply = DeltaDiscoveryRequest {
            type_url: TYPE_URL.into(),
            response_nonce: nonce,
            error_detail: error_detail(result),
            ..DeltaDiscoveryRequest::default()
        };
        send(&requests, reply).await?;
    }
}

/// The last rejected update.
///
/// Control planes of the state-of-the-world variant send a rejected update again as soon as they receive the NACK,
/// without end.
#[derive(Default)]
struct RejectedUpdate {
    /// Digest and error of the update.
    last: Option<([u8; 32], String)>,
    pause: Duration,
}

impl RejectedUpdate {
    /// Returns the error if the update with this digest is the rejected one. Pauses first, longer each time.
    async fn error_if_repeated(&mut self, digest: [u8; 32]) -> Option<String> {
        let (_, error) = self.last.as_ref().filter(|(last, _)| *last == digest)?;
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        Some(error.clone())
    }

    fn record(&mut self, digest: [u8; 32], result: &Result<(), String>) {
        let rejected = result.as_ref().err().map(|error| (digest, error.clone()));
        if rejected != self.last {
            *self = Self { last: rejected, pause: MIN_PAUSE };
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

/// Returns a sender, and the stream of the items that are sent.
fn outgoing<T>() -> (mpsc::Sender<T>, impl Stream<Item = T>) {
    let (sender, receiver) = mpsc::channel(1);
    let items = stream::unfold(receiver, |mut receiver| async {
        let item = receiver.recv().await?;
        Some((item, receiver))
    });
    (sender, items)
}

async fn send<T>(requests: &mpsc::Sender<T>, request: T) -> Result<(), Disconnect> {
    requests.send(request).await.map_err(|_| Disconnect::Ended)
}

/// Converts all resources of a response into rule files. Returns the error of the first invalid resource.
fn files(type_url: &str, resources: &[Any]) -> Result<Vec<SourceFile>, String> {
    if type_url != TYPE_URL {
        return Err(format!("the response has type {type_url:?}, expected {TYPE_URL:?}"));
    }
    let mut files = Vec::new();
    for (index, resource) in resources.iter().enumerate() {
        if resource.type_url != TYPE_URL {
            return Err(format!("resource {index} has type {:?}, expected {TYPE_URL:?}", resource.type_url));
        }
        match RateLimitConfig::decode(&*resource.value) {
            Ok(config) => files.push(convert::file(&config)),
            Err(error) => return Err(format!("resource {index} cannot be read: {error}")),
        }
    }
    Ok(files)
}

/// Returns the error of a NACK, or `None` for an ACK.
fn error_detail(result: Result<(), String>) -> Option<RpcStatus> {
    result.err().map(|message| RpcStatus { code: Code::InvalidArgument as i32, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_resources_of_another_type() {
        let resource = |type_url: &str, value: &[u8]| Any { type_url: type_url.into(), value: value.to_vec() };
        let named = RateLimitConfig { domain: "d".into(), ..RateLimitConfig::default() }.encode_to_vec();
        let valid = resource(TYPE_URL, &named);
        assert_eq!(files(TYPE_URL, std::slice::from_ref(&valid)).unwrap()[0].name, "d");
        for (type_url, resources, expected) in [
            ("other", vec![valid.clone()], "the response has type \"other\""),
            (TYPE_URL, vec![valid.clone(), resource("other", &named)], "resource 1 has type \"other\""),
            (TYPE_URL, vec![resource(TYPE_URL, &[0xff])], "resource 0 cannot be read"),
            (TYPE_URL, vec![Any::default()], "resource 0 has type \"\""),
        ] {
            let error = files(type_url, &resources).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_repetition_of_a_rejected_update_waits_longer() {
        let mut rejected = RejectedUpdate::default();
        let (one, other) = ([1; 32], [2; 32]);
        assert_eq!(rejected.error_if_repeated(one).await, None);
        rejected.record(one, &Err("bad".into()));
        let mut waits = Vec::new();
        for _ in 0..7 {
            let start = tokio::time::Instant::now();
            assert_eq!(rejected.error_if_repeated(one).await.as_deref(), Some("bad"));
            rejected.record(one, &Err("bad".into()));
            waits.push(start.elapsed().as_millis());
        }
        assert_eq!(waits, [100, 200, 400, 800, 1_600, 2_000, 2_000]);
        assert_eq!(rejected.error_if_repeated(other).await, None);
        rejected.record(other, &Ok(()));
        assert_eq!(rejected.error_if_repeated(one).await, None);
    }
}
