//! Reads a [`Currency`]: its name, or its name and the number of hits in one unit.

use super::{Reader, keywords::CURRENCY};
use crate::{
    currency::Currency,
    yaml::{Kind, Yaml},
};

/// Maximum length of a currency's name, in bytes.
const MAX_CODE_BYTES: usize = 16;

impl Reader<'_, '_> {
    /// Reads the unit in which a budget is displayed.
    pub(super) fn currency(&mut self, node: &Yaml) -> Option<Currency> {
        let Kind::Map(_) = &node.kind else {
            let code = self.currency_code("currency", node)?;
            return Some(Currency { code, hits: Currency::DEFAULT_HITS });
        };
        let mut code = None;
        let mut hits = Currency::DEFAULT_HITS;
        for (key, _, value) in self.read_map("currency", node, &CURRENCY)? {
            match key {
                "code" => code = Some(self.currency_code(key, value)?),
                _ => {
                    hits = self.large_number(key, value)?;
                    if hits == 0 {
                        self.diagnostics.error(value.location, "hits must be at least 1");
                        return None;
                    }
                }
            }
        }
        if code.is_none() {
            self.diagnostics.error(node.location, "currency requires a code, such as USD");
        }
        Some(Currency { code: code?, hits })
    }

    fn currency_code(&mut self, name: &str, node: &Yaml) -> Option<Box<str>> {
        let code = self.text(name, node)?;
        let is_valid = (1..=MAX_CODE_BYTES).contains(&code.len()) && !code.chars().any(char::is_control);
        if !is_valid {
            let message = format!("{name} must be the name of a unit with at most {MAX_CODE_BYTES} bytes, such as USD");
            self.diagnostics.error(node.location, message);
            return None;
        }
        Some(code.into())
    }
}
