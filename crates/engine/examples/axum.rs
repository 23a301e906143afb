//! An axum application with its own rate limits, without a rate limit service.
//!
//! ```console
//! $ cargo run -p sluicegate-engine --features tower --example axum -- 127.0.0.1:8000 client/examples/rules
//! $ for i in 1 2 3; do curl -i -H 'x-user: alice' http://127.0.0.1:8000/orders; done
//! $ curl -i -X POST http://127.0.0.1:8000/reload
//! ```
#![allow(clippy::expect_used, reason = "an example stops on the first error")]

use axum::{
    Router,
    extract::State,
    http::{StatusCode, request::Parts},
    routing::{get, post},
};
use sluicegate_engine::{RateLimiter, layer::RateLimitLayer};

/// The rules without a folder: two requests a minute for each user.
const RULES: &str = "
domain: api
descriptors:
- key: user
  rate_limit: { unit: minute, requests_per_unit: 2 }
";

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let listen = arguments.next().unwrap_or_else(|| "127.0.0.1:8000".to_owned());
    let limiter = match arguments.next() {
        Some(folder) => RateLimiter::from_folder(folder),
        None => RateLimiter::from_rules(RULES),
    };
    let limiter = limiter.unwrap_or_else(|error| panic!("{error}"));

    let listener = tokio::net::TcpListener::bind(&listen).await.expect("cannot listen");
    println!("{}", listener.local_addr().expect("no local address"));
    axum::serve(listener, app(limiter)).await.expect("server failed");
}

/// Returns the application. Denied requests get status 429, `RateLimit-Policy`, `RateLimit` and `Retry-After`.
///
/// The layer applies to the routes above it, so a reload is not limited. An application would let only operators reload.
fn app(limiter: RateLimiter) -> Router {
    Router::new()
        .route("/orders", get(async || "no orders\n"))
        .layer(RateLimitLayer::new(limiter.clone(), descriptor))
        .route("/reload", post(reload))
        .with_state(limiter)
}

/// Returns the domain and the entries to check. An application would read the user from its session or token.
fn descriptor(request: &Parts) -> Option<(&'static str, Vec<(&'static str, String)>)> {
    let user = request.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("anonymous");
    Some(("api", vec![("user", user.to_owned())]))
}

/// Reads the rules again. If they are invalid, the response has the errors, and the former rules stay in force.
async fn reload(State(limiter): State<RateLimiter>) -> (StatusCode, String) {
    // Reading files blocks the thread.
    match tokio::task::spawn_blocking(move || limiter.reload()).await.expect("a reload does not panic") {
        Ok(warnings) => (StatusCode::OK, warnings.iter().map(|warning| format!("{warning}\n")).collect()),
        Err(error) => (StatusCode::UNPROCESSABLE_ENTITY, format!("{error}\n")),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering::Relaxed},
        },
    };

    use axum::{
        body::Body,
        http::{Method, Request, Response},
    };
    use sluicegate_engine::Clock;
    use tower_service::Service;

    use super::*;

    /// A quarter past a full minute, in microseconds.
    const START: u64 = 60_000_000_000_000 + 15_000_000;

    fn clock() -> (Arc<AtomicU64>, Clock) {
        let time = Arc::new(AtomicU64::new(START));
        (Arc::clone(&time), Clock::Manual(time))
    }

    async fn send(app: &mut Router, method: Method, path: &str, user: &str) -> Response<Body> {
        let request = Request::builder().method(method).uri(path).header("x-user", user).body(Body::empty());
        app.call(request.expect("a valid request")).await.expect("a response")
    }

    async fn get_orders(app: &mut Router, user: &str) -> StatusCode {
        send(app, Method::GET, "/orders", user).await.status()
    }

    #[tokio::test]
    async fn each_user_is_limited_until_the_next_minute() {
        let (time, clock) = clock();
        let mut app = app(RateLimiter::builder().clock(clock).rules(RULES).expect("valid rules"));
        assert_eq!(get_orders(&mut app, "alice").await, StatusCode::OK);
        assert_eq!(get_orders(&mut app, "alice").await, StatusCode::OK);
        let denied = send(&mut app, Method::GET, "/orders", "alice").await;
        assert_eq!(
            (denied.status(), &denied.headers()["retry-after"]),
            (StatusCode::TOO_MANY_REQUESTS, &"45".parse().expect("a value"))
        );
        assert_eq!(get_orders(&mut app, "bob").await, StatusCode::OK);
        time.fetch_add(45_000_000, Relaxed);
        assert_eq!(get_orders(&mut app, "alice").await, StatusCode::OK);
    }

    #[tokio::test]
    async fn a_reload_changes_the_limit_and_invalid_rules_change_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |rules: &str| fs::write(folder.path().join("api.yaml"), rules).expect("a file");
        write(RULES);
        let limiter = RateLimiter::builder().clock(clock().1).folder(folder.path()).expect("valid rules");
        let mut app = app(limiter);
        for status in [StatusCode::OK, StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
            assert_eq!(get_orders(&mut app, "alice").await, status);
        }
        write(&RULES.replace("unit: 2", "unit: 4"));
        assert_eq!(send(&mut app, Method::POST, "/reload", "").await.status(), StatusCode::OK);
        assert_eq!(get_orders(&mut app, "alice").await, StatusCode::OK, "the denied request counts as well");
        write("domain: api\ndescriptors: 7\n");
        assert_eq!(send(&mut app, Method::POST, "/reload", "").await.status(), StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(get_orders(&mut app, "alice").await, StatusCode::TOO_MANY_REQUESTS);
    }
}
