//! Reads the scalars of a rule file: texts, numbers and booleans, in the forms that envoyproxy/ratelimit reads.

use std::borrow::Cow;

use sluicegate_algorithm::MAX_NUMBER;

use super::{Reader, hints};
use crate::{
    diagnostic::Location,
    yaml::{Kind, Yaml},
};

impl Reader<'_, '_> {
    /// Reads a scalar as text. A missing value is an empty text.
    pub(super) fn text(&mut self, name: &str, node: &Yaml) -> Option<String> {
        match &node.kind {
            Kind::Null => Some(String::new()),
            Kind::Scalar { text, .. } => Some(text.clone()),
            Kind::List(_) | Kind::Map(_) => {
                let several = if name == "value" { "; several values need a descriptor each" } else { "" };
                let message = format!(
                    "{name} must be a scalar, not {}; a text that begins with [ or {{ needs quotes{several}",
                    node.describe()
                );
                self.diagnostics.error(node.location, message);
                None
            }
        }
    }

    /// Reads a number such as `1e3` or `1.5`, without its fraction, as envoyproxy/ratelimit does.
    fn truncated(&mut self, name: &str, text: &str, location: Location) -> Option<u64> {
        let number = decimal_number(text)?;
        let whole = number.trunc() as u64;
        if number.fract() != 0.0 {
            self.diagnostics.warning(location, format!("{name} {text} is read as {whole}, without its fraction"));
        }
        Some(whole)
    }

    /// Reads a number of 32 bits. A missing value is 0, as in envoyproxy/ratelimit.
    pub(super) fn number(&mut self, name: &str, node: &Yaml) -> Option<u32> {
        u32::try_from(self.number_up_to(name, node, u32::MAX.into())?).ok()
    }

    /// Reads a number of hits or costs, up to [`MAX_NUMBER`].
    pub(super) fn large_number(&mut self, name: &str, node: &Yaml) -> Option<u64> {
        self.number_up_to(name, node, MAX_NUMBER)
    }

    fn number_up_to(&mut self, name: &str, node: &Yaml, max: u64) -> Option<u64> {
        let parsed = match &node.kind {
            Kind::Null => {
                let denies = matches!(name, "requests_per_unit" | "limit" | "ceiling");
                let effect = if denies { ", which denies every request" } else { "" };
                self.diagnostics.warning(node.location, format!("{name} is empty and read as 0{effect}"));
                Some(0)
            }
            Kind::Scalar { text, plain: true } => {
                let parsed = whole_number(text).or_else(|| self.truncated(name, text, node.location));
                let parsed = parsed.filter(|number| *number <= max);
                if let Some(number) =
                    parsed.filter(|number| octal_number(text).is_some_and(|octal| octal != Some(*number)))
                {
                    let message = format!(
                        "{name} {text} is read as {number}; envoyproxy/ratelimit reads numbers with a leading zero as \
                         octal, so write {number} without it, or 0o and the octal digits"
                    );
                    self.diagnostics.warning(node.location, message);
                }
                parsed
            }
            Kind::Scalar { plain: false, .. } | Kind::List(_) | Kind::Map(_) => None,
        };
        if parsed.is_none() {
            let hint = node.scalar().filter(|(_, plain)| *plain).and_then(|(text, _)| hints::number_hint(text));
            let hint = hint.map(|hint| format!("; {hint}")).unwrap_or_default();
            let message = format!("{name} must be a whole number from 0 to {max}{}{hint}", actual(node));
            self.diagnostics.error(node.location, message);
        }
        parsed
    }

    /// Reads a boolean in any spelling of YAML 1.1, as envoyproxy/ratelimit does.
    pub(super) fn boolean(&mut self, name: &str, node: &Yaml) -> bool {
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
        self.diagnostics.error(node.location, format!("{name} must be true or false{}", actual(node)));
        false
    }
}

/// Parses a whole number in the forms that envoyproxy/ratelimit reads, except that a leading zero does not mean octal.
fn whole_number(text: &str) -> Option<u64> {
    let text = text.replace('_', "");
    let digits = text.strip_prefix(['+', '-']).unwrap_or(&text);
    let (radix, digits) = match digits.split_at_checked(2) {
        Some(("0x" | "0X", digits)) => (16, digits),
        Some(("0o" | "0O", digits)) => (8, digits),
        Some(("0b" | "0B", digits)) => (2, digits),
        _ => (10, digits),
    };
    // `from_str_radix` accepts a second sign.
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let number = u64::from_str_radix(digits, radix).ok()?;
    (number == 0 || !text.starts_with('-')).then_some(number)
}

/// Parses a decimal number such as `1e3` or `1.0`. Returns `None` if it is negative, or above
/// [`MAX_NUMBER`].
fn decimal_number(text: &str) -> Option<f64> {
    let text = text.replace('_', "");
    if !text.bytes().all(|letter| matches!(letter, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E')) {
        return None;
    }
    let number: f64 = text.parse().ok()?;
    (0.0..=MAX_NUMBER as f64).contains(&number.trunc()).then_some(number)
}

/// Reads decimal digits after a leading zero, such as `010`, as octal. Returns `Some(None)` if they are no octal
/// number, and `None` for other texts, such as `0` or `0x10`.
fn octal_number(text: &str) -> Option<Option<u64>> {
    let text = text.replace('_', "");
    let digits = text.strip_prefix(['+', '-']).unwrap_or(&text).strip_prefix('0')?;
    let is_decimal = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    if is_decimal { Some(u64::from_str_radix(digits, 8).ok()) } else { None }
}

/// Returns the end of a message that states the actual value: `, not …`.
pub(super) fn actual(node: &Yaml) -> String {
    match &node.kind {
        // A scalar without quotes can have several lines.
        Kind::Scalar { text, plain: true } if !text.contains(char::is_control) => format!(", not {}", short(text)),
        Kind::Scalar { text, .. } => format!(", not the text {:?}", short(text)),
        Kind::Null | Kind::List(_) | Kind::Map(_) => format!(", not {}", node.describe()),
    }
}

/// Returns a text, cut off with `…` after 80 characters.
pub(super) fn short(text: &str) -> Cow<'_, str> {
    const MAX_CHARS: usize = 80;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}
