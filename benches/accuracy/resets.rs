//! Callers who wait for a reset: the peak of requests when it comes, with and without a phase or jitter.

use std::{collections::BinaryHeap, error::Error};

use plotters::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use sluicegate::algorithm::{
    Action, Algorithm, MaxHits, Micros, Operation, RequestContext, State,
    first_request::FirstRequestWindow,
    fixed_window::FixedWindow,
    scheduled_window::{Schedule, ScheduledWindow},
};

use super::{WINDOW, traces::START};

const CALLERS: usize = 1_000;
const LIMIT: u64 = 10;
const MINUTES: usize = 5;
const SECONDS: usize = 60 * MINUTES;
/// Time between two requests of a caller that is not denied.
const PACE: u64 = 500_000;
const WIDTH: u32 = 880;
const HEIGHT: u32 = 150;

/// A variant of the limit, and the requests in each second.
struct Run {
    name: &'static str,
    requests: [u32; SECONDS],
}

/// Prints the peaks after the first minute, and returns a plot of all variants.
pub(crate) fn print() -> Result<String, Box<dyn Error>> {
    let max_hits = MaxHits::hard(LIMIT);
    let epoch: Algorithm = FixedWindow::new(max_hits, WINDOW, false).ok_or("window")?.into();
    let first_request = FirstRequestWindow::new(max_hits, WINDOW, false).ok_or("window")?.into();
    let schedule = Schedule::Phase { window: WINDOW, phase: Micros::ZERO };
    let phase = ScheduledWindow::new(max_hits, schedule, false).into();
    let runs = [
        run("window: epoch", &epoch, 0),
        run("window: epoch, retry_jitter: 30s", &epoch, 30_000_000),
        run("phase: entity", &phase, 0),
        run("window: first_request", &first_request, 0),
    ];
    println!("\nRequests per second of {CALLERS} callers who wait for their reset, after the first minute:\n");
    println!("| limit of {LIMIT} per minute | highest second | mean |\n| --- | ---: | ---: |");
    for run in &runs {
        let later = &run.requests[60..];
        let sum: u32 = later.iter().sum();
        let highest = later.iter().max().unwrap_or(&0);
        println!("| `{}` | {highest} | {} |", run.name, sum as usize / later.len());
    }
    plot(&runs)
}

/// Simulates callers who send until they are denied, and then as soon as `Retry-After` permits.
fn run(name: &'static str, algorithm: &Algorithm, jitter: u64) -> Run {
    let mut random = StdRng::seed_from_u64(2);
    let mut requests = [0; SECONDS];
    let mut states = vec![State::default(); CALLERS];
    // The next request is the largest.
    let mut next = BinaryHeap::new();
    for caller in 0..CALLERS {
        next.push((std::cmp::Reverse(random.random_range(0..60_000_000)), caller));
    }
    while let Some((std::cmp::Reverse(at), caller)) = next.pop() {
        let Some(second) = requests.get_mut((at / 1_000_000) as usize) else {
            break;
        };
        *second += 1;
        let entity = (caller as u64 + 1) * WINDOW.get() / CALLERS as u64;
        let algorithm = algorithm.with_context(RequestContext { entity, ..RequestContext::default() });
        let operation = Operation { action: Action::Take, cost: 1, now: Micros::new(START + at) };
        let decision = algorithm.apply(&mut states[caller], operation);
        let wait = match decision.retry_after {
            Some(wait) => (wait.get() + random.random_range(0..=jitter)).div_ceil(1_000_000) * 1_000_000,
            None => PACE,
        };
        next.push((std::cmp::Reverse(at + wait), caller));
    }
    Run { name, requests }
}

fn plot(runs: &[Run]) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    let size = (WIDTH, HEIGHT * runs.len() as u32);
    let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    root.fill(&WHITE)?;
    let highest = runs.iter().flat_map(|run| run.requests).max().unwrap_or(1);
    for (run, area) in runs.iter().zip(root.split_evenly((runs.len(), 1))) {
        let mut chart = ChartBuilder::on(&area)
            .margin(8)
            .caption(run.name, ("sans-serif", 14))
            .x_label_area_size(34)
            .y_label_area_size(52)
            .build_cartesian_2d(0..SECONDS, 0..highest)?;
        let mesh = &mut chart.configure_mesh();
        let mesh = mesh.x_desc("seconds").y_desc("requests per second");
        mesh.x_labels(6).y_labels(4).light_line_style(TRANSPARENT).draw()?;
        let mut outline = Vec::new();
        for (second, requests) in run.requests.iter().enumerate() {
            outline.extend([(second, *requests), (second + 1, *requests)]);
        }
        chart.draw_series(AreaSeries::new(outline, 0, RGBColor(52, 120, 190)))?;
    }
    root.present()?;
    drop(root);
    Ok(svg)
}
