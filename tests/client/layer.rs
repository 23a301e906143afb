//! The client's tower layer around real services, with a real rate limit service.

use std::time::{Duration, Instant};

use axum::{Extension, Router, body::Body, routing::get};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use prost::Message;
use sluicegate_client::{
    Client, OnError, descriptor,
    layer::{Cost, LimitedBody, RateLimitLayer, Reservation},
};
use tower_layer::Layer;
use tower_service::Service;

use crate::support::{DEADLINE, Server, rules, wait_for_async};

const RULES: &str = "
domain: d
descriptors:
- key: few
  rate_limit: {unit: hour, requests_per_unit: 2, name: 'the \"few\"'}
- key: paced
  rate_limit: {unit: second, requests_per_unit: 10, algorithm: leaky_bucket, burst: 1, queue: 5}
- key: slow
  rate_limit: {unit: hour, requests_per_unit: 1, algorithm: token_bucket}
- key: soon
  rate_limit: {unit: second, requests_per_unit: 5, algorithm: gcra, burst: 1}
- key: tokens
  rate_limit: {unit: year, requests_per_unit: 1000, name: tokens}
";

fn start() -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::start(folder.path(), "memory")
}

fn client(server: &Server) -> Client {
    let client = Client::builder(format!("http://{}", server.grpc)).domain("d").timeout(DEADLINE);
    client.deny_cache(0).connect_lazy().unwrap()
}

/// Builds a layer that takes the descriptor from the header `x-counts-as`, for example `few=alice`.
fn layer(
    client: Client,
) -> RateLimitLayer<impl Fn(&http::request::Parts) -> Vec<sluicegate_client::Descriptor<'static>> + Send + Sync + 'static>
{
    RateLimitLayer::new(client, |request: &http::request::Parts| {
        let text = request.headers.get("x-counts-as").map(|text| text.to_str().unwrap().to_owned());
        let entry = text.as_deref().and_then(|text| text.split_once('='));
        entry.map(|(key, value)| descriptor! { key.to_owned() => value.to_owned() }).into_iter().collect()
    })
}

async fn send<S, R>(service: &mut S, counts_as: &str, content_type: &str) -> Response<LimitedBody<R>>
where
    S: Service<Request<Body>, Response = Response<LimitedBody<R>>>,
    S::Error: std::fmt::Debug,
{
    let request = Request::builder().uri("/").header("x-counts-as", counts_as).header("content-type", content_type);
    std::future::poll_fn(|context| service.poll_ready(context)).await.unwrap();
    service.call(request.body(Body::empty()).unwrap()).await.unwrap()
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> &'h str {
    headers.get(name).unwrap_or_else(|| panic!("{name} is not in {headers:?}")).to_str().unwrap()
}

async fn body(response: Response<LimitedBody<Body>>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn a_denied_request_gets_a_problem_with_retry_after() {
    let server = start();
    let mut service = layer(client(&server)).layer(Router::new().route("/", get(async || "served")));
    for remaining in ["1", "0"] {
        let response = send(&mut service, "few=alice", "").await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(text(response.headers(), "ratelimit-policy"), r#""the \"few\"";q=2;w=3600"#);
        assert!(text(response.headers(), "ratelimit").starts_with(&format!(r#""the \"few\"";r={remaining};t="#)));
        assert_eq!(body(response).await, "served");
    }
    let response = send(&mut service, "few=alice", "").await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(text(response.headers(), "content-type"), "application/problem+json");
    let wait: u64 = text(response.headers(), "retry-after").parse().unwrap();
    assert!((1..=3_600).contains(&wait), "{wait}");
    assert!(text(response.headers(), "ratelimit").contains(&format!("r=0;t={wait}")));
    let problem: serde_json::Value = serde_json::from_str(&body(response).await).unwrap();
    assert_eq!((&problem["status"], &problem["violated-policies"][0]), (&429.into(), &"the \"few\"".into()));
    assert!(problem["type"].as_str().unwrap().ends_with("#quota-exceeded"), "{problem}");
    assert_eq!(problem["detail"], format!("Retry in {wait} s."));
    // Requests of other users, and requests without a descriptor, are served.
    assert_eq!(send(&mut service, "few=bob", "").await.status(), StatusCode::OK);
    let free = send(&mut service, "nothing", "").await;
    assert_eq!((free.status(), free.headers().get("ratelimit")), (StatusCode::OK, None));
}

#[derive(Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

#[derive(Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<prost_types::Duration>,
}

#[tokio::test]
async fn a_denied_grpc_call_gets_a_grpc_status() {
    let server = start();
    let mut service = layer(client(&server)).layer(Router::new().route("/", get(async || "served")));
    for _ in 0..2 {
        assert_eq!(send(&mut service, "few=alice", "application/grpc").await.headers().get("grpc-status"), None);
    }
    let response = send(&mut service, "few=alice", "application/grpc+proto").await;
    assert_eq!(response.status(), StatusCode::OK);
    let status = tonic::Status::from_header_map(response.headers()).unwrap();
    assert_eq!((status.code(), status.message()), (tonic::Code::ResourceExhausted, "too many requests"));
    let details = RpcStatus::decode(status.details()).unwrap();
    let [info] = details.details.as_slice() else { panic!("{details:?}") };
    assert_eq!((details.code, info.type_url.as_str()), (8, "type.googleapis.com/google.rpc.RetryInfo"));
    let delay = RetryInfo::decode(&*info.value).unwrap().retry_delay.unwrap();
    assert!((0..3_600).contains(&delay.seconds), "{delay:?}");
}

#[tokio::test]
async fn a_shaped_request_waits_for_its_delay() {
    let server = start();
    let router = Router::new().route("/", get(async || "served"));
    let mut service = layer(client(&server)).layer(router.clone());
    let start = Instant::now();
    for _ in 0..3 {
        assert_eq!(send(&mut service, "paced=alice", "").await.status(), StatusCode::OK);
    }
    assert!(start.elapsed() >= Duration::from_millis(190), "{:?}", start.elapsed());
    // A request waits at most `max_delay`.
    let mut without_delay = layer(client(&server)).max_delay(Duration::ZERO).headers(false).layer(router);
    let start = Instant::now();
    for _ in 0..4 {
        let response = send(&mut without_delay, "paced=bob", "").await;
        assert_eq!((response.status(), response.headers().get("ratelimit")), (StatusCode::OK, None));
    }
    assert!(start.elapsed() < Duration::from_millis(300), "requests waited for more than max_delay");
}

#[tokio::test]
async fn a_request_waits_until_it_is_allowed_but_not_beyond_its_deadline() {
    let server = start();
    let router = Router::new().route("/", get(async || "served"));
    let mut waits = layer(client(&server)).max_wait(Duration::from_secs(7_200)).layer(router);
    for _ in 0..3 {
        assert_eq!(send(&mut waits, "soon=alice", "").await.status(), StatusCode::OK);
    }
    // The second request would be allowed in an hour.
    for expected in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
        let request = Request::get("/").header("x-counts-as", "slow=alice").header("grpc-timeout", "20S");
        let response = waits.call(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), expected);
    }
}

#[tokio::test]
async fn a_cost_that_is_known_after_the_response_is_settled() {
    let server = start();
    let limiter = client(&server);
    let remaining = async || limiter.check([descriptor! { "tokens" => "alice" }.hits(0)]).await.remaining().unwrap();
    let reports_cost = Router::new().route("/", get(async || (Extension(Cost(130)), "served")));
    let mut service = layer(client(&server)).hits(100).layer(reports_cost);
    send(&mut service, "tokens=alice", "").await;
    wait_for_async("30 more hits to be taken", async || (remaining().await == 870).then_some(())).await;
    let settles_reservation = Router::new().route(
        "/",
        get(async |Extension(reservation): Extension<Reservation>| {
            assert_eq!(reservation.hits(), 100);
            tokio::spawn(reservation.settle(1));
        }),
    );
    let mut service = layer(client(&server)).hits(100).layer(settles_reservation);
    send(&mut service, "tokens=alice", "").await;
    wait_for_async("99 hits to be refunded", async || (remaining().await == 869).then_some(())).await;
}

#[tokio::test]
async fn a_descriptor_with_its_own_hits_is_not_settled() {
    let server = start();
    let limiter = client(&server);
    let both = |_: &http::request::Parts| {
        vec![descriptor! { "tokens" => "alice" }, descriptor! { "tokens" => "calls" }.hits(1)]
    };
    let router = Router::new().route("/", get(async || (Extension(Cost(17)), "served")));
    let mut service = RateLimitLayer::new(client(&server), both).hits(100).layer(router);
    send(&mut service, "", "").await;
    let remaining =
        async |user: &'static str| limiter.check([descriptor! { "tokens" => user }.hits(0)]).await.remaining().unwrap();
    wait_for_async("83 hits to be refunded", async || (remaining("alice").await == 983).then_some(())).await;
    assert_eq!(remaining("calls").await, 999);
}

#[tokio::test]
async fn without_the_service_requests_are_allowed_or_get_503() {
    let router = Router::new().route("/", get(async || "served"));
    let unavailable = || Client::builder("http://127.0.0.1:1").domain("d");
    let mut allow = layer(unavailable().connect_lazy().unwrap()).layer(router.clone());
    assert_eq!(send(&mut allow, "few=alice", "").await.status(), StatusCode::OK);
    let denying = unavailable().on_error(OnError::Deny).connect_lazy().unwrap();
    let mut deny = layer(denying).layer(router);
    let response = send(&mut deny, "few=alice", "").await;
    assert_eq!((response.status(), text(response.headers(), "retry-after")), (StatusCode::SERVICE_UNAVAILABLE, "1"));
    let call = send(&mut deny, "few=alice", "application/grpc").await;
    assert_eq!(tonic::Status::from_header_map(call.headers()).unwrap().code(), tonic::Code::Unavailable);
}
