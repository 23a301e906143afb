//! Cost of a check for a gateway that uses the client crate, and for the service, relative to a plain tonic client that
//! makes the same unary calls. This process is the gateway: one thread with many tasks, each of which makes its next
//! check as soon as it receives the response to the previous one.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use sluicegate_client::{Client, DecidedBy, descriptor};
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::Entry},
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::{DescriptorStatus, Quota},
        rate_limit_service_client::RateLimitServiceClient,
        rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
    },
};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use super::{
    algorithms::median,
    process::{Process, cpu_micros},
};

const USERS: usize = 100_000;
/// A multiple of the number of clients, so that each has every place in the order equally often.
const ROUNDS: usize = 6;

#[derive(Clone)]
enum Caller {
    Tonic(RateLimitServiceClient<Channel>),
    Sluicegate(Client),
}

impl Caller {
    async fn tonic(server: &Process) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{}", server.address)).unwrap().tcp_nodelay(true);
        Self::Tonic(RateLimitServiceClient::new(endpoint.connect().await.unwrap()))
    }

    fn sluicegate(server: &Process, batching: bool) -> Self {
        let client = Client::builder(format!("http://{}", server.address)).domain("bench");
        let client = client.timeout(Duration::from_secs(5)).batching(batching);
        Self::Sluicegate(client.connect_lazy().unwrap())
    }

    async fn check(&mut self, number: usize) {
        let user = format!("user{}", number % USERS);
        match self {
            Self::Tonic(client) => {
                let entries = vec![Entry { key: "user".into(), value: user }];
                let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
                let request = RateLimitRequest { domain: "bench".into(), descriptors, hits_addend: 0 };
                let mut request = tonic::Request::new(request);
                request.set_timeout(Duration::from_secs(5));
                black_box(client.should_rate_limit(request).await.unwrap());
            }
            Self::Sluicegate(client) => {
                let verdict = client.check([descriptor! { "user" => user }]).await;
                assert_eq!(verdict.decided_by(), DecidedBy::Server, "{:?}", verdict.failure());
            }
        }
    }
}

pub(crate) fn run() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        called().await;
        denied().await;
        granted().await;
    });
}

/// Makes `checks` calls with one client and nothing else, for callgrind. Two runs with different numbers of checks
/// differ by the instructions of the checks.
pub(crate) fn calls(client: &str, concurrency: usize, checks: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let server = Process::service("memory");
        let caller = match client {
            "tonic" => Caller::tonic(&server).await,
            "unary" => Caller::sluicegate(&server, false),
            "stream" => Caller::sluicegate(&server, true),
            _ => panic!("unknown client {client}; expected one of: tonic, unary, stream"),
        };
        make_checks(&caller, concurrency, checks).await;
    });
}

/// Measures checks that the service decides.
async fn called() {
    let server = Process::service("memory");
    let callers = [
        ("tonic, unary", Caller::tonic(&server).await, 1),
        ("unary", Caller::sluicegate(&server, false), 1),
        // Checks on a stream take so little time that more of them are measured.
        ("stream", Caller::sluicegate(&server, true), 4),
    ];
    println!("\nChecks by a gateway with one thread, service with the memory store, medians of {ROUNDS} rounds\n");
    print!("| client | concurrency | checks/s | CPU us, client | x tonic | CPU us, service | x tonic, both ");
    println!("| checks/s of two busy cores | p50 us |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for (concurrency, checks) in [(1, 20_000), (16, 100_000), (256, 250_000)] {
        let mut samples = vec![Vec::new(); callers.len()];
        for round in 0..=ROUNDS {
            // The order rotates, because a round can affect the next one, for instance through the allocator.
            for turn in 0..callers.len() {
                let index = (round + turn) % callers.len();
                let (_, caller, factor) = &callers[index];
                let sample = measure(caller, &server, concurrency, checks * factor).await;
                if round > 0 {
                    samples[index].push(sample);
                }
            }
        }
        for ((name, ..), own) in callers.iter().zip(&samples) {
            let of = |field: &dyn Fn(&Sample) -> f64| median(own.iter().map(field));
            // Ratios are computed per round, because the other load of the machine changes from round to round.
            let relative = |field: fn(&Sample) -> f64| {
                median(own.iter().zip(&samples[0]).map(|(sample, tonic)| field(sample) / field(tonic)))
            };
            println!(
                "| {name} | {concurrency} | {:.0} | {:.2} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} |",
                of(&|sample| sample.per_second),
                of(&|sample| sample.client_micros),
                relative(|sample| sample.client_micros),
                of(&|sample| sample.service_micros),
                relative(Sample::both_micros),
                of(&|sample| 2e6 / sample.both_micros()),
                of(&|sample| sample.p50_micros),
            );
        }
    }
}

/// A server that always grants `u32::MAX` hits.
struct GrantServer;

#[tonic::async_trait]
impl RateLimitService for GrantServer {
    async fn should_rate_limit(
        &self,
        _: tonic::Request<RateLimitRequest>,
    ) -> Result<tonic::Response<RateLimitResponse>, tonic::Status> {
        let quota = Some(Quota { requests: u32::MAX, ..Quota::default() });
        let statuses = vec![DescriptorStatus { code: 1, quota, ..DescriptorStatus::default() }];
        let response = RateLimitResponse { overall_code: 1, statuses, ..RateLimitResponse::default() };
        let mut response = tonic::Response::new(response);
        response.metadata_mut().insert("sluicegate-grant-ttl-us", "600000000".parse().unwrap());
        Ok(response)
    }
}

/// Measures a check that a grant decides.
async fn granted() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let service = RateLimitServiceServer::new(GrantServer);
    tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
    for requests_grants in [false, true] {
        let client =
            Client::builder(&url).domain("bench").timeout(Duration::from_secs(5)).request_grants(requests_grants);
        let client = client.batching(false).connect_lazy().unwrap();
        client.check([descriptor! { "user" => "alice" }]).without_fallback().await.unwrap();
        let nanos = time(&client, DecidedBy::Grant).await;
        let variant = if requests_grants { ", counted for the next demand" } else { "" };
        println!("Check decided by a grant{variant}: {nanos:.0} ns");
    }
}

/// Result of one round of checks. CPU times are per check.
#[derive(Clone, Copy)]
struct Sample {
    per_second: f64,
    client_micros: f64,
    service_micros: f64,
    p50_micros: f64,
}

impl Sample {
    fn both_micros(&self) -> f64 {
        self.client_micros + self.service_micros
    }
}

async fn measure(caller: &Caller, server: &Process, concurrency: usize, checks: usize) -> Sample {
    let (client_cpu, service_cpu, started) = (cpu_micros(std::process::id()), server.cpu_micros(), Instant::now());
    let latencies = make_checks(caller, concurrency, checks).await;
    let count = checks as f64;
    Sample {
        per_second: count / started.elapsed().as_secs_f64(),
        client_micros: (cpu_micros(std::process::id()) - client_cpu) / count,
        service_micros: (server.cpu_micros() - service_cpu) / count,
        p50_micros: median(latencies),
    }
}

/// Makes `checks` checks in `concurrency` tasks, and returns the latency of each in microseconds.
async fn make_checks(caller: &Caller, concurrency: usize, checks: usize) -> Vec<f64> {
    let mut tasks = JoinSet::new();
    for first in 0..concurrency {
        let mut caller = caller.clone();
        tasks.spawn(async move {
            let mut latencies = Vec::with_capacity(checks / concurrency + 1);
            for number in (first..checks).step_by(concurrency) {
                let started = Instant::now();
                caller.check(number).await;
                latencies.push(started.elapsed().as_secs_f64() * 1e6);
            }
            latencies
        });
    }
    tasks.join_all().await.concat()
}

/// Measures a check that the client's deny cache decides.
async fn denied() {
    let server = Process::service_with("memory", "unit: year, requests_per_unit: 1");
    let client = Client::builder(format!("http://{}", server.address)).domain("bench").timeout(Duration::from_secs(5));
    let client = client.connect_lazy().unwrap();
    let check = || client.check([descriptor! { "user" => "alice" }]);
    check().await;
    assert!(!check().await.allowed());
    println!("\nCheck decided by the deny cache: {:.0} ns", time(&client, DecidedBy::DenyCache).await);
}

/// Returns the nanoseconds of a check that needs no call, as the median of 5 rounds.
///
/// What decides a check ends (an entry of the deny cache after a second at most), and the next check calls the service.
/// Rounds are therefore short, and a round with a call does not count.
async fn time(client: &Client, decided_by: DecidedBy) -> f64 {
    const CHECKS: u32 = 100_000;
    let mut rounds: Vec<_> = Vec::new();
    while rounds.len() < 5 {
        let mut calls = 0;
        let started = Instant::now();
        for _ in 0..CHECKS {
            let verdict = black_box(client.check([descriptor! { "user" => "alice" }]).await);
            calls += u32::from(verdict.decided_by() != decided_by);
        }
        let nanos = started.elapsed().as_secs_f64() * 1e9 / f64::from(CHECKS);
        assert!(calls < CHECKS / 2, "most checks call the service");
        if calls == 0 {
            rounds.push(nanos);
        }
    }
    rounds.sort_by(f64::total_cmp);
    rounds[2]
}
