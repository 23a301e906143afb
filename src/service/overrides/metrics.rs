//! The metrics of [`OverrideSync`].

use std::sync::Arc;

use super::{OverrideSync, Replication};
use crate::{
    engine::overrides::Target,
    metrics::{Instrument, Label, Meter, Registrar},
};

impl OverrideSync {
    /// Registers the metrics of the overrides with `meter`.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let this = Arc::clone(self);
        meter.register(Instrument::gauge(
            "sluicegate_overrides",
            "Number of overrides in force, by kind of target, and of planned ones",
            move |observer| {
                let snapshot = this.context.in_force.snapshot().load();
                let [limits, plans, switches] = snapshot.overrides().counts();
                let planned = snapshot.overrides().planned_count();
                for (kind, count) in [("limit", limits), ("plan", plans), ("switch", switches), ("planned", planned)] {
                    observer.observe(count as u64, [Label::new("kind", kind)]);
                }
            },
        ));
        let this = Arc::clone(self);
        meter.register(Instrument::gauge(
            "sluicegate_overrides_without_effect",
            "Number of overrides without effect: they name a domain, rule or plan that the rules do not have",
            move |observer| {
                for (kind, count) in this.without_effect.by_kind() {
                    observer.observe(count, [Label::new("kind", kind)]);
                }
            },
        ));
        let this = Arc::clone(self);
        meter.register(Instrument::gauge(
            "sluicegate_switch",
            "1 for each switch in force, by scope, mode and origin",
            move |observer| {
                for (scope, mode, origin) in this.context.in_force.snapshot().load().modes().in_force() {
                    let scope = Target::Switch(scope.clone()).to_string().replacen("switch|", "", 1);
                    let scope = Label::new("scope", scope);
                    let labels = [scope, Label::new("mode", mode.name()), Label::new("origin", origin.name())];
                    observer.observe(1, labels);
                }
            },
        ));
        let registrar = Registrar { meter, source: self };
        registrar.gauge(
            "sluicegate_overrides_version",
            "Version of the last override change that this instance has applied",
            |this| this.status().version,
        );
        registrar.gauge(
            "sluicegate_overrides_age_seconds",
            "Seconds since the last successful override sync with the store",
            |this| match &this.replication {
                Replication::Redis(_) => match this.status().last_sync {
                    Some(last_sync) => last_sync.elapsed().as_secs(),
                    None => u64::MAX >> 32,
                },
                Replication::Journal(_) => 0,
            },
        );
        registrar.gauge(
            "sluicegate_overrides_read_only",
            "1 while another process holds the override journal, so that overrides cannot be changed",
            |this| this.status().is_read_only.into(),
        );
        registrar.gauge("sluicegate_overrides_journal_bytes", "Length of the override journal in bytes", |this| {
            match &this.replication {
                Replication::Redis(_) => 0,
                Replication::Journal(journal) => journal.bytes(),
            }
        });
        registrar.counter(
            "sluicegate_overrides_unreadable_total",
            "Number of overrides in the store that were ignored because they cannot be read",
            |this| this.context.unreadable.get(),
        );
    }
}
