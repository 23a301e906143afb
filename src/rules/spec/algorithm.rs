//! The words of `rate_limit` that say how it is counted. Which of them may stand together depends on `algorithm`, which
//! may stand behind them: they are gathered first.

use sluicegate_common::adaptive::Method;

use super::{
    Reader,
    keywords::{EDGES, MAX_PERCENT},
    sharing::{Capacity, Sharing},
};
use crate::{
    algorithm::{Algorithm, AlgorithmKind, LimitSpec, Micros},
    rules::{diagnostic::Location, limit::Measure, matcher::ModifierEntry, yaml::Yaml},
};

/// For so long a request in flight counts, if its rule does not say.
const HOLD: Micros = Micros::from_secs(60);

/// What was read, and where each word stands.
pub(super) struct AlgorithmKeywords {
    kind: AlgorithmKind,
    shape: LimitSpec,
    /// Requests at once, for how long each, and the key of who they are.
    limit: Option<u32>,
    hold: Option<Micros>,
    holder: Option<String>,
    /// What several share, who they are, and the key of the entry that says which of them a request belongs to.
    capacity: Option<Capacity>,
    sharing: Option<Sharing>,
    class: Option<String>,
    places: Vec<(String, Location)>,
    /// A word had no meaning: the limit cannot be made.
    spoiled: bool,
}

impl Default for AlgorithmKeywords {
    fn default() -> Self {
        Self {
            kind: Algorithm::DEFAULT,
            shape: LimitSpec::default(),
            limit: None,
            hold: None,
            holder: None,
            capacity: None,
            sharing: None,
            class: None,
            places: Vec::new(),
            spoiled: false,
        }
    }
}

/// How a limit says how many.
pub(super) enum Counted {
    /// By a unit and requests per unit.
    ByUnit,
    /// By itself; `None` where that has no meaning.
    Otherwise(Option<(u32, Measure)>),
}

impl AlgorithmKeywords {
    pub(super) fn read(&mut self, reader: &mut Reader<'_, '_>, word: &str, place: Location, node: &Yaml) {
        self.places.push((word.to_owned(), place));
        let shape = &mut self.shape;
        let understood = match word {
            "algorithm" => {
                let kinds: Vec<_> = Algorithm::named().map(|kind| (kind.name, kind)).collect();
                let kind = reader.word(word, node, &kinds);
                self.kind = kind.unwrap_or(self.kind);
                kind.is_some()
            }
            "buckets" => keep(&mut shape.buckets, reader.number(word, node)),
            "edge" => keep(&mut shape.edge, reader.word(word, node, &EDGES)),
            "burst" => keep(&mut shape.burst, reader.number(word, node)),
            "queue" => keep(&mut shape.queue, reader.number(word, node)),
            "warm_up" => keep(&mut shape.warm_up, duration(reader, word, node)),
            "count_denied" => keep(&mut shape.count_denied, Some(reader.boolean(word, node))),
            "min_interval" => keep(&mut shape.min_interval, duration(reader, word, node)),
            "soft" => keep(&mut shape.soft, reader.percent(word, node, 1, MAX_PERCENT)),
            "limit" => keep(&mut self.limit, reader.number(word, node)),
            "hold" => keep(&mut self.hold, duration(reader, word, node)),
            "holder" => keep(&mut self.holder, key_of_entry(reader, word, node)),
            "ceiling" => keep(&mut self.limit, reader.number(word, node)),
            "floor" => keep(&mut shape.floor, reader.number(word, node)),
            "initial" => keep(&mut shape.initial, reader.number(word, node)),
            "timeout" => keep(&mut shape.timeout, duration(reader, word, node)),
            "method" => keep(&mut shape.method, reader.word(word, node, &Method::ALL.map(|it| (it.name(), it)))),
            "class" => keep(&mut self.class, key_of_entry(reader, word, node)),
            "capacity" => keep(&mut self.capacity, reader.capacity(node)),
            "shares" | "reserve" if self.sharing.is_some() => {
                reader.problems.error(place, "shares and reserve exclude each other: a reserve is a share for short");
                false
            }
            "shares" => keep(&mut self.sharing, reader.shares(node)),
            "reserve" => keep(&mut self.sharing, reader.reserve(node)),
            _ => true,
        };
        self.spoiled |= !understood;
    }

    pub(super) fn place(&self, word: &str) -> Option<Location> {
        self.places.iter().find(|(known, _)| known == word).map(|(_, place)| *place)
    }

    /// Where `count_denied: true` stands, if it does.
    pub(super) fn explicit_count_denied(&self) -> Option<Location> {
        self.place("count_denied").filter(|_| self.shape.count_denied == Some(true))
    }

    /// A capacity says by itself how it is counted.
    pub(super) fn kind(&self) -> AlgorithmKind {
        let name = match self.capacity {
            None => return self.kind,
            Some(Capacity { per: Some(_), .. }) => "shares",
            Some(Capacity { per: None, .. }) => "concurrency",
        };
        Algorithm::kind(name).unwrap_or(self.kind)
    }

    /// The shape, unless a word has no meaning or belongs to another algorithm.
    pub(super) fn shape(&self, reader: &mut Reader<'_, '_>) -> Option<LimitSpec> {
        if self.spoiled {
            // It has been reported; and what belongs to an algorithm that was not understood is not known.
            return None;
        }
        let kind = self.kind();
        let mut stray = false;
        for (word, place) in self.places.iter().filter(|(word, _)| !kind.keywords.contains(&word.as_str())) {
            // What belongs to none in particular belongs to all.
            let homes: Vec<_> = Algorithm::named()
                .filter(|kind| kind.keywords.contains(&word.as_str()))
                .map(|kind| kind.name)
                .collect();
            if !homes.is_empty() {
                let message = format!("{word} belongs to algorithm {}, not to {}", homes.join(", "), kind.name);
                reader.problems.error(*place, message);
                stray = true;
            }
        }
        stray |= self.contradicts(reader);
        let mut shape = self.shape;
        if let (Some(sharing), Some(capacity)) = (&self.sharing, self.capacity) {
            match sharing.table(capacity.hits).1 {
                Ok(classes) => shape.classes = Some(classes),
                Err(error) => {
                    reader.problems.error(sharing.place(), error.to_string());
                    stray = true;
                }
            }
        }
        (!stray).then_some(shape)
    }

    /// Words that want one another, or exclude each other.
    fn contradicts(&self, reader: &mut Reader<'_, '_>) -> bool {
        let place = |word| self.place(word);
        let sharing = place("shares").or_else(|| place("reserve"));
        let wrong = [
            (place("capacity").and(place("limit")), "a limit at once is a capacity that nobody shares: one of the two"),
            (
                place("capacity").and(place("algorithm")).filter(|_| self.kind() != self.kind),
                "capacity says by itself how it is counted",
            ),
            (sharing.filter(|_| self.capacity.is_none()), "who has a share needs a capacity to have it of"),
            (
                sharing.filter(|_| self.class.is_none()),
                "shares need a class: the key of the entry that says whose request it is",
            ),
            (place("class").filter(|_| self.sharing.is_none()), "a class needs shares, or a reserve"),
            (place("class").filter(|_| self.class == self.holder), "class and holder are two entries"),
        ];
        let wrong = wrong.into_iter().filter_map(|(place, why)| Some((place?, why)));
        wrong.map(|(place, why)| reader.problems.error(place, why)).count() > 0
    }

    /// How many, where no unit says so.
    pub(super) fn counted(&self, reader: &mut Reader<'_, '_>, place: Location) -> Counted {
        let in_flight = Measure::InFlight { hold: self.hold.unwrap_or(HOLD) };
        match self.capacity {
            Some(Capacity { hits, per: Some(unit) }) => {
                Counted::Otherwise(Some((hits, Measure::Rate { unit, multiplier: 1 })))
            }
            Some(Capacity { hits, per: None }) => Counted::Otherwise(Some((hits, in_flight))),
            None if self.spoiled && self.place("capacity").is_some() => Counted::Otherwise(None),
            None if self.kind.keywords.contains(&"hold") => {
                if self.limit.is_none() && !self.spoiled {
                    let word = if self.kind.keywords.contains(&"ceiling") { "ceiling" } else { "limit" };
                    let name = self.kind.name;
                    reader.problems.error(place, format!("{name} needs a {word}: how many requests at once"));
                }
                Counted::Otherwise(self.limit.map(|limit| (limit, in_flight)))
            }
            None if self.kind.keywords.contains(&"capacity") => {
                reader.problems.error(place, "shares are of a capacity: 1000/s");
                Counted::Otherwise(None)
            }
            None => Counted::ByUnit,
        }
    }

    /// What of a limit says how many.
    pub(super) fn counted_by(&self) -> &'static str {
        if self.place("capacity").is_some() { "capacity" } else { self.kind.name }
    }

    /// The keys of the entries that say who asks, in their order, and the classes.
    pub(super) fn askers(&self) -> (Vec<(ModifierEntry, String)>, Vec<Box<str>>) {
        let class = self.class.clone().map(|key| (ModifierEntry::Class, key));
        let holder = self.holder.clone().map(|key| (ModifierEntry::Holder, key));
        let names = self.sharing.as_ref().map(|sharing| sharing.table(0).0);
        (class.into_iter().chain(holder).collect(), names.unwrap_or_default())
    }

    /// Whether all that is refused is overload: what others could have is kept for some.
    pub(super) fn sheds(&self) -> bool {
        self.sharing.as_ref().is_some_and(|sharing| sharing.reserve)
    }

    /// Nothing is counted: no word has a meaning.
    pub(super) fn refuse_all(&self, reader: &mut Reader<'_, '_>) {
        for (word, place) in &self.places {
            reader.problems.error(*place, format!("{word} has no meaning for a limit that is unlimited"));
        }
    }
}

/// Whether there was something to keep.
fn keep<T>(field: &mut Option<T>, value: Option<T>) -> bool {
    *field = value;
    field.is_some()
}

fn duration(reader: &mut Reader<'_, '_>, word: &str, node: &Yaml) -> Option<Micros> {
    let text = reader.text(word, node)?;
    let parsed = humantime::parse_duration(&text).ok();
    let micros = parsed.and_then(|duration| u64::try_from(duration.as_micros()).ok());
    if micros.is_none() {
        reader.problems.error(node.place, format!("{word} must be a duration like 200ms, 30s or 5m, not {text:?}"));
    }
    micros.map(Micros::new)
}

/// The key of an entry that says something of the request.
fn key_of_entry(reader: &mut Reader<'_, '_>, word: &str, node: &Yaml) -> Option<String> {
    let key = reader.text(word, node)?;
    if key.is_empty() {
        reader.problems.error(node.place, format!("{word} needs the key of the entry that names it, not an empty one"));
        return None;
    }
    Some(key)
}
