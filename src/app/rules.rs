//! The rules phase: where rules come from, and the component that keeps them up to date.

use std::sync::Arc;

use super::{
    AppError,
    signals::Signals,
    tasks::{self, Tasks},
    telemetry::Telemetry,
};
use crate::{
    engine::Resources,
    metrics::Meter,
    rules::{
        Options, SourceFile,
        source::{FileFilter, Source},
    },
    service::reload::RulesInForce,
    settings::Settings,
    transport::xds,
};

/// Returns the rules that are served without a rule directory.
fn examples() -> Vec<SourceFile> {
    let text = include_str!("../../deploy/examples/quickstart.yaml").to_owned();
    vec![SourceFile { name: "deploy/examples/quickstart.yaml".into(), text }]
}

/// Returns the source of the rules that the settings select.
pub(crate) fn source(settings: &Settings) -> Source {
    if settings.rules.xds.server.is_some() {
        return Source::Pushed;
    }
    let filter = if settings.rules.all_files { FileFilter::All } else { FileFilter::Yaml };
    match &settings.rules.dir {
        Some(directory) => Source::Directory(directory.clone(), filter),
        None => Source::BuiltIn(examples()),
    }
}

/// The rules in force, and the component that loads them.
pub(super) struct Rules {
    pub(super) in_force: Arc<RulesInForce>,
    pub(super) options: Options,
    resources: Arc<Resources>,
    control_plane: Option<Arc<xds::Client>>,
}

impl Rules {
    /// Loads the first set of rules, or connects to the control plane that will send it.
    pub(super) fn start(settings: &Settings, telemetry: &Telemetry, tasks: &mut Tasks) -> Result<Self, AppError> {
        let options = Options {
            merge_domains: settings.rules.merge_domains,
            charge_all: settings.rules.charge_all,
            instances: settings.cluster.divisor(),
            peers: settings.cluster.has_peers() && settings.store == "memory",
            notes: false,
        };
        let resources = Arc::new(Resources::default());
        let clock = telemetry.clock.clone();
        let statistics = Arc::clone(&telemetry.statistics);
        let in_force = RulesInForce::start(source(settings), options, clock, statistics, Arc::clone(&resources));
        let in_force = in_force.map_err(AppError::Rules)?;
        let control_plane = xds::Client::new(&settings.rules.xds, &in_force)?;
        if let Some(client) = &control_plane {
            tasks.spawn(&tasks::CONTROL_PLANE, Arc::clone(client).run());
        }
        Ok(Self { in_force, options, resources, control_plane })
    }

    /// Waits until there are rules, unless the service may start without them. Returns `false` if a signal arrives
    /// first.
    pub(super) async fn wait_until_loaded(&self, settings: &Settings, signals: &mut Signals) -> bool {
        if self.control_plane.is_none() || settings.rules.xds.start_without_rules {
            return true;
        }
        tokio::select! {
            () = self.in_force.wait_until_loaded() => true,
            () = signals.next() => false,
        }
    }

    /// Returns the utilization of the resources that elastic limits use.
    pub(super) fn resources(&self) -> Arc<Resources> {
        Arc::clone(&self.resources)
    }

    /// Registers the metrics of reloads and of the control plane.
    pub(super) fn observe(&self, meter: &dyn Meter) {
        self.in_force.observe(meter);
        if let Some(client) = &self.control_plane {
            client.observe(meter);
        }
    }
}
