//! A client that shares no code with this project: Python's grpcio, which reads the protocol by reflection.

use std::process::Command;

use crate::support::{Server, repository, tool};

#[test]
fn a_foreign_client_calls_the_service_by_reflection() {
    let server = Server::builder().start();
    assert_calls_by_reflection(&server.grpc.to_string());
}

/// Its `:authority` is then the escaped path.
#[test]
fn a_foreign_client_calls_the_service_on_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("grpc.sock").display().to_string();
    let _server = Server::builder().set("grpc.uds", &path).start();
    assert_calls_by_reflection(&format!("unix:{path}"));
}

fn assert_calls_by_reflection(target: &str) {
    let script = repository("tests/wire/foreign_client.py");
    let output = Command::new(tool("python")).arg(script).arg(target).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    let expected = "health: SERVING, SERVING\nNOT_FOUND\nOK 2\nOK 1\nOK 0\nOVER_LIMIT 0\nINVALID_ARGUMENT\n";
    assert!(out.ends_with(expected), "{out}");
    for service in ["envoy.service.ratelimit.v3.RateLimitService", "grpc.health.v1.Health"] {
        assert!(out.contains(service), "{out}");
    }
}

/// The documented example: Python code generated from the project's .proto files.
#[test]
fn a_foreign_client_uses_a_stream() {
    let server = Server::builder().start();
    let script = repository("proto/examples/python/stream.py");
    let output = Command::new(tool("python")).arg(script).arg(server.grpc.to_string()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    let allowed = "0: allowed, 2 remaining\n1: allowed, 1 remaining\n2: allowed, 0 remaining\n";
    assert!(out.starts_with(&format!("{allowed}3: denied, retry after ")), "{out}");
    assert_eq!(out.lines().count(), 5, "{out}");
}

/// The older version of the reflection protocol (`v1alpha`) lists the service as well.
#[tokio::test]
async fn the_older_reflection_protocol_is_supported() {
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
    for other in ["AdminService", "AggregatedDiscoveryService"] {
        assert!(!answer.contains(other), "{other} must not be served on this port: {answer}");
    }
}
