//! [`OneLine`]: writes each log event as one line without control characters, whatever its fields contain.

use std::{
    borrow::Cow,
    fmt::Write as _,
    io::{self, Stderr, Write},
};

/// Standard error, with control characters escaped as in JSON: `\n`, `\u001b`.
///
/// Without it, a name with a newline could imitate a log event in the format `text`, and a name with an escape sequence
/// could control the terminal of a reader.
pub(super) struct OneLine {
    output: Stderr,
    /// Whether the formatter writes colours. It escapes the escape character in fields itself.
    has_colours: bool,
}

impl OneLine {
    pub(super) fn stderr(has_colours: bool) -> Self {
        Self { output: io::stderr(), has_colours }
    }
}

impl Write for OneLine {
    /// Writes an event, which ends with a newline. The formatter passes each event as one piece.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let line = escape(text.strip_suffix('\n').unwrap_or(&text), self.has_colours).into_owned() + "\n";
        self.output.write_all(line.as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

/// Escapes control characters, except the escape character if the text has colours.
fn escape(text: &str, has_colours: bool) -> Cow<'_, str> {
    if !text.contains(|character| is_escaped(character, has_colours)) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match character {
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            '\t' => escaped.push_str("\\t"),
            // Writing to a string cannot fail.
            _ if is_escaped(character, has_colours) => drop(write!(escaped, "\\u{:04x}", u32::from(character))),
            _ => escaped.push(character),
        }
    }
    Cow::Owned(escaped)
}

fn is_escaped(character: char, has_colours: bool) -> bool {
    const ESCAPE: char = '\x1b';
    character.is_control() && !(has_colours && character == ESCAPE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        for (text, expected) in [
            ("plain é 日本", "plain é 日本"),
            ("a\nb\r\tc", "a\\nb\\r\\tc"),
            ("\u{1b}[31m\u{0}\u{7f}\u{9b}", "\\u001b[31m\\u0000\\u007f\\u009b"),
        ] {
            assert_eq!(escape(text, false), expected);
        }
        assert_eq!(escape("\u{1b}[31mred\n", true), "\u{1b}[31mred\\n");
    }
}
