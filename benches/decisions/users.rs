//! A hundred thousand users, in turn or some of them much more often than others. h2load cannot vary the body, and a
//! client that costs as much as the server takes half of the machine: what is left never fills the server, and its CPU time
//! is that of waking up. So frames are written by hand, as h2load's are: a connection's next burst leaves in one piece.

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
/// Without an answer for so long, it stops.
const PATIENCE: Duration = Duration::from_secs(10);

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
        for first in 0..CONNECTIONS {
            let socket = TcpStream::connect(process.address).await.unwrap();
            let users = (first..REQUESTS).step_by(CONNECTIONS as usize).map(user);
            tasks.spawn(Connection::new(socket).ask(users));
        }
        let mut took = tasks.join_all().await.concat();
        assert_eq!(took.len(), REQUESTS as usize);
        let seconds = started.elapsed().as_secs_f64();
        took.sort_by(f64::total_cmp);
        (f64::from(REQUESTS) / seconds, took[took.len() / 2], took[took.len() * 99 / 100])
    })
}

/// Kinds of HTTP/2 frames, and flags (RFC 9113, 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const HEAD: usize = 9;

/// One caller's connection.
struct Connection {
    socket: TcpStream,
    output: Vec<u8>,
    input: Vec<u8>,
    asked: HashMap<u32, Instant>,
    next_stream: u32,
    messages: usize,
}

impl Connection {
    fn new(socket: TcpStream) -> Self {
        socket.set_nodelay(true).unwrap();
        let output = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let mut connection =
            Self { socket, output, input: Vec::new(), asked: HashMap::new(), next_stream: 1, messages: 0 };
        connection.frame(SETTINGS, 0, 0, &[]);
        // All answers of a round fit into one window.
        connection.frame(WINDOW_UPDATE, 0, 0, &0x7000_0000_u32.to_be_bytes());
        connection
    }

    /// Asks for each, twenty at a time; how many microseconds each took.
    async fn ask(mut self, mut users: impl Iterator<Item = u32> + Send) -> Vec<f64> {
        let mut took = Vec::new();
        loop {
            while self.asked.len() < STREAMS {
                let Some(user) = users.next() else {
                    break;
                };
                self.request(user);
            }
            self.socket.write_all(&self.output).await.unwrap();
            self.output.clear();
            if self.asked.is_empty() {
                // An error has no message before its trailers.
                assert_eq!(self.messages, took.len());
                return took;
            }
            let read = timeout(PATIENCE, self.socket.read_buf(&mut self.input)).await.expect("no answer");
            assert!(read.unwrap() > 0, "the server has closed the connection");
            self.answers(&mut took);
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
        self.asked.insert(stream, Instant::now());
    }

    fn answers(&mut self, took: &mut Vec<f64>) {
        let mut start = 0;
        while let Some(head) = self.input.get(start..start + HEAD) {
            let [high, middle, low, kind, flags, stream @ ..] = *head.first_chunk::<HEAD>().unwrap();
            let (length, stream) = (u32::from_be_bytes([0, high, middle, low]), u32::from_be_bytes(stream));
            let end = start + HEAD + length as usize;
            if self.input.len() < end {
                break;
            }
            match kind {
                DATA => self.messages += 1,
                HEADERS if flags & END_STREAM != 0 => {
                    let asked = self.asked.remove(&stream).unwrap();
                    took.push(asked.elapsed().as_secs_f64() * 1e6);
                }
                SETTINGS | PING if flags & ACK == 0 => {
                    let payload = if kind == PING { self.input[start + HEAD..end].to_vec() } else { Vec::new() };
                    self.frame(kind, ACK, 0, &payload);
                }
                HEADERS | SETTINGS | PING | WINDOW_UPDATE => {}
                kind => panic!("a frame of kind {kind}"),
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

/// The header block (RFC 7541): the first request of a connection names what the others then say by number.
fn headers(first: bool) -> Vec<u8> {
    const POST: u8 = 0x83;
    const HTTP: u8 = 0x86;
    let mut block = vec![POST, HTTP];
    if !first {
        // The one that was named first has the highest.
        block.extend((62..66).rev().map(|index| 0x80 | index));
        return block;
    }
    let path = format!("/{}", h2load::METHOD);
    // By the number of the name in the static table, or by name.
    let named: [(Result<u8, &str>, &str); 4] =
        [(Ok(4), &path), (Ok(1), "bench"), (Ok(31), "application/grpc"), (Err("te"), "trailers")];
    for (name, value) in named {
        block.push(0x40 | name.unwrap_or(0));
        for text in name.err().into_iter().chain([value]) {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}
