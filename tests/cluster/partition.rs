//! Members in network namespaces, whose connections are cut.

use std::net::SocketAddr;

use crate::{
    cluster::members::{Group, Members},
    support::network::Network,
};

const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 200}
- key: log
  rate_limit: {unit: year, requests_per_unit: 200, algorithm: sliding_log}
- key: bucket
  rate_limit: {unit: year, requests_per_unit: 200, algorithm: token_bucket}
- key: small
  rate_limit: {unit: year, requests_per_unit: 50, count_denied: false}
";
const KEYS: [&str; 3] = ["window", "log", "bucket"];
/// Port of every member, each at its own address.
const PORT: u16 = 8_083;

async fn start_members(network: &Network) -> Members {
    let addresses = network.addresses.iter().map(|address| SocketAddr::from((*address, PORT))).collect();
    Members::of(Group::at(addresses, RULES), |member, builder| builder.in_namespace(&network.namespace(member))).await
}

#[tokio::test]
async fn both_sides_of_a_partition_enforce_limits_and_agree_afterwards() {
    let network = Network::new(3);
    let members = start_members(&network).await;
    let [one, other, apart] = &members.all[..] else { unreachable!() };
    for key in KEYS {
        one.take(key, 20).await;
        members.wait_for_remaining(key, 180).await;
    }
    one.take("small", 10).await;
    members.wait_for_remaining("small", 40).await;
    for member in 0..2 {
        network.cut(member, 2);
        network.cut(2, member);
    }
    one.wait_for_peers(1);
    other.wait_for_peers(1);
    apart.wait_for_peers(0);
    for key in KEYS {
        for _ in 0..15 {
            one.take(key, 2).await;
            apart.take(key, 4).await;
        }
        other.wait_for_remaining(key, 150).await;
        assert_eq!(apart.remaining(key).await, 120, "{key}");
    }
    assert_eq!(apart.exhaust("small").await, 40);
    assert_eq!(one.exhaust("small").await, 40);
    other.wait_for_remaining("small", 0).await;
    assert!(!other.is_allowed("small", 1).await);
    for member in 0..2 {
        network.heal(member, 2);
        network.heal(2, member);
    }
    for key in KEYS {
        members.wait_for_remaining(key, 90).await;
    }
    members.wait_until_connected();
    for member in &members.all {
        assert!(!member.is_allowed("small", 1).await);
    }
    // Connected members exchange further hits once.
    apart.take("log", 10).await;
    one.take("log", 5).await;
    members.wait_for_remaining("log", 75).await;
}

/// What one member sends to another one is lost, so neither receives the other's hits.
#[tokio::test]
async fn members_agree_after_a_partition_in_one_direction() {
    let network = Network::new(3);
    let members = start_members(&network).await;
    let [one, other, third] = &members.all[..] else { unreachable!() };
    network.cut(0, 1);
    one.wait_for_peers(1);
    other.wait_for_peers(1);
    third.wait_for_peers(2);
    for key in KEYS {
        for _ in 0..10 {
            one.take(key, 2).await;
            other.take(key, 3).await;
        }
        third.wait_for_remaining(key, 150).await;
        assert_eq!((one.remaining(key).await, other.remaining(key).await), (180, 170), "{key}");
    }
    network.heal(0, 1);
    for key in KEYS {
        members.wait_for_remaining(key, 150).await;
    }
    members.wait_until_connected();
}
