//! [`Statsd`]: sends counters to statsd under the names of envoyproxy/ratelimit, over TCP like that service or over UDP
//! with DogStatsD tags.
//!
//! A counter is sent as its increase since the last transmission. If a transmission over TCP fails, the next one
//! contains its increase as well; with UDP it is unknown whether a datagram arrived.

use std::{collections::BTreeMap, fmt::Write, io, sync::Arc, time::Duration};

use regex_lite::Regex;
use serde::{Deserialize, Serialize};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpStream, UdpSocket},
    sync::watch,
    time::{interval, timeout},
};

use super::{RESPONSE_TIME, TelemetryError, expand};
use crate::metrics::{Histogram, LogThrottle, Totals};

/// Timeout for connecting and sending all metrics.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a datagram, as in the clients of DogStatsD: it fits into an Ethernet frame.
const MAX_DATAGRAM_BYTES: usize = 1_432;

/// Settings of a statsd server.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct StatsdSettings {
    /// Address as `host:port`. Without it no metrics are sent.
    pub addr: Option<String>,
    /// Protocol: `tcp` or `udp`.
    pub protocol: StatsdProtocol,
    /// Interval at which metrics are sent.
    #[serde(with = "sluicegate_duration::Text")]
    pub interval: Duration,
    /// Tags of all metrics, as `name:value`.
    pub tags: Vec<String>,
    /// Mappings of names to other names with tags, for UDP.
    pub name_mappings: Vec<NameMapping>,
}

impl Default for StatsdSettings {
    fn default() -> Self {
        Self {
            addr: None,
            protocol: StatsdProtocol::default(),
            interval: Duration::from_secs(10),
            tags: Vec::new(),
            name_mappings: Vec::new(),
        }
    }
}

impl StatsdSettings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if self.interval.is_zero() {
            return Some("telemetry.statsd.interval must be greater than 0");
        }
        if self.tags.iter().any(|tag| tag.contains('|') || tag.contains(char::is_control)) {
            return Some("telemetry.statsd.tags must contain neither | nor control characters");
        }
        None
    }
}

/// Protocol of a statsd server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum StatsdProtocol {
    /// Lines over TCP, with tags as a part of the name: `name.__tag=value`.
    #[default]
    Tcp,
    /// Datagrams of lines over UDP, with DogStatsD tags.
    Udp,
}

/// Mapping of a name to another name with tags. The first mapping with a matching pattern applies.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NameMapping {
    /// Regular expression for the name.
    pub pattern: String,
    /// New name; `$1` is the first group.
    pub name: String,
    /// Tags such as `tag:$2`.
    #[serde(default)]
    pub tags: Vec<String>,
}

/// A sender of metrics to statsd.
pub struct Statsd {
    addr: String,
    protocol: StatsdProtocol,
    interval: Duration,
    tags: Vec<String>,
    name_mappings: Vec<(Regex, NameMapping)>,
    /// Totals of the last successful transmission.
    sent_totals: Totals,
    sent_times: BTreeMap<Duration, u64>,
    log_throttle: LogThrottle,
}

impl Statsd {
    /// Creates a sender; `None` if no address is configured.
    ///
    /// # Errors
    ///
    /// Returns an error if the pattern of a name mapping is invalid.
    pub fn new(settings: &StatsdSettings) -> Result<Option<Self>, TelemetryError> {
        let Some(addr) = settings.addr.clone() else {
            return Ok(None);
        };
        let name_mappings = settings.name_mappings.iter().map(|mapping| {
            let pattern = Regex::new(&mapping.pattern).map_err(|error| {
                let pattern = &mapping.pattern;
                TelemetryError(format!("invalid pattern {pattern:?} in telemetry.statsd.name_mappings: {error}"))
            })?;
            Ok((pattern, mapping.clone()))
        });
        Ok(Some(Self {
            addr,
            protocol: settings.protocol,
            interval: settings.interval,
            tags: settings.tags.clone(),
            name_mappings: name_mappings.collect::<Result<_, TelemetryError>>()?,
            sent_totals: Totals::new(),
            sent_times: BTreeMap::new(),
            log_throttle: LogThrottle::default(),
        }))
    }

    /// Sends metrics at the interval until the service stops, and a last time then.
    pub async fn run(
        mut self,
        read: impl Fn() -> Totals + Send + Sync + 'static,
        latency: Arc<Histogram>,
        mut stopping: watch::Receiver<bool>,
    ) {
        let read = Arc::new(read);
        let mut tick = interval(self.interval);
        let mut is_last = false;
        while !is_last {
            tokio::select! {
                _ = tick.tick() => {}
                _ = stopping.wait_for(|stop| *stop) => is_last = true,
            }
            let read = Arc::clone(&read);
            // With many rules, reading all counters takes a while.
            let Ok(totals) = tokio::task::spawn_blocking(move || read()).await else {
                continue;
            };
            let times = latency.buckets().collect();
            let lines = self.lines(&totals, &times);
            match timeout(SEND_TIMEOUT, self.send(&lines)).await {
                Ok(Ok(())) => {
                    self.sent_totals = totals;
                    self.sent_times = times;
                }
                failed if self.log_throttle.should_log() => {
                    let error = match failed {
                        Ok(Err(error)) => error.to_string(),
                        _ => "timeout".to_owned(),
                    };
                    tracing::warn!(
                        addr = self.addr,
                        error,
                        "cannot send metrics to statsd; retrying at the next interval"
                    );
                }
                _ => {}
            }
        }
    }

    fn lines(&self, totals: &Totals, times: &BTreeMap<Duration, u64>) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, total) in totals {
            let added = increase(self.sent_totals.get(name), *total);
            if added > 0 {
                lines.push(self.line(name, &format!("{added}|c")));
            }
        }
        for (time, total) in times {
            let added = increase(self.sent_times.get(time), *total);
            if added > 0 {
                // The sample rate stands for `added` requests with this response time.
                let value = format!("{}|ms|@{}", time.as_secs_f64() * 1e3, 1.0 / added as f64);
                lines.push(self.line(RESPONSE_TIME, &value));
            }
        }
        lines
    }

    fn line(&self, name: &str, value: &str) -> String {
        if self.protocol == StatsdProtocol::Tcp {
            let mut line = name.to_owned();
            for tag in &self.tags {
                let _ = write!(line, ".__{}", tag.replacen(':', "=", 1));
            }
            return format!("{line}:{value}\n");
        }
        let matching = self.name_mappings.iter().find_map(|(pattern, to)| Some((pattern.captures(name)?, to)));
        let (name, mut tags) = match matching {
            Some((groups, NameMapping { name, tags, .. })) => {
                let mut expanded = Vec::new();
                for part in tags.iter().flat_map(|tag| tag.split(',')) {
                    // A comma in a name must not begin a tag.
                    expanded.push(expand(&groups, part).replace(',', "_"));
                }
                (expand(&groups, name), expanded)
            }
            None => (name.to_owned(), Vec::new()),
        };
        tags.extend_from_slice(&self.tags);
        let tags = if tags.is_empty() { String::new() } else { format!("|#{}", tags.join(",")) };
        format!("{name}:{value}{tags}\n")
    }

    async fn send(&self, lines: &[String]) -> io::Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        match self.protocol {
            StatsdProtocol::Tcp => {
                // Each transmission uses a new connection, because a failure of an idle connection is not detected.
                let mut stream = TcpStream::connect(&self.addr).await?;
                stream.write_all(lines.concat().as_bytes()).await?;
                stream.shutdown().await
            }
            StatsdProtocol::Udp => {
                let target = tokio::net::lookup_host(&self.addr).await?.next();
                let target = target.ok_or_else(|| io::Error::other("host not found"))?;
                let local = if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                let socket = UdpSocket::bind(local).await?;
                let mut datagram = String::new();
                for line in lines {
                    if !datagram.is_empty() && datagram.len() + line.len() > MAX_DATAGRAM_BYTES {
                        socket.send_to(datagram.as_bytes(), target).await?;
                        datagram.clear();
                    }
                    datagram += line;
                }
                socket.send_to(datagram.as_bytes(), target).await.map(drop)
            }
        }
    }
}

/// Returns how much a counter has grown since it was last sent.
fn increase(before: Option<&u64>, now: u64) -> u64 {
    let before = before.copied().unwrap_or(0);
    // The counters of a rule that was removed and added again restart at zero.
    now.checked_sub(before).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use sluicegate_testing::test_log::TestLog;

    use super::*;

    fn statsd(settings: StatsdSettings) -> Statsd {
        Statsd::new(&StatsdSettings { addr: Some("x:1".into()), ..settings }).unwrap().unwrap()
    }

    fn totals(all: &[(&str, u64)]) -> Totals {
        all.iter().map(|(name, total)| ((*name).to_owned(), *total)).collect()
    }

    #[test]
    fn sends_the_increase_since_the_last_time() {
        let mut statsd = statsd(StatsdSettings { tags: vec!["zone:a".into(), "b:c:d".into()], ..Default::default() });
        statsd.sent_totals = totals(&[("a", 5), ("b", 5), ("c", 5)]);
        statsd.sent_times = BTreeMap::from([(Duration::from_micros(1_500), 4)]);
        let times = BTreeMap::from([(Duration::from_micros(1_500), 8), (Duration::from_millis(2), 0)]);
        let lines = statsd.lines(&totals(&[("a", 7), ("b", 5), ("c", 2), ("d", 1)]), &times);
        let tags = ".__zone=a.__b=c:d";
        assert_eq!(
            lines,
            [
                format!("a{tags}:2|c\n"),
                format!("c{tags}:2|c\n"),
                format!("d{tags}:1|c\n"),
                format!("ratelimit_server.ShouldRateLimit.response_time{tags}:1.5|ms|@0.25\n"),
            ]
        );
    }

    #[test]
    fn lines_over_udp_have_tags() {
        let mapping = |pattern: &str, name: &str, tags: &[&str]| NameMapping {
            pattern: pattern.into(),
            name: name.into(),
            tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        };
        let statsd = statsd(StatsdSettings {
            protocol: StatsdProtocol::Udp,
            tags: vec!["zone:a".into()],
            name_mappings: vec![
                mapping(r"^rate\.([^.]+)\.(.+)\.hits$", "rate.hits", &["domain:$1", "rule:${2}_x"]),
                mapping("^rate", "never", &[]),
            ],
            ..Default::default()
        });
        assert_eq!(statsd.line("rate.d.k.v.hits", "1|c"), "rate.hits:1|c|#domain:d,rule:k.v_x,zone:a\n");
        assert_eq!(statsd.line("rate.d.k.v,env.hits", "1|c"), "rate.hits:1|c|#domain:d,rule:k.v_env_x,zone:a\n");
        assert_eq!(statsd.line("other", "1|c"), "other:1|c|#zone:a\n");
        let invalid = StatsdSettings {
            addr: Some("x:1".into()),
            name_mappings: vec![mapping("(", "x", &[])],
            ..Default::default()
        };
        assert!(Statsd::new(&invalid).is_err());
    }

    /// Runs for two transmissions: the first reading of the totals stops the sender, so the second is the last.
    async fn send_twice(statsd: Statsd) {
        let (stop, stopping) = watch::channel(false);
        let total = AtomicU64::new(5);
        let read = move || {
            stop.send_replace(true);
            totals(&[("a", total.fetch_add(2, Relaxed))])
        };
        statsd.run(read, Arc::new(Histogram::new("x", "", 1)), stopping).await;
    }

    #[tokio::test]
    async fn a_transmission_contains_the_increase_since_the_last_successful_one() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let mut statsd = statsd(StatsdSettings { protocol: StatsdProtocol::Udp, ..Default::default() });
        statsd.addr = socket.local_addr().unwrap().to_string();
        send_twice(statsd).await;
        let mut datagram = [0; 100];
        for expected in ["a:5|c\n", "a:2|c\n"] {
            let length = socket.recv(&mut datagram).await.unwrap();
            assert_eq!(&datagram[..length], expected.as_bytes());
        }
    }

    #[tokio::test]
    async fn repeated_failures_are_logged_once() {
        let log = TestLog::start();
        let mut statsd = statsd(StatsdSettings::default());
        statsd.addr = "127.0.0.1:1".into();
        send_twice(statsd).await;
        let log = log.text();
        assert_eq!(log.matches("cannot send metrics to statsd").count(), 1, "{log}");
    }

    #[tokio::test]
    async fn a_datagram_contains_as_many_lines_as_fit() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let mut statsd = statsd(StatsdSettings { protocol: StatsdProtocol::Udp, ..Default::default() });
        statsd.addr = socket.local_addr().unwrap().to_string();
        let half = "x".repeat(MAX_DATAGRAM_BYTES / 2);
        statsd.send(&[half.clone(), half, "y".to_owned()]).await.unwrap();
        let mut datagram = [0; 2 * MAX_DATAGRAM_BYTES];
        for expected in [MAX_DATAGRAM_BYTES, 1] {
            assert_eq!(socket.recv(&mut datagram).await.unwrap(), expected);
        }
    }
}
