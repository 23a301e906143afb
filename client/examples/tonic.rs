//! A gRPC service behind [`RateLimitLayer`]: gRPC's own health service, with a limit per `x-user`.
//!
//! ```console
//! $ cargo run --release                                            # the service, in the repository's root
//! $ cargo run -p sluicegate-client --features tower --example tonic -- http://127.0.0.1:8081 127.0.0.1:9001
//! $ grpcurl -plaintext -H 'x-user: alice' 127.0.0.1:9001 grpc.health.v1.Health/Check
//! ```
#![allow(clippy::expect_used, reason = "an example stops on the first error")]

use http::request::Parts;
use sluicegate_client::{Client, Descriptor, descriptor, layer::RateLimitLayer};
use tokio_stream::wrappers::TcpListenerStream;

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let service = arguments.next().unwrap_or_else(|| "http://127.0.0.1:8081".to_owned());
    let listen = arguments.next().unwrap_or_else(|| "127.0.0.1:9001".to_owned());

    let client = Client::builder(service).domain("example").connect_lazy().expect("invalid service address");
    let (_reporter, health) = tonic_health::server::health_reporter();
    let listener = tokio::net::TcpListener::bind(&listen).await.expect("cannot listen");
    println!("{}", listener.local_addr().expect("no local address"));
    tonic::transport::Server::builder()
        .layer(RateLimitLayer::new(client, descriptors))
        .add_service(health)
        .serve_with_incoming(TcpListenerStream::new(listener))
        .await
        .expect("server failed");
}

fn descriptors(request: &Parts) -> Vec<Descriptor<'static>> {
    let user = request.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("anonymous");
    vec![descriptor! { "user" => user.to_owned() }]
}
