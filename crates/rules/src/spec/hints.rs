//! Hints about frequent mistakes: keywords of other systems, other spellings of values, and values that look like
//! regular expressions or networks.

use super::keywords::{DESCRIPTOR, MapSchema, PLANS, RATE_LIMIT, ROOT};
use crate::{diagnostic::Location, limit::Unit};

/// Keywords of other systems with the meaning of one of ours.
struct ForeignWords {
    /// The map in which our keyword is allowed.
    map: &'static MapSchema,
    /// Our keyword.
    keyword: &'static str,
    /// The keywords of other systems, without `_` and `-` and in lower case.
    words: &'static [&'static str],
    /// How to write the correct form, if another keyword is not enough; otherwise empty.
    form: &'static str,
}

/// Keywords of Envoy, Envoy Gateway, Limitador, Kong, APISIX, nginx and Kubernetes.
const FOREIGN_WORDS: &[ForeignWords] = &[
    ForeignWords {
        map: &RATE_LIMIT,
        keyword: "requests_per_unit",
        words: &[
            "requests",
            "request",
            "maxvalue",
            "maxrequests",
            "count",
            "rate",
            "tokens",
            "tokensperfill",
            "hits",
            "calls",
            "average",
            "quota",
            "max",
        ],
        form: "",
    },
    ForeignWords {
        map: &RATE_LIMIT,
        keyword: "unit",
        words: &[
            "seconds",
            "minutes",
            "hours",
            "days",
            "timewindow",
            "windowsize",
            "period",
            "interval",
            "fillinterval",
            "duration",
            "per",
            "timeunit",
            "every",
        ],
        form: "write unit: minute, and unit_multiplier: 5 for five minutes",
    },
    ForeignWords {
        map: &RATE_LIMIT,
        keyword: "unit_multiplier",
        words: &["multiplier", "units", "unitcount"],
        form: "",
    },
    ForeignWords {
        map: &RATE_LIMIT,
        keyword: "burst",
        words: &["maxburst", "bucketsize", "burstsize", "maxtokens"],
        form: "it needs algorithm: token_bucket, leaky_bucket or gcra",
    },
    ForeignWords {
        map: &RATE_LIMIT,
        keyword: "on_error",
        words: &["faulttolerant", "failopen", "failuremode", "failuremodedeny", "failuremodeallow", "failclosed"],
        form: "write on_error: allow or on_error: deny",
    },
    ForeignWords { map: &RATE_LIMIT, keyword: "algorithm", words: &["strategy", "windowtype"], form: "" },
    ForeignWords {
        map: &DESCRIPTOR,
        keyword: "rate_limit",
        words: &["limits", "limit"],
        form: "write rate_limit: { unit: minute, requests_per_unit: 100 }",
    },
    ForeignWords {
        map: &DESCRIPTOR,
        keyword: "value",
        words: &["values", "match", "matches", "pattern", "regex", "prefix", "exact"],
        form: "it is one text, in which * stands for any characters",
    },
    ForeignWords {
        map: &DESCRIPTOR,
        keyword: "key",
        words: &["descriptorkey", "header", "headername", "generickey", "variables", "conditions", "clientselectors"],
        form: "a rule matches the entries that the caller sends, by their keys and values",
    },
    ForeignWords {
        map: &DESCRIPTOR,
        keyword: "descriptors",
        words: &["children", "entries", "nested", "rules", "subdescriptors"],
        form: "",
    },
    ForeignWords { map: &DESCRIPTOR, keyword: "shadow_mode", words: &["dryrun", "shadow", "logonly"], form: "" },
    ForeignWords { map: &ROOT, keyword: "domain", words: &["namespace", "name"], form: "" },
    ForeignWords { map: &ROOT, keyword: "descriptors", words: &["rules", "limits", "ratelimits", "entries"], form: "" },
    ForeignWords {
        map: &ROOT,
        keyword: "domain",
        words: &["apiversion"],
        form: "a rule file is no manifest of Kubernetes, and has domain and descriptors at its top; in a ConfigMap, the \
               rule file is the text of one key of data",
    },
];

/// A keyword to use in place of an unknown one.
pub(super) struct Suggestion {
    pub(super) keyword: &'static str,
    /// How to write the correct form, if another keyword is not enough; otherwise empty.
    pub(super) form: String,
}

/// Returns the keyword of the map that an unknown key means: the same keyword in another spelling, or that of another
/// system. `value` is the text of the key's value, if it is a scalar.
pub(super) fn translate(key: &str, value: Option<&str>, map: &MapSchema) -> Option<Suggestion> {
    let simple = simplified(key);
    let same = map.names().find(|name| simplified(name) == simple);
    if let Some(keyword) = same {
        return Some(Suggestion { keyword, form: String::new() });
    }
    if map.name == RATE_LIMIT.name {
        let unit = simple.strip_prefix("requestsper").or_else(|| simple.strip_prefix("per")).unwrap_or(&simple);
        if let Some(unit) = unit_of(unit).filter(|unit| simple != format!("{}s", unit.name())) {
            let requests = value.filter(|value| is_short_number(value)).unwrap_or("100");
            let form = format!("write unit: {} and requests_per_unit: {requests}", unit.name());
            return Some(Suggestion { keyword: "unit", form });
        }
    }
    let foreign =
        FOREIGN_WORDS.iter().find(|foreign| foreign.map.name == map.name && foreign.words.contains(&simple.as_str()));
    foreign.map(|foreign| Suggestion { keyword: foreign.keyword, form: foreign.form.to_owned() })
}

/// Returns the place of a keyword of another map, as in `it belongs …`.
pub(super) fn place_of(key: &str, map: &MapSchema, maps: &[&'static MapSchema]) -> Option<&'static str> {
    // Both the file and a descriptor have descriptors.
    if key == "descriptors" && map.name == RATE_LIMIT.name {
        return Some("one level up, beside rate_limit");
    }
    if key == "descriptors" && map.name != PLANS.name {
        return Some(DESCRIPTOR.context);
    }
    maps.iter().find(|map| map.has(key)).map(|map| map.context)
}

/// Returns the most similar keyword of a map, if it is similar enough to be suggested.
///
/// An unknown key of a descriptor is often that of an entry, such as `user`, which must not suggest `key`.
pub(super) fn nearest_keyword(keyword: &str, map: &MapSchema) -> Option<&'static str> {
    if map.name == DESCRIPTOR.name {
        return nearest(keyword, map.names());
    }
    let (distance, nearest) = most_similar(keyword, map.names())?;
    (distance < keyword.chars().count()).then_some(nearest)
}

/// Returns the most similar name, if at least half of it is the same.
pub(crate) fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let (distance, nearest) = most_similar(name, known)?;
    (distance * 2 <= name.chars().count()).then_some(nearest)
}

/// Returns `; did you mean …?` with the most similar known name, or nothing if none is similar.
pub(crate) fn did_you_mean<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> String {
    match most_similar(name, known) {
        Some((distance, known)) if distance < name.chars().count() => format!("; did you mean {known:?}?"),
        _ => String::new(),
    }
}

/// Returns the name with the smallest distance and the distance, at most 3.
fn most_similar<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<(usize, &'n str)> {
    if name.len() > MAX_COMPARED_BYTES {
        return None;
    }
    let comparable = known.filter(|known| known.len() <= MAX_COMPARED_BYTES).take(MAX_COMPARED_NAMES);
    let nearest = comparable.map(|known| (strsim::damerau_levenshtein(name, known), known)).min()?;
    Some(nearest).filter(|(distance, _)| *distance <= 3)
}

/// Maximum length of a name that is compared with others, in bytes. The time of a comparison is quadratic.
const MAX_COMPARED_BYTES: usize = 64;
/// Maximum number of names that an unknown name is compared with.
const MAX_COMPARED_NAMES: usize = 10_000;

/// Returns the choice that an invalid value probably means: another spelling, an abbreviation, or a typing error.
pub(super) fn nearest_choice<'c>(text: &str, choices: impl Iterator<Item = &'c str> + Clone) -> Option<&'c str> {
    let simple = simplified(text);
    if simple.len() > MAX_COMPARED_BYTES || simple.is_empty() {
        return None;
    }
    if let Some(same) = choices.clone().find(|choice| simplified(choice) == simple) {
        return Some(same);
    }
    // `sliding` could mean several algorithms.
    let mut longer = choices.clone().filter(|choice| simple.len() >= 3 && simplified(choice).starts_with(&simple));
    if let (Some(only), None) = (longer.next(), longer.next()) {
        return Some(only);
    }
    let (distance, nearest) =
        choices.map(|choice| (strsim::damerau_levenshtein(&simple, &simplified(choice)), choice)).min()?;
    (distance <= 2 && distance * 2 < simple.chars().count()).then_some(nearest)
}

/// Returns a name in lower case without `_`, `-` and spaces, so that `requestsPerUnit` is `requests_per_unit`.
fn simplified(name: &str) -> String {
    name.chars().filter(|letter| !matches!(letter, '_' | '-' | ' ')).flat_map(char::to_lowercase).collect()
}

/// Returns the unit that an abbreviation or a plural means.
fn unit_of(word: &str) -> Option<Unit> {
    let unit = match word.trim().to_ascii_lowercase().as_str() {
        "s" | "sec" | "secs" => Unit::Second,
        "m" | "min" | "mins" => Unit::Minute,
        "h" | "hr" | "hrs" => Unit::Hour,
        "d" => Unit::Day,
        "w" | "wk" => Unit::Week,
        "mo" | "mon" => Unit::Month,
        "y" | "yr" => Unit::Year,
        "daily" => Unit::Day,
        name => {
            let singular = name.strip_suffix('s').or_else(|| name.strip_suffix("ly")).unwrap_or(name);
            Unit::from_name(singular)?
        }
    };
    Some(unit)
}

/// Returns the correct form of an invalid unit: `minute` for `mins`, and a multiplier for `5m`.
pub(super) fn unit_hint(text: &str) -> Option<String> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, word) = text.split_at(digits);
    if let Some(unit) = unit_of(word) {
        return Some(match number {
            "" | "1" => format!("did you mean {}?", unit.name()),
            _ if is_short_number(number) => {
                format!("write unit: {} and unit_multiplier: {number}", unit.name())
            }
            _ => return None,
        });
    }
    let nearest = nearest_choice(text, Unit::ALL.into_iter().map(Unit::name))?;
    Some(format!("did you mean {nearest}?"))
}

/// Returns the map for a limit in another form, such as `100/minute`, `100 per minute`, `10r/s` or `5/10m`.
pub(super) fn limit_in_words(text: &str) -> Option<String> {
    if text == "unlimited" {
        return Some("{ unlimited: true }".to_owned());
    }
    let (requests, window) = text.split_once('/').or_else(|| text.split_once(" per "))?;
    let requests: String = requests.chars().filter(|letter| !matches!(letter, '_' | ' ')).collect();
    let digits = requests.bytes().take_while(u8::is_ascii_digit).count();
    let (number, noun) = requests.split_at(digits);
    let is_noun = matches!(noun.to_ascii_lowercase().as_str(), "" | "r" | "req" | "request" | "requests" | "hits");
    if !is_noun || !is_short_number(number) {
        return None;
    }
    let window = window.trim();
    let digits = window.bytes().take_while(u8::is_ascii_digit).count();
    let (multiplier, unit) = window.split_at(digits);
    let unit = unit_of(unit)?.name();
    match multiplier {
        "" | "1" => Some(format!("{{ unit: {unit}, requests_per_unit: {number} }}")),
        _ if is_short_number(multiplier) => {
            Some(format!("{{ unit: {unit}, unit_multiplier: {multiplier}, requests_per_unit: {number} }}"))
        }
        _ => None,
    }
}

/// Returns the correct form of a number such as `10k`, `10,000`, `-1` or `unlimited`.
pub(super) fn number_hint(text: &str) -> Option<String> {
    let text = text.trim().to_ascii_lowercase();
    if matches!(text.as_str(), "-1" | "unlimited" | "none" | "inf" | "infinite" | "infinity" | ".inf") {
        return Some("a rule without a limit has unlimited: true".to_owned());
    }
    let digits: String = text.chars().filter(|letter| !matches!(letter, ',' | '_' | ' ')).collect();
    let (digits, factor) = match digits.char_indices().next_back()? {
        (end, 'k') => (&digits[..end], 1_000_u32),
        (end, 'm') => (&digits[..end], 1_000_000),
        _ => (digits.as_str(), 1),
    };
    let number = digits.parse::<u32>().ok()?.checked_mul(factor)?;
    Some(format!("write {number}"))
}

/// Returns a hint for a syntax error, if there is a frequent reason for it. `line` is the line of the error.
pub(super) fn syntax_hint(error: &str, line: &str) -> &'static str {
    let before_comment = line.split(" #").next().unwrap_or(line);
    let value = match before_comment.split_once(": ") {
        Some((_, value)) => value.trim(),
        None => "",
    };
    if error.contains("a tab") || error.contains("tabs ") {
        "; indent with spaces"
    } else if value.starts_with(['*', '&', '@', '`', '%', '!', '|', '>']) && !error.contains("indentation") {
        "; a text that begins with such a character needs quotes: \"*.example.com\""
    } else if error.contains("unknown anchor") || error.contains("anchor or alias") {
        "; * refers to an anchor (&) of the same file; a text that begins with * needs quotes"
    } else if value.contains(": ") && !value.starts_with(['{', '[', '"', '\'']) {
        "; a text with a colon and a space needs quotes"
    } else if error.contains("mapping values") || error.contains("did not find expected key") {
        "; check the indentation, and the space after the colon of each key, here and in the line before"
    } else {
        ""
    }
}

/// Returns the locations of keys with a comment in place of the value: `value: #free`.
pub(super) fn commented_values(text: &str) -> Vec<Location> {
    let mut locations = Vec::new();
    if !text.contains(": #") {
        return locations;
    }
    for (line, content) in (1..).zip(text.lines()) {
        let start = content.trim_start_matches([' ', '-', '{']);
        for key in ["value: #", "key: #", "domain: #"] {
            let comment = start.strip_prefix(key);
            if comment.is_some_and(|comment| comment.starts_with(|letter: char| letter.is_alphanumeric())) {
                let column = content.chars().count() - start.chars().count() + 1;
                locations.push(Location { line, column });
            }
        }
    }
    locations
}

/// Returns a warning about a text with spaces or quotes at its ends, which are a part of the text.
pub(super) fn misread_ends(name: &str, text: &str) -> Option<String> {
    if text.trim() != text {
        return Some(format!("{name} {text:?} begins or ends with a space, which requests must contain as well"));
    }
    let quotes = ['"', '\'', '\u{201c}', '\u{201d}', '\u{2018}', '\u{2019}'];
    let is_quoted = text.chars().count() > 1 && text.starts_with(quotes) && text.ends_with(quotes);
    if !is_quoted {
        return None;
    }
    Some(format!("the quotes in {name} {text:?} are a part of it, which requests must contain as well"))
}

fn is_short_number(text: &str) -> bool {
    !text.is_empty() && text.len() <= 10 && text.bytes().all(|digit| digit.is_ascii_digit())
}

/// Returns a warning about a value that looks like a regular expression or a network.
pub(super) fn misread_value(key: &str, value: &str) -> Option<String> {
    if is_regular_expression(value) {
        return Some(format!(
            "the value {value:?} looks like a regular expression, but is compared as text; in a value, only * has a \
             meaning, and stands for any characters: /api/*"
        ));
    }
    if !has_networks(key)
        && let Some(pattern) = network_pattern(value)
    {
        let pattern =
            pattern.map(|pattern| format!("; value: {pattern} matches the addresses of this network as text"));
        return Some(format!(
            "the network {value:?} is compared as text, so no address matches it; ip_prefix, without a value, gives \
             each network a counter{}",
            pattern.unwrap_or_default()
        ));
    }
    None
}

/// Returns whether a value has signs that only regular expressions have.
fn is_regular_expression(value: &str) -> bool {
    let is_anchored = value.starts_with('^') && value.len() > 1;
    // `api.*` is a valid pattern, and `US$` a valid text.
    let has_operator = contains_any(value, &[".*", ".+", "[", "(", "\\", "]"]);
    let is_ended = value.len() > 1 && value.ends_with('$') && has_operator;
    let classes = ["\\d", "\\w", "\\s", "\\.", "\\/", "[0-9]", "[a-z]", "[A-Z]", "[^", "(?:", ".+)", ".*)"];
    let has_class = contains_any(value, &classes);
    let has_choice = value.starts_with('(') && value.ends_with(')') && value.contains('|');
    is_anchored || is_ended || has_class || has_choice || ends_with_any(value)
}

fn contains_any(value: &str, texts: &[&str]) -> bool {
    texts.iter().any(|text| value.contains(text))
}

/// Returns whether the value ends with `.*` after a character that no name or number has before a dot: `.*`, `/api/.*`.
fn ends_with_any(value: &str) -> bool {
    let Some(start) = value.strip_suffix(".*") else {
        return false;
    };
    !start.ends_with(|last: char| last.is_alphanumeric() || last == '*')
}

/// Returns whether the values of a key are networks, such as Envoy's `masked_remote_address`.
fn has_networks(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    contains_any(&key, &["mask", "cidr", "network", "subnet", "prefix"])
}

/// Returns `Some` if the value is a network in CIDR notation, with the pattern that matches its addresses as texts, if
/// there is one.
fn network_pattern(value: &str) -> Option<Option<String>> {
    let (address, length) = value.split_once('/')?;
    let address: std::net::IpAddr = address.parse().ok()?;
    let length: u8 = length.parse().ok()?;
    let std::net::IpAddr::V4(address) = address else {
        return (length <= 128).then_some(None);
    };
    let octets = address.octets();
    match length {
        8 => Some(Some(format!("{}.*", octets[0]))),
        16 => Some(Some(format!("{}.{}.*", octets[0], octets[1]))),
        24 => Some(Some(format!("{}.{}.{}.*", octets[0], octets[1], octets[2]))),
        0..=32 => Some(None),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_foreign_word_suggests_a_keyword_of_its_map() {
        for ForeignWords { map, keyword, words, .. } in FOREIGN_WORDS {
            assert!(map.has(keyword), "{keyword} in {}", map.name);
            for word in *words {
                assert_eq!(simplified(word), *word);
                assert!(map.names().all(|name| simplified(name) != *word), "{word} is a keyword of {}", map.name);
                assert_eq!(translate(word, None, map).map(|suggestion| suggestion.keyword), Some(*keyword), "{word}");
            }
        }
    }

    #[test]
    fn a_limit_in_words_is_written_as_a_map() {
        for (text, expected) in [
            ("100/minute", Some("{ unit: minute, requests_per_unit: 100 }")),
            ("1_000 / Hour", Some("{ unit: hour, requests_per_unit: 1000 }")),
            ("100 per minute", Some("{ unit: minute, requests_per_unit: 100 }")),
            ("10r/s", Some("{ unit: second, requests_per_unit: 10 }")),
            ("5/10m", Some("{ unit: minute, unit_multiplier: 10, requests_per_unit: 5 }")),
            ("unlimited", Some("{ unlimited: true }")),
            ("many/minute", None),
            ("5/fortnight", None),
            ("5", None),
            ("/minute", None),
            ("99999999999/minute", None),
        ] {
            assert_eq!(limit_in_words(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_number_in_another_form_is_written_as_one() {
        for (text, expected) in [
            ("10k", Some("write 10000")),
            ("2M", Some("write 2000000")),
            ("10,000", Some("write 10000")),
            ("-1", Some("a rule without a limit has unlimited: true")),
            ("unlimited", Some("a rule without a limit has unlimited: true")),
            ("5000000k", None),
            ("many", None),
            ("k", None),
            ("", None),
        ] {
            assert_eq!(number_hint(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_value_that_is_a_comment_has_a_location() {
        let text = "domain: d\ndescriptors:\n- key: user\n  value: #free\n- key: #a\n- key: b # any\n  value: # any\n";
        let locations = commented_values(text);
        assert_eq!(locations, [Location { line: 4, column: 3 }, Location { line: 5, column: 3 }]);
    }

    #[test]
    fn a_regular_expression_has_signs_that_no_pattern_has() {
        for value in [
            "^/api/.*$",
            "^a",
            "/users/\\d+",
            "[0-9]+",
            "(?:a|b)",
            "/v[0-9]*",
            "foo.*$",
            "www\\.example\\.com",
            ".*",
            "/api/.*",
            "partner-.*",
            "(a|b)",
        ] {
            assert!(misread_value("path", value).is_some_and(|text| text.contains("regular expression")), "{value}");
        }
        for value in [
            "/api/*",
            "api.*",
            "10.*",
            "*.*",
            "(a)",
            "*.example.com",
            "US$",
            "$",
            "^",
            "a+b",
            "/users/{id}",
            "[::1]",
            "a|b",
            "what?",
        ] {
            assert_eq!(misread_value("path", value), None, "{value}");
        }
    }

    #[test]
    fn a_network_has_a_hint_how_addresses_are_matched() {
        for (value, expected) in [
            ("10.0.0.0/8", Some("value: 10.* matches")),
            ("192.168.0.0/16", Some("value: 192.168.* matches")),
            ("192.0.2.0/24", Some("value: 192.0.2.* matches")),
            ("172.16.0.0/12", Some("ip_prefix, without a value")),
            ("2001:db8::/32", Some("ip_prefix, without a value")),
            ("10.0.0.0/33", None),
            ("10.0.0.0", None),
            ("10.0.0/8", None),
            ("a/8", None),
        ] {
            let warning = misread_value("remote_address", value);
            assert_eq!(warning.is_some(), expected.is_some(), "{value}");
            assert!(warning.unwrap_or_default().contains(expected.unwrap_or_default()), "{value}");
        }
        // Envoy sends the network itself under this key.
        assert_eq!(misread_value("masked_remote_address", "10.0.0.0/8"), None);
    }
}
