//! [`Simulator`]: replays recorded requests with changed rules, limits or switches, before operators apply them.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Semaphore;

use super::{
    Clock,
    overrides::{ChangeRequest, OverrideSync},
    reload::RulesInForce,
};
use crate::{
    engine::{Overrides, overrides::OverrideError},
    replay::Replay,
    rules::{self, Diagnostic, Options, RuleSet, SourceFile},
    traffic::{
        self, Reader, TrafficError,
        access_log::{Mapping, MappingError},
    },
};

/// Time after which a simulation stops to read requests.
const MAX_TIME: Duration = Duration::from_secs(20);
/// Number of requests that are replayed together.
const BATCH_REQUESTS: usize = 1_024;
/// Size of encoded requests in bytes above which they are replayed before there are [`BATCH_REQUESTS`].
const BATCH_BYTES: usize = 1 << 20;
/// Maximum number of requests. Bounds the memory for their entities.
const MAX_REQUESTS: u64 = 2_000_000;

/// The requests to replay.
#[derive(Clone, Debug)]
pub enum Traffic {
    /// The requests that this instance has recorded, compared with their decisions.
    Recorded,
    /// Lines of an access log, compared with the decisions of the rules in force.
    AccessLog {
        /// The lines.
        log: String,
        /// The mapping from the fields of a line to descriptors, in YAML.
        mapping: String,
    },
}

/// The input of a simulation.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// The rules to evaluate; `None` for those in force.
    pub files: Option<Vec<SourceFile>>,
    /// Overrides to set or remove in addition to those in force.
    pub changes: Vec<ChangeRequest>,
    /// The requests.
    pub traffic: Traffic,
}

/// Outcome of a simulation.
pub struct Outcome {
    /// The decisions.
    pub replay: Replay,
    /// Number of lines of an access log that could not be read.
    pub invalid_lines: u64,
    /// Whether only a part of the requests was replayed.
    pub is_incomplete: bool,
}

/// Error returned when a simulation is not possible.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// Another simulation is in progress.
    #[error("another simulation is running on this instance; try again later")]
    Busy,
    /// This instance records no requests.
    #[error("this instance records no requests: set record.dir, or upload an access log")]
    NothingRecorded,
    /// The rules are invalid.
    #[error("the rules are invalid: {}", list(.0))]
    Rules(Vec<Diagnostic>),
    /// A change is invalid.
    #[error("{0}: {1}")]
    Change(String, OverrideError),
    /// The mapping is invalid.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The recorded requests cannot be read.
    #[error(transparent)]
    Traffic(#[from] TrafficError),
    /// The simulation was stopped, because the service is shutting down.
    #[error("the service is shutting down")]
    Stopped,
}

fn list(diagnostics: &[Diagnostic]) -> String {
    diagnostics.iter().take(5).map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Replays requests, one simulation at a time.
pub struct Simulator {
    in_force: Arc<RulesInForce>,
    overrides: Arc<OverrideSync>,
    clock: Clock,
    options: Options,
    /// Directory of the recorded requests.
    recorded: Option<PathBuf>,
    permit: Arc<Semaphore>,
}

/// The rules and overrides to evaluate, and those to compare with.
struct Setup {
    rules: RuleSet,
    overrides: Overrides,
    baseline: Option<(RuleSet, Overrides)>,
}

impl Simulator {
    /// Creates a simulator. `recorded` is the directory of the recorded requests.
    #[must_use]
    pub fn new(
        in_force: Arc<RulesInForce>,
        overrides: Arc<OverrideSync>,
        clock: Clock,
        options: Options,
        recorded: Option<PathBuf>,
    ) -> Arc<Self> {
        Arc::new(Self { in_force, overrides, clock, options, recorded, permit: Arc::new(Semaphore::new(1)) })
    }

    /// Returns whether this instance records requests.
    #[must_use]
    pub fn records_requests(&self) -> bool {
        self.recorded.is_some()
    }

    /// Runs a simulation on another thread. It changes nothing.
    ///
    /// # Errors
    ///
    /// Returns an error if another simulation is running, or if rules, changes or requests cannot be read.
    pub async fn run(self: &Arc<Self>, simulation: Simulation) -> Result<Outcome, SimulationError> {
        let permit = Arc::clone(&self.permit).try_acquire_owned().map_err(|_| SimulationError::Busy)?;
        let this = Arc::clone(self);
        let running = tokio::task::spawn_blocking(move || {
            let outcome = this.replay(&simulation);
            drop(permit);
            outcome
        });
        running.await.map_err(|_| SimulationError::Stopped)?
    }

    fn replay(&self, simulation: &Simulation) -> Result<Outcome, SimulationError> {
        let now = self.clock.now();
        let Setup { rules, overrides, baseline } = self.setup(simulation)?;
        let baseline = baseline.as_ref().map(|(rules, overrides)| (rules.clone(), overrides));
        let mut replay = Replay::with_overrides((rules, &overrides), baseline, now);
        let (invalid_lines, is_incomplete) = match &simulation.traffic {
            Traffic::Recorded => {
                let directory = self.recorded.clone().ok_or(SimulationError::NothingRecorded)?;
                (0, replay_recorded(&mut replay, directory)?)
            }
            Traffic::AccessLog { log, mapping } => replay_log(&mut replay, log, &Mapping::read(mapping)?),
        };
        Ok(Outcome { replay, invalid_lines, is_incomplete })
    }

    fn setup(&self, simulation: &Simulation) -> Result<Setup, SimulationError> {
        let snapshot = self.in_force.snapshot().load_full();
        let rules = match &simulation.files {
            Some(files) => rules::compile(files, self.options).map_err(SimulationError::Rules)?.0,
            None => snapshot.rule_set().clone(),
        };
        let mut overrides = snapshot.overrides().clone();
        for change in &simulation.changes {
            match self.overrides.new_override(change) {
                Some(entry) => {
                    // A planned override is simulated as if it had begun.
                    let entry = entry.begun().unwrap_or(entry);
                    let checked = Overrides::check(&entry, self.options);
                    let added = checked.and_then(|()| overrides.put(entry, self.options));
                    added.map_err(|error| SimulationError::Change(change.target.to_string(), error))?;
                }
                None => drop(overrides.remove(&change.target)),
            }
        }
        // Recorded requests are compared with the decisions that were made. An access log does not have these.
        let baseline = match &simulation.traffic {
            Traffic::Recorded => None,
            Traffic::AccessLog { .. } => Some((snapshot.rule_set().clone(), snapshot.overrides().clone())),
        };
        Ok(Setup { rules, overrides, baseline })
    }
}

/// Encoded requests that are replayed in batches, until there were [`MAX_REQUESTS`] or [`MAX_TIME`] is over.
struct Batches<'a> {
    replay: &'a mut Replay,
    bytes: Vec<u8>,
    ends: Vec<usize>,
    started: Instant,
}

impl<'a> Batches<'a> {
    fn new(replay: &'a mut Replay) -> Self {
        Self { replay, bytes: Vec::new(), ends: Vec::new(), started: Instant::now() }
    }

    /// Completes the encoded request at the end of `bytes`. Returns false if no further requests are accepted.
    fn end_request(&mut self) -> bool {
        self.ends.push(self.bytes.len());
        if self.ends.len() < BATCH_REQUESTS && self.bytes.len() < BATCH_BYTES {
            return true;
        }
        self.replay_all();
        self.started.elapsed() < MAX_TIME && self.replay.requests < MAX_REQUESTS
    }

    fn replay_all(&mut self) {
        let mut requests = Vec::new();
        let mut invalid = 0;
        let mut start = 0;
        for &end in &self.ends {
            match traffic::decode(&self.bytes[start..end]) {
                Ok(request) => requests.push(request),
                Err(_) => invalid += 1,
            }
            start = end;
        }
        self.replay.process(&requests);
        self.replay.skipped += invalid;
        drop(requests);
        self.bytes.clear();
        self.ends.clear();
    }
}

/// Replays recorded requests. Returns whether some may not have been replayed.
fn replay_recorded(replay: &mut Replay, directory: PathBuf) -> Result<bool, TrafficError> {
    let mut reader = Reader::new(&[directory])?;
    let mut message = Vec::new();
    let mut batches = Batches::new(replay);
    let mut is_incomplete = false;
    while reader.next(&mut message)? {
        batches.bytes.extend_from_slice(&message);
        if !batches.end_request() {
            is_incomplete = true;
            break;
        }
    }
    batches.replay_all();
    Ok(is_incomplete)
}

/// Replays the lines of an access log. Returns the number of invalid lines, and whether some lines may not have been
/// replayed.
fn replay_log(replay: &mut Replay, log: &str, mapping: &Mapping) -> (u64, bool) {
    let mut batches = Batches::new(replay);
    let mut invalid_lines = 0;
    let mut is_incomplete = false;
    for line in log.lines() {
        let is_request = mapping.encode(line, &mut batches.bytes);
        invalid_lines += u64::from(is_request.is_err() && !line.trim().is_empty());
        if is_request == Ok(true) && !batches.end_request() {
            is_incomplete = true;
            break;
        }
    }
    batches.replay_all();
    (invalid_lines, is_incomplete)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::testing::admin;

    const RULES: &str =
        "domain: api\ndescriptors:\n- { key: user, rate_limit: { unit: hour, requests_per_unit: 1 } }\n";

    fn replay() -> Replay {
        let file = SourceFile { name: "a.yaml".into(), text: RULES.into() };
        Replay::new(rules::compile(&[file], Options::default()).unwrap().0, None)
    }

    #[tokio::test]
    async fn an_error_lists_what_is_wrong_in_the_rules() {
        let text = "domain: api\ndescriptors: [{key: k, rate_limit: {unit: eon}}]\n".to_owned();
        let files = Some(vec![SourceFile { name: "a.yaml".into(), text }]);
        let simulation = Simulation { files, changes: Vec::new(), traffic: Traffic::Recorded };
        let error = admin(RULES).simulator.run(simulation).await.err().unwrap().to_string();
        assert!(error.contains("a.yaml:2:") && error.contains("eon"), "{error}");
    }

    #[test]
    fn an_instance_with_a_directory_records_requests() {
        let admin = admin(RULES);
        let with = |recorded| {
            let (in_force, overrides) = (Arc::clone(&admin.in_force), Arc::clone(&admin.overrides));
            Simulator::new(in_force, overrides, admin.clock.clone(), Options::default(), recorded).records_requests()
        };
        assert_eq!((with(None), with(Some("traffic".into()))), (false, true));
    }

    #[test]
    fn further_requests_are_accepted_until_the_maximum() {
        let accepted = |requests: u64| {
            let mut replay = replay();
            replay.requests = requests;
            let mut batches = Batches::new(&mut replay);
            (0..BATCH_REQUESTS).filter(|_| batches.end_request()).count()
        };
        assert_eq!((accepted(MAX_REQUESTS - 1), accepted(MAX_REQUESTS)), (BATCH_REQUESTS, BATCH_REQUESTS - 1));
    }

    #[test]
    fn requests_that_cannot_be_decoded_are_skipped() {
        let mut replay = replay();
        let mut batches = Batches::new(&mut replay);
        for _ in 0..2 {
            batches.bytes.push(0xff);
            assert!(batches.end_request());
        }
        batches.replay_all();
        assert_eq!((replay.skipped, replay.requests), (2, 0));
    }

    #[test]
    fn invalid_lines_of_an_access_log_are_counted() {
        let mapping = Mapping::read("domain: api\ntime: at\ndescriptors:\n- [{ key: user, field: user }]\n").unwrap();
        let log = "not json\n\n  \n{\"at\": 1700000000, \"user\": \"bob\"}\nneither\n";
        let mut replay = replay();
        let (invalid_lines, is_incomplete) = replay_log(&mut replay, log, &mapping);
        assert_eq!((invalid_lines, is_incomplete, replay.requests), (2, false, 1));
    }
}
