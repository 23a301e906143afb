//! [`Sampler`]: measures all processes at an interval, and [`Trend`], which finds growth.

use std::{
    fs,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{MissedTickBehavior, interval, timeout},
};

use crate::{
    load::http,
    observer::{Failure, Observer, Via},
    site::{INSTANCES, Target},
};

/// Interval between samples.
pub(crate) const INTERVAL: Duration = Duration::from_secs(5);
/// Masters of the cluster. Keys are counted only if all are present.
const MASTERS: usize = 3;

/// The state of one instance. A value is `None` while the instance is killed or does not answer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Process {
    pub(crate) memory: Option<f64>,
    pub(crate) descriptors: Option<f64>,
    pub(crate) threads: Option<f64>,
    pub(crate) connections: Option<f64>,
}

/// All measurements at one time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) second: f64,
    pub(crate) processes: [Process; INSTANCES.len()],
    pub(crate) keys: Option<f64>,
    pub(crate) answered_per_second: f64,
    pub(crate) errors_per_second: f64,
    pub(crate) p50_millis: f64,
    pub(crate) p99_millis: f64,
}

/// Takes samples until it is dropped.
pub(crate) struct Sampler {
    pub(crate) observer: Arc<Observer>,
    pub(crate) targets: Vec<Target>,
    /// Process ids of the instances, which change with each restart.
    pub(crate) pids: Arc<Mutex<Vec<Option<u32>>>>,
    pub(crate) redis: Vec<SocketAddr>,
    pub(crate) samples: Arc<Mutex<Vec<Sample>>>,
}

impl Sampler {
    pub(crate) async fn run(self) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        ticks.tick().await;
        let mut previous = self.observer.now();
        loop {
            ticks.tick().await;
            let now = self.observer.now();
            let seconds = (now - previous) as f64 / 1e3;
            previous = now;
            let mut interval = self.observer.sample();
            interval.latencies.sort_unstable();
            let quantile = |q: f64| {
                let index = (interval.latencies.len() as f64 * q) as usize;
                interval.latencies.get(index).map_or(0.0, |micros| f64::from(*micros) / 1e3)
            };
            let mut sample = Sample {
                second: (now - self.observer.epoch) as f64 / 1e3,
                keys: self.keys().await,
                answered_per_second: interval.answered as f64 / seconds,
                errors_per_second: interval.errors as f64 / seconds,
                p50_millis: quantile(0.5),
                p99_millis: quantile(0.99),
                ..Sample::default()
            };
            for (process, target) in sample.processes.iter_mut().zip(&self.targets) {
                *process = self.process(target).await;
            }
            self.samples.lock().unwrap().push(sample);
        }
    }

    async fn process(&self, target: &Target) -> Process {
        let Some(pid) = self.pids.lock().unwrap()[target.index] else { return Process::default() };
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |name: &str| -> Option<f64> {
            status.lines().find_map(|line| line.strip_prefix(name))?.trim().trim_end_matches(" kB").parse().ok()
        };
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok().map(|folder| folder.count() as f64);
        let scrape = async {
            match http(target.http, "/metrics", None, None).await? {
                (200, metrics) => Ok(metrics),
                (status, _) => Err(Failure::Status(format!("HTTP {status} scrape"))),
            }
        };
        let metrics = self.observer.call(Via::NewConnection(target.index), "scrape", scrape).await.ok();
        let connections = metrics.and_then(|(metrics, _)| {
            metrics.lines().find_map(|line| line.strip_prefix("sluicegate_grpc_connections "))?.trim().parse().ok()
        });
        Process {
            memory: field("VmRSS:").map(|kilobytes| kilobytes / 1024.0),
            descriptors,
            threads: field("Threads:"),
            connections,
        }
    }

    /// Returns the number of keys on all masters, or `None` if one does not answer.
    async fn keys(&self) -> Option<f64> {
        let (mut masters, mut keys) = (0, 0.0);
        for node in &self.redis {
            let answer = timeout(Duration::from_millis(500), role_and_size(*node)).await;
            if let Ok(Ok(answer)) = answer
                && answer.contains("\r\nmaster\r\n")
            {
                masters += 1;
                keys += answer.trim_end().rsplit(':').next()?.parse::<f64>().ok()?;
            }
        }
        (masters == MASTERS).then_some(keys)
    }
}

/// Returns the answers of a Redis node to `ROLE` and `DBSIZE`.
async fn role_and_size(node: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(node).await?;
    stream.write_all(b"ROLE\r\nDBSIZE\r\nQUIT\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer.trim_end().trim_end_matches("+OK").to_owned())
}

/// A straight line through the second half of a series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Trend {
    pub(crate) mean: f64,
    pub(crate) per_hour: f64,
    /// Rise of the line over the second half.
    pub(crate) rise: f64,
    /// The largest rise that is still noise.
    pub(crate) noise: f64,
}

impl Trend {
    /// Fits a line to the second half of `(second, value)` by least squares. A rise is noise below three standard
    /// deviations of the values from the line, below a twentieth of the mean, or below `tolerance`.
    pub(crate) fn of(points: &[(f64, f64)], tolerance: f64) -> Option<Self> {
        let (first, last) = (points.first()?.0, points.last()?.0);
        let half: Vec<_> = points.iter().filter(|(second, _)| *second >= (first + last) / 2.0).collect();
        let count = half.len() as f64;
        let mean_of = |value: &dyn Fn(&(f64, f64)) -> f64| half.iter().map(|point| value(point)).sum::<f64>() / count;
        let (mean_second, mean) = (mean_of(&|point| point.0), mean_of(&|point| point.1));
        let variance = mean_of(&|point| (point.0 - mean_second).powi(2));
        if variance == 0.0 {
            return None;
        }
        let slope = mean_of(&|point| (point.0 - mean_second) * (point.1 - mean)) / variance;
        let deviation = mean_of(&|point| (point.1 - mean - slope * (point.0 - mean_second)).powi(2)).sqrt();
        let rise = slope * (last - first) / 2.0;
        let noise = (3.0 * deviation).max(0.05 * mean).max(tolerance);
        Some(Self { mean, per_hour: slope * 3_600.0, rise, noise })
    }

    pub(crate) fn is_flat(&self) -> bool {
        self.rise <= self.noise
    }
}
