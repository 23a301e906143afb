//! Tokens of a language model: what an answer costs is known when it has been streamed to its end. So a request reserves
//! as much as it may cost, and settles afterwards.
//!
//! ```console
//! $ cargo run --release                                            # the service, in the repository's root
//! $ cargo run -p sluicegate-client --features tower --example llm -- http://127.0.0.1:8081 127.0.0.1:8000
//! $ curl -i -H 'x-user: alice' 'http://127.0.0.1:8000/?words=7'
//! ```
#![allow(clippy::expect_used, reason = "an example that cannot go on should stop")]

use std::{convert::Infallible, time::Duration};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    http::{Uri, request::Parts},
    routing::get,
};
use sluicegate_client::{
    Client, Descriptor, descriptor,
    layer::{RateLimitLayer, Reservation},
};
use tokio_stream::StreamExt;

/// No answer has more words.
const MOST: u32 = 100;

#[tokio::main]
async fn main() {
    let mut words = std::env::args().skip(1);
    let limiter = words.next().unwrap_or_else(|| "http://127.0.0.1:8081".to_owned());
    let listen = words.next().unwrap_or_else(|| "127.0.0.1:8000".to_owned());

    let limiter = Client::builder(limiter).domain("example").connect_lazy().expect("the limiter's address");
    let app = Router::new().route("/", get(generate)).layer(RateLimitLayer::new(limiter, descriptors).hits(MOST));
    let listener = tokio::net::TcpListener::bind(&listen).await.expect("a free port");
    println!("{}", listener.local_addr().expect("an address"));
    axum::serve(listener, app).await.expect("a server");
}

fn descriptors(request: &Parts) -> Vec<Descriptor<'static>> {
    let user = request.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("nobody");
    vec![descriptor! { "tokens" => user.to_owned() }]
}

/// A model of few words.
async fn generate(uri: Uri, Extension(reservation): Extension<Reservation>) -> Body {
    let words = uri.query().and_then(|query| query.strip_prefix("words=")?.parse().ok()).unwrap_or(10).min(MOST);
    let mut meter = Meter { reservation: Some(reservation), used: 0 };
    let stream = tokio_stream::iter(0..words).throttle(Duration::from_millis(1)).map(move |word| {
        meter.count();
        Ok::<_, Infallible>(Bytes::from(format!("word {word}\n")))
    });
    Body::from_stream(stream)
}

/// Counts what has left, and settles when the stream ends, also when the caller has gone before its end.
struct Meter {
    reservation: Option<Reservation>,
    used: u64,
}

impl Meter {
    fn count(&mut self) {
        self.used += 1;
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            tokio::spawn(reservation.settle(self.used));
        }
    }
}
