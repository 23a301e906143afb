//! Cost per request of the client's layers that need no rate limit service, in addition to the wrapped service.

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

/// A service that responds immediately, with a boxed future as most services do.
#[derive(Clone)]
struct Immediate;

impl Service<Request<Body>> for Immediate {
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
        let (mut plain, mut adaptive, mut shed, mut keyed) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let limit = AdaptiveLimit::new(Method::Vegas, bounds);
        let mut with_limit = AdaptiveLayer::new(limit).layer(Immediate);
        let rules = ClassRules::new().rule("critical", None, "/payments").rule("test", None, "/test/");
        let shedder = || ShedLayer::new(LoadShedder::new(Signal::WorkerUtilization(8)), rules.clone());
        let (mut with_shedder, mut by_user) = (shedder().layer(Immediate), shedder().key_by("x-user").layer(Immediate));
        for _ in 0..7 {
            plain.push(time(&mut Immediate).await);
            adaptive.push(time(&mut with_limit).await);
            shed.push(time(&mut with_shedder).await);
            keyed.push(time(&mut by_user).await);
        }
        let [plain, adaptive, shed, keyed] = [plain, adaptive, shed, keyed].map(super::algorithms::median);
        println!("| layer | ns per request, in addition to the service's {plain:.0} |");
        println!("| --- | ---: |");
        println!("| adaptive limit | {:.0} |", adaptive - plain);
        println!("| shedder, random per request | {:.0} |", shed - plain);
        println!("| shedder, keyed by a header | {:.0} |", keyed - plain);
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
