//! [`Event`]s that changed decisions or may have: reloads, changes of operators, and servers that became unavailable.
//!
//! Nothing reports events. [`Detector`] compares the state of the service with that of the previous poll, so the modules
//! that change it need to know nothing of events, and polls cost a few comparisons.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use super::instance::Instance;
use crate::{
    algorithm::Micros,
    engine::{
        ClassTotals, Override,
        overrides::{RuleSetSlot, Target},
    },
    service::{overrides::AppliedChange, reload::Status},
};

/// Maximum number of events that are stored.
const MAX_EVENTS: usize = 200;
/// Maximum number of changed overrides that one event lists.
const MAX_LISTED: usize = 3;

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventKind {
    /// The instance started.
    Start,
    /// Rules were loaded.
    Rules,
    /// Rules were rejected.
    RulesRejected,
    /// A switch was set or removed.
    Switch,
    /// A limit or plan of an entity was set or removed.
    Limit,
    /// Candidate rules were uploaded, dropped, promoted or rolled back.
    Candidate,
    /// A server of the store became unavailable.
    ServerDown,
    /// A server of the store became available, or joined the store.
    ServerUp,
    /// A class began to be shed.
    Shedding,
    /// Another action of an operator.
    Action,
}

/// A change of rules, overrides or servers that can affect decisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Number of the event, one more than that of the previous event of the instance.
    pub id: u64,
    /// Time of the event.
    pub at: Micros,
    /// The kind.
    pub kind: EventKind,
    /// Description, as a sentence without a full stop.
    pub text: String,
    /// Description without names of entities.
    pub public_text: String,
    /// The operator who caused the event; empty if there is none.
    pub author: String,
    /// The reason that the operator gave.
    pub reason: String,
    /// The instance that reports the event; empty for this one.
    pub instance: String,
}

/// The latest events, the oldest first.
#[derive(Default)]
pub(super) struct EventLog {
    events: VecDeque<Event>,
    last_id: u64,
}

impl EventLog {
    pub(super) fn push(&mut self, event: Event) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.last_id += 1;
        self.events.push_back(Event { id: self.last_id, ..event });
    }

    /// Returns the events after the one with this id.
    pub(super) fn after(&self, id: u64) -> impl Iterator<Item = &Event> {
        self.events.iter().filter(move |event| event.id > id)
    }
}

/// The state of the service that events are detected from.
pub(super) struct Observed<'a> {
    pub(super) now: Micros,
    pub(super) rules: Status,
    /// Number of rules in force, and of their domains.
    pub(super) rule_counts: (usize, usize),
    pub(super) servers: Vec<(Arc<str>, bool)>,
    /// Changes of overrides that this instance has applied since the previous poll, the oldest first.
    pub(super) changes: Vec<AppliedChange>,
    /// Switches that apply to this instance only.
    pub(super) own_switches: Vec<Override>,
    /// Classes of callers, if they were read.
    pub(super) classes: Option<&'a [ClassTotals]>,
}

/// Detects events by comparing the state of the service with the previous state.
#[derive(Default)]
pub(super) struct Detector {
    rules: Option<Status>,
    servers: Option<BTreeMap<Arc<str>, bool>>,
    own_switches: BTreeMap<String, Arc<str>>,
    shed: BTreeSet<(Vec<String>, String)>,
}

impl Detector {
    /// Returns the events since the previous call. Their ids are not set yet.
    pub(super) fn detect(&mut self, observed: &Observed<'_>) -> Vec<Event> {
        let mut events = Vec::new();
        self.detect_rules(observed, &mut events);
        self.detect_servers(observed, &mut events);
        observed.changes.iter().for_each(|change| events.push(of_change(change)));
        self.detect_own_switches(observed, &mut events);
        self.detect_shedding(observed, &mut events);
        events
    }

    fn detect_rules(&mut self, observed: &Observed<'_>, events: &mut Vec<Event>) {
        let status = &observed.rules;
        let previous = self.rules.replace(status.clone()).unwrap_or_default();
        if let Some(at) = status.loaded_at.filter(|at| previous.loaded_at != Some(*at)) {
            let (rules, domains) = observed.rule_counts;
            let text = format!("{} in {} loaded", count(rules, "rule"), count(domains, "domain"));
            events.push(event(EventKind::Rules, at, text));
        }
        if let Some(error) = status.last_error.as_ref().filter(|error| previous.last_error.as_ref() != Some(*error)) {
            let first = error.lines().next().unwrap_or_default();
            events.push(event(EventKind::RulesRejected, observed.now, format!("rules rejected: {first}")));
        }
    }

    fn detect_servers(&mut self, observed: &Observed<'_>, events: &mut Vec<Event>) {
        let servers: BTreeMap<_, _> = observed.servers.iter().cloned().collect();
        let previous = self.servers.replace(servers.clone());
        let Some(previous) = previous else {
            return;
        };
        for (name, up) in &servers {
            let (kind, text) = match (previous.get(name), up) {
                (Some(true), false) => (EventKind::ServerDown, format!("server {name} of the store is unavailable")),
                (Some(false), true) => (EventKind::ServerUp, format!("server {name} of the store is available again")),
                (None, true) => (EventKind::ServerUp, format!("server {name} joined the store")),
                // A new server is not connected yet; it joins the store when it is.
                (None, false) => {
                    if let Some(servers) = &mut self.servers {
                        servers.remove(name);
                    }
                    continue;
                }
                _ => continue,
            };
            events.push(event(kind, observed.now, text));
        }
        for name in previous.keys().filter(|name| !servers.contains_key(*name)) {
            let text = format!("server {name} left the store");
            events.push(event(EventKind::ServerDown, observed.now, text));
        }
    }

    fn detect_own_switches(&mut self, observed: &Observed<'_>, events: &mut Vec<Event>) {
        let switches: BTreeMap<String, Arc<str>> =
            observed.own_switches.iter().map(|switch| (describe(&switch.target), Arc::clone(&switch.value))).collect();
        let previous = std::mem::replace(&mut self.own_switches, switches);
        for switch in &observed.own_switches {
            let name = describe(&switch.target);
            if previous.get(&name) != Some(&switch.value) {
                let text = format!("{name} set to {} on this instance only", switch.value);
                events.push(Event {
                    author: switch.author.to_string(),
                    reason: switch.reason.to_string(),
                    ..event(EventKind::Switch, observed.now, text)
                });
            }
        }
        for name in previous.keys().filter(|name| !self.own_switches.contains_key(*name)) {
            events.push(event(EventKind::Switch, observed.now, format!("{name} removed on this instance")));
        }
    }

    fn detect_shedding(&mut self, observed: &Observed<'_>, events: &mut Vec<Event>) {
        let Some(classes) = observed.classes else {
            return;
        };
        let shed: BTreeSet<_> = classes
            .iter()
            .filter(|class| class.shed_since.is_some())
            .map(|class| (class.rule.clone(), class.class.clone()))
            .collect();
        for (rule, class) in shed.difference(&self.shed) {
            let text = format!("class {class} of rule {} is being shed", rule.join("."));
            events.push(event(EventKind::Shedding, observed.now, text));
        }
        self.shed = shed;
    }
}

/// Returns a number with its noun, such as `2 rules`.
fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Returns the event of the start of this instance.
pub(super) fn started(at: Micros, instance: &Instance) -> Event {
    event(EventKind::Start, at, format!("instance {} started, version {}", instance.name, instance.version))
}

fn event(kind: EventKind, at: Micros, text: String) -> Event {
    Event {
        id: 0,
        at,
        kind,
        public_text: text.clone(),
        text,
        author: String::new(),
        reason: String::new(),
        instance: String::new(),
    }
}

/// Returns the event of a change of overrides, or of an operator's action that changed none.
fn of_change(change: &AppliedChange) -> Event {
    let kind = match change.changes.first().map(|first| first.target.begun()) {
        None => EventKind::Action,
        Some(Target::Switch(_)) => EventKind::Switch,
        Some(Target::Limit { .. } | Target::Plan { .. }) => EventKind::Limit,
        Some(Target::Rules(_) | Target::Planned { .. }) => EventKind::Candidate,
    };
    let mut listed = Vec::new();
    for changed in change.changes.iter().take(MAX_LISTED) {
        listed.push(describe_change(&changed.target, changed.after.as_ref()));
    }
    let mut text = listed.join("; ");
    if change.changes.len() > MAX_LISTED {
        text += &format!("; and {} more", change.changes.len() - MAX_LISTED);
    }
    let public_text = match kind {
        EventKind::Limit => match change.changes.len() {
            1 => "limit or plan of an entity changed".to_owned(),
            changes => format!("limits or plans of {changes} entities changed"),
        },
        EventKind::Action => "an operator reset a counter or refunded hits".to_owned(),
        _ => text.clone(),
    };
    // The reason of an action is its description.
    let (text, reason) = match kind {
        EventKind::Action => (change.info.reason.clone(), String::new()),
        _ => (text, change.info.reason.clone()),
    };
    let author = change.info.author.clone();
    Event { public_text, author, reason, ..event(kind, Micros::new(change.info.at), text) }
}

/// Describes the change of an override for people.
fn describe_change(target: &Target, after: Option<&Override>) -> String {
    match (target, after) {
        (Target::Rules(slot), Some(_)) => format!("{} set", slot_name(*slot)),
        (Target::Rules(slot), None) => format!("{} removed", slot_name(*slot)),
        (target, Some(after)) => {
            let from = match target.beginning() {
                Some(from) => format!(" from {}", time_text(from)),
                None => String::new(),
            };
            format!("{} set to {}{from}", describe(target), after.value)
        }
        (target, None) => format!("{} removed", describe(target)),
    }
}

fn time_text(time: Micros) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_micros(time.get())).to_string()
}

/// Describes a target for people.
fn describe(target: &Target) -> String {
    use crate::engine::overrides::Scope;
    match target {
        Target::Limit { domain, entries } => {
            let entries: Vec<_> = entries.iter().map(|(key, value)| format!("{key}={value}")).collect();
            format!("limit of {domain} {}", entries.join(" "))
        }
        Target::Plan { domain, key, value } => format!("plan of {domain} {key}={value}"),
        Target::Switch(Scope::Rule { domain, rule }) => format!("switch for rule {domain} {rule}"),
        Target::Switch(Scope::Algorithm(name)) => format!("switch for algorithm {name}"),
        Target::Switch(Scope::Domain(domain)) => format!("switch for domain {domain}"),
        Target::Switch(Scope::Everything) => "switch for all rules".to_owned(),
        Target::Rules(slot) => slot_name(*slot).to_owned(),
        Target::Planned { target, .. } => format!("planned {}", describe(target)),
    }
}

fn slot_name(slot: RuleSetSlot) -> &'static str {
    match slot {
        RuleSetSlot::Candidate => "candidate rules",
        RuleSetSlot::InForce => "promoted rules",
        RuleSetSlot::Previous => "rules for a rollback",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::overrides::Scope,
        service::overrides::{ChangeInfo, ChangedOverride},
    };

    fn observed() -> Observed<'static> {
        Observed {
            now: Micros::from_secs(100),
            rules: Status { loaded_at: Some(Micros::from_secs(90)), last_error: None },
            rule_counts: (2, 1),
            servers: Vec::new(),
            changes: Vec::new(),
            own_switches: Vec::new(),
            classes: None,
        }
    }

    fn texts(events: &[Event]) -> Vec<&str> {
        events.iter().map(|event| event.text.as_str()).collect()
    }

    fn switch(value: &str) -> Override {
        Override {
            target: Target::Switch(Scope::Domain("api".into())),
            value: value.into(),
            until: None,
            author: "alice".into(),
            reason: "test".into(),
            at: Micros::ZERO,
            version: 0,
        }
    }

    #[test]
    fn rules_are_reported_when_they_are_loaded_or_rejected() {
        let mut detector = Detector::default();
        let events = detector.detect(&observed());
        assert_eq!(texts(&events), ["2 rules in 1 domain loaded"]);
        assert_eq!((events[0].kind, events[0].at), (EventKind::Rules, Micros::from_secs(90)));
        assert!(detector.detect(&observed()).is_empty());
        let rejected = || Observed {
            rules: Status { last_error: Some("a.yaml:1: wrong\nmore".into()), ..observed().rules },
            ..observed()
        };
        let events = detector.detect(&rejected());
        assert_eq!(
            (texts(&events), events[0].kind),
            (vec!["rules rejected: a.yaml:1: wrong"], EventKind::RulesRejected)
        );
        assert!(detector.detect(&rejected()).is_empty());
    }

    #[test]
    fn servers_are_reported_when_their_state_changes() {
        let mut detector = Detector::default();
        let mut with = |servers: &[(&str, bool)]| {
            let servers = servers.iter().map(|(name, up)| (Arc::from(*name), *up)).collect();
            let events = detector.detect(&Observed { servers, rules: Status::default(), ..observed() });
            events.into_iter().map(|event| event.text).collect::<Vec<_>>()
        };
        assert!(with(&[("a", true), ("b", false)]).is_empty());
        assert_eq!(
            with(&[("a", false), ("b", true)]),
            ["server a of the store is unavailable", "server b of the store is available again"]
        );
        assert!(with(&[("a", false), ("b", true), ("c", false)]).is_empty());
        assert_eq!(with(&[("a", false), ("b", true), ("c", true)]), ["server c joined the store"]);
        assert_eq!(with(&[("b", true), ("c", true)]), ["server a left the store"]);
    }

    #[test]
    fn switches_of_this_instance_are_reported() {
        let mut detector = Detector::default();
        let mut with = |values: &[&str]| {
            let own_switches = values.iter().map(|value| switch(value)).collect();
            detector.detect(&Observed { own_switches, rules: Status::default(), ..observed() })
        };
        let events = with(&["off"]);
        assert_eq!(texts(&events), ["switch for domain api set to off on this instance only"]);
        assert_eq!((events[0].author.as_str(), events[0].reason.as_str()), ("alice", "test"));
        assert!(with(&["off"]).is_empty());
        assert_eq!(texts(&with(&["deny"])), ["switch for domain api set to deny on this instance only"]);
        assert_eq!(texts(&with(&[])), ["switch for domain api removed on this instance"]);
    }

    #[test]
    fn shedding_is_reported_when_it_begins() {
        let class = |shed_since| {
            vec![ClassTotals {
                rule: vec!["api".into(), "user".into()],
                class: "free".into(),
                allowed: 0,
                denied: 0,
                shed: 0,
                shed_since,
            }]
        };
        let mut detector = Detector::default();
        let mut with = |since| {
            let classes = class(since);
            detector.detect(&Observed { classes: Some(&classes), rules: Status::default(), ..observed() })
        };
        assert!(with(None).is_empty());
        assert_eq!(texts(&with(Some(Micros::from_secs(1)))), ["class free of rule api.user is being shed"]);
        assert!(with(Some(Micros::from_secs(1))).is_empty());
        assert!(with(None).is_empty());
        assert_eq!(with(Some(Micros::from_secs(9))).len(), 1);
        // Between two periods classes are not read, which does not end shedding.
        assert!(detector.detect(&Observed { rules: Status::default(), ..observed() }).is_empty());
        let classes = class(Some(Micros::from_secs(9)));
        let again = Observed { classes: Some(&classes), rules: Status::default(), ..observed() };
        assert!(detector.detect(&again).is_empty());
    }

    fn removed(target: Target) -> ChangedOverride {
        ChangedOverride { target, before: None, after: None, refunded_hits: 0 }
    }

    #[test]
    fn a_change_has_a_text_without_names_of_entities() {
        let limit = |user: &str| Target::Limit { domain: "api".into(), entries: vec![("user".into(), user.into())] };
        let set = |target: Target| {
            let after = Some(Override { target: target.clone(), ..switch("5/minute") });
            ChangedOverride { after, ..removed(target) }
        };
        let change = |changes, reason: &str| {
            let info = ChangeInfo { author: "alice".into(), reason: reason.into(), at: 7 };
            of_change(&AppliedChange { version: 1, info, changes })
        };
        let event = change(vec![set(limit("bob"))], "why");
        assert_eq!((event.kind, event.at, event.reason.as_str()), (EventKind::Limit, Micros::new(7), "why"));
        assert_eq!(event.text, "limit of api user=bob set to 5/minute");
        assert_eq!(event.public_text, "limit or plan of an entity changed");
        let event = change(["a", "b", "c", "d", "e"].map(|user| set(limit(user))).into(), "");
        assert!(event.text.ends_with("user=c set to 5/minute; and 2 more"), "{}", event.text);
        assert_eq!(event.public_text, "limits or plans of 5 entities changed");
        let event = change(vec![removed(switch("").target)], "");
        assert_eq!((event.kind, event.public_text.as_str()), (EventKind::Switch, "switch for domain api removed"));
        let event = change(vec![removed(Target::Rules(RuleSetSlot::Candidate))], "");
        assert_eq!((event.kind, event.text.as_str()), (EventKind::Candidate, "candidate rules removed"));
        let event = change(Vec::new(), "reset api|user=bob");
        assert_eq!((event.kind, event.text.as_str()), (EventKind::Action, "reset api|user=bob"));
        assert!(!event.public_text.contains("bob") && event.reason.is_empty());
    }

    #[test]
    fn the_log_keeps_the_latest_events() {
        let mut log = EventLog::default();
        for number in 0..=MAX_EVENTS {
            log.push(event(EventKind::Action, Micros::ZERO, number.to_string()));
        }
        let all: Vec<_> = log.after(0).map(|event| event.id).collect();
        assert_eq!((all.len(), all[0]), (MAX_EVENTS, 2));
        assert_eq!(log.after(MAX_EVENTS as u64).map(|event| event.text.clone()).collect::<Vec<_>>(), ["200"]);
    }

    #[test]
    fn up_to_three_overrides_of_a_change_are_listed() {
        let limit = |user: &str| Target::Limit { domain: "api".into(), entries: vec![("user".into(), user.into())] };
        let changes = Vec::from(["a", "b", "c"].map(|user| removed(limit(user))));
        let event = of_change(&AppliedChange { version: 1, info: ChangeInfo::default(), changes });
        let expected = "limit of api user=a removed; limit of api user=b removed; limit of api user=c removed";
        assert_eq!(event.text, expected);
    }

    #[test]
    fn an_action_has_a_public_text() {
        let info = ChangeInfo { reason: "reset api|user=bob".into(), ..ChangeInfo::default() };
        let event = of_change(&AppliedChange { version: 1, info, changes: Vec::new() });
        assert_eq!(event.public_text, "an operator reset a counter or refunded hits");
    }
}
