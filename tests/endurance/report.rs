//! The report of a run: tables in Markdown and plots.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path, time::Duration};

use crate::{
    PERIOD, QUIET,
    features::{FEATURES, IN_FLIGHT, Sharing},
    observer::{Observer, Record},
    plot::{Panel, svg},
    samples::{INTERVAL, Process, Sample, Trend},
    schedule::{Fault, Kind},
    site::INSTANCES,
    support::server::binary,
};

/// Instances that are never restarted. Only their growth is judged.
const NEVER_RESTARTED: [usize; 2] = [0, 3];
/// Memory in MB that half an hour may add: an instance stores the last hour for the console, in at most 10 MB.
const HISTORY: f64 = 5.0;
/// A shorter run does not judge growth, because the caches of a new process fill for some minutes.
const MIN_JUDGED: Duration = Duration::from_secs(1_800);
/// The share of the time in which the machine may not run the observer. A busier machine proves nothing.
const MAX_STALLED: f64 = 0.01;
/// The share of calls that may fail outside of faults and their recovery.
const MAX_STRAY_ERRORS: f64 = 0.0001;

/// The failed calls of one fault.
#[derive(Debug)]
pub(crate) struct FaultReport {
    kind: Kind,
    pub(crate) errors: u64,
    /// Time from the first error to the last one.
    outage: Duration,
    /// Time from the end of the fault to the last error, or `None` if errors did not end.
    pub(crate) recovery: Option<Duration>,
}

impl FaultReport {
    pub(crate) fn new(fault: &Fault, from: u64, until: u64, observer: &Observer) -> Self {
        let now = observer.now();
        let has_errors = |time: &u64| observer.errors_between(*time, *time + PERIOD) > 0;
        let failed: Vec<_> = (from..now).step_by(PERIOD as usize).filter(has_errors).collect();
        let outage = failed.first().zip(failed.last()).map_or(0, |(first, last)| last + PERIOD - first);
        let recovered = (until..now.saturating_sub(QUIET))
            .step_by(PERIOD as usize)
            .find(|time| observer.errors_between(*time, *time + QUIET) == 0);
        Self {
            kind: fault.kind,
            errors: observer.errors_between(from, now),
            outage: Duration::from_millis(outage),
            recovery: recovered.map(|time| Duration::from_millis(time - until)),
        }
    }
}

/// A finished run.
pub(crate) struct Run {
    length: Duration,
    faults: Vec<FaultReport>,
    samples: Vec<Sample>,
    record: Record,
    trends: Vec<(String, Trend)>,
    stray_errors: u64,
    pub(crate) violations: Vec<String>,
}

impl Run {
    pub(crate) fn new(
        is_timed: bool,
        length: Duration,
        epoch: u64,
        faults: Vec<FaultReport>,
        samples: Vec<Sample>,
        mut record: Record,
    ) -> Self {
        let mut violations = std::mem::take(&mut record.violations);
        violations.extend(unused(&record));
        let trends = trends(&samples);
        if length >= MIN_JUDGED {
            violations.extend(growth(&trends));
        }
        let affected = |period: usize| {
            let time = epoch + period as u64 * PERIOD;
            let recovery = crate::RECOVERY.as_millis() as u64;
            record.disturbances.iter().any(|disturbance| {
                let until = disturbance.until.unwrap_or(u64::MAX - recovery);
                disturbance.from < time + PERIOD && time < until + recovery
            })
        };
        let errors = record.errors.iter().enumerate();
        let stray_errors = errors.filter(|(period, _)| !affected(*period)).map(|(_, errors)| errors).sum();
        let calls: u64 = record.results.values().sum();
        if is_timed && stray_errors as f64 > MAX_STRAY_ERRORS * calls as f64 {
            violations.push(format!("{stray_errors} of {calls} calls failed without a fault"));
        }
        let stalled = Duration::from_millis(record.stalls.iter().sum());
        if is_timed && stalled > length.mul_f64(MAX_STALLED) {
            violations.push(format!("the machine did not run the observer for {stalled:?}"));
        }
        Self { length, faults, samples, record, trends, stray_errors, violations }
    }

    /// Writes `report.md` and the plots into this folder.
    pub(crate) fn write(&self, folder: &Path, seed: u64) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("report.md"), self.text(seed)).unwrap();
        for (name, panels) in [("processes.svg", self.process_panels()), ("calls.svg", self.call_panels())] {
            fs::write(folder.join(name), svg(&panels).unwrap()).unwrap();
        }
    }

    fn text(&self, seed: u64) -> String {
        let calls: u64 = self.record.results.values().sum();
        let profile = if binary().components().any(|part| part.as_os_str() == "release") { "release" } else { "test" };
        let minutes = self.length.as_secs_f64() / 60.0;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut text = format!(
            "# Report of an endurance run\n\n\
             `tests/endurance` wrote this page; [Endurance](../design/endurance.md) explains it.\n\n\
             - {minutes:.0} minutes, seed {seed}, build of the profile `{profile}`, {cores} cores for all processes\n\
             - {calls} calls, {:.0} per second, {} faults\n\
             - calls that failed without a fault: {}\n\
             - stalls of the machine: {}, {:.1} s in total\n\
             - violations: {}\n",
            calls as f64 / self.length.as_secs_f64(),
            self.faults.len(),
            self.stray_errors,
            self.record.stalls.len(),
            self.record.stalls.iter().sum::<u64>() as f64 / 1e3,
            self.violations.len(),
        );
        for violation in &self.violations {
            let _ = writeln!(text, "  - {violation}");
        }
        self.write_faults(&mut text);
        self.write_laws(&mut text);
        self.write_trends(&mut text);
        text += "\n## Results of calls\n\n| result | calls |\n| --- | ---: |\n";
        for (name, count) in &self.record.results {
            let _ = writeln!(text, "| {name} | {count} |");
        }
        text
    }

    fn write_faults(&self, text: &mut String) {
        *text += "\n## Faults\n\n| fault | times | failed calls | longest outage s | median recovery s | longest recovery s |\n";
        *text += "| --- | ---: | ---: | ---: | ---: | ---: |\n";
        let mut kinds = BTreeMap::<Kind, Vec<&FaultReport>>::new();
        self.faults.iter().for_each(|fault| kinds.entry(fault.kind).or_default().push(fault));
        for (kind, faults) in kinds {
            let outage = faults.iter().map(|fault| fault.outage).max().unwrap_or_default().as_secs_f64();
            let errors: u64 = faults.iter().map(|fault| fault.errors).sum();
            let mut recoveries: Vec<_> = faults.iter().map(|fault| fault.recovery.unwrap_or(Duration::MAX)).collect();
            recoveries.sort();
            let text_of = |time: Duration| match time {
                Duration::MAX => "never".to_owned(),
                time => format!("{:.1}", time.as_secs_f64()),
            };
            let (median, longest) =
                (text_of(recoveries[recoveries.len() / 2]), text_of(recoveries[recoveries.len() - 1]));
            let (name, times) = (kind.name(), faults.len());
            let _ = writeln!(text, "| {name} | {times} | {errors} | {outage:.1} | {median} | {longest} |");
        }
    }

    fn write_laws(&self, text: &mut String) {
        *text += "\n## Admissions\n\n| feature | counters | windows | mean | highest | bound of that window |\n";
        *text += "| --- | --- | ---: | ---: | ---: | ---: |\n";
        for (feature, highest) in FEATURES.iter().zip(&self.record.highest) {
            let counters = match feature.sharing {
                Sharing::Exact => "Redis",
                Sharing::Eventual { .. } => "Redis, eventual",
                Sharing::Peers { .. } => "peers",
            };
            let mean = highest.total as f64 / highest.windows.max(1) as f64;
            let (key, windows, admitted, bound) = (feature.key, highest.windows, highest.admitted, highest.bound);
            let _ = writeln!(text, "| `{key}` | {counters} | {windows} | {mean:.0} | {admitted} | {bound} |");
        }
        *text += "\n| slots | highest in use | limit |\n| --- | ---: | ---: |\n";
        for (slots, highest) in IN_FLIGHT.iter().zip(self.record.highest_in_flight) {
            let _ = writeln!(text, "| `{}` | {highest} | {} |", slots.key, slots.bound);
        }
        let mut in_force = self.record.in_force.clone();
        in_force.sort();
        if let Some(longest) = in_force.last() {
            let median = in_force[in_force.len() / 2].as_secs_f64();
            let (count, longest) = (in_force.len(), longest.as_secs_f64());
            let _ = writeln!(
                text,
                "\n{count} changes of an override without a fault were in force on all instances after {median:.2} s \
                 (median), {longest:.2} s (longest)."
            );
        }
    }

    fn write_trends(&self, text: &mut String) {
        *text += "\n## Growth in the second half\n\n| | mean | per hour | rise | noise |\n";
        *text += "| --- | ---: | ---: | ---: | ---: |\n";
        for (name, trend) in &self.trends {
            let Trend { mean, per_hour, rise, noise } = trend;
            let _ = writeln!(text, "| {name} | {mean:.1} | {per_hour:.1} | {rise:.1} | {noise:.1} |");
        }
    }

    fn process_panels(&self) -> Vec<Panel> {
        let lines = |value: fn(&Process) -> Option<f64>| -> Vec<(String, Vec<f64>)> {
            let line = |index: usize| filled(self.samples.iter().map(|sample| value(&sample.processes[index])));
            INSTANCES.iter().enumerate().map(|(index, name)| ((*name).to_owned(), line(index))).collect()
        };
        vec![
            panel("resident memory", "MB", lines(|process| process.memory)),
            panel("file descriptors", "descriptors", lines(|process| process.descriptors)),
            panel("gRPC connections", "connections", lines(|process| process.connections)),
            panel("threads", "threads", lines(|process| process.threads)),
        ]
    }

    fn call_panels(&self) -> Vec<Panel> {
        let line =
            |name: &str, value: fn(&Sample) -> Option<f64>| (name.to_owned(), filled(self.samples.iter().map(value)));
        vec![
            panel("answered calls", "per second", vec![line("answered", |sample| Some(sample.answered_per_second))]),
            panel("failed calls", "per second", vec![line("failed", |sample| Some(sample.errors_per_second))]),
            panel(
                "latency",
                "ms",
                vec![line("p50", |sample| Some(sample.p50_millis)), line("p99", |sample| Some(sample.p99_millis))],
            ),
            panel("keys of all masters", "keys", vec![line("keys", |sample| sample.keys)]),
        ]
    }
}

/// Returns a violation for each feature that admitted nothing: its law was not tested.
fn unused(record: &Record) -> impl Iterator<Item = String> {
    let rates = FEATURES.iter().zip(&record.highest).map(|(feature, highest)| (feature.key, highest.total));
    let slots = IN_FLIGHT.iter().zip(record.highest_in_flight).map(|(slots, highest)| (slots.key, highest));
    rates.chain(slots).filter(|(_, admitted)| *admitted == 0).map(|(key, _)| format!("nothing of {key} was admitted"))
}

/// Returns the growth of each series.
pub(crate) fn trends(samples: &[Sample]) -> Vec<(String, Trend)> {
    let series = |value: &dyn Fn(&Sample) -> Option<f64>| -> Vec<(f64, f64)> {
        samples.iter().filter_map(|sample| Some((sample.second, value(sample)?))).collect()
    };
    let mut all = Vec::new();
    for index in NEVER_RESTARTED {
        let name = INSTANCES[index];
        all.push((format!("memory of {name}, MB"), series(&|sample| sample.processes[index].memory), HISTORY));
        all.push((format!("descriptors of {name}"), series(&|sample| sample.processes[index].descriptors), 3.0));
        all.push((format!("connections of {name}"), series(&|sample| sample.processes[index].connections), 3.0));
        all.push((format!("threads of {name}"), series(&|sample| sample.processes[index].threads), 2.0));
    }
    all.push(("keys in Redis".to_owned(), series(&|sample| sample.keys), 5.0));
    all.push(("failed calls per second".to_owned(), series(&|sample| Some(sample.errors_per_second)), 1.0));
    all.into_iter().filter_map(|(name, points, tolerance)| Some((name, Trend::of(&points, tolerance)?))).collect()
}

/// Returns a violation for each series that grows.
pub(crate) fn growth(trends: &[(String, Trend)]) -> impl Iterator<Item = String> {
    let growing = trends.iter().filter(|(_, trend)| !trend.is_flat());
    growing.map(|(name, trend)| format!("{name} grows by {:.1} per hour, from {:.1}", trend.per_hour, trend.mean))
}

fn panel(title: &str, unit: &'static str, lines: Vec<(String, Vec<f64>)>) -> Panel {
    let highest = lines.iter().flat_map(|(_, values)| values).copied().fold(1.0, f64::max);
    Panel {
        title: title.to_owned(),
        unit,
        values_per_second: 1.0 / INTERVAL.as_secs_f64(),
        max_value: 1.1 * highest,
        lines,
    }
}

/// Replaces missing values by the previous one.
fn filled(values: impl Iterator<Item = Option<f64>>) -> Vec<f64> {
    let mut last = 0.0;
    let mut fill = |value: Option<f64>| {
        last = value.unwrap_or(last);
        last
    };
    values.map(&mut fill).collect()
}
