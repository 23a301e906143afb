//! An axum application that limits each user, with tests that need no running service.
//!
//! ```console
//! $ cargo run --release -- --rules client/examples/rules           # the service, in the repository's root
//! $ cargo run -p sluicegate-client --features tower --example axum -- http://127.0.0.1:8081 127.0.0.1:8000
//! $ curl -i -H 'x-user: alice' http://127.0.0.1:8000/orders
//! ```
#![allow(clippy::expect_used, reason = "an example stops on the first error")]

use axum::{Router, http::request::Parts, routing::get};
use sluicegate_client::{Client, Descriptor, descriptor, layer::RateLimitLayer};

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let service = arguments.next().unwrap_or_else(|| "http://127.0.0.1:8081".to_owned());
    let listen = arguments.next().unwrap_or_else(|| "127.0.0.1:8000".to_owned());

    let client = Client::builder(service).domain("api").connect_lazy().expect("invalid service address");
    let listener = tokio::net::TcpListener::bind(&listen).await.expect("cannot listen");
    println!("{}", listener.local_addr().expect("no local address"));
    axum::serve(listener, app(client)).await.expect("server failed");
}

/// Returns the application. Denied requests get status 429, `Retry-After` and a problem description (RFC 9457).
fn app(client: Client) -> Router {
    Router::new().route("/orders", get(async || "no orders\n")).layer(RateLimitLayer::new(client, descriptors))
}

/// Returns the descriptors to check. An application would read the user from its session or token.
fn descriptors(request: &Parts) -> Vec<Descriptor<'static>> {
    let user = request.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("anonymous");
    vec![descriptor! { "user" => user.to_owned() }]
}

#[cfg(all(test, feature = "test-util"))]
mod tests {
    use std::time::Duration;

    use axum::{
        body::Body,
        http::{Request, Response, StatusCode},
    };
    use sluicegate_client::{
        Failure,
        testing::{Answer, FakeService},
    };
    use tower_service::Service;

    use super::*;

    async fn get_orders(service: &FakeService, user: &str) -> Response<Body> {
        let client = Client::builder("http://ratelimit.internal:8081").domain("api").connect_fake(service);
        let request = Request::get("/orders").header("x-user", user).body(Body::empty()).expect("a valid request");
        app(client).call(request).await.expect("a response")
    }

    #[tokio::test]
    async fn each_user_is_limited_separately() {
        let service = FakeService::new();
        assert_eq!(get_orders(&service, "alice").await.status(), StatusCode::OK);
        let [check] = service.checks().try_into().expect("one check");
        assert_eq!((check.domain.as_str(), check.descriptors), ("api", vec![descriptor! { "user" => "alice" }]));
    }

    #[tokio::test]
    async fn a_denied_request_gets_429_with_retry_after() {
        let service = FakeService::new();
        service.answer_next(Answer::denied(Duration::from_secs(30)));
        let response = get_orders(&service, "alice").await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()["retry-after"], "30");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
    }

    #[tokio::test]
    async fn orders_are_served_while_the_rate_limit_service_is_down() {
        let service = FakeService::new();
        service.answer_always(Answer::failure(Failure::Unreachable));
        assert_eq!(get_orders(&service, "alice").await.status(), StatusCode::OK);
    }
}
