//! Load test with 100,000 users, in turn or with a Zipf distribution.
//!
//! `h2load` cannot vary the body. A full HTTP/2 client would use as much CPU time as the server, and with half of the
//! machine the server would never be busy, so that its CPU time would mostly be that of waking up. Therefore this
//! client writes HTTP/2 frames directly, and writes the next requests of a connection in one piece, as `h2load` does.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};

use crate::{
    REQUESTS,
    frames::{Frames, Response},
    process::Process,
};

const USERS: u32 = 100_000;
const CONNECTIONS: u32 = 10;
const STREAMS: usize = 20;
/// Time without a response after which the benchmark fails.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the load test with all users in turn. Returns calls per second, and p50 and p99 in microseconds.
pub(crate) fn run(process: &Process) -> (f64, f64, f64) {
    load(&[process], REQUESTS, in_turn)
}

/// Runs the load test with a Zipf distribution with exponent 1: the first user makes 1/12 of all requests.
pub(crate) fn zipf(process: &Process) -> (f64, f64, f64) {
    load(&[process], REQUESTS, zipf_user)
}

/// Sends one request of each of the users to the process.
pub(crate) fn all(process: &Process, users: u32) {
    load(&[process], users, |number| number);
}

/// Runs the load test with connections to all processes. Returns calls per second.
pub(crate) fn spread(processes: &[Process], user: impl Fn(u32) -> u32 + Copy + Send + 'static) -> f64 {
    load(&processes.iter().collect::<Vec<_>>(), REQUESTS, user).0
}

/// Returns the user of a request if all users take turns.
pub(crate) const fn in_turn(number: u32) -> u32 {
    number % USERS
}

/// Returns the user of a request in a Zipf distribution with exponent 1.
pub(crate) fn zipf_user(number: u32) -> u32 {
    // Approximates the inverse of the harmonic numbers.
    let harmonic = f64::from(USERS).ln() + 0.577;
    // The multiplication generates a sequence without early repetitions.
    let fraction = f64::from(number.wrapping_mul(2_654_435_769)) / f64::from(u32::MAX);
    ((fraction * harmonic - 0.577).exp() as u32).min(USERS - 1)
}

fn load(processes: &[&Process], requests: u32, user: impl Fn(u32) -> u32 + Copy + Send + 'static) -> (f64, f64, f64) {
    // The same number of connections to each process.
    let connections = CONNECTIONS.next_multiple_of(processes.len() as u32);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for first in 0..connections {
            let process = processes[first as usize % processes.len()];
            let socket = TcpStream::connect(process.address).await.unwrap();
            let users = (first..requests).step_by(connections as usize).map(user);
            tasks.spawn(async move { Connection::new(socket).send_all(users).await });
        }
        let mut latencies = tasks.join_all().await.concat();
        assert_eq!(latencies.len(), requests as usize);
        let seconds = started.elapsed().as_secs_f64();
        latencies.sort_by(f64::total_cmp);
        (f64::from(requests) / seconds, latencies[latencies.len() / 2], latencies[latencies.len() * 99 / 100])
    })
}

/// One HTTP/2 connection.
pub(crate) struct Connection {
    socket: TcpStream,
    frames: Frames,
    input: Vec<u8>,
    /// Start time of each request without a response, by stream.
    in_flight: HashMap<u32, Instant>,
    messages: usize,
}

impl Connection {
    pub(crate) fn new(socket: TcpStream) -> Self {
        socket.set_nodelay(true).unwrap();
        Self { socket, frames: Frames::new(), input: Vec::new(), in_flight: HashMap::new(), messages: 0 }
    }

    /// Sends a request for each user, up to [`STREAMS`] concurrently. Returns the latencies in microseconds.
    pub(crate) async fn send_all(&mut self, mut users: impl Iterator<Item = u32> + Send) -> Vec<f64> {
        let (mut latencies, messages) = (Vec::new(), self.messages);
        let mut responses = Vec::new();
        loop {
            while self.in_flight.len() < STREAMS {
                let Some(user) = users.next() else {
                    break;
                };
                let stream = self.frames.request(user);
                self.in_flight.insert(stream, Instant::now());
            }
            self.socket.write_all(&self.frames.output).await.unwrap();
            self.frames.output.clear();
            if self.in_flight.is_empty() {
                // An error response has trailers but no message.
                assert_eq!(self.messages - messages, latencies.len());
                return latencies;
            }
            let read = timeout(RESPONSE_TIMEOUT, self.socket.read_buf(&mut self.input)).await.expect("no response");
            assert!(read.unwrap() > 0, "the server has closed the connection");
            self.frames.read(&mut self.input, &mut responses);
            for response in responses.drain(..) {
                match response {
                    Response::Message => self.messages += 1,
                    Response::End(stream) => {
                        let started = self.in_flight.remove(&stream).unwrap();
                        latencies.push(started.elapsed().as_secs_f64() * 1e6);
                    }
                }
            }
        }
    }
}
