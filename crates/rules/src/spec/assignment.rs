//! Reads a [`PlanAssignment`]: the plan of an entity, and when its calendar windows begin.

use sluicegate_calendar::Anchor;

use super::{
    Reader,
    keywords::{ASSIGNMENT, WEEKDAYS},
};
use crate::{
    diagnostic::{Diagnostic, Diagnostics},
    options::Options,
    plan_assignment::PlanAssignment,
    yaml::{self, Kind, Yaml},
};

impl PlanAssignment {
    /// Reads the name of a plan, or a map such as `{plan: gold, day: 15}`.
    ///
    /// # Errors
    ///
    /// Returns every mistake with its location in the text.
    pub fn read(text: &str) -> Result<Self, Vec<Diagnostic>> {
        if !text.trim_start().starts_with('{') {
            return Ok(Self { plan: text.into(), anchor: Anchor::default() });
        }
        let mut list = Vec::new();
        let mut diagnostics = Diagnostics::new("plan", &mut list);
        let assignment = read_map(text, &mut diagnostics);
        match assignment {
            Some(assignment) if list.is_empty() => Ok(assignment),
            Some(_) | None => Err(list),
        }
    }
}

fn read_map(text: &str, diagnostics: &mut Diagnostics<'_>) -> Option<PlanAssignment> {
    let document = match yaml::parse(text) {
        Ok(document) => document,
        Err(error) => {
            diagnostics.error(error.location, error.message);
            return None;
        }
    };
    for (location, message) in document.ignored {
        diagnostics.warning(location, message);
    }
    Reader::new(diagnostics, Options::default()).assignment(&document.root?)
}

impl Reader<'_, '_> {
    /// Reads the plan of an entity: its name, or a map.
    pub(super) fn assignment(&mut self, node: &Yaml) -> Option<PlanAssignment> {
        let Kind::Map(_) = &node.kind else {
            let plan = self.text("the plan of an entity", node)?.into();
            return Some(PlanAssignment { plan, anchor: Anchor::default() });
        };
        let mut assignment = PlanAssignment::default();
        let anchor = &mut assignment.anchor;
        for (key, _, value) in self.read_map("the plan of an entity", node, &ASSIGNMENT)? {
            match key {
                "plan" => assignment.plan = self.text(key, value)?.into(),
                "zone" => anchor.zone = Some(self.zone(value)?),
                "week_starts" => anchor.week_starts = Some(self.choice(key, value, &WEEKDAYS)?),
                "month" => anchor.month = Some(self.up_to(key, value, 12)?),
                "day" => anchor.day = Some(self.up_to(key, value, 31)?),
                _ => anchor.at = Some(self.time_of_day(key, value)?),
            }
        }
        if assignment.plan.is_empty() {
            self.diagnostics.error(node.location, "the plan of an entity requires plan: the name of the plan");
            return None;
        }
        Some(assignment)
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_calendar::Zone;

    use super::*;

    #[test]
    fn an_assignment_is_a_name_or_a_map() {
        let plain = |plan: &str| Ok(PlanAssignment { plan: plan.into(), anchor: Anchor::default() });
        assert_eq!(PlanAssignment::read("gold"), plain("gold"));
        assert_eq!(PlanAssignment::read("gold: plus"), plain("gold: plus"));
        assert_eq!(PlanAssignment::read("{plan: gold}"), plain("gold"));
        let zone = Zone::find("Asia/Tokyo").ok();
        let anchor = Anchor { zone, day: Some(15), month: Some(4), at: "06:00".parse().ok(), ..Anchor::default() };
        let text = "{plan: gold, zone: Asia/Tokyo, month: 4, day: 15, at: '06:00'}";
        assert_eq!(PlanAssignment::read(text), Ok(PlanAssignment { plan: "gold".into(), anchor }));
        for (text, expected) in [
            ("{day: 15}", "requires plan"),
            ("{plan: gold, day: 32}", "day must be a number from 1 to 31"),
            ("{plan: gold, zone: Europe/Berln}", "did you mean \"Europe/Berlin\"?"),
            ("{plan: gold, days: 3}", "day"),
            ("{plan: gold", "invalid YAML"),
            ("{plan: [gold]}", "plan must be a scalar"),
            ("{plan: gold, at: noon}", "at must be a time of day such as \"06:00\", not \"noon\""),
        ] {
            let errors = PlanAssignment::read(text).unwrap_err();
            let messages: Vec<_> = errors.iter().map(|error| error.message.as_str()).collect();
            assert!(messages.join("; ").contains(expected), "{text}: {messages:?}");
        }
    }
}
