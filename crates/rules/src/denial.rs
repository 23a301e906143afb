//! [`Denial`]: the message, the headers and the status of a rule's denials.

use std::fmt::Write;

use super::currency::Currency;

/// The message, the headers and the status of a rule's denials.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Denial {
    /// HTTP status; by default 429, or 503 for overload.
    pub status: Option<u16>,
    /// Type of the message; `None` without a message.
    pub content_type: Option<Box<str>>,
    /// The message, which is empty if there is none.
    pub message: Template,
    /// Names and values of headers.
    pub headers: Vec<(Box<str>, Template)>,
    /// Name of the plan that the rule belongs to; empty without plans.
    pub plan: Box<str>,
    /// Unit in which the limit is displayed.
    pub currency: Option<Currency>,
}

/// A text with placeholders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(Box<str>),
    Placeholder(Placeholder),
}

/// A part of a [`Template`] that a denial replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placeholder {
    Limit,
    Name,
    Plan,
    Reset,
    Wait,
}

impl Placeholder {
    const ALL: [Self; 5] = [Self::Limit, Self::Name, Self::Plan, Self::Reset, Self::Wait];

    const fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Name => "name",
            Self::Plan => "plan",
            Self::Reset => "reset",
            Self::Wait => "wait",
        }
    }
}

/// The values of a denial's placeholders.
#[derive(Clone, Copy, Debug, Default)]
pub struct DenialValues<'v> {
    /// The limit, such as `100 per day`.
    pub limit: &'v str,
    /// Name of the limit.
    pub name: &'v str,
    /// Name of the plan.
    pub plan: &'v str,
    /// Seconds until the full limit is available again.
    pub reset: u64,
    /// Seconds until the request would be allowed; `None` if it never will be, or if that is unknown.
    pub wait: Option<u64>,
}

impl Template {
    /// Parses a text in which `{limit}`, `{name}`, `{plan}`, `{reset}` and `{wait}` are placeholders. Other braces are text,
    /// so that a message can be JSON.
    ///
    /// # Errors
    ///
    /// Returns a word in braces that is no placeholder.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(start) = rest.find('{') {
            let (before, braces) = rest.split_at(start);
            literal.push_str(before);
            let Some(word) = word_in_braces(braces) else {
                literal.push('{');
                rest = &braces[1..];
                continue;
            };
            let Some(placeholder) = Placeholder::ALL.into_iter().find(|known| known.name() == word) else {
                return Err(word.to_owned());
            };
            if !literal.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut literal).into()));
            }
            parts.push(Part::Placeholder(placeholder));
            rest = &braces[word.len() + 2..];
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(Part::Text(literal.into()));
        }
        Ok(Self(parts))
    }

    /// Returns the names of all placeholders.
    pub(crate) fn placeholders() -> String {
        Placeholder::ALL.map(|placeholder| format!("{{{}}}", placeholder.name())).join(", ")
    }

    /// Returns whether the text is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the text with values in place of its placeholders. In JSON, they are escaped.
    #[must_use]
    pub fn render(&self, values: &DenialValues<'_>, is_json: bool) -> String {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Text(literal) => text.push_str(literal),
                Part::Placeholder(Placeholder::Limit) => push_value(&mut text, values.limit, is_json),
                Part::Placeholder(Placeholder::Name) => push_value(&mut text, values.name, is_json),
                Part::Placeholder(Placeholder::Plan) => push_value(&mut text, values.plan, is_json),
                Part::Placeholder(Placeholder::Reset) => push_number(&mut text, values.reset),
                // A caller that reads a number gets the reset, which is never too early.
                Part::Placeholder(Placeholder::Wait) => push_number(&mut text, values.wait.unwrap_or(values.reset)),
            }
        }
        text
    }
}

impl Denial {
    /// Returns whether the message is JSON, in which inserted values are escaped.
    #[must_use]
    pub fn is_json(&self) -> bool {
        self.content_type.as_deref().is_some_and(|kind| kind.contains("json"))
    }
}

/// Returns the word between the brace at the beginning and the next one: lower-case letters and `_`.
fn word_in_braces(text: &str) -> Option<&str> {
    let (word, _) = text.strip_prefix('{')?.split_once('}')?;
    let is_word = !word.is_empty() && word.bytes().all(|letter| letter.is_ascii_lowercase() || letter == b'_');
    is_word.then_some(word)
}

fn push_number(text: &mut String, number: u64) {
    // Writing to memory cannot fail.
    let _ = write!(text, "{number}");
}

fn push_value(text: &mut String, value: &str, is_json: bool) {
    for letter in value.chars() {
        match letter {
            '"' | '\\' if is_json => {
                text.push('\\');
                text.push(letter);
            }
            // Neither a header nor a JSON text can contain them.
            letter if letter.is_control() => text.push(' '),
            letter => text.push(letter),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VALUES: DenialValues<'_> =
        DenialValues { limit: "100 per day", name: "daily", plan: "a\"b", reset: 3_600, wait: Some(60) };

    #[test]
    fn placeholders_are_replaced_and_other_braces_stay() {
        for (text, expected) in [
            ("", ""),
            ("Slow down.", "Slow down."),
            ("{limit}: wait {wait} s", "100 per day: wait 60 s"),
            ("{name}{plan}{reset}", "dailya\"b3600"),
            ("{\"error\": \"{plan}\", \"retry\": {wait}}", "{\"error\": \"a\"b\", \"retry\": 60}"),
            ("{ limit } {} {LIMIT} {limit", "{ limit } {} {LIMIT} {limit"),
        ] {
            let template = Template::parse(text).unwrap();
            assert_eq!(template.render(&VALUES, false), expected);
            assert_eq!(template.is_empty(), text.is_empty());
        }
        let json = Template::parse("{\"plan\": \"{plan}\"}").unwrap();
        assert_eq!(json.render(&VALUES, true), "{\"plan\": \"a\\\"b\"}");
        assert_eq!(Template::parse("{limti}"), Err("limti".to_owned()));
        let never = DenialValues { wait: None, ..VALUES };
        assert_eq!(Template::parse("{wait}").unwrap().render(&never, false), "3600");
    }

    #[test]
    fn values_have_no_control_characters() {
        let values = DenialValues { plan: "a\r\nb", ..VALUES };
        assert_eq!(Template::parse("{plan}").unwrap().render(&values, false), "a  b");
    }

    proptest! {
        #[test]
        fn texts_without_placeholders_stay_as_they_are(text in "[a-z{} \"]{0,20}") {
            if let Ok(template) = Template::parse(&text) {
                let has_placeholder = Placeholder::ALL.iter().any(|known| text.contains(&format!("{{{}}}", known.name())));
                prop_assume!(!has_placeholder);
                prop_assert_eq!(template.render(&VALUES, false), text);
            }
        }
    }
}
