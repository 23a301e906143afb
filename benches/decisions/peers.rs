//! Cost of the exchange between instances: CPU time of all members per decision, bytes between them, and memory.
//!
//! The baseline is the same number of instances that do not exchange hits, with the same load in the same round. Both
//! rows have new processes in each round, because identical processes differ by up to 10% for their whole lifetime.

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use sluicegate::{
    algorithm::{Algorithm, MaxHits, Micros, fixed_window::FixedWindow, gcra::Gcra},
    store::{
        Counter, Memory, memory,
        peers::{self, Peers, Pull},
    },
};

use crate::{
    REQUESTS,
    algorithms::median,
    process::{Process, free_address},
    rounds, users,
};

/// Numbers of members.
const MEMBERS: [usize; 4] = [1, 3, 5, 9];
/// Number of users in the measurement of memory.
const MANY_USERS: u32 = 300_000;

/// A load test on all members. Returns decisions per second.
type MembersLoad = fn(&[Process]) -> f64;

/// Result of one load test on all members.
#[derive(Clone, Copy)]
struct Sample {
    cpu_micros: f64,
    per_second: f64,
    /// Bytes per second that all members sent to each other, without the overhead of HTTP/2.
    sent_bytes: f64,
}

pub(crate) fn run() {
    in_process();
    println!(
        "Peers: {REQUESTS} requests a round over all members, medians of {} rounds, cluster.sync 100ms\n",
        rounds()
    );
    println!("| members | traffic | decisions/s | CPU us per decision | x without peers | bytes/s between members |");
    println!("| ---: | --- | ---: | ---: | ---: | ---: |");
    let loads: [(&str, MembersLoad); 3] = [
        ("one hot key", |members| users::spread(members, |_| 0)),
        ("100,000 users in turn", |members| users::spread(members, users::in_turn)),
        ("100,000 users, Zipf", |members| users::spread(members, users::zipf_user)),
    ];
    // `MEMBERS=n` measures one number of members only.
    let only = std::env::var("MEMBERS").ok().and_then(|members| members.parse::<usize>().ok());
    for count in MEMBERS.into_iter().filter(|count| only.is_none_or(|only| only == *count)) {
        for (traffic, load) in loads {
            let samples: Vec<_> =
                (0..rounds()).map(|_| (sample(count, false, load), sample(count, true, load))).collect();
            let of = |field: fn(&(Sample, Sample)) -> f64| median(samples.iter().map(field));
            println!(
                "| {count} | {traffic} | {:.0} | {:.2} | {:.2} | {:.0} |",
                of(|(_, peers)| peers.per_second),
                of(|(_, peers)| peers.cpu_micros),
                of(|(alone, peers)| peers.cpu_micros / alone.cpu_micros),
                of(|(_, peers)| peers.sent_bytes),
            );
        }
    }
    println!();
    memory();
}

/// Starts `count` members and measures one load test after a first one that creates the counters.
fn sample(count: usize, with_peers: bool, load: MembersLoad) -> Sample {
    let members = start(count, with_peers);
    load(&members);
    let (cpu, sent, started) = (cpu_micros(&members), sent_bytes(&members), Instant::now());
    let per_second = load(&members);
    let seconds = started.elapsed().as_secs_f64();
    Sample {
        cpu_micros: (cpu_micros(&members) - cpu) / f64::from(REQUESTS),
        per_second,
        sent_bytes: (sent_bytes(&members) - sent) / seconds,
    }
}

/// Measures the memory that peers need in addition, per counter and origin.
fn memory() {
    const ORIGINS: usize = 3;
    let resident = |with_peers| {
        let members = start(ORIGINS, with_peers);
        // Every user calls every member, so that each counter has hits of all origins everywhere.
        for member in &members {
            users::all(member, MANY_USERS);
        }
        if with_peers {
            // The increments of the last minute are kept, at most 500,000 changes.
            let applied =
                || members.iter().map(|member| member.metric("sluicegate_cluster_changes_applied_total")).sum::<f64>();
            let expected = f64::from(MANY_USERS) * (ORIGINS * (ORIGINS - 1)) as f64;
            while applied() < expected {
                std::thread::yield_now();
            }
        }
        members.iter().map(Process::resident).sum::<f64>() / ORIGINS as f64
    };
    let (alone, peers) = (resident(false), resident(true));
    println!(
        "{MANY_USERS} users on each of {ORIGINS} members: {:.1} MB each without peers, {:.1} MB with peers, \
         {:.1} bytes more per counter and origin\n",
        alone / 1e6,
        peers / 1e6,
        (peers - alone) / f64::from(MANY_USERS) / ORIGINS as f64
    );
}

fn start(count: usize, with_peers: bool) -> Vec<Process> {
    if !with_peers {
        return (0..count).map(|_| Process::service_with_defaults("memory")).collect();
    }
    let addresses: Vec<String> = (0..count).map(|_| free_address().to_string()).collect();
    let peers = addresses.join(",");
    let members: Vec<_> = addresses.iter().map(|address| Process::member(address, &peers)).collect();
    let connected = |member: &Process| member.metric("sluicegate_cluster_peers ") as usize == count - 1;
    while !members.iter().all(connected) {
        std::thread::yield_now();
    }
    members
}

fn cpu_micros(members: &[Process]) -> f64 {
    members.iter().map(Process::cpu_micros).sum()
}

fn sent_bytes(members: &[Process]) -> f64 {
    members.iter().map(|member| member.metric("sluicegate_cluster_sent_bytes_total")).sum()
}

/// Number of operations in one round of the measurements within this process.
const OPERATIONS: usize = 100_000;
const START: u64 = 1_763_672_400_000_000;

/// Measures each part of the exchange within this process, for 100,000 counters in turn.
fn in_process() {
    let limits: [(&str, Algorithm); 2] = [
        (
            "fixed window",
            FixedWindow::new(MaxHits::hard(4_000_000_000), Micros::from_secs(86_400), true).unwrap().into(),
        ),
        ("GCRA", Gcra::new(1_000_000, Micros::from_secs(1), MaxHits::hard(1_000_000), false).unwrap().into()),
    ];
    println!("Peers: ns per decision or change, {OPERATIONS} counters in turn, medians of 9 rounds\n");
    println!("| limit | decision without peers | decision with peers | publish a change | apply a change |");
    println!("| --- | ---: | ---: | ---: | ---: |");
    for (name, limit) in limits {
        let counter = |user| Counter::new(format!("{{bench|user=user{user}}}fw:86400"), limit);
        let counters: Vec<_> = (0..OPERATIONS).map(counter).collect();
        let alone = Memory::new(&memory::Settings::default());
        let exchanged = Arc::new(Memory::exchanged(&memory::Settings::default()));
        let origin = Peers::with_epoch(Arc::clone(&exchanged), peers::Metrics::new(), 1);
        let receiver = Arc::new(Memory::exchanged(&memory::Settings::default()));
        let receiver = Peers::with_epoch(receiver, peers::Metrics::new(), 2);
        let clock = AtomicU64::new(START);
        let decide = |memory: &Memory| {
            for counter in &counters {
                let now = Micros::new(clock.fetch_add(1, Relaxed));
                black_box(memory.decide(&counter.take(1), now));
            }
        };
        let nanos = |act: &mut dyn FnMut()| {
            let started = Instant::now();
            act();
            started.elapsed().as_secs_f64() * 1e9 / OPERATIONS as f64
        };
        let mut rounds: [Vec<f64>; 4] = Default::default();
        for _ in 0..10 {
            rounds[0].push(nanos(&mut || decide(&alone)));
            rounds[1].push(nanos(&mut || decide(&exchanged)));
            rounds[2].push(nanos(&mut || origin.publish(Micros::new(clock.load(Relaxed)))));
            let mut after = receiver.position(1);
            let now = Micros::new(clock.load(Relaxed));
            rounds[3].push(nanos(&mut || {
                while let Pull::Batch(batch) = origin.pull(2, after, now) {
                    assert!(receiver.apply(&batch, now));
                    after = batch.until;
                }
            }));
        }
        // The first round creates the counters.
        let [alone, exchanged, publish, apply] = rounds.map(|samples| median(samples.into_iter().skip(1)));
        println!("| {name} | {alone:.0} | {exchanged:.0} | {publish:.0} | {apply:.0} |");
    }
    println!();
}
