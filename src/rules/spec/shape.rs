//! The words of `rate_limit` that say how it is counted. Which of them may stand together depends on `algorithm`, which
//! may stand behind them: they are gathered first.

use super::Reader;
use crate::{
    algorithm::{Algorithm, Kind, Micros, Shape, sliding_window::Edge},
    rules::{limit::Measure, problem::Place, yaml::Yaml},
};

/// What `edge` can be.
const EDGES: [(&str, Edge); 2] = [("weighted", Edge::Weighted), ("strict", Edge::Strict)];
/// A soft limit of more percent than this is a mistake.
const MOST_PERCENT: u32 = 1_000;
/// For so long a request in flight counts, if its rule does not say.
const HOLD: Micros = Micros::from_secs(60);

/// What was read, and where each word stands.
pub(super) struct Words {
    kind: Kind,
    shape: Shape,
    /// Requests at once, for how long each, and the key of who they are.
    limit: Option<u32>,
    hold: Option<Micros>,
    holder: Option<String>,
    places: Vec<(String, Place)>,
    /// A word had no meaning: the limit cannot be made.
    spoiled: bool,
}

impl Default for Words {
    fn default() -> Self {
        Self {
            kind: Algorithm::DEFAULT,
            shape: Shape::default(),
            limit: None,
            hold: None,
            holder: None,
            places: Vec::new(),
            spoiled: false,
        }
    }
}

impl Words {
    pub(super) fn read(&mut self, reader: &mut Reader<'_, '_>, word: &str, place: Place, node: &Yaml) {
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
            "soft" => keep(&mut shape.soft, percent(reader, node)),
            "limit" => keep(&mut self.limit, reader.number(word, node)),
            "hold" => keep(&mut self.hold, duration(reader, word, node)),
            "holder" => {
                let key = reader.text(word, node);
                if key.as_ref().is_some_and(String::is_empty) {
                    reader
                        .problems
                        .error(node.place, "holder needs the key of the entry that names it, not an empty one");
                }
                keep(&mut self.holder, key.filter(|key| !key.is_empty()))
            }
            _ => true,
        };
        self.spoiled |= !understood;
    }

    pub(super) fn place(&self, word: &str) -> Option<Place> {
        self.places.iter().find(|(known, _)| known == word).map(|(_, place)| *place)
    }

    /// Where `count_denied: true` stands, if it does.
    pub(super) fn explicit_count_denied(&self) -> Option<Place> {
        self.place("count_denied").filter(|_| self.shape.count_denied == Some(true))
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// The shape, unless a word has no meaning or belongs to another algorithm.
    pub(super) fn shape(&self, reader: &mut Reader<'_, '_>) -> Option<Shape> {
        if self.spoiled {
            // It has been reported; and what belongs to an algorithm that was not understood is not known.
            return None;
        }
        let mut stray = false;
        for (word, place) in self.places.iter().filter(|(word, _)| !self.kind.words.contains(&word.as_str())) {
            // What belongs to none in particular belongs to all.
            let homes: Vec<_> =
                Algorithm::named().filter(|kind| kind.words.contains(&word.as_str())).map(|kind| kind.name).collect();
            if !homes.is_empty() {
                let message = format!("{word} belongs to algorithm {}, not to {}", homes.join(", "), self.kind.name);
                reader.problems.error(*place, message);
                stray = true;
            }
        }
        (!stray).then_some(self.shape)
    }

    /// Whether the algorithm counts these, and has no unit.
    pub(super) fn are_of_requests_at_once(&self) -> bool {
        self.kind.words.contains(&"hold")
    }

    /// The key of the entry that names who holds what is taken.
    pub(super) fn holder(&self) -> Option<String> {
        self.holder.clone()
    }

    /// How many at once, and for how long each.
    pub(super) fn in_flight(&self, reader: &mut Reader<'_, '_>, place: Place) -> Option<(u32, Measure)> {
        let hold = self.hold.unwrap_or(HOLD);
        if self.limit.is_none() && !self.spoiled {
            reader.problems.error(place, "concurrency needs a limit: how many requests at once");
        }
        Some((self.limit?, Measure::InFlight { hold }))
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

fn percent(reader: &mut Reader<'_, '_>, node: &Yaml) -> Option<u32> {
    let text = reader.text("soft", node)?;
    let number = text.strip_suffix('%').and_then(|digits| digits.trim_end().parse().ok());
    let percent = number.filter(|percent| (1..=MOST_PERCENT).contains(percent));
    if percent.is_none() {
        let message = format!("soft must be a whole percentage from 1% to {MOST_PERCENT}%, not {text:?}");
        reader.problems.error(node.place, message);
    }
    percent
}
