//! Latency of a decision at a fixed rate, measured outside of the servers.
//!
//! The load is an open loop: the time at which each check should be sent is fixed before the run, with random gaps as
//! independent callers have them, and the latency counts from that time. A server that stops for 50 ms delays all
//! checks in this time, and each one counts. A closed loop would send, and count, only one.
//!
//! One thread sends. It sleeps until shortly before each check and then spins, because timers wake a thread some 60 µs
//! late. One thread per connection reads. All share the machine with the servers.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    algorithms::median,
    frames::{Frames, Response},
    process::Process,
    rounds,
};

/// Checks per second, unless the variable `CHECKS_PER_SECOND` is set.
const DEFAULT_RATE: u32 = 3_000;
/// Length of a round in seconds.
const ROUND_SECONDS: u32 = 10;
const USERS: u32 = 15_000;
const CONNECTIONS: usize = 10;
/// Time before a check at which the sender stops sleeping and spins.
const SPIN: Duration = Duration::from_micros(150);
/// Time without a response after which the benchmark fails.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A server to measure.
struct Row {
    name: &'static str,
    process: Process,
}

/// Latencies of one round, in milliseconds.
#[derive(Clone, Copy)]
struct Percentiles {
    p50: f64,
    p99: f64,
    p999: f64,
    /// How late the sender was at the 99th percentile. It is a part of the latency.
    lateness_p99: f64,
}

/// Prints the latencies of a server that decides nothing, of the memory store, of Redis, and of other services if their
/// programs are given: `RATELIMIT` (envoyproxy/ratelimit) and `LIMITADOR` (limitador-server).
pub(crate) fn run() {
    // Each service has a Redis server of its own, so that no counters of another one are in it.
    let (redis, others) = (Process::redis(), [Process::redis(), Process::redis()]);
    let mut rows = vec![
        Row { name: "no-op tonic", process: Process::bench(&["noop"]).listening() },
        Row { name: "memory", process: Process::service("memory") },
        Row { name: "single Redis", process: Process::service(&redis.url()) },
    ];
    if let Ok(program) = std::env::var("LIMITADOR") {
        rows.push(Row { name: "limitador, single Redis", process: Process::limitador(&program, &others[0]) });
    }
    if let Ok(program) = std::env::var("RATELIMIT") {
        let process = Process::envoyproxy_ratelimit(&program, &others[1]);
        rows.push(Row { name: "envoyproxy/ratelimit, single Redis", process });
    }
    let rate = std::env::var("CHECKS_PER_SECOND").map_or(DEFAULT_RATE, |rate| rate.parse().unwrap());
    let mut samples = vec![Vec::new(); rows.len()];
    for round in 0..=rounds() {
        for (row, samples) in rows.iter().zip(&mut samples) {
            let percentiles = measure(row.process.address, schedule(rate, round as u64));
            // The first round warms up: connections, and a counter for each user.
            if round > 0 {
                samples.push(percentiles);
            }
        }
    }
    println!(
        "open loop, {rate} checks/s of {USERS} users, {CONNECTIONS} connections, medians of {} rounds of \
         {ROUND_SECONDS} s\n",
        rounds()
    );
    println!("| server | p50 ms | p99 ms | p99.9 ms | of it late sending, p99 ms |");
    println!("| --- | ---: | ---: | ---: | ---: |");
    for (row, samples) in rows.iter().zip(&samples) {
        let of = |field: fn(&Percentiles) -> f64| median(samples.iter().map(field));
        println!(
            "| {} | {:.2} | {:.1} | {:.1} | {:.2} |",
            row.name,
            of(|sample| sample.p50),
            of(|sample| sample.p99),
            of(|sample| sample.p999),
            of(|sample| sample.lateness_p99),
        );
    }
    println!();
}

/// One check of the schedule: its time since the start of the round, and its user.
struct Planned {
    at: Duration,
    user: u32,
}

/// Returns the checks of a round. The gaps have an exponential distribution, so the arrivals are a Poisson process.
fn schedule(rate: u32, seed: u64) -> Vec<Planned> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut at = 0.0;
    let next = |_| {
        at -= (1.0 - random.random::<f64>()).ln() / f64::from(rate);
        Planned { at: Duration::from_secs_f64(at), user: random.random_range(0..USERS) }
    };
    (0..rate * ROUND_SECONDS).map(next).collect()
}

/// Sends the checks of one round and waits for all responses.
fn measure(address: SocketAddr, schedule: Vec<Planned>) -> Percentiles {
    let schedule = Arc::new(schedule);
    let connections: Vec<_> = (0..CONNECTIONS).map(|_| Connection::open(address)).collect();
    // Time to start all threads.
    let start = Instant::now() + Duration::from_millis(100);
    let mut readers = Vec::new();
    for (index, connection) in connections.iter().enumerate() {
        let reader = Reader { connection: connection.clone(), index, start, schedule: Arc::clone(&schedule) };
        readers.push(thread::spawn(move || reader.read_all()));
    }
    let mut lateness = Vec::with_capacity(schedule.len());
    for (number, planned) in schedule.iter().enumerate() {
        let due = start + planned.at;
        if let Some(pause) = due.checked_duration_since(Instant::now() + SPIN) {
            thread::sleep(pause);
        }
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        lateness.push(due.elapsed().as_secs_f64() * 1e3);
        connections[number % CONNECTIONS].send(|frames| {
            frames.request(planned.user);
        });
    }
    let mut latencies = Vec::with_capacity(schedule.len());
    for reader in readers {
        latencies.extend(reader.join().unwrap());
    }
    assert_eq!(latencies.len(), schedule.len());
    for values in [&mut latencies, &mut lateness] {
        values.sort_by(f64::total_cmp);
    }
    let at = |values: &[f64], share: f64| values[((values.len() - 1) as f64 * share) as usize];
    Percentiles {
        p50: at(&latencies, 0.5),
        p99: at(&latencies, 0.99),
        p999: at(&latencies, 0.999),
        lateness_p99: at(&lateness, 0.99),
    }
}

/// One HTTP/2 connection. The sender and its reader share it.
#[derive(Clone)]
struct Connection {
    socket: Arc<TcpStream>,
    frames: Arc<Mutex<Frames>>,
}

impl Connection {
    fn open(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(RESPONSE_TIMEOUT)).unwrap();
        Self { socket: Arc::new(socket), frames: Arc::new(Mutex::new(Frames::new())) }
    }

    /// Writes frames, and sends them before another thread can write.
    fn send(&self, write: impl FnOnce(&mut Frames)) {
        let mut frames = self.frames.lock().unwrap();
        write(&mut frames);
        (&*self.socket).write_all(&frames.output).unwrap();
        frames.output.clear();
    }
}

/// Reads the responses of one connection.
struct Reader {
    connection: Connection,
    index: usize,
    start: Instant,
    schedule: Arc<Vec<Planned>>,
}

impl Reader {
    /// Reads until all checks of the connection are answered. Returns their latencies in milliseconds.
    fn read_all(self) -> Vec<f64> {
        let expected = (self.index..self.schedule.len()).step_by(CONNECTIONS).len();
        let mut latencies = Vec::with_capacity(expected);
        let (mut input, mut buffer) = (Vec::new(), [0; 16_384]);
        let (mut responses, mut messages) = (Vec::new(), 0);
        while latencies.len() < expected {
            let read = (&*self.connection.socket).read(&mut buffer);
            let read = read.expect("no response within ten seconds: the server is too slow for this rate");
            let arrived = Instant::now();
            assert!(read > 0, "the server has closed the connection");
            input.extend_from_slice(&buffer[..read]);
            self.connection.send(|frames| frames.read(&mut input, &mut responses));
            for response in responses.drain(..) {
                match response {
                    Response::Message => messages += 1,
                    // Streams of clients have the numbers 1, 3, 5, …
                    Response::End(stream) => {
                        let planned = &self.schedule[self.index + stream as usize / 2 * CONNECTIONS];
                        let latency = arrived.saturating_duration_since(self.start + planned.at);
                        latencies.push(latency.as_secs_f64() * 1e3);
                    }
                }
            }
        }
        // An error response has trailers but no message.
        assert_eq!(messages, latencies.len());
        latencies
    }
}
