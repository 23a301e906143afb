//! [`AlgorithmKeywords`]: the keywords of `rate_limit` that define how hits are counted.
//!
//! The allowed combinations depend on `algorithm`, which may come after the other keywords. All of them are therefore
//! read before they are checked.

use sluicegate_algorithm::{Algorithm, AlgorithmKind, LimitSpec, Micros, WindowStart};
use sluicegate_overload::adaptive::Method;

use super::{
    Reader,
    keywords::{EDGES, MAX_PERCENT, PHASE_ENTITY, WEEKDAYS},
    sharing::{Capacity, Sharing},
};
use crate::{diagnostic::Location, limit::Measure, matcher::ModifierEntry, yaml::Yaml};

/// Default of `hold`: the maximum time for which a request in flight counts.
const DEFAULT_HOLD: Micros = Micros::from_secs(60);

/// The values and locations of the keywords that define how hits are counted.
pub(super) struct AlgorithmKeywords {
    kind: AlgorithmKind,
    spec: LimitSpec,
    /// Maximum number of requests in flight, from `limit` or `ceiling`.
    limit: Option<u32>,
    hold: Option<Micros>,
    /// Key of the entry that contains the holder.
    holder: Option<String>,
    capacity: Option<Capacity>,
    sharing: Option<Sharing>,
    /// Key of the entry that contains the request's class.
    class: Option<String>,
    locations: Vec<(String, Location)>,
    /// Whether a value was invalid and was reported, so that the limit cannot be built.
    has_invalid_value: bool,
}

impl Default for AlgorithmKeywords {
    fn default() -> Self {
        Self {
            kind: Algorithm::DEFAULT,
            spec: LimitSpec::default(),
            limit: None,
            hold: None,
            holder: None,
            capacity: None,
            sharing: None,
            class: None,
            locations: Vec::new(),
            has_invalid_value: false,
        }
    }
}

/// The keywords that define the maximum of a limit.
pub(super) enum Quantity {
    /// `unit` and `requests_per_unit`.
    PerUnit,
    /// Keywords of the algorithm, with the maximum and its measure; `None` if they are invalid, which has been
    /// reported.
    Explicit(Option<(u64, Measure)>),
}

impl AlgorithmKeywords {
    pub(super) fn read(&mut self, reader: &mut Reader<'_, '_>, keyword: &str, location: Location, node: &Yaml) {
        self.locations.push((keyword.to_owned(), location));
        let spec = &mut self.spec;
        let is_valid = match keyword {
            "algorithm" => {
                let kinds: Vec<_> = Algorithm::named().map(|kind| (kind.name, kind)).collect();
                let kind = reader.choice(keyword, node, &kinds);
                self.kind = kind.unwrap_or(self.kind);
                kind.is_some()
            }
            "window" => {
                let starts = WindowStart::ALL.map(|start| (start.name(), start));
                set(&mut spec.window_start, reader.choice(keyword, node, &starts))
            }
            "zone" => set(&mut spec.anchor.zone, reader.zone(node)),
            "week_starts" => set(&mut spec.anchor.week_starts, reader.choice(keyword, node, &WEEKDAYS)),
            "month" => set(&mut spec.anchor.month, reader.up_to(keyword, node, 12)),
            "day" => set(&mut spec.anchor.day, reader.up_to(keyword, node, 31)),
            "at" => set(&mut spec.anchor.at, reader.time_of_day(keyword, node)),
            // The engine sets the phase of each entity.
            "phase" => set(&mut spec.phase, reader.choice(keyword, node, &[(PHASE_ENTITY, Micros::ZERO)])),
            "buckets" => set(&mut spec.buckets, reader.number(keyword, node)),
            "edge" => set(&mut spec.edge, reader.choice(keyword, node, &EDGES)),
            "burst" => set(&mut spec.burst, reader.large_number(keyword, node)),
            "debt" => set(&mut spec.debt, reader.large_number(keyword, node)),
            "queue" => set(&mut spec.queue, reader.number(keyword, node)),
            "warm_up" => set(&mut spec.warm_up, duration(reader, keyword, node)),
            "count_denied" => set(&mut spec.count_denied, Some(reader.boolean(keyword, node))),
            "min_interval" => set(&mut spec.min_interval, duration(reader, keyword, node)),
            "soft" => set(&mut spec.soft, reader.percent(keyword, node, 1, MAX_PERCENT)),
            "limit" => set(&mut self.limit, reader.number(keyword, node)),
            "hold" => set(&mut self.hold, duration(reader, keyword, node)),
            "holder" => set(&mut self.holder, key_of_entry(reader, keyword, node)),
            "ceiling" => set(&mut self.limit, reader.number(keyword, node)),
            "floor" => set(&mut spec.floor, reader.number(keyword, node)),
            "initial" => set(&mut spec.initial, reader.number(keyword, node)),
            "timeout" => set(&mut spec.timeout, duration(reader, keyword, node)),
            "method" => {
                set(&mut spec.method, reader.choice(keyword, node, &Method::ALL.map(|method| (method.name(), method))))
            }
            "class" => set(&mut self.class, key_of_entry(reader, keyword, node)),
            "capacity" => set(&mut self.capacity, reader.capacity(node)),
            "shares" | "reserve" if self.sharing.is_some() => {
                reader
                    .diagnostics
                    .error(location, "shares and reserve cannot be combined; reserve is a short form of shares");
                false
            }
            "shares" => set(&mut self.sharing, reader.shares(node)),
            "reserve" => set(&mut self.sharing, reader.reserve(node)),
            _ => true,
        };
        self.has_invalid_value |= !is_valid;
    }

    pub(super) fn location(&self, keyword: &str) -> Option<Location> {
        self.locations.iter().find(|(name, _)| name == keyword).map(|(_, location)| *location)
    }

    /// Returns the location of `count_denied: true`, if it is present.
    pub(super) fn explicit_count_denied(&self) -> Option<Location> {
        if self.spec.count_denied == Some(true) { self.location("count_denied") } else { None }
    }

    /// Returns the algorithm, which `capacity` determines if it is present.
    pub(super) fn kind(&self) -> AlgorithmKind {
        let name = match self.capacity {
            None => return self.kind,
            Some(Capacity { unit: Some(_), .. }) => "shares",
            Some(Capacity { unit: None, .. }) => "concurrency",
        };
        Algorithm::kind(name).unwrap_or(self.kind)
    }

    /// Returns the parameters of the algorithm.
    ///
    /// Returns `None` if a value is invalid, if keywords contradict each other or if one is not supported.
    pub(super) fn limit_spec(&self, reader: &mut Reader<'_, '_>) -> Option<LimitSpec> {
        if self.has_invalid_value {
            // The invalid value has been reported. If it is the algorithm, the supported keywords are unknown.
            return None;
        }
        let kind = self.kind();
        let mut is_invalid = false;
        for (keyword, location) in
            self.locations.iter().filter(|(keyword, _)| !kind.keywords.contains(&keyword.as_str()))
        {
            // A keyword that no algorithm lists is supported by all of them.
            let supporting: Vec<_> = Algorithm::named()
                .filter(|kind| kind.keywords.contains(&keyword.as_str()))
                .map(|kind| kind.name)
                .collect();
            if !supporting.is_empty() {
                let message =
                    format!("{keyword} is not supported by algorithm {}, only by {}", kind.name, supporting.join(", "));
                reader.diagnostics.error(*location, message);
                is_invalid = true;
            }
        }
        is_invalid |= self.reject_contradictions(reader);
        let mut spec = self.spec;
        if let (Some(sharing), Some(capacity)) = (&self.sharing, self.capacity) {
            match sharing.class_table(capacity.hits) {
                Ok(classes) => spec.classes = Some(classes),
                Err(error) => {
                    reader.diagnostics.error(sharing.location(), error.to_string());
                    is_invalid = true;
                }
            }
        }
        if is_invalid { None } else { Some(spec) }
    }

    /// Reports keywords that require or exclude each other, and returns whether there were any.
    fn reject_contradictions(&self, reader: &mut Reader<'_, '_>) -> bool {
        let mut contradictions = Vec::new();
        let has_capacity = self.location("capacity").is_some();
        if has_capacity && let Some(limit) = self.location("limit") {
            let message = "limit cannot be combined with capacity; a limit is a capacity without classes";
            contradictions.push((limit, message));
        }
        if has_capacity
            && self.kind() != self.kind
            && let Some(algorithm) = self.location("algorithm")
        {
            let message = "algorithm cannot be combined with capacity, which determines the algorithm";
            contradictions.push((algorithm, message));
        }
        if let Some(sharing) = self.location("shares").or_else(|| self.location("reserve")) {
            if self.capacity.is_none() {
                contradictions.push((sharing, "shares and reserve require a capacity"));
            }
            if self.class.is_none() {
                let message = "shares and reserve require class: the key of the entry that contains a request's class";
                contradictions.push((sharing, message));
            }
        }
        if let Some(class) = self.location("class") {
            if self.sharing.is_none() {
                contradictions.push((class, "class requires shares or reserve"));
            }
            if self.class == self.holder {
                contradictions.push((class, "class and holder must be different entries"));
            }
        }
        for (location, message) in &contradictions {
            reader.diagnostics.error(*location, *message);
        }
        !contradictions.is_empty()
    }

    /// Returns how the limit defines its maximum, and reports missing keywords.
    pub(super) fn quantity(&self, reader: &mut Reader<'_, '_>, location: Location) -> Quantity {
        let in_flight = Measure::InFlight { hold: self.hold.unwrap_or(DEFAULT_HOLD) };
        match self.capacity {
            Some(Capacity { hits, unit: Some(unit) }) => {
                Quantity::Explicit(Some((hits.into(), Measure::Rate { unit, multiplier: 1 })))
            }
            Some(Capacity { hits, unit: None }) => Quantity::Explicit(Some((hits.into(), in_flight))),
            None if self.has_invalid_value && self.location("capacity").is_some() => Quantity::Explicit(None),
            None if self.kind.keywords.contains(&"hold") => {
                if self.limit.is_none() && !self.has_invalid_value {
                    let keyword = if self.kind.keywords.contains(&"ceiling") { "ceiling" } else { "limit" };
                    let name = self.kind.name;
                    reader.diagnostics.error(
                        location,
                        format!("{name} requires {keyword}: the maximum number of requests in flight"),
                    );
                }
                Quantity::Explicit(self.limit.map(|limit| (limit.into(), in_flight)))
            }
            None if self.kind.keywords.contains(&"capacity") => {
                reader.diagnostics.error(location, "algorithm shares requires a capacity such as 1000/s");
                Quantity::Explicit(None)
            }
            None => Quantity::PerUnit,
        }
    }

    /// Returns the keyword or the algorithm that defines the limit's maximum in place of a unit.
    pub(super) fn quantity_keyword(&self) -> &'static str {
        if self.location("capacity").is_some() { "capacity" } else { self.kind.name }
    }

    /// Returns the modifier entries with their keys, in the order of the descriptor.
    pub(super) fn modifiers(&self) -> Vec<(ModifierEntry, String)> {
        let mut modifiers = Vec::new();
        if let Some(key) = &self.class {
            modifiers.push((ModifierEntry::Class, key.clone()));
        }
        if let Some(key) = &self.holder {
            modifiers.push((ModifierEntry::Holder, key.clone()));
        }
        modifiers
    }

    /// Returns the names of the classes that share the limit, in the order of its class table.
    pub(super) fn class_names(&self) -> Vec<Box<str>> {
        match &self.sharing {
            Some(sharing) => sharing.class_names(),
            None => Vec::new(),
        }
    }

    /// Returns whether denials are overload: with `reserve`, requests are denied to keep capacity for other classes.
    pub(super) fn sheds(&self) -> bool {
        self.sharing.as_ref().is_some_and(|sharing| sharing.reserve)
    }

    /// Reports all keywords, because an unlimited rule is not counted.
    pub(super) fn reject_all(&self, reader: &mut Reader<'_, '_>) {
        for (keyword, location) in &self.locations {
            reader.diagnostics.error(*location, format!("{keyword} cannot be combined with unlimited: true"));
        }
    }
}

/// Sets the field and returns whether there is a value.
fn set<T>(field: &mut Option<T>, value: Option<T>) -> bool {
    *field = value;
    field.is_some()
}

pub(super) fn duration(reader: &mut Reader<'_, '_>, keyword: &str, node: &Yaml) -> Option<Micros> {
    let text = reader.text(keyword, node)?;
    let parsed = humantime::parse_duration(&text).ok();
    let micros = parsed.and_then(|duration| u64::try_from(duration.as_micros()).ok());
    if micros.is_none() {
        reader
            .diagnostics
            .error(node.location, format!("{keyword} must be a duration such as 200ms, 30s or 5m, not {text:?}"));
    }
    micros.map(Micros::new)
}

/// Reads the key of a modifier entry.
fn key_of_entry(reader: &mut Reader<'_, '_>, keyword: &str, node: &Yaml) -> Option<String> {
    let key = reader.text(keyword, node)?;
    if key.is_empty() {
        reader.diagnostics.error(node.location, format!("{keyword} must be the key of an entry, not empty"));
        return None;
    }
    Some(key)
}
