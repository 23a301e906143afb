//! Reads a [`Denial`]: the message, the headers and the status of a rule's denials.

use super::{Reader, keywords::DENIAL};
use crate::{
    denial::{Denial, Template},
    yaml::{Kind, Yaml},
};

/// Maximum length of a message, in bytes.
const MAX_MESSAGE_BYTES: usize = 4_096;
/// Maximum length of the value of a header, in bytes.
const MAX_VALUE_BYTES: usize = 1_024;
/// Maximum number of headers.
const MAX_HEADERS: usize = 16;
/// Type of a message that does not name one.
const DEFAULT_CONTENT_TYPE: &str = "text/plain; charset=utf-8";
/// Headers that the transport sets itself.
const FOREIGN_HEADERS: [&str; 6] =
    ["connection", "content-length", "content-type", "host", "transfer-encoding", "upgrade"];

impl Reader<'_, '_> {
    /// Reads the message, the headers and the status of denials.
    pub(super) fn denial(&mut self, node: &Yaml) -> Option<Denial> {
        let mut denial = Denial::default();
        for (key, _, value) in self.read_map("denial", node, &DENIAL)? {
            match key {
                "message" => denial.message = self.template(key, value, MAX_MESSAGE_BYTES)?,
                "content_type" => denial.content_type = Some(self.header_value(key, value)?.into()),
                "status" => denial.status = Some(self.status(value)?),
                _ => denial.headers = self.denial_headers(value)?,
            }
        }
        if denial.message.is_empty() {
            if denial.content_type.is_some() {
                self.diagnostics.error(node.location, "content_type requires a message");
                return None;
            }
        } else if denial.content_type.is_none() {
            denial.content_type = Some(DEFAULT_CONTENT_TYPE.into());
        }
        Some(denial)
    }

    fn status(&mut self, node: &Yaml) -> Option<u16> {
        let number = self.number("status", node)?;
        let status = u16::try_from(number).ok().filter(|status| (400..=599).contains(status));
        if status.is_none() {
            self.diagnostics.error(node.location, "status must be an HTTP status from 400 to 599");
        }
        status
    }

    fn denial_headers(&mut self, node: &Yaml) -> Option<Vec<(Box<str>, Template)>> {
        let entries = self.named_entries("headers", node);
        if entries.len() > MAX_HEADERS {
            self.diagnostics.error(node.location, format!("headers may contain at most {MAX_HEADERS} headers"));
            return None;
        }
        let mut headers = Vec::new();
        for (name, location, value) in entries {
            let is_token =
                name.bytes().all(|letter| letter.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&letter));
            if !is_token || FOREIGN_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
                let message = format!("{name:?} is not the name of a header that a denial can have");
                self.diagnostics.error(location, message);
                return None;
            }
            self.header_value(&name, value)?;
            headers.push((name.as_str().into(), self.template(&name, value, MAX_VALUE_BYTES)?));
        }
        Some(headers)
    }

    /// Reads a text that a header can have as its value.
    fn header_value(&mut self, name: &str, node: &Yaml) -> Option<String> {
        let text = self.text(name, node)?;
        if text.is_empty() || !text.bytes().all(|letter| (b' '..=b'~').contains(&letter)) {
            let message = format!("{name} must be a text of visible ASCII characters, not {text:?}");
            self.diagnostics.error(node.location, message);
            return None;
        }
        Some(text)
    }

    fn template(&mut self, name: &str, node: &Yaml, max_bytes: usize) -> Option<Template> {
        if matches!(node.kind, Kind::Null) {
            return Some(Template::default());
        }
        let text = self.text(name, node)?;
        if text.len() > max_bytes {
            self.diagnostics.error(node.location, format!("{name} may have at most {max_bytes} bytes"));
            return None;
        }
        match Template::parse(&text) {
            Ok(template) => Some(template),
            Err(word) => {
                let known = Template::placeholders();
                let message = format!("{name} contains {{{word}}}, which is not one of the placeholders {known}");
                self.diagnostics.error(node.location, message);
                None
            }
        }
    }
}
