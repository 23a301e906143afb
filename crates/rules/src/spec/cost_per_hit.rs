//! Reads a [`CostPerHit`]: a number, or a table by the value of an entry.

use super::{Reader, keywords::COST_PER_HIT};
use crate::{
    cost_per_hit::CostPerHit,
    yaml::{Kind, Yaml},
};

impl Reader<'_, '_> {
    /// Reads the factor by which the hits of a request count.
    pub(super) fn cost_per_hit(&mut self, node: &Yaml) -> Option<CostPerHit> {
        let Kind::Map(_) = &node.kind else {
            let default = self.factor("cost_per_hit", node)?;
            return Some(CostPerHit { default, ..CostPerHit::default() });
        };
        let mut cost = CostPerHit::default();
        let mut has_default = false;
        for (key, _, value) in self.read_map("cost_per_hit", node, &COST_PER_HIT)? {
            match key {
                "key" => {
                    let entry = self.text(key, value)?;
                    if !entry.is_empty() {
                        cost.key = Some(entry.into());
                    }
                }
                "default" => {
                    cost.default = self.factor(key, value)?;
                    has_default = true;
                }
                _ => {
                    for (name, _, factor) in self.named_entries("values", value) {
                        cost.values.insert(name.as_str().into(), self.factor(&name, factor)?);
                    }
                }
            }
        }
        if cost.key.is_none() || cost.values.is_empty() || !has_default {
            let message = "cost_per_hit requires key, values and default, the cost of all other values";
            self.diagnostics.error(node.location, message);
            return None;
        }
        Some(cost)
    }

    fn factor(&mut self, name: &str, node: &Yaml) -> Option<u64> {
        let number = self.large_number(name, node)?;
        if number == 0 {
            self.diagnostics.error(node.location, format!("{name} must be at least 1, or its hits would cost nothing"));
            return None;
        }
        Some(number)
    }
}
