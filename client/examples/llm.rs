//! Limits the tokens of a language model. The cost of a response is known only when it has been streamed to its end, so
//! each request reserves the maximum cost and settles afterwards.
//!
//! ```console
//! $ cargo run --release                                            # the service, in the repository's root
//! $ cargo run -p sluicegate-client --features tower --example llm -- http://127.0.0.1:8081 127.0.0.1:8000
//! $ curl -i -H 'x-user: alice' 'http://127.0.0.1:8000/?words=7'
//! ```
#![allow(clippy::expect_used, reason = "an example stops on the first error")]

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

/// Maximum number of words in a response.
const MAX_WORDS: u32 = 100;

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let service = arguments.next().unwrap_or_else(|| "http://127.0.0.1:8081".to_owned());
    let listen = arguments.next().unwrap_or_else(|| "127.0.0.1:8000".to_owned());

    let client = Client::builder(service).domain("example").connect_lazy().expect("invalid service address");
    let app = Router::new().route("/", get(generate)).layer(RateLimitLayer::new(client, descriptors).hits(MAX_WORDS));
    let listener = tokio::net::TcpListener::bind(&listen).await.expect("cannot listen");
    println!("{}", listener.local_addr().expect("no local address"));
    axum::serve(listener, app).await.expect("server failed");
}

fn descriptors(request: &Parts) -> Vec<Descriptor<'static>> {
    let user = request.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("anonymous");
    vec![descriptor! { "tokens" => user.to_owned() }]
}

/// Generates a response with the number of words in the query, one per millisecond.
async fn generate(uri: Uri, Extension(reservation): Extension<Reservation>) -> Body {
    let words = uri.query().and_then(|query| query.strip_prefix("words=")?.parse().ok()).unwrap_or(10).min(MAX_WORDS);
    let mut meter = Meter { reservation: Some(reservation), used: 0 };
    let stream = tokio_stream::iter(0..words).throttle(Duration::from_millis(1)).map(move |word| {
        meter.count();
        Ok::<_, Infallible>(Bytes::from(format!("word {word}\n")))
    });
    Body::from_stream(stream)
}

/// Counts the words sent, and settles the reservation when the stream ends or the caller disconnects.
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
