//! A gRPC service behind the layer: gRPC's own health service, limited by the caller's `x-user`.
//!
//! ```console
//! $ cargo run --release                                            # the service, in the repository's root
//! $ cargo run -p sluicegate-client --features tower --example tonic -- http://127.0.0.1:8081 127.0.0.1:9001
//! $ grpcurl -plaintext -H 'x-user: alice' 127.0.0.1:9001 grpc.health.v1.Health/Check
//! ```
#![allow(clippy::expect_used, reason = "an example that cannot go on should stop")]

use http::request::Parts;
use sluicegate_client::{Client, Descriptor, descriptor, layer::RateLimitLayer};
use tokio_stream::wrappers::TcpListenerStream;

#[tokio::main]
async fn main() {
    let mut words = std::env::args().skip(1);
    let limiter = words.next().unwrap_or_else(|| "http://127.0.0.1:8081".to_owned());
    let listen = words.next().unwrap_or_else(|| "127.0.0.1:9001".to_owned());

    let limiter = Client::builder(limiter).domain("example").connect_lazy().expect("the limiter's address");
    let (_reporter, health) = tonic_health::server::health_reporter();
    let listener = tokio::net::TcpListener::bind(&listen).await.expect("a free port");
    println!("{}", listener.local_addr().expect("an address"));
    tonic::transport::Server::builder()
        .layer(RateLimitLayer::new(limiter, descriptors))
        .add_service(health)
        .serve_with_incoming(TcpListenerStream::new(listener))
        .await
        .expect("a server");
}

fn descriptors(request: &Parts) -> Vec<Descriptor<'static>> {
    let user = request.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("nobody");
    vec![descriptor! { "user" => user.to_owned() }]
}
