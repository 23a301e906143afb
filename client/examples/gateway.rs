//! A reverse proxy with rate limits for users and client addresses.
//!
//! ```console
//! $ cargo run --release                                            # the service, in the repository's root
//! $ python3 -m http.server 9000                                    # the upstream to protect
//! $ cargo run -p sluicegate-client --features tower --example gateway -- http://127.0.0.1:8081 http://127.0.0.1:9000
//! $ curl -i -H 'x-user: alice' http://127.0.0.1:8000/
//! ```
#![allow(clippy::expect_used, reason = "an example stops on the first error")]

use std::net::{Ipv4Addr, SocketAddr};

use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, Request, State},
    http::{StatusCode, Uri, request::Parts},
    response::{IntoResponse, Response},
};
use hyper_util::{
    client::legacy::{Client as Http, connect::HttpConnector},
    rt::TokioExecutor,
};
use sluicegate_client::{Client, Descriptor, descriptor, layer::RateLimitLayer};

#[derive(Clone)]
struct Upstream {
    http: Http<HttpConnector, Body>,
    address: String,
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut argument = |default: &str| arguments.next().unwrap_or_else(|| default.to_owned());
    let (service, upstream, listen) =
        (argument("http://127.0.0.1:8081"), argument("http://127.0.0.1:9000"), argument("127.0.0.1:8000"));

    let client = Client::builder(service).domain("example").connect_lazy().expect("invalid service address");
    let upstream = Upstream { http: Http::builder(TokioExecutor::new()).build_http(), address: upstream };
    let app = Router::new().fallback(forward).with_state(upstream).layer(RateLimitLayer::new(client, descriptors));

    let listener = tokio::net::TcpListener::bind(&listen).await.expect("cannot listen");
    println!("{}", listener.local_addr().expect("no local address"));
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, app).await.expect("server failed");
}

/// Returns a descriptor with the client's address, and one with the user if the request has an `x-user` header.
fn descriptors(request: &Parts) -> Vec<Descriptor<'static>> {
    let peer =
        request.extensions.get::<ConnectInfo<SocketAddr>>().map_or(Ipv4Addr::LOCALHOST.into(), |peer| peer.0.ip());
    let user = request.headers.get("x-user").and_then(|user| user.to_str().ok());
    let user = user.map(|user| descriptor! { "user" => user.to_owned() });
    std::iter::once(descriptor! { "ip" => peer.to_string() }).chain(user).collect()
}

async fn forward(State(upstream): State<Upstream>, mut request: Request) -> Response {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    match format!("{}{path}", upstream.address).parse::<Uri>() {
        Ok(uri) => *request.uri_mut() = uri,
        Err(error) => return (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
    }
    match upstream.http.request(request).await {
        Ok(response) => response.into_response(),
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}
