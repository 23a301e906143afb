//! Load test with 100,000 users, in turn or with a Zipf distribution.
//!
//! `h2load` cannot vary the body. A full HTTP/2 client would use as much CPU time as the server, and with half of the
//! machine the server would never be busy, so that its CPU time would mostly be that of waking up. Therefore this
//! client writes HTTP/2 frames directly, and writes the next requests of a connection in one piece, as `h2load` does.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use prost::Message;
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::Entry},
    service::ratelimit::v3::RateLimitRequest,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};

use crate::{REQUESTS, h2load, process::Process};

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

/// Types of HTTP/2 frames, and flags (RFC 9113, section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const FRAME_HEADER_LEN: usize = 9;

/// One HTTP/2 connection.
pub(crate) struct Connection {
    socket: TcpStream,
    output: Vec<u8>,
    input: Vec<u8>,
    /// Start time of each request without a response, by stream.
    in_flight: HashMap<u32, Instant>,
    next_stream: u32,
    messages: usize,
}

impl Connection {
    pub(crate) fn new(socket: TcpStream) -> Self {
        socket.set_nodelay(true).unwrap();
        let output = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let mut connection =
            Self { socket, output, input: Vec::new(), in_flight: HashMap::new(), next_stream: 1, messages: 0 };
        connection.frame(SETTINGS, 0, 0, &[]);
        // The window is large enough for all responses of a round.
        connection.frame(WINDOW_UPDATE, 0, 0, &0x7000_0000_u32.to_be_bytes());
        connection
    }

    /// Sends a request for each user, up to [`STREAMS`] concurrently. Returns the latencies in microseconds.
    pub(crate) async fn send_all(&mut self, mut users: impl Iterator<Item = u32> + Send) -> Vec<f64> {
        let (mut latencies, messages) = (Vec::new(), self.messages);
        loop {
            while self.in_flight.len() < STREAMS {
                let Some(user) = users.next() else {
                    break;
                };
                self.request(user);
            }
            self.socket.write_all(&self.output).await.unwrap();
            self.output.clear();
            if self.in_flight.is_empty() {
                // An error response has trailers but no message.
                assert_eq!(self.messages - messages, latencies.len());
                return latencies;
            }
            let read = timeout(RESPONSE_TIMEOUT, self.socket.read_buf(&mut self.input)).await.expect("no response");
            assert!(read.unwrap() > 0, "the server has closed the connection");
            self.read_frames(&mut latencies);
        }
    }

    fn request(&mut self, user: u32) {
        let stream = self.next_stream;
        self.next_stream += 2;
        self.frame(HEADERS, END_HEADERS, stream, &headers(stream == 1));
        let entry = Entry { key: "user".into(), value: format!("user{user}") };
        let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
        let message = RateLimitRequest { domain: "bench".into(), descriptors: vec![descriptor], hits_addend: 0 };
        self.frame(DATA, END_STREAM, stream, &h2load::framed(&message.encode_to_vec()));
        self.in_flight.insert(stream, Instant::now());
    }

    fn read_frames(&mut self, latencies: &mut Vec<f64>) {
        let mut start = 0;
        while let Some(head) = self.input.get(start..start + FRAME_HEADER_LEN) {
            let [high, middle, low, kind, flags, stream @ ..] = *head.first_chunk::<FRAME_HEADER_LEN>().unwrap();
            let (length, stream) = (u32::from_be_bytes([0, high, middle, low]), u32::from_be_bytes(stream));
            let end = start + FRAME_HEADER_LEN + length as usize;
            if self.input.len() < end {
                break;
            }
            match kind {
                DATA => self.messages += 1,
                HEADERS if flags & END_STREAM != 0 => {
                    let started = self.in_flight.remove(&stream).unwrap();
                    latencies.push(started.elapsed().as_secs_f64() * 1e6);
                }
                SETTINGS | PING if flags & ACK == 0 => {
                    let payload =
                        if kind == PING { self.input[start + FRAME_HEADER_LEN..end].to_vec() } else { Vec::new() };
                    self.frame(kind, ACK, 0, &payload);
                }
                HEADERS | SETTINGS | PING | WINDOW_UPDATE => {}
                kind => panic!("unexpected frame of type {kind}"),
            }
            start = end;
        }
        self.input.drain(..start);
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.output.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes()[1..]);
        self.output.extend_from_slice(&[kind, flags]);
        self.output.extend_from_slice(&stream.to_be_bytes());
        self.output.extend_from_slice(payload);
    }
}

/// Returns the header block of a request (RFC 7541). The first request of a connection adds its headers to the dynamic
/// table, and later requests refer to them by index.
fn headers(first: bool) -> Vec<u8> {
    const POST: u8 = 0x83;
    const HTTP: u8 = 0x86;
    let mut block = vec![POST, HTTP];
    if !first {
        // The header that was added first has the highest index.
        block.extend((62..66).rev().map(|index| 0x80 | index));
        return block;
    }
    let path = format!("/{}", h2load::METHOD);
    // Each name is an index in the static table or a string.
    let literals: [(Result<u8, &str>, &str); 4] =
        [(Ok(4), &path), (Ok(1), "bench"), (Ok(31), "application/grpc"), (Err("te"), "trailers")];
    for (name, value) in literals {
        block.push(0x40 | name.unwrap_or(0));
        for text in name.err().into_iter().chain([value]) {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}
