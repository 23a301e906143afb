//! What is counted, sent to statsd under the names of envoyproxy/ratelimit: over TCP as that service does it, or over UDP with
//! DogStatsD's tags.
//!
//! Counters go as what has been added since they were last sent. What could not be sent over TCP goes with the next; of a
//! datagram nobody knows whether it arrived.

use std::{collections::BTreeMap, fmt::Write, io, sync::Arc, time::Duration};

use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpStream, UdpSocket},
    sync::watch,
    time::{interval, timeout},
};

use super::{RESPONSE_TIME, TelemetryError};
use crate::metrics::{Histogram, LogThrottle, Totals};

/// To connect, and to send all there is.
const PATIENCE: Duration = Duration::from_secs(5);
/// Fits into a frame of Ethernet, as DogStatsD's clients have it.
const DATAGRAM: usize = 1_432;

/// Whom to tell, and how.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StatsdSettings {
    /// `host:port`; without it nobody is told.
    pub addr: Option<String>,
    /// How.
    pub protocol: StatsdProtocol,
    /// How often.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub interval: Duration,
    /// `name:value`, for all.
    pub tags: Vec<String>,
    /// Names that become others with tags, over UDP.
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

/// How statsd is spoken to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StatsdProtocol {
    /// Lines; tags are a part of the name, `name.__tag=value`.
    #[default]
    Tcp,
    /// Datagrams of lines, with DogStatsD's tags.
    Udp,
}

/// A name that becomes another one, and parts of it tags; the first that fits has the say.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NameMapping {
    /// A regular expression.
    pub pattern: String,
    /// The name then; `$1` is the first group.
    pub name: String,
    /// `tag:$2`.
    #[serde(default)]
    pub tags: Vec<String>,
}

/// Tells it.
pub struct Statsd {
    addr: String,
    protocol: StatsdProtocol,
    interval: Duration,
    tags: Vec<String>,
    name_mappings: Vec<(Regex, NameMapping)>,
    /// What was sent.
    before: Totals,
    times_before: BTreeMap<Duration, u64>,
    away: LogThrottle,
}

impl Statsd {
    /// `None` where nobody is to be told.
    pub fn new(settings: &StatsdSettings) -> Result<Option<Self>, TelemetryError> {
        let Some(addr) = settings.addr.clone() else {
            return Ok(None);
        };
        let name_mappings = settings.name_mappings.iter().map(|mapping| {
            let pattern = Regex::new(&mapping.pattern).map_err(|error| TelemetryError(error.to_string()))?;
            Ok((pattern, mapping.clone()))
        });
        Ok(Some(Self {
            addr,
            protocol: settings.protocol,
            interval: settings.interval,
            tags: settings.tags.clone(),
            name_mappings: name_mappings.collect::<Result<_, TelemetryError>>()?,
            before: Totals::new(),
            times_before: BTreeMap::new(),
            away: LogThrottle::default(),
        }))
    }

    /// Until the service stops, and once more then.
    pub async fn run(
        mut self,
        read: impl Fn() -> Totals + Send + Sync + 'static,
        latency: Arc<Histogram>,
        mut stopping: watch::Receiver<bool>,
    ) {
        let read = Arc::new(read);
        let mut tick = interval(self.interval);
        let mut last = false;
        while !last {
            tokio::select! {
                _ = tick.tick() => {}
                _ = stopping.wait_for(|stop| *stop) => last = true,
            }
            let read = Arc::clone(&read);
            // Of many rules this is work for a while.
            let Ok(totals) = tokio::task::spawn_blocking(move || read()).await else {
                continue;
            };
            let times = latency.buckets().collect();
            let lines = self.lines(&totals, &times);
            match timeout(PATIENCE, self.send(&lines)).await {
                Ok(Ok(())) => (self.before, self.times_before) = (totals, times),
                failed if self.away.should_log() => {
                    let error = failed.ok().and_then(Result::err).map_or("too slow".into(), |error| error.to_string());
                    tracing::warn!(addr = self.addr, error, "statsd cannot be told; it will be later");
                }
                _ => {}
            }
        }
    }

    fn lines(&self, totals: &Totals, times: &BTreeMap<Duration, u64>) -> Vec<String> {
        // A rule that went and came back begins at nothing.
        let since = |before: Option<&u64>, now: u64| now.checked_sub(before.copied().unwrap_or(0)).unwrap_or(now);
        let mut lines = Vec::new();
        for (name, total) in totals {
            let added = since(self.before.get(name), *total);
            if added > 0 {
                lines.push(self.line(name, &format!("{added}|c")));
            }
        }
        for (time, total) in times {
            let added = since(self.times_before.get(time), *total);
            if added > 0 {
                // So many like this one.
                let value = format!("{}|ms|@{}", time.as_secs_f64() * 1e3, 1.0 / added as f64);
                lines.push(self.line(RESPONSE_TIME, &value));
            }
        }
        lines
    }

    fn line(&self, name: &str, value: &str) -> String {
        if self.protocol == StatsdProtocol::Tcp {
            let tag = |line: &mut String, tag: &String| {
                let _ = write!(line, ".__{}", tag.replacen(':', "=", 1));
            };
            let mut line = name.to_owned();
            self.tags.iter().for_each(|it| tag(&mut line, it));
            return format!("{line}:{value}\n");
        }
        let found = self.name_mappings.iter().find_map(|(pattern, to)| Some((pattern.captures(name)?, to)));
        let (name, mut tags) = match found {
            Some((groups, NameMapping { name, tags, .. })) => {
                let expand = |template: &str| {
                    let mut text = String::new();
                    groups.expand(template, &mut text);
                    text
                };
                (expand(name), tags.iter().map(|tag| expand(tag)).collect())
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
                // A connection of its own for each time: one that stays open may be dead without anybody knowing.
                let mut stream = TcpStream::connect(&self.addr).await?;
                stream.write_all(lines.concat().as_bytes()).await?;
                stream.shutdown().await
            }
            StatsdProtocol::Udp => {
                let target = tokio::net::lookup_host(&self.addr).await?.next();
                let target = target.ok_or_else(|| io::Error::other("no such host"))?;
                let any = if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                let socket = UdpSocket::bind(any).await?;
                let mut datagram = String::new();
                for line in lines {
                    if !datagram.is_empty() && datagram.len() + line.len() > DATAGRAM {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn statsd(settings: StatsdSettings) -> Statsd {
        Statsd::new(&StatsdSettings { addr: Some("x:1".into()), ..settings }).unwrap().unwrap()
    }

    fn totals(all: &[(&str, u64)]) -> Totals {
        all.iter().map(|(name, total)| ((*name).to_owned(), *total)).collect()
    }

    #[test]
    fn what_was_added_is_told() {
        let mut statsd = statsd(StatsdSettings { tags: vec!["zone:a".into(), "b:c:d".into()], ..Default::default() });
        statsd.before = totals(&[("a", 5), ("b", 5), ("c", 5)]);
        statsd.times_before = BTreeMap::from([(Duration::from_micros(1_500), 4)]);
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
    fn a_datagram_has_tags() {
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
        assert_eq!(statsd.line("other", "1|c"), "other:1|c|#zone:a\n");
        let wrong = StatsdSettings {
            addr: Some("x:1".into()),
            name_mappings: vec![mapping("(", "x", &[])],
            ..Default::default()
        };
        assert!(Statsd::new(&wrong).is_err());
    }
}
