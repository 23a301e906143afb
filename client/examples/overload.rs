//! An axum service that is asked for more than it can do, behind all layers. It prints what becomes of each class, second by
//! second:
//!
//! ```console
//! $ sluicegate --rules deploy/examples &
//! $ cargo run -p sluicegate-client --example overload --features tower
//! ```
//!
//! The service has ten workers, a request takes one of them for 20 ms: 500 a second. For five seconds it is asked for 250, for
//! thirty for 1,000, and then for 250 again. One user calls far more than her plan allows. The shedder is set to react in
//! seconds, so that nobody has to wait for it; its defaults take minutes.
#![allow(clippy::unwrap_used, reason = "an example")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body, routing::get};
use http::{Request, request::Parts};
use hyper_util::{
    client::legacy::Client as Http,
    rt::{TokioExecutor, TokioTimer},
};
use sluicegate_client::{
    Client,
    adaptive::{AdaptiveLimit, Bounds, Method},
    descriptor,
    layer::{AdaptiveLayer, ClassRules, PermitLayer, RateLimitLayer, ShedLayer},
    shed::{CLASSES, LoadShedder, Settings, Signal},
};
use tokio::{net::TcpListener, sync::Semaphore, time::sleep_until};

const WORKERS: usize = 10;
const WORK: Duration = Duration::from_millis(20);

/// Of each class its path and its part of the requests.
const MIX: [(&str, u32); 4] = [("/pay", 10), ("/orders", 20), ("/items", 55), ("/test/items", 15)];

/// What became of the requests of a class within a second: passed, 429, 503.
#[derive(Default)]
struct Counts([AtomicU32; 3]);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:8081".into());
    let limiter = Client::builder(limiter).domain("plans").connect_lazy()?;

    // From the outside inwards. What refuses by a caller's own limit stands before what learns from refusals.
    let settings = Settings {
        patience: Duration::from_secs(2),
        shed_in: Duration::from_secs(12),
        restore_in: Duration::from_secs(15),
        ..Settings::default()
    };
    let shedding = LoadShedder::of(Signal::Busy(WORKERS), CLASSES, settings);
    let classes =
        ClassRules::new().rule("critical", None, "/pay").rule("post", None, "/orders").rule("test", None, "/test/");
    let shed = ShedLayer::new(shedding.clone(), classes);
    let limit = AdaptiveLimit::new(Method::Vegas, Bounds { floor: 5, ..Bounds::default() });
    let user =
        |head: &Parts| head.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("nobody").to_owned();
    let rates = RateLimitLayer::new(limiter.clone(), move |head: &Parts| vec![descriptor! { "user" => user(head) }]);
    let exports = PermitLayer::new(limiter, move |head: &Parts| match head.uri.path() {
        "/orders" => vec![descriptor! { "exporter" => user(head), "plan" => "pro" }],
        _ => Vec::new(),
    })
    .holder("request_id");

    let workers = Arc::new(Semaphore::new(WORKERS));
    let work = async move || {
        let _worker = workers.acquire().await;
        tokio::time::sleep(WORK).await;
        "done\n"
    };
    let router = MIX.iter().fold(Router::new(), |router, (path, _)| router.route(path, get(work.clone())));
    let router = router.layer(exports).layer(AdaptiveLayer::new(limit.clone())).layer(rates).layer(shed);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(axum::serve(listener, router).into_future());

    println!(
        "| second | asked | {} | greedy: passed, 429 | limit | shed level | mean ms |",
        CLASSES.map(|class| format!("{class}: passed, 429, 503")).join(" | ")
    );
    println!("| ---: | ---: | {} --- | ---: | ---: | ---: |", "--- | ".repeat(CLASSES.len()));
    let http = Http::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build_http::<Body>();
    let began = tokio::time::Instant::now();
    let mut sent = 0_u32;
    for second in 0..60_u32 {
        let rate = if (5..35).contains(&second) { 1_000 } else { 250 };
        let counts: Arc<[Counts; MIX.len() + 1]> = Arc::default();
        let (took, answered) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU32::new(0)));
        for number in 0..rate {
            sleep_until(began + Duration::from_secs(second.into()) + Duration::from_secs(1) * number / rate).await;
            sent = sent.wrapping_add(7);
            let mut draw = sent % 100;
            let class =
                MIX.iter().position(|(_, part)| draw.checked_sub(*part).map(|left| draw = left).is_none()).unwrap();
            // Every other request that reads is hers: sixty a second and more, and her plan, which is free, has fifty.
            let greedy = number % 2 == 1 && class == 2;
            let user = if greedy { "greedy".to_owned() } else { format!("user{}", sent % 9_973) };
            let request = Request::get(format!("http://{address}{}", MIX[class].0)).header("x-user", user);
            let response = http.request(request.body(Body::empty())?);
            let (counts, took, answered) = (Arc::clone(&counts), Arc::clone(&took), Arc::clone(&answered));
            tokio::spawn(async move {
                let asked = Instant::now();
                let code = response.await.map_or(0, |response| response.status().as_u16());
                let place = [200, 429].iter().position(|known| *known == code).unwrap_or(2);
                counts[if greedy { MIX.len() } else { class }].0[place].fetch_add(1, Relaxed);
                if code == 200 {
                    took.fetch_add(asked.elapsed().as_micros() as u64, Relaxed);
                    answered.fetch_add(1, Relaxed);
                }
            });
        }
        let text = |counts: &Counts| counts.0.each_ref().map(|count| count.load(Relaxed).to_string());
        let classes: Vec<_> = counts[..MIX.len()].iter().map(|counts| text(counts).join(", ")).collect();
        let greedy = text(&counts[MIX.len()]);
        let mean = took.load(Relaxed) as f64 / 1_000.0 / f64::from(answered.load(Relaxed).max(1));
        println!(
            "| {second} | {rate} | {} | {}, {} | {} | {:.2} | {mean:.0} |",
            classes.join(" | "),
            greedy[0],
            greedy[1],
            limit.limit(),
            shedding.level(),
        );
    }
    Ok(())
}
