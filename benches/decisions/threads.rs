//! Cost of a decision in the memory store if many threads decide at the same time.

use std::{hint::black_box, thread, time::Instant};

use sluicegate::{
    algorithm::{MaxHits, Micros, fixed_window::FixedWindow},
    store::{Counter, Memory, memory},
};

use super::{algorithms::median, process::cpu_micros};

const ROUNDS: usize = 7;
const DECISIONS: usize = 4_000_000;
const NOW: Micros = Micros::from_secs(1_763_672_400);

/// Compares one counter that all threads use with a million counters.
pub(crate) fn run() {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    println!("\nThreads that decide in one memory store, {cores} cores, medians of {ROUNDS} rounds\n");
    println!("| threads | hot key: ns of CPU | decisions/s | a million keys: ns of CPU | decisions/s |");
    println!("| ---: | ---: | ---: | ---: | ---: |");
    let names: Vec<Vec<u8>> = (0..1_000_000).map(|user| format!("{{bench|user={user}}}fw:60").into_bytes()).collect();
    for threads in [1, 2, 8, 64] {
        let [hot, many] = [&names[..1], &names].map(|names| measure(names, threads));
        println!("| {threads} | {:.0} | {:.0} | {:.0} | {:.0} |", hot.0, hot.1, many.0, many.1);
    }
    println!();
}

/// Returns the CPU nanoseconds per decision, and decisions per second.
fn measure(names: &[Vec<u8>], threads: usize) -> (f64, f64) {
    let store = Memory::new(&memory::Settings::default());
    let limit = FixedWindow::new(MaxHits::hard(4_000_000_000), Micros::from_secs(60), true).unwrap();
    let counters: Vec<_> = names.iter().map(|name| Counter::new(&**name, limit)).collect();
    let round = |_| {
        let (cpu, started) = (cpu_micros(std::process::id()), Instant::now());
        thread::scope(|scope| {
            for thread in 0..threads {
                let (store, counters) = (&store, &counters);
                scope.spawn(move || {
                    for decision in 0..DECISIONS / threads {
                        // The stride visits all keys, in another place for each thread.
                        let counter = &counters[(thread * 104_729 + decision * 7_919) % counters.len()];
                        black_box(store.decide(&counter.take(1), NOW));
                    }
                });
            }
        });
        let elapsed = started.elapsed().as_secs_f64();
        ((cpu_micros(std::process::id()) - cpu) * 1e3 / DECISIONS as f64, DECISIONS as f64 / elapsed)
    };
    // The first round creates the counters.
    round(0);
    let rounds: Vec<_> = (0..ROUNDS).map(round).collect();
    (median(rounds.iter().map(|round| round.0)), median(rounds.iter().map(|round| round.1)))
}
