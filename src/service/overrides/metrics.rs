//! What can be seen of overrides from outside.

use std::sync::Arc;

use opentelemetry::{KeyValue, metrics::Meter};

use super::OverrideSync;
use crate::{
    engine::overrides::Target,
    metrics::{observe_counter, observe_gauge},
};

impl OverrideSync {
    /// Shows everything to the meter.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        let this = Arc::clone(self);
        let gauge = meter.u64_observable_gauge("sluicegate_overrides");
        gauge
            .with_description("Directives of operators in force, by what they are about")
            .with_callback(move |observer| {
                let counts = this.reloader.rules().load().overrides().counts();
                for (kind, count) in ["limit", "plan", "switch"].into_iter().zip(counts) {
                    observer.observe(count as u64, &[KeyValue::new("kind", kind)]);
                }
            })
            .build();
        let this = Arc::clone(self);
        let gauge = meter.u64_observable_gauge("sluicegate_switch");
        gauge
            .with_description("1 for each switch in force, by its scope, its mode, and who threw it")
            .with_callback(move |observer| {
                for (scope, mode, origin) in this.reloader.rules().load().modes().in_force() {
                    let scope =
                        KeyValue::new("scope", Target::Switch(scope.clone()).to_string().replacen("switch|", "", 1));
                    let labels = [scope, KeyValue::new("mode", mode.name()), KeyValue::new("origin", origin.name())];
                    observer.observe(1, &labels);
                }
            })
            .build();
        let this = Arc::clone(self);
        observe_gauge(
            meter,
            "sluicegate_overrides_version",
            "The last change of overrides that is in force",
            move || this.status().version,
        );
        let this = Arc::clone(self);
        observe_gauge(
            meter,
            "sluicegate_overrides_age_seconds",
            "Since the store was last heard of what operators say",
            move || match this.store.is_shared() {
                true => this.status().last_sync.map_or(u64::MAX >> 32, |heard| heard.elapsed().as_secs()),
                false => 0,
            },
        );
        let this = Arc::clone(self);
        observe_counter(
            meter,
            "sluicegate_overrides_unreadable_total",
            "Directives in the store that this version of the service does not understand, and ignores",
            move || this.unreadable.get(),
        );
    }
}
