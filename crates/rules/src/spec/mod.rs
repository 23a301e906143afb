//! [`read`]: reads a rule file into types. Every mistake becomes a diagnostic with its location, and reading continues.
//!
//! A `Reader` has the options and the diagnostics found so far. Each file of this folder has its methods for one part of
//! a rule file.

mod algorithm;
mod anchor;
mod assignment;
mod cost_per_hit;
mod currency;
mod custom_limit;
mod denial;
mod elastic;
pub(super) mod hints;
pub(super) mod keywords;
mod penalty;
mod plans;
mod rate_limit;
mod scalars;
mod sharing;

pub(super) use plans::Plans;
pub(super) use rate_limit::{RateLimit, ReplacedLimit};

use self::{
    hints::Suggestion,
    keywords::{CHARGES, DESCRIPTOR, IP_PREFIX, MAPS, MapSchema, RATE_LIMIT, ROOT},
    scalars::{actual, short},
};
use super::{
    diagnostic::{Diagnostics, Location},
    ip_prefix::IpPrefix,
    metadata::Metadata,
    options::Options,
    yaml::{self, Kind, Yaml},
};

/// A rule file.
pub(super) struct File {
    pub(super) domain: String,
    pub(super) domain_location: Location,
    pub(super) charge_all: bool,
    pub(super) shard_by: Vec<String>,
    pub(super) shard_by_location: Location,
    pub(super) plans: Plans,
    pub(super) descriptors: Vec<Descriptor>,
}

/// A descriptor of a rule file, with its limit and its children.
#[derive(Default)]
pub(super) struct Descriptor {
    pub(super) location: Location,
    pub(super) key: String,
    pub(super) value: Option<String>,
    /// Boxed because the upper levels have none.
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

/// Keywords of envoyproxy/ratelimit. It ignores them where they have no effect, so existing files may have them there.
const ENVOYPROXY_KEYWORDS: &[&str] = &[
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

/// Reads one file. Returns `None` if it has no domain or is not a YAML map.
pub(super) fn read(text: &str, options: Options, diagnostics: &mut Diagnostics<'_>) -> Option<File> {
    let document = match yaml::parse(text) {
        Ok(document) => document,
        Err(error) => {
            let line = text.lines().nth(error.location.line.saturating_sub(1)).unwrap_or_default();
            let hint = hints::syntax_hint(&error.message, line);
            diagnostics.error(error.location, error.message + hint);
            return None;
        }
    };
    for (location, message) in document.ignored {
        diagnostics.warning(location, message);
    }
    let start = Location { line: 1, column: 1 };
    let Some(root) = document.root.filter(|root| !matches!(root.kind, Kind::Null)) else {
        diagnostics.error(start, "the file is empty; a domain is required");
        return None;
    };
    for location in hints::commented_values(text) {
        let message = "the # begins a comment, so the value is empty; write a text with # in quotes";
        diagnostics.warning(location, message);
    }
    let mut reader = Reader::new(diagnostics, options);
    let mut domain = None;
    let mut shard_by = Vec::new();
    let mut shard_by_location = start;
    let mut charge_all = options.charge_all;
    let mut plans = Plans::default();
    let mut descriptors = Vec::new();
    let fields = reader.read_map("the file", &root, &ROOT)?;
    let is_domain_reported = reader.suggested.contains(&"domain");
    for (key, location, value) in fields {
        match key {
            "domain" => domain = reader.domain(value).map(|text| (text, location)),
            "charge" => charge_all = reader.choice(key, value, &CHARGES).unwrap_or_default(),
            "shard_by" => {
                shard_by = reader.shard_by(value);
                shard_by_location = location;
            }
            "plans" => plans = reader.plans(value),
            "descriptors" => descriptors = reader.descriptors(value),
            _ => {}
        }
    }
    let Some((domain, location)) = domain.filter(|(domain, _)| !domain.is_empty()) else {
        if !is_domain_reported {
            reader.diagnostics.error(root.location, "the file has no domain, or the domain is empty");
        }
        return None;
    };
    if charge_all {
        reader.reject_count_denied(&descriptors, &plans);
    }
    Some(File { domain, domain_location: location, charge_all, shard_by, shard_by_location, plans, descriptors })
}

/// Returns whether a key is YAML's merge key.
fn is_merge_key(key: &Yaml) -> bool {
    matches!(&key.kind, Kind::Scalar { text, plain: true } if text == "<<")
}

/// Reads YAML nodes and reports their mistakes.
struct Reader<'r, 'p> {
    diagnostics: &'r mut Diagnostics<'p>,
    /// Number of instances among which a limit is divided if each instance decides on its own.
    instances: u32,
    /// See [`Options::peers`].
    peers: bool,
    /// Whether the next limit by months or years has a note that they are not those of the calendar.
    notes: bool,
    /// Keywords that a message about an unknown key of the last map has suggested.
    suggested: Vec<&'static str>,
}

impl<'r, 'p> Reader<'r, 'p> {
    fn new(diagnostics: &'r mut Diagnostics<'p>, options: Options) -> Self {
        Self {
            diagnostics,
            instances: options.instances.into(),
            peers: options.peers,
            notes: options.notes,
            suggested: Vec::new(),
        }
    }

    /// Returns the map's known keys with their locations and values, and reports unknown and duplicate keys.
    ///
    /// `name` is the name of the map in diagnostics.
    fn read_map<'y>(
        &mut self,
        name: &str,
        node: &'y Yaml,
        known: &MapSchema,
    ) -> Option<Vec<(&'y str, Location, &'y Yaml)>> {
        self.suggested.clear();
        let Kind::Map(pairs) = &node.kind else {
            let message = match node.scalar().and_then(|(text, _)| hints::limit_in_words(text)) {
                Some(map) if known.name == RATE_LIMIT.name => {
                    format!("{name} must be a map{}; write {map}", actual(node))
                }
                Some(_) | None => format!("{name} must be a map such as {}{}", known.example, actual(node)),
            };
            self.diagnostics.error(node.location, message);
            return None;
        };
        let mut fields: Vec<(&str, Location, &Yaml)> = Vec::new();
        for (key, value) in self.merge_keys(pairs) {
            let Kind::Scalar { text, .. } = &key.kind else {
                self.diagnostics.error(key.location, format!("a key must be a scalar, not {}", key.describe()));
                continue;
            };
            if !known.has(text) {
                self.report_unknown_key(key.location, text, value, known);
            } else if fields.iter().any(|(name, ..)| name == text) {
                let message = format!("duplicate key {text:?}; a map contains each key once");
                self.diagnostics.error(key.location, message);
            } else {
                fields.push((text, key.location, value));
            }
        }
        Some(fields)
    }

    /// Returns the pairs with YAML's merge key (`<<: *base`) expanded. The map's own keys take precedence.
    fn merge_keys<'y>(&mut self, pairs: &'y [(Yaml, Yaml)]) -> Vec<(&'y Yaml, &'y Yaml)> {
        let mut all = Vec::new();
        for (key, value) in pairs {
            if !is_merge_key(key) {
                all.push((key, value));
            }
        }
        for (_, base) in pairs.iter().filter(|(key, _)| is_merge_key(key)) {
            let bases = match &base.kind {
                Kind::List(bases) => bases.as_slice(),
                Kind::Map(_) => std::slice::from_ref(base),
                Kind::Null | Kind::Scalar { .. } => {
                    self.diagnostics.error(base.location, "the merge key << requires a map or a list of maps");
                    continue;
                }
            };
            for base in bases {
                let Kind::Map(inherited) = &base.kind else {
                    self.diagnostics.error(base.location, "the merge key << requires a map or a list of maps");
                    continue;
                };
                for (key, value) in inherited.iter() {
                    let is_present = key.scalar().is_some() && all.iter().any(|(own, _)| own.scalar() == key.scalar());
                    if !is_present {
                        all.push((key, value));
                    }
                }
            }
        }
        all
    }

    /// Reports a key that is not allowed here.
    ///
    /// This is an error, unless envoyproxy/ratelimit supports the key elsewhere. Then it is a warning, because
    /// envoyproxy/ratelimit accepts such files and ignores the key.
    fn report_unknown_key(&mut self, location: Location, key: &str, value: &Yaml, known: &MapSchema) {
        let place = hints::place_of(key, known, &MAPS);
        if ENVOYPROXY_KEYWORDS.contains(&key)
            && let Some(place) = place
        {
            self.diagnostics.warning(location, format!("{key} has no effect here; it belongs {place}"));
            return;
        }
        let scalar = value.scalar().map(|(text, _)| text);
        if !key.is_empty() && key.bytes().all(|digit| digit.is_ascii_digit()) && matches!(value.kind, Kind::Null) {
            let message = format!("unknown key {key:?}; a number has no commas: write 10000, not 10,000");
            self.diagnostics.error(location, message);
            return;
        }
        // A keyword of another map that another system has in this map: `limit: 5`, but `limit: { … }`.
        let is_word = place.is_none() || scalar.is_none();
        let hint = if is_word && let Some(Suggestion { keyword, form }) = hints::translate(key, scalar, known) {
            self.suggested.push(keyword);
            let separator = if form.is_empty() { "" } else { " " };
            format!("did you mean {keyword}?{separator}{form}")
        } else if let Some(place) = place {
            format!("it belongs {place}")
        } else if let Some(nearest) = hints::nearest_keyword(key, known) {
            self.suggested.push(nearest);
            format!("did you mean {nearest}?")
        } else {
            let entry = match scalar {
                Some(text) if known.name == DESCRIPTOR.name && !text.is_empty() => {
                    format!("; an entry is written as key: {:?}, value: {:?}", short(key), short(text))
                }
                Some(_) | None => String::new(),
            };
            let names = known.names().collect::<Vec<_>>().join(", ");
            format!("keys allowed here: {names}{entry}")
        };
        self.diagnostics.error(location, format!("unknown key {key:?}; {hint}"));
    }

    fn list<'y>(&mut self, name: &str, node: &'y Yaml) -> &'y [Yaml] {
        match &node.kind {
            Kind::List(items) => items,
            Kind::Null => &[],
            Kind::Scalar { .. } | Kind::Map(_) => {
                let mut message = format!("{name} must be a list, not {}", node.describe());
                if matches!(node.kind, Kind::Map(_)) {
                    message += "; begin each of its items with \"- \"";
                }
                self.diagnostics.error(node.location, message);
                &[]
            }
        }
    }

    fn descriptors(&mut self, node: &Yaml) -> Vec<Descriptor> {
        self.list("descriptors", node).iter().filter_map(|item| self.descriptor(item)).collect()
    }

    fn descriptor(&mut self, node: &Yaml) -> Option<Descriptor> {
        let mut descriptor = Descriptor { location: node.location, ..Descriptor::default() };
        let mut share_threshold = None;
        let mut ip_prefix = None;
        let mut value_location = node.location;
        let mut limit_location = None;
        let fields = self.read_map("a descriptor", node, &DESCRIPTOR)?;
        let is_key_reported = self.suggested.contains(&"key");
        for (key, location, value) in fields {
            match key {
                "key" => descriptor.key = self.descriptor_key(value),
                "value" => {
                    descriptor.value = self.text(key, value).filter(|value| !value.is_empty());
                    value_location = value.location;
                }
                "rate_limit" => {
                    if matches!(value.kind, Kind::Null) {
                        let message = "rate_limit is empty, so this descriptor has no limit of its own";
                        self.diagnostics.warning(value.location, message);
                    }
                    descriptor.rate_limit = self.rate_limit(key, value).map(Box::new);
                    self.reject_second_list(&mut limit_location, location);
                }
                "rate_limits" => {
                    descriptor.rate_limit = self.rate_limits(key, value).map(Box::new);
                    self.reject_second_list(&mut limit_location, location);
                }
                "shadow_mode" => descriptor.shadow_mode = self.boolean(key, value),
                "quota_mode" => descriptor.quota_mode = self.boolean(key, value),
                "detailed_metric" => descriptor.detailed_metric = self.boolean(key, value),
                "value_to_metric" => descriptor.value_to_metric = self.boolean(key, value),
                "share_threshold" => share_threshold = self.boolean(key, value).then_some(location),
                "ip_prefix" => ip_prefix = self.ip_prefix(value).map(|prefix| (prefix, location)),
                "metadata" => descriptor.metadata = self.metadata(value),
                "descriptors" => descriptor.children = self.descriptors(value),
                _ => {}
            }
        }
        if descriptor.key.is_empty() {
            if !is_key_reported {
                self.diagnostics.error(node.location, "a descriptor requires a non-empty key");
            }
            return None;
        }
        match &descriptor.value {
            Some(value) => self.warn_about_value(&descriptor.key, value, value_location),
            None => self.warn_about_entry_in_key(&descriptor),
        }
        if let Some(location) = share_threshold {
            descriptor.share_threshold = descriptor.value.as_ref().is_some_and(|value| value.contains('*'));
            if !descriptor.share_threshold {
                let message = "share_threshold requires a value with a wildcard (*)";
                self.diagnostics.error(location, message);
            }
        }
        if let Some((prefix, location)) = ip_prefix {
            descriptor.ip_prefix = Some(prefix);
            if descriptor.share_threshold {
                self.diagnostics.error(
                    location,
                    "ip_prefix cannot be combined with share_threshold, which uses one counter for all addresses",
                );
            }
        }
        Some(descriptor)
    }

    /// Rejects `rate_limit` together with `rate_limits`.
    fn reject_second_list(&mut self, first: &mut Option<Location>, location: Location) {
        if first.is_some() {
            let message = "rate_limit and rate_limits cannot be combined; rate_limits is a list of all limits";
            self.diagnostics.error(location, message);
        }
        *first = Some(location);
    }

    fn domain(&mut self, node: &Yaml) -> Option<String> {
        let domain = self.text("domain", node)?;
        if domain.contains('*') {
            let message =
                format!("the * in the domain {domain:?} is no pattern, only requests with exactly this domain match");
            self.diagnostics.warning(node.location, message);
        }
        self.warn_about_ends("the domain", &domain, node.location);
        Some(domain)
    }

    fn warn_about_value(&mut self, key: &str, value: &str, location: Location) {
        if let Some(message) = hints::misread_value(key, value) {
            self.diagnostics.warning(location, message);
        }
        self.warn_about_ends("the value", value, location);
    }

    fn warn_about_entry_in_key(&mut self, descriptor: &Descriptor) {
        let Some((key, value)) = descriptor.key.split_once('=') else {
            return;
        };
        if !key.is_empty() && !value.is_empty() {
            let message = format!(
                "the = in the key {:?} is a part of it, which requests must contain as well; an entry is written as key: \
                 {key:?} and value: {value:?}",
                descriptor.key
            );
            self.diagnostics.warning(descriptor.location, message);
        }
    }

    fn warn_about_ends(&mut self, name: &str, text: &str, location: Location) {
        if let Some(message) = hints::misread_ends(name, text) {
            self.diagnostics.warning(location, message);
        }
    }

    fn descriptor_key(&mut self, node: &Yaml) -> String {
        let key = self.text("key", node).unwrap_or_default();
        self.warn_about_ends("the key", &key, node.location);
        if key.contains('*') {
            let message = format!(
                "the * in the key {key:?} is no pattern, only entries with exactly this key match; \
                 envoyproxy/ratelimit matches a * at the end of a key as a pattern"
            );
            self.diagnostics.warning(node.location, message);
        }
        key
    }

    /// Reads a value that must be one of `choices`.
    fn choice<T: Copy>(&mut self, name: &str, node: &Yaml, choices: &[(&str, T)]) -> Option<T> {
        let text = self.text(name, node)?;
        let value = choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        if value.is_none() {
            let choices: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
            let nearest = hints::nearest_choice(&text, choices.iter().copied());
            let hint = nearest.map(|nearest| format!("; did you mean {nearest}?")).unwrap_or_default();
            let message = format!("{name} {text:?} is not one of {}{hint}", choices.join(", "));
            self.diagnostics.error(node.location, message);
        }
        value
    }

    fn ip_prefix(&mut self, node: &Yaml) -> Option<IpPrefix> {
        let mut prefix = IpPrefix::default();
        for (key, _, value) in self.read_map("ip_prefix", node, &IP_PREFIX)? {
            let (bits, max) = if key == "v4" { (&mut prefix.v4, 32) } else { (&mut prefix.v6, 128) };
            if let Some((text, _)) = value.scalar().filter(|(text, _)| text.starts_with('/')) {
                let message = format!("{key} must be a prefix length from 1 to {max}, without a slash, not {text:?}");
                self.diagnostics.error(value.location, message);
                continue;
            }
            match self.number(key, value) {
                Some(number) if (1..=max).contains(&number) => *bits = number as u8,
                Some(_) => {
                    self.diagnostics.error(value.location, format!("{key} must be a prefix length from 1 to {max}"));
                }
                None => {}
            }
        }
        Some(prefix)
    }

    /// Rejects `count_denied` in a domain with `charge: all`, where a denied request takes no hits.
    fn reject_count_denied(&mut self, descriptors: &[Descriptor], plans: &Plans) {
        let limits = descriptors.iter().filter_map(|descriptor| descriptor.rate_limit.as_deref());
        let limits = limits.flat_map(RateLimit::all);
        for location in limits.chain(plans.limits()).filter_map(|limit| limit.count_denied) {
            self.diagnostics.error(location, "count_denied cannot be combined with the domain's charge: all");
        }
        for descriptor in descriptors {
            self.reject_count_denied(&descriptor.children, &Plans::default());
        }
    }

    /// Reads the keys of the entries that select the shard.
    fn shard_by(&mut self, node: &Yaml) -> Vec<String> {
        let mut keys: Vec<String> = Vec::new();
        for item in self.list("shard_by", node) {
            let Some(key) = self.text("an entry of shard_by", item) else { continue };
            if key.is_empty() {
                self.diagnostics.error(item.location, "shard_by must not contain an empty key");
            } else if keys.contains(&key) {
                self.diagnostics.error(item.location, format!("shard_by contains {key:?} twice"));
            } else {
                keys.push(key);
            }
        }
        keys
    }

    fn metadata(&mut self, node: &Yaml) -> Option<Metadata> {
        match Metadata::from_yaml(node) {
            Metadata::Null => None,
            map @ Metadata::Map(_) => Some(map),
            _ => {
                self.diagnostics.error(node.location, format!("metadata must be a map, not {}", node.describe()));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
