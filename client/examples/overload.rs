//! An overloaded axum service behind all four layers. Prints the number of requests of each class by status, once a
//! second:
//!
//! ```console
//! $ sluicegate --rules deploy/examples &
//! $ cargo run -p sluicegate-client --example overload --features tower
//! ```
//!
//! The service has ten workers, and a request occupies one of them for 20 ms, so the capacity is 500 requests per
//! second. The load is 250 requests per second for five seconds, then 1,000 for thirty seconds, then 250 again. One
//! user sends far more than the user's plan allows. The shedder is configured to react within seconds; its defaults
//! take minutes.
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
    shed::{DEFAULT_CLASSES, LoadShedder, Settings, Signal},
};
use tokio::{net::TcpListener, sync::Semaphore, time::sleep_until};

const WORKERS: usize = 10;
const WORK: Duration = Duration::from_millis(20);

/// Path of each class, and its share of the requests in percent.
const CLASSES: [(&str, u32); 4] = [("/pay", 10), ("/orders", 20), ("/items", 55), ("/test/items", 15)];

/// Number of requests of a class in one second by result: admitted, 429, 503.
#[derive(Default)]
struct Counts([AtomicU32; 3]);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let service = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:8081".into());
    let client = Client::builder(service).domain("plans").connect_lazy()?;

    // The order from the outside is: shed, rates, adaptive limit, permits. The layer that enforces the callers' own
    // limits is outside of the adaptive limit, because that limit counts 429 and 503 as signs of overload.
    let settings = Settings {
        stabilization: Duration::from_secs(2),
        shed_time: Duration::from_secs(12),
        restore_time: Duration::from_secs(15),
        ..Settings::default()
    };
    let shedder = LoadShedder::with_classes(Signal::WorkerUtilization(WORKERS), DEFAULT_CLASSES, settings);
    let classes =
        ClassRules::new().rule("critical", None, "/pay").rule("post", None, "/orders").rule("test", None, "/test/");
    let shed = ShedLayer::new(shedder.clone(), classes);
    let limit = AdaptiveLimit::new(Method::Vegas, Bounds { floor: 5, ..Bounds::default() });
    let user =
        |head: &Parts| head.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("anonymous").to_owned();
    let rates = RateLimitLayer::new(client.clone(), move |head: &Parts| vec![descriptor! { "user" => user(head) }]);
    let exports = PermitLayer::new(client, move |head: &Parts| match head.uri.path() {
        "/orders" => vec![descriptor! { "exporter" => user(head), "plan" => "pro" }],
        _ => Vec::new(),
    })
    .holder_key("request_id");

    let workers = Arc::new(Semaphore::new(WORKERS));
    let work = async move || {
        let _worker = workers.acquire().await;
        tokio::time::sleep(WORK).await;
        "done\n"
    };
    let router = CLASSES.iter().fold(Router::new(), |router, (path, _)| router.route(path, get(work.clone())));
    let router = router.layer(exports).layer(AdaptiveLayer::new(limit.clone())).layer(rates).layer(shed);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(axum::serve(listener, router).into_future());

    println!(
        "| second | requests | {} | greedy: admitted, 429 | limit | shed level | mean ms |",
        DEFAULT_CLASSES.map(|class| format!("{class}: admitted, 429, 503")).join(" | ")
    );
    println!("| ---: | ---: | {} --- | ---: | ---: | ---: |", "--- | ".repeat(DEFAULT_CLASSES.len()));
    let http = Http::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build_http::<Body>();
    let began = tokio::time::Instant::now();
    let mut sequence = 0_u32;
    for second in 0..60_u32 {
        let rate = if (5..35).contains(&second) { 1_000 } else { 250 };
        let counts: Arc<[Counts; CLASSES.len() + 1]> = Arc::default();
        let (total_us, completed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU32::new(0)));
        for number in 0..rate {
            sleep_until(began + Duration::from_secs(second.into()) + Duration::from_secs(1) * number / rate).await;
            sequence = sequence.wrapping_add(7);
            let mut draw = sequence % 100;
            let is_drawn = |share: u32| draw.checked_sub(share).map(|remaining| draw = remaining).is_none();
            let class = CLASSES.iter().map(|(_, share)| *share).position(is_drawn).unwrap();
            // Every other GET request is from one user: at least sixty a second, while the user's free plan allows
            // fifty.
            let greedy = number % 2 == 1 && class == 2;
            let user = if greedy { "greedy".to_owned() } else { format!("user{}", sequence % 9_973) };
            let request = Request::get(format!("http://{address}{}", CLASSES[class].0)).header("x-user", user);
            let response = http.request(request.body(Body::empty())?);
            let (counts, total_us, completed) = (Arc::clone(&counts), Arc::clone(&total_us), Arc::clone(&completed));
            tokio::spawn(async move {
                let sent = Instant::now();
                let code = response.await.map_or(0, |response| response.status().as_u16());
                let result = [200, 429].iter().position(|known| *known == code).unwrap_or(2);
                counts[if greedy { CLASSES.len() } else { class }].0[result].fetch_add(1, Relaxed);
                if code == 200 {
                    total_us.fetch_add(sent.elapsed().as_micros() as u64, Relaxed);
                    completed.fetch_add(1, Relaxed);
                }
            });
        }
        let text = |counts: &Counts| counts.0.each_ref().map(|count| count.load(Relaxed).to_string());
        let classes: Vec<_> = counts[..CLASSES.len()].iter().map(|counts| text(counts).join(", ")).collect();
        let greedy = text(&counts[CLASSES.len()]);
        let mean = total_us.load(Relaxed) as f64 / 1_000.0 / f64::from(completed.load(Relaxed).max(1));
        println!(
            "| {second} | {rate} | {} | {}, {} | {} | {:.2} | {mean:.0} |",
            classes.join(" | "),
            greedy[0],
            greedy[1],
            limit.limit(),
            shedder.level(),
        );
    }
    Ok(())
}
