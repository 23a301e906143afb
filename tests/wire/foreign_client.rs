//! A client that shares no code with us: Python's grpcio, which learns the protocol through reflection.

use std::process::Command;

use crate::support::{Server, repository, tool};

#[test]
fn a_foreign_client_finds_its_way_by_reflection() {
    let server = Server::builder().start();
    let output = Command::new(tool("python"))
        .arg(repository("tests/wire/foreign_client.py"))
        .arg(server.grpc.to_string())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    let expected = "health: SERVING, SERVING\nNOT_FOUND\nOK 2\nOK 1\nOK 0\nOVER_LIMIT 0\nINVALID_ARGUMENT\n";
    assert!(out.ends_with(expected), "{out}");
    for service in ["envoy.service.ratelimit.v3.RateLimitService", "grpc.health.v1.Health"] {
        assert!(out.contains(service), "{out}");
    }
}

/// Code that Python generates from our .proto files: the example of the documentation.
#[test]
fn a_foreign_client_has_a_stream() {
    let server = Server::builder().start();
    let script = repository("proto/examples/python/stream.py");
    let output = Command::new(tool("python")).arg(script).arg(server.grpc.to_string()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    let allowed = "0: allowed, 2 remaining\n1: allowed, 1 remaining\n2: allowed, 0 remaining\n";
    assert!(out.starts_with(&format!("{allowed}3: denied, retry after ")), "{out}");
    assert_eq!(out.lines().count(), 5, "{out}");
}

/// The older version of the reflection protocol, by its bare bytes: the answer names the service.
#[tokio::test]
async fn the_older_reflection_is_there_too() {
    use tonic_reflection::pb::v1alpha::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest,
    };
    let server = Server::builder().start();
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap();
    let mut client = ServerReflectionClient::new(endpoint.connect().await.unwrap());
    let list = MessageRequest::ListServices(String::new());
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut answers = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let answer = format!("{:?}", answers.message().await.unwrap());
    assert!(answer.contains("envoy.service.ratelimit.v3.RateLimitService"), "{answer}");
    for elsewhere in ["AdminService", "AggregatedDiscoveryService"] {
        assert!(!answer.contains(elsewhere), "{elsewhere} is not served on this port: {answer}");
    }
}
