//! The telemetry phase: the exporters, and the metrics that several phases record.

use std::sync::Arc;

use tokio::{sync::watch, task::JoinHandle};

use super::AppError;
use crate::{
    engine::{Statistics, StatisticsSettings},
    metrics::{Totals, WorkerId},
    process::observe_usage,
    service::{Clock, decisions, reload::RulesInForce},
    settings::Settings,
    store,
    telemetry::{Meters, Statsd, Traces},
};

/// The exporters, and the metrics that several phases record.
pub(super) struct Telemetry {
    pub(super) clock: Clock,
    /// Number of worker threads.
    pub(super) workers: usize,
    pub(super) meters: Meters,
    pub(super) traces: Traces,
    /// The exporter to statsd, until [`Telemetry::start_statsd`] takes it.
    statsd: Option<Statsd>,
    pub(super) statistics: Arc<Statistics>,
    pub(super) decision_metrics: Arc<decisions::Metrics>,
    pub(super) store_metrics: Arc<store::Metrics>,
}

impl Telemetry {
    /// Starts the exporters.
    pub(super) fn start(settings: &Settings) -> Result<Self, AppError> {
        let workers = settings.number_of_workers();
        // The control runtime decides requests that arrive as JSON, and records them like one more worker.
        let recorders = workers + 1;
        let statistics_settings = StatisticsSettings {
            max_dynamic_series: settings.telemetry.max_dynamic_series,
            near_limit_ratio: settings.decisions.near_limit_ratio,
        };
        let store_metrics = store::Metrics::new(recorders);
        let decision_metrics = decisions::Metrics::new(recorders);
        let histograms = vec![Arc::clone(decision_metrics.latency()), Arc::clone(store_metrics.calls.latency())];
        let clock = Clock::System;
        let meters = Meters::start(&settings.telemetry.otlp, histograms)?;
        observe_usage(&meters, clock.now());
        Ok(Self {
            clock,
            workers,
            meters,
            traces: Traces::start_exporting(&settings.telemetry.otlp)?,
            statsd: Statsd::new(&settings.telemetry.statsd)?,
            statistics: Statistics::new(recorders, statistics_settings),
            decision_metrics,
            store_metrics,
        })
    }

    /// Returns the worker id under which the control runtime records its decisions.
    pub(super) const fn control(&self) -> WorkerId {
        WorkerId(self.workers)
    }

    /// Returns a function that sums up the metrics of envoyproxy/ratelimit, for statsd and mapping files.
    pub(super) fn totals(&self, in_force: &Arc<RulesInForce>) -> impl Fn() -> Totals + Clone + Send + Sync + 'static {
        let statistics = Arc::clone(&self.statistics);
        let metrics = Arc::clone(&self.decision_metrics);
        let in_force = Arc::clone(in_force);
        move || {
            let mut totals = Totals::new();
            statistics.add_totals(&mut totals);
            metrics.add_totals(&mut totals);
            in_force.add_totals(&mut totals);
            totals
        }
    }

    /// Starts the export to statsd, if `telemetry.statsd.addr` is set.
    ///
    /// The export is not in the list of background tasks, because its last run follows the end of the servers.
    pub(super) fn start_statsd(&mut self, in_force: &Arc<RulesInForce>) -> Option<StatsdExport> {
        let statsd = self.statsd.take()?;
        let (stop, stopping) = watch::channel(false);
        let latency = Arc::clone(self.decision_metrics.latency());
        let task = tokio::spawn(statsd.run(self.totals(in_force), latency, stopping));
        Some(StatsdExport { stop, task })
    }

    /// Exports the last metrics and all buffered spans.
    pub(super) async fn stop(self) {
        self.meters.stop().await;
        let traces = self.traces;
        let _ = tokio::task::spawn_blocking(move || traces.stop()).await;
    }
}

/// The running export to statsd.
pub(super) struct StatsdExport {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl StatsdExport {
    /// Exports a last time and stops.
    pub(super) async fn stop(self) {
        self.stop.send_replace(true);
        let _ = self.task.await;
    }
}
