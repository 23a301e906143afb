//! What a check costs the gateway that links the client, and the service, beside a bare tonic client that makes the same
//! unary calls. The gateway is this process: one thread, many tasks that each ask again as soon as they are answered.

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

use super::process::{Process, cpu_micros};

const CHECKS: usize = 400_000;
const USERS: usize = 100_000;

#[derive(Clone)]
enum Caller {
    Bare(RateLimitServiceClient<Channel>),
    Ours(Client),
}

impl Caller {
    async fn bare(server: &Process) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{}", server.address)).unwrap().tcp_nodelay(true);
        Self::Bare(RateLimitServiceClient::new(endpoint.connect().await.unwrap()))
    }

    fn ours(server: &Process, coalesces: bool) -> Self {
        let client = Client::builder(format!("http://{}", server.address)).domain("bench");
        let client = client.deadline(Duration::from_secs(5)).coalesce(coalesces);
        Self::Ours(client.connect_lazy().unwrap())
    }

    async fn check(&mut self, number: usize) {
        let user = format!("user{}", number % USERS);
        match self {
            Self::Bare(client) => {
                let entries = vec![Entry { key: "user".into(), value: user }];
                let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
                let request = RateLimitRequest { domain: "bench".into(), descriptors, hits_addend: 0 };
                let mut request = tonic::Request::new(request);
                request.set_timeout(Duration::from_secs(5));
                black_box(client.should_rate_limit(request).await.unwrap());
            }
            Self::Ours(client) => {
                let verdict = client.check([descriptor! { "user" => user }]).await;
                assert_eq!(verdict.decided_by(), DecidedBy::Server, "{:?}", verdict.failure());
            }
        }
    }
}

pub(crate) fn run() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let server = Process::service("memory");
        let callers = [
            ("bare tonic, unary", Caller::bare(&server).await),
            ("unary", Caller::ours(&server, false)),
            ("coalesced", Caller::ours(&server, true)),
        ];
        println!(
            "\nA gateway's checks: memory store, one thread here and the service beside it, medians of 5 rounds\n"
        );
        println!("| client | at once | checks/s | CPU us here | x bare | CPU us there | x bare, both | p50 us |");
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        for (at_once, checks) in [(1, 20_000), (16, 100_000), (256, CHECKS)] {
            let mut samples = vec![Vec::new(); callers.len()];
            for round in 0..6 {
                for ((_, caller), samples) in callers.iter().zip(&mut samples) {
                    let sample = measure(caller, &server, at_once, checks).await;
                    if round > 0 {
                        samples.push(sample);
                    }
                }
            }
            let medians: Vec<[f64; 4]> = samples.iter().map(|samples| medians(samples)).collect();
            let [_, here, there, _] = medians[0];
            for ((name, _), [rate, own, servers, p50]) in callers.iter().zip(&medians) {
                let (alone, both) = (own / here, (own + servers) / (here + there));
                println!(
                    "| {name} | {at_once} | {rate:.0} | {own:.2} | {alone:.2} | {servers:.2} | {both:.2} | {p50:.0} |"
                );
            }
        }
        denied().await;
        granted().await;
    });
}

/// Grants without end.
struct Granting;

#[tonic::async_trait]
impl RateLimitService for Granting {
    async fn should_rate_limit(
        &self,
        _: tonic::Request<RateLimitRequest>,
    ) -> Result<tonic::Response<RateLimitResponse>, tonic::Status> {
        let quota = Some(Quota { requests: u32::MAX, ..Quota::default() });
        let statuses = vec![DescriptorStatus { code: 1, quota, ..DescriptorStatus::default() }];
        let answer = RateLimitResponse { overall_code: 1, statuses, ..RateLimitResponse::default() };
        let mut answer = tonic::Response::new(answer);
        answer.metadata_mut().insert("sluicegate-grant-life-us", "600000000".parse().unwrap());
        Ok(answer)
    }
}

/// A hit of a grant.
async fn granted() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let service = RateLimitServiceServer::new(Granting);
    tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
    for wants in [false, true] {
        let client = Client::builder(&url).domain("bench").deadline(Duration::from_secs(5)).hold_grants(wants);
        let client = client.coalesce(false).connect_lazy().unwrap();
        client.check([descriptor! { "user" => "alice" }]).strict().await.unwrap();
        let nanos = time(&client, DecidedBy::Grant).await;
        let told = if wants { ", and counted for the next" } else { "" };
        println!("A hit of a grant{told}: {nanos:.0} ns");
    }
}

/// Checks per second, the CPU time of both sides per check, and the median time of a check.
async fn measure(caller: &Caller, server: &Process, at_once: usize, checks: usize) -> [f64; 4] {
    let (own, servers, began) = (cpu_micros(std::process::id()), server.cpu_micros(), Instant::now());
    let mut tasks = JoinSet::new();
    for first in 0..at_once {
        let mut caller = caller.clone();
        tasks.spawn(async move {
            let mut took = Vec::with_capacity(checks / at_once + 1);
            for number in (first..checks).step_by(at_once) {
                let asked = Instant::now();
                caller.check(number).await;
                took.push(asked.elapsed().as_secs_f64() * 1e6);
            }
            took
        });
    }
    let mut took = tasks.join_all().await.concat();
    took.sort_by(f64::total_cmp);
    let count = checks as f64;
    [
        count / began.elapsed().as_secs_f64(),
        (cpu_micros(std::process::id()) - own) / count,
        (server.cpu_micros() - servers) / count,
        took[took.len() / 2],
    ]
}

fn medians(samples: &[[f64; 4]]) -> [f64; 4] {
    std::array::from_fn(|field| {
        let mut values: Vec<_> = samples.iter().map(|sample| sample[field]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    })
}

/// A refusal that is known.
async fn denied() {
    let server = Process::service_with("memory", "unit: year, requests_per_unit: 1");
    let client = Client::builder(format!("http://{}", server.address)).domain("bench").deadline(Duration::from_secs(5));
    let client = client.connect_lazy().unwrap();
    let check = || client.check([descriptor! { "user" => "alice" }]);
    check().await;
    assert!(!check().await.allowed());
    println!("\nA refusal that is remembered: {:.0} ns", time(&client, DecidedBy::DenyCache).await);
}

/// Nanoseconds of a check that needs no call, median of 5 rounds.
async fn time(client: &Client, by: DecidedBy) -> f64 {
    const TIMES: u32 = 1_000_000;
    let mut rounds: Vec<_> = Vec::new();
    for _ in 0..5 {
        let began = Instant::now();
        for _ in 0..TIMES {
            assert_eq!(black_box(client.check([descriptor! { "user" => "alice" }]).await).decided_by(), by);
        }
        rounds.push(began.elapsed().as_secs_f64() * 1e9 / f64::from(TIMES));
    }
    rounds.sort_by(f64::total_cmp);
    rounds[2]
}
