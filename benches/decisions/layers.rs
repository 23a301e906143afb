//! What the client's layers that need no service cost a request, beside the service that they stand before.

use std::{
    convert::Infallible,
    hint::black_box,
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

use axum::body::Body;
use http::{Request, Response};
use sluicegate_client::{
    adaptive::{AdaptiveLimit, Bounds, Method},
    layer::{AdaptiveLayer, ClassRules, ShedLayer},
    shed::{LoadShedder, Signal},
};
use tower_layer::Layer;
use tower_service::Service;

const REQUESTS: u32 = 1_000_000;

/// Answers at once, by a future in a box as most services do.
#[derive(Clone)]
struct Nothing;

impl Service<Request<Body>> for Nothing {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        Box::pin(async { Ok(Response::new(Body::empty())) })
    }
}

pub(crate) fn run() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let bounds = Bounds { initial: 100, ..Bounds::default() };
    runtime.block_on(async {
        let (mut plain, mut adaptive, mut shed, mut idle) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let limit = AdaptiveLimit::new(Method::Vegas, bounds);
        let mut with_limit = AdaptiveLayer::new(limit).layer(Nothing);
        let rules = ClassRules::new().rule("critical", None, "/payments").rule("test", None, "/test/");
        let shedder = || ShedLayer::new(LoadShedder::new(Signal::Busy(8)), rules.clone());
        let (mut with_shedder, mut by_user) = (shedder().layer(Nothing), shedder().alike_by("x-user").layer(Nothing));
        for _ in 0..7 {
            plain.push(time(&mut Nothing).await);
            adaptive.push(time(&mut with_limit).await);
            shed.push(time(&mut with_shedder).await);
            idle.push(time(&mut by_user).await);
        }
        let [plain, adaptive, shed, by_user] = [plain, adaptive, shed, idle].map(super::algorithms::median);
        println!("| layer | ns per request, above the service's own {plain:.0} |");
        println!("| --- | ---: |");
        println!("| adaptive limit | {:.0} |", adaptive - plain);
        println!("| shedder, drawn for each request | {:.0} |", shed - plain);
        println!("| shedder, alike by a header | {:.0} |", by_user - plain);
        println!();
    });
}

async fn time<S, R>(service: &mut S) -> f64
where
    S: Service<Request<Body>, Response = Response<R>, Error = Infallible>,
{
    let started = Instant::now();
    for _ in 0..REQUESTS {
        let mut request = Request::new(Body::empty());
        request.headers_mut().insert("x-user", http::HeaderValue::from_static("alice"));
        std::future::poll_fn(|context| service.poll_ready(context)).await.unwrap();
        black_box(service.call(request).await.unwrap());
    }
    started.elapsed().as_secs_f64() * 1e9 / f64::from(REQUESTS)
}
