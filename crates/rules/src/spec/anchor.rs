//! Reads the fields of an [`Anchor`](sluicegate_calendar::Anchor): when the windows of a calendar begin.

use sluicegate_calendar::{TimeOfDay, Zone};

use super::{Reader, hints};
use crate::yaml::Yaml;

impl Reader<'_, '_> {
    /// Reads the name of a time zone.
    pub(super) fn zone(&mut self, node: &Yaml) -> Option<Zone> {
        let name = self.text("zone", node)?;
        if let Ok(zone) = Zone::find(&name) {
            return Some(zone);
        }
        let names = Zone::names();
        let hint = hints::did_you_mean(&name, names.iter().map(String::as_str));
        let message = format!("zone {name:?} is not a time zone of the IANA database, such as Europe/Berlin{hint}");
        self.diagnostics.error(node.location, message);
        None
    }

    /// Reads a number from 1 to `max`.
    pub(super) fn up_to(&mut self, keyword: &str, node: &Yaml, max: u8) -> Option<u8> {
        let number = self.number(keyword, node)?;
        let number = u8::try_from(number).ok().filter(|number| (1..=max).contains(number));
        if number.is_none() {
            self.diagnostics.error(node.location, format!("{keyword} must be a number from 1 to {max}"));
        }
        number
    }

    /// Reads a local time.
    pub(super) fn time_of_day(&mut self, keyword: &str, node: &Yaml) -> Option<TimeOfDay> {
        let text = self.text(keyword, node)?;
        let time = text.parse().ok();
        if time.is_none() {
            let message = format!("{keyword} must be a time of day such as \"06:00\", not {text:?}");
            self.diagnostics.error(node.location, message);
        }
        time
    }
}
