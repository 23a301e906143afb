//! What a person wrote, as types: every mistake is noted with its place, and reading goes on.

mod algorithm;
mod elastic;
pub(super) mod keywords;
mod plans;
mod rate_limit;
mod sharing;

pub(super) use plans::Plans;
pub(super) use rate_limit::RateLimit;

use self::keywords::{CHARGES, DESCRIPTOR, IP_PREFIX, MAPS, MapSchema, ROOT};
use super::{
    compile::Options,
    custom_limit::{self, Allowance, CustomLimit},
    diagnostic::{Diagnostics, Location},
    ip_prefix::IpPrefix,
    limit::Limit,
    metadata::Metadata,
    yaml::{self, Kind, Yaml},
};
use crate::algorithm::{Algorithm, LimitSpec};

pub(super) struct File {
    pub(super) domain: String,
    pub(super) place: Location,
    pub(super) charge_all: bool,
    pub(super) shard_by: Vec<String>,
    pub(super) shard_by_place: Location,
    pub(super) plans: Plans,
    pub(super) descriptors: Vec<Descriptor>,
}

#[derive(Default)]
pub(super) struct Descriptor {
    pub(super) place: Location,
    pub(super) key: String,
    pub(super) value: Option<String>,
    /// Boxed: the levels above have none.
    pub(super) rate_limit: Option<Box<RateLimit>>,
    pub(super) shadow_mode: bool,
    pub(super) quota_mode: bool,
    pub(super) detailed_metric: bool,
    pub(super) value_to_metric: bool,
    pub(super) share_threshold: bool,
    pub(super) ip_prefix: Option<IpPrefix>,
    pub(super) metadata: Option<Metadata>,
    pub(super) children: Vec<Descriptor>,
}

/// Words that envoyproxy/ratelimit knows. A file of its users may have them in the wrong place.
const PEERS: &[&str] = &[
    "domain",
    "descriptors",
    "key",
    "value",
    "rate_limit",
    "shadow_mode",
    "quota_mode",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
    "unit",
    "requests_per_unit",
    "unlimited",
    "name",
    "replaces",
];
/// Reads one file; `None` when nothing of it can be used.
pub(super) fn read(text: &str, options: Options, problems: &mut Diagnostics<'_>) -> Option<File> {
    let root = match yaml::parse(text) {
        Ok(root) => root,
        Err(failure) => {
            problems.error(failure.place, failure.message);
            return None;
        }
    };
    let start = Location { line: 1, column: 1 };
    let Some(root) = root.filter(|root| !matches!(root.kind, Kind::Null)) else {
        problems.error(start, "the file is empty; it needs a domain");
        return None;
    };
    let mut reader = Reader { problems, instances: options.instances.into() };
    let mut domain = None;
    let (mut shard_by, mut shard_by_place) = (Vec::new(), start);
    let mut charge_all = options.charge_all;
    let (mut plans, mut descriptors) = (Plans::default(), Vec::new());
    for (key, place, value) in reader.map(&root, &ROOT)? {
        match key {
            "domain" => domain = reader.text(key, value).map(|text| (text, place)),
            "charge" => charge_all = reader.word(key, value, &CHARGES).unwrap_or_default(),
            "shard_by" => (shard_by, shard_by_place) = (reader.shard_by(value), place),
            "plans" => plans = reader.plans(value),
            "descriptors" => descriptors = reader.descriptors(value),
            _ => {}
        }
    }
    let Some((domain, place)) = domain.filter(|(domain, _)| !domain.is_empty()) else {
        reader.problems.error(root.place, "the file has no domain, or an empty one");
        return None;
    };
    if charge_all {
        reader.deny_counted_denials(&descriptors, &plans);
    }
    Some(File { domain, place, charge_all, shard_by, shard_by_place, plans, descriptors })
}

/// Words about a rule's place among others, or about the shape of its descriptor.
const RULES_OWN: &[&str] = &["name", "replaces", "holder", "class", "shares", "reserve", "shed", "elastic", "by_plan"];

/// Reads a limit that has no rule around it.
pub(super) fn read_terms(text: &str, options: Options, problems: &mut Diagnostics<'_>) -> Option<CustomLimit> {
    let start = Location { line: 1, column: 1 };
    let node = match yaml::parse(text) {
        Ok(Some(node)) if !matches!(node.kind, Kind::Null) => node,
        Ok(_) => {
            problems.error(start, "a limit is expected here, and there is nothing");
            return None;
        }
        Err(failure) => {
            problems.error(failure.place, failure.message);
            return None;
        }
    };
    let mut reader = Reader { problems, instances: options.instances.into() };
    if let Some((word, _)) = node.scalar() {
        return reader.short_terms(word, node.place);
    }
    if let Kind::Map(pairs) = &node.kind {
        for (key, _) in pairs.iter() {
            if let Some((word, _)) = key.scalar().filter(|(word, _)| RULES_OWN.contains(word)) {
                reader.problems.error(key.place, format!("{word} belongs to a rule, and stands in its file"));
                return None;
            }
        }
    }
    let RateLimit { limit, part, on_error, consistency, .. } = reader.rate_limit(&node)?;
    let part = part.filter(|part| Some(*part) != limit).map(Box::new);
    let allowance = if limit.is_some() { Allowance::Limited } else { Allowance::Unlimited };
    Some(CustomLimit { allowance, limit: limit.unwrap_or(Limit::NOTHING), part, on_error, consistency })
}

struct Reader<'r, 'p> {
    problems: &'r mut Diagnostics<'p>,
    /// Among whom a limit is divided when each has to decide by itself.
    instances: u32,
}

impl Reader<'_, '_> {
    /// The map's known keys with their values; what is not known is noted.
    fn map<'y>(&mut self, node: &'y Yaml, known: &MapSchema) -> Option<Vec<(&'y str, Location, &'y Yaml)>> {
        let Kind::Map(pairs) = &node.kind else {
            self.problems.error(node.place, format!("a map was expected here, not {}", node.describe()));
            return None;
        };
        let mut fields: Vec<(&str, Location, &Yaml)> = Vec::new();
        for (key, value) in self.merged(pairs) {
            let Kind::Scalar { text, .. } = &key.kind else {
                self.problems.error(key.place, format!("a key must be a word, not {}", key.describe()));
                continue;
            };
            if !known.has(text) {
                self.stray(text, key.place, known);
            } else if fields.iter().any(|(name, ..)| name == text) {
                self.problems.error(key.place, format!("{text} is given twice"));
            } else {
                fields.push((text, key.place, value));
            }
        }
        Some(fields)
    }

    /// The pairs with YAML's merge key (`<<: *base`) written out; what a map says itself wins.
    fn merged<'y>(&mut self, pairs: &'y [(Yaml, Yaml)]) -> Vec<(&'y Yaml, &'y Yaml)> {
        let is_merge = |key: &Yaml| matches!(&key.kind, Kind::Scalar { text, plain: true } if text == "<<");
        let mut all: Vec<_> = pairs.iter().filter(|(key, _)| !is_merge(key)).map(|(key, value)| (key, value)).collect();
        for (_, base) in pairs.iter().filter(|(key, _)| is_merge(key)) {
            let bases = match &base.kind {
                Kind::List(bases) => bases.as_slice(),
                Kind::Map(_) => std::slice::from_ref(base),
                Kind::Null | Kind::Scalar { .. } => {
                    self.problems.error(base.place, "<< takes a map or a list of maps");
                    continue;
                }
            };
            for base in bases {
                let Kind::Map(inherited) = &base.kind else {
                    self.problems.error(base.place, "<< takes a map or a list of maps");
                    continue;
                };
                for (key, value) in inherited.iter() {
                    let has = |(own, _): &(&Yaml, &Yaml)| own.scalar().is_some() && own.scalar() == key.scalar();
                    if !all.iter().any(has) {
                        all.push((key, value));
                    }
                }
            }
        }
        all
    }

    /// A key that means nothing here: refused, unless it is known elsewhere. That is a warning, since
    /// envoyproxy/ratelimit takes such files and ignores the key.
    fn stray(&mut self, key: &str, place: Location, known: &MapSchema) {
        let home = MAPS.into_iter().find(|map| map.has(key)).map(|map| map.place);
        if let Some(home) = home.filter(|_| PEERS.contains(&key)) {
            self.problems.warning(place, format!("{key} has no effect here; it belongs {home}"));
            return;
        }
        let hint = match (home, nearest(key, known)) {
            (Some(home), _) => format!("it belongs {home}"),
            (None, Some(near)) => format!("did you mean {near}?"),
            (None, None) => format!("known here: {}", known.names().collect::<Vec<_>>().join(", ")),
        };
        self.problems.error(place, format!("unknown key {key:?}; {hint}"));
    }

    /// `500/minute`, or one word.
    fn short_terms(&mut self, word: &str, place: Location) -> Option<CustomLimit> {
        match word {
            custom_limit::UNLIMITED => return Some(CustomLimit::plain(Allowance::Unlimited)),
            custom_limit::BLOCKED => return Some(CustomLimit::plain(Allowance::Blocked)),
            _ => {}
        }
        let Some((requests, unit)) = custom_limit::short(word) else {
            let message = format!("{word:?} is no limit: 500/minute, unlimited, blocked, or the words of rate_limit");
            self.problems.error(place, message);
            return None;
        };
        let limit =
            Limit::new(requests, unit, 1).map_err(|error| self.problems.error(place, error.to_string())).ok()?;
        let part =
            Limit::divided(requests, limit.measure(), Algorithm::DEFAULT, LimitSpec::default(), self.instances).ok();
        let part = part.filter(|part| *part != limit).map(Box::new);
        Some(CustomLimit { limit, part, ..CustomLimit::plain(Allowance::Limited) })
    }

    fn list<'y>(&mut self, name: &str, node: &'y Yaml) -> &'y [Yaml] {
        match &node.kind {
            Kind::List(items) => items,
            Kind::Null => &[],
            Kind::Scalar { .. } | Kind::Map(_) => {
                self.problems.error(node.place, format!("{name} must be a list, not {}", node.describe()));
                &[]
            }
        }
    }

    fn descriptors(&mut self, node: &Yaml) -> Vec<Descriptor> {
        self.list("descriptors", node).iter().filter_map(|item| self.descriptor(item)).collect()
    }

    fn descriptor(&mut self, node: &Yaml) -> Option<Descriptor> {
        let mut it = Descriptor { place: node.place, ..Descriptor::default() };
        let (mut share_threshold, mut ip_prefix) = (None, None);
        for (key, place, value) in self.map(node, &DESCRIPTOR)? {
            match key {
                "key" => it.key = self.text(key, value).unwrap_or_default(),
                "value" => it.value = self.text(key, value).filter(|value| !value.is_empty()),
                "rate_limit" => it.rate_limit = self.rate_limit(value).map(Box::new),
                "shadow_mode" => it.shadow_mode = self.boolean(key, value),
                "quota_mode" => it.quota_mode = self.boolean(key, value),
                "detailed_metric" => it.detailed_metric = self.boolean(key, value),
                "value_to_metric" => it.value_to_metric = self.boolean(key, value),
                "share_threshold" => share_threshold = self.boolean(key, value).then_some(place),
                "ip_prefix" => ip_prefix = self.ip_prefix(value).map(|prefix| (prefix, place)),
                "metadata" => it.metadata = self.metadata(value),
                "descriptors" => it.children = self.descriptors(value),
                _ => {}
            }
        }
        if it.key.is_empty() {
            self.problems.error(node.place, "a descriptor needs a key that is not empty");
            return None;
        }
        if let Some(place) = share_threshold {
            it.share_threshold = it.value.as_ref().is_some_and(|value| value.contains('*'));
            if !it.share_threshold {
                let message = "share_threshold needs a value with a wildcard (*): other values share nothing";
                self.problems.error(place, message);
            }
        }
        if let Some((prefix, place)) = ip_prefix {
            it.ip_prefix = Some(prefix);
            if it.share_threshold {
                self.problems
                    .error(place, "ip_prefix and share_threshold exclude each other: one counter has no prefixes");
            }
        }
        Some(it)
    }

    /// One of a few words.
    fn word<T: Copy>(&mut self, name: &str, node: &Yaml, words: &[(&str, T)]) -> Option<T> {
        let text = self.text(name, node)?;
        let meant = words.iter().find(|(word, _)| *word == text).map(|(_, meant)| *meant);
        if meant.is_none() {
            let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
            self.problems.error(node.place, format!("{name} {text:?} is not one of {}", words.join(", ")));
        }
        meant
    }

    fn ip_prefix(&mut self, node: &Yaml) -> Option<IpPrefix> {
        let mut prefix = IpPrefix::default();
        for (key, _, value) in self.map(node, &IP_PREFIX)? {
            let (bits, most) = if key == "v4" { (&mut prefix.v4, 32) } else { (&mut prefix.v6, 128) };
            match self.number(key, value) {
                Some(number) if (1..=most).contains(&number) => *bits = number as u8,
                Some(_) => self.problems.error(value.place, format!("{key} must be a prefix length from 1 to {most}")),
                None => {}
            }
        }
        Some(prefix)
    }

    /// With `charge: all` a refused request takes nothing, so nothing of it can be counted.
    fn deny_counted_denials(&mut self, descriptors: &[Descriptor], plans: &Plans) {
        let limits = descriptors.iter().filter_map(|descriptor| descriptor.rate_limit.as_deref());
        for place in limits.chain(plans.limits()).filter_map(|limit| limit.count_denied) {
            self.problems.error(place, "count_denied contradicts the domain's charge: all");
        }
        for descriptor in descriptors {
            self.deny_counted_denials(&descriptor.children, &Plans::default());
        }
    }

    /// The keys of the entries that choose the shard.
    fn shard_by(&mut self, node: &Yaml) -> Vec<String> {
        let mut keys: Vec<String> = Vec::new();
        for item in self.list("shard_by", node) {
            let Some(key) = self.text("an entry of shard_by", item) else { continue };
            if key.is_empty() {
                self.problems.error(item.place, "shard_by names keys of descriptors; an empty one there is not");
            } else if keys.contains(&key) {
                self.problems.error(item.place, format!("shard_by names {key:?} twice"));
            } else {
                keys.push(key);
            }
        }
        keys
    }

    /// A scalar as it was written; nothing is an empty text.
    fn text(&mut self, name: &str, node: &Yaml) -> Option<String> {
        match &node.kind {
            Kind::Null => Some(String::new()),
            Kind::Scalar { text, .. } => Some(text.clone()),
            Kind::List(_) | Kind::Map(_) => {
                self.problems.error(node.place, format!("{name} must be a word, not {}", node.describe()));
                None
            }
        }
    }

    fn number(&mut self, name: &str, node: &Yaml) -> Option<u32> {
        let parsed = match &node.kind {
            Kind::Null => Some(0),
            Kind::Scalar { text, plain: true } => {
                let digits = text.replace('_', "");
                match digits.strip_prefix("0x") {
                    Some(hex) => u32::from_str_radix(hex, 16).ok(),
                    None => digits.parse().ok(),
                }
            }
            Kind::Scalar { plain: false, .. } | Kind::List(_) | Kind::Map(_) => None,
        };
        if parsed.is_none() {
            let message = format!("{name} must be a whole number from 0 to {}{}", u32::MAX, found(node));
            self.problems.error(node.place, message);
        }
        parsed
    }

    /// True or false in any spelling of YAML 1.1, since that is what the peer reads.
    fn boolean(&mut self, name: &str, node: &Yaml) -> bool {
        if let Kind::Null = node.kind {
            return false;
        }
        if let Some((text, true)) = node.scalar() {
            match text.to_ascii_lowercase().as_str() {
                "true" | "yes" | "on" | "y" => return true,
                "false" | "no" | "off" | "n" => return false,
                _ => {}
            }
        }
        self.problems.error(node.place, format!("{name} must be true or false{}", found(node)));
        false
    }

    fn metadata(&mut self, node: &Yaml) -> Option<Metadata> {
        match Metadata::from_yaml(node) {
            Metadata::Null => None,
            map @ Metadata::Map(_) => Some(map),
            _ => {
                self.problems.error(node.place, format!("metadata must be a map, not {}", node.describe()));
                None
            }
        }
    }
}

fn found(node: &Yaml) -> String {
    match &node.kind {
        Kind::Scalar { text, plain: true } => format!(", not {text}"),
        Kind::Scalar { text, plain: false } => format!(", not the text {text:?}"),
        Kind::Null | Kind::List(_) | Kind::Map(_) => format!(", not {}", node.describe()),
    }
}

/// The known word that was most likely meant.
fn nearest(word: &str, known: &MapSchema) -> Option<&'static str> {
    let (distance, near) = known.names().map(|near| (strsim::damerau_levenshtein(word, near), near)).min()?;
    (distance <= 3 && distance < word.chars().count()).then_some(near)
}
