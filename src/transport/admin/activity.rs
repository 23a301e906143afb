//! The methods about activity: conversions of [`crate::service::activity`], and the stream of updates.

use std::pin::Pin;

use futures_util::{Stream, stream};
use sluicegate_proto::sluicegate::admin::v1 as api;
use tokio::sync::watch;
use tonic::Status;

use super::{
    auth::Role,
    convert::{outcomes, rule, time},
};
use crate::{
    engine::{Micros, Snapshot},
    service::activity::{
        ClassHits, Event, EventKind, Instance, Period, RuleList, RuleOrder, RuleQuery, RuleRow, Unmatched, Update,
        Viewer,
    },
    transport::shutdown::wait_for_shutdown,
};

/// Maximum number of rows in one response.
const MAX_ROWS: u32 = 500;
/// Maximum length of the text to find, in bytes.
const MAX_FIND_BYTES: usize = 1_000;

pub(super) type UpdateStream = Pin<Box<dyn Stream<Item = Result<api::WatchActivityResponse, Status>> + Send>>;

/// Streams updates until the service stops. The role decides which details of events are visible.
pub(super) fn stream_updates(viewer: Viewer, role: Role, stopping: watch::Receiver<bool>) -> UpdateStream {
    Box::pin(stream::unfold((viewer, stopping), move |(mut viewer, mut stopping)| async move {
        let update = tokio::select! {
            update = viewer.next() => update,
            () = wait_for_shutdown(&mut stopping) => return None,
        };
        Some((Ok(write_update(update, role, viewer.instance_name())), (viewer, stopping)))
    }))
}

fn write_update(update: Update, role: Role, instance: &str) -> api::WatchActivityResponse {
    let Update { at, periods, current, servers, events, instances, rules_version } = update;
    api::WatchActivityResponse {
        at: Some(time(at)),
        periods: periods.into_iter().map(period).collect(),
        current: Some(period(current)),
        servers: servers.into_iter().map(|(name, up)| api::StoreServer { name: name.to_string(), up }).collect(),
        events: events.into_iter().map(|event| write_event(event, role, instance)).collect(),
        instances: instances.into_iter().map(write_instance).collect(),
        rules_version,
    }
}

fn write_instance(Instance { name, version, since }: Instance) -> api::Instance {
    api::Instance { name, version, since: Some(time(Micros::new(since))) }
}

fn period(period: Period) -> api::ActivityPeriod {
    let Period { local: [by_lease, by_eventual_counter, by_deny_cache], latency: [p50, p99], .. } = period;
    api::ActivityPeriod {
        start: Some(time(Micros::new(period.start))),
        length_ms: u32::try_from(period.length / 1_000).unwrap_or(u32::MAX),
        requests: period.requests,
        errors: period.errors,
        requested: period.requested,
        denied: period.denied,
        denied_requests: period.denied_requests,
        near_limit: period.near,
        shadow: period.shadow,
        store_calls: period.store_calls,
        decided_by_lease: by_lease,
        decided_by_eventual_counter: by_eventual_counter,
        decided_by_deny_cache: by_deny_cache,
        store_errors: period.store_errors,
        latency_p50_us: p50,
        latency_p99_us: p99,
        classes: period.classes.into_iter().map(write_class).collect(),
    }
}

fn write_class(ClassHits { class, hits: [allowed, denied, shed] }: ClassHits) -> api::ClassActivity {
    api::ClassActivity { class, allowed, denied, shed }
}

fn write_event(event: Event, role: Role, instance: &str) -> api::ActivityEvent {
    let kind = match event.kind {
        EventKind::Start => api::EventKind::Start,
        EventKind::Rules => api::EventKind::Rules,
        EventKind::RulesRejected => api::EventKind::RulesRejected,
        EventKind::Switch => api::EventKind::Switch,
        EventKind::Limit => api::EventKind::Limit,
        EventKind::Candidate => api::EventKind::Candidate,
        EventKind::ServerDown => api::EventKind::ServerDown,
        EventKind::ServerUp => api::EventKind::ServerUp,
        EventKind::Shedding => api::EventKind::Shedding,
        EventKind::Action => api::EventKind::Action,
    };
    let (text, author, reason) = if role >= Role::Read {
        (event.text, event.author, event.reason)
    } else {
        (event.public_text, String::new(), String::new())
    };
    api::ActivityEvent {
        id: event.id,
        at: Some(time(event.at)),
        kind: kind.into(),
        text,
        author,
        reason,
        instance: if event.instance.is_empty() { instance.to_owned() } else { event.instance },
    }
}

/// Converts descriptors that no rule matches.
pub(super) fn write_unmatched(unmatched: Unmatched) -> api::UnmatchedDescriptors {
    let (nearest_domain, nearest_rule) = if unmatched.is_unknown_domain {
        (unmatched.nearest, String::new())
    } else {
        (String::new(), unmatched.nearest)
    };
    api::UnmatchedDescriptors {
        domain: unmatched.domain,
        keys: unmatched.keys,
        recent: unmatched.recent,
        total: unmatched.total,
        first: Some(time(Micros::new(unmatched.first))),
        latest: Some(time(Micros::new(unmatched.latest))),
        nearest_rule,
        unknown_domain: unmatched.is_unknown_domain,
        nearest_domain,
    }
}

pub(super) fn read_query(request: api::ListRuleActivityRequest) -> Result<RuleQuery, Status> {
    let api::ListRuleActivityRequest { find, order, offset, page_size, path, rules_only, all_instances } = request;
    if find.len() > MAX_FIND_BYTES {
        return Err(Status::invalid_argument(format!("find must have at most {MAX_FIND_BYTES} bytes")));
    }
    let order = match api::RuleOrder::try_from(order) {
        Ok(api::RuleOrder::Denied) => RuleOrder::Denied,
        Ok(api::RuleOrder::File) => RuleOrder::File,
        Err(_) => return Err(Status::invalid_argument("order must be RULE_ORDER_DENIED or RULE_ORDER_FILE")),
    };
    let max_rows = if page_size == 0 { 100 } else { page_size.min(MAX_ROWS) } as usize;
    Ok(RuleQuery { find, order, path, rules_only, all_instances, offset: offset as usize, max_rows })
}

pub(super) fn write_rules(list: RuleList) -> api::ListRuleActivityResponse {
    let mut rows = Vec::with_capacity(list.rows.len());
    for row in list.rows {
        rows.push(write_row(row, &list.snapshot));
    }
    api::ListRuleActivityResponse {
        rows,
        total_rows: to_u32(list.total_rows),
        total_rules: to_u32(list.total_rules),
        all_rules: to_u32(list.snapshot.rule_set().rules().len()),
        instances: list.instances,
        has_candidate: list.snapshot.candidate().is_some(),
        ..Default::default()
    }
}

fn write_row(row: RuleRow, snapshot: &Snapshot) -> api::RuleRow {
    let found = row.rule.and_then(|id| snapshot.rule_set().rules().get(id));
    api::RuleRow {
        depth: to_u32(row.depth),
        rule: found.map(|found| rule(found, Some(snapshot))),
        activity: Some(api::RuleActivity {
            requested_rate: row.hits.requested_rate,
            denied_rate: row.hits.denied_rate,
            shadow_rate: row.hits.shadow_rate,
            requested: row.hits.requested,
            denied: row.hits.denied,
            requested_per_minute: row.minutes.iter().map(|minute| minute.requested).collect(),
            denied_per_minute: row.minutes.iter().map(|minute| minute.denied).collect(),
            request_rate: row.hits.request_rate,
            denied_request_rate: row.hits.denied_request_rate,
            requests: row.hits.requests,
            denied_requests: row.hits.denied_requests,
            requests_per_minute: row.minutes.iter().map(|minute| minute.requests).collect(),
            denied_requests_per_minute: row.minutes.iter().map(|minute| minute.denied_requests).collect(),
        }),
        entries: row.entries.into_iter().map(|(key, value)| api::Entry { key, value }).collect(),
        overrides: row.overrides,
        candidate: row.candidate.map(outcomes),
        label: row.label,
        path: row.path,
    }
}

/// Converts a number to 32 bits. Larger ones become `u32::MAX`.
fn to_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_has_its_instances_and_the_lengths_of_its_periods() {
        let instance = Instance { name: "a:8081".into(), version: "1.2.3".into(), since: 7_000_000 };
        let current = Period { start: 5_000_000, length: 5_000_000, ..Period::default() };
        let update = Update { current, instances: vec![instance], ..Update::default() };
        let written = write_update(update, Role::Read, "a:8081");
        let period = written.current.unwrap();
        assert_eq!((period.start.unwrap().seconds, period.length_ms), (5, 5_000));
        let since = Some(time(Micros::from_secs(7)));
        let expected = api::Instance { name: "a:8081".into(), version: "1.2.3".into(), since };
        assert_eq!(written.instances, [expected]);
    }

    #[test]
    fn the_text_to_find_has_a_maximum_length() {
        let find = |bytes: usize| {
            let request = api::ListRuleActivityRequest { find: "x".repeat(bytes), ..Default::default() };
            read_query(request).map(|query| query.find.len()).map_err(|status| status.code())
        };
        assert_eq!(find(MAX_FIND_BYTES), Ok(MAX_FIND_BYTES));
        assert_eq!(find(MAX_FIND_BYTES + 1), Err(tonic::Code::InvalidArgument));
    }
}
