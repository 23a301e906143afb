//! A hundred thousand users, in turn or some of them much more often than others: h2load cannot vary the body. This generator is slower than h2load, which does
//! not matter: what is told is the server's own CPU time.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tonic::transport::Endpoint;

use crate::{
    REQUESTS,
    plain::{Client, Descriptor, Request},
    process::Process,
};

const USERS: u32 = 100_000;
const CONNECTIONS: u32 = 10;
const STREAMS: u32 = 20;

/// Calls per second, p50 and p99 in microseconds.
pub(crate) fn run(process: &Process) -> (f64, f64, f64) {
    load(process, |number| number % USERS)
}

/// The same with a popularity by Zipf, exponent 1: the first user has a twelfth of all requests.
pub(crate) fn zipf(process: &Process) -> (f64, f64, f64) {
    // The inverse of the harmonic numbers, about.
    let harmonic = f64::from(USERS).ln() + 0.577;
    load(process, move |number| {
        // Any order that repeats nothing soon.
        let part = f64::from(number.wrapping_mul(2_654_435_769)) / f64::from(u32::MAX);
        ((part * harmonic - 0.577).exp() as u32).min(USERS - 1)
    })
}

fn load(process: &Process, user: impl Fn(u32) -> u32 + Copy + Send + 'static) -> (f64, f64, f64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for connection in 0..CONNECTIONS {
            let client = Client::with(
                Endpoint::from_shared(format!("http://{}", process.address)).unwrap().timeout(Duration::from_secs(1)),
            )
            .await
            .unwrap();
            for stream in 0..STREAMS {
                tasks.spawn(ask(client.clone(), connection * STREAMS + stream, user));
            }
        }
        let mut took = tasks.join_all().await.concat();
        let seconds = started.elapsed().as_secs_f64();
        took.sort_by(f64::total_cmp);
        (f64::from(REQUESTS) / seconds, took[took.len() / 2], took[took.len() * 99 / 100])
    })
}

async fn ask(client: Client, first: u32, user: impl Fn(u32) -> u32) -> Vec<f64> {
    let mut took = Vec::new();
    for number in (first..REQUESTS).step_by((CONNECTIONS * STREAMS) as usize) {
        let user = Descriptor::new().entry("user", format!("user{}", user(number)));
        let asked = Instant::now();
        client.check(Request::new("bench").descriptor(user)).await.unwrap();
        took.push(asked.elapsed().as_secs_f64() * 1e6);
    }
    took
}
