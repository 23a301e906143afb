//! [`Zone`]: a time zone of the IANA database.

use std::{
    borrow::Cow,
    hash::{Hash, Hasher},
    path::Path,
    ptr,
    sync::OnceLock,
};

use jiff::tz::{TimeZone, TimeZoneDatabase};
use parking_lot::Mutex;

/// A time zone. Copies are cheap, because the data of each zone is loaded once and kept until the process ends.
#[derive(Clone, Copy)]
pub struct Zone(&'static ZoneData);

struct ZoneData {
    name: Cow<'static, str>,
    /// Number of zones that were loaded before.
    number: usize,
    time_zone: TimeZone,
}

static UTC: ZoneData = ZoneData { name: Cow::Borrowed("UTC"), number: 0, time_zone: TimeZone::UTC };

/// The loaded zones. The database bounds their number.
static LOADED: Mutex<Vec<Zone>> = Mutex::new(Vec::new());

/// Error returned when no time zone has the given name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownZone;

impl Zone {
    /// Returns the zone with this name, such as `Europe/Berlin`, ignoring case.
    ///
    /// # Errors
    ///
    /// Returns an error if neither the folder that `TZDIR` names nor the program contains the zone.
    pub fn find(name: &str) -> Result<Self, UnknownZone> {
        if name.eq_ignore_ascii_case(&UTC.name) {
            return Ok(Self::default());
        }
        let time_zone = load(name).ok_or(UnknownZone)?;
        let name = time_zone.iana_name().unwrap_or(name).to_owned();
        let mut loaded = LOADED.lock();
        if let Some(zone) = loaded.iter().find(|zone| zone.name() == name) {
            return Ok(*zone);
        }
        let data = ZoneData { name: name.into(), number: loaded.len() + 1, time_zone };
        let zone = Self(Box::leak(Box::new(data)));
        loaded.push(zone);
        Ok(zone)
    }

    /// Checks whether the folder that the environment variable `TZDIR` names, if it is set, has a readable time zone database.
    ///
    /// # Errors
    ///
    /// Returns why the folder cannot be read. The time zones in the program are used then.
    pub fn check_folder() -> Result<(), &'static str> {
        match folder() {
            Some(Err(error)) => Err(error),
            Some(Ok(_)) | None => Ok(()),
        }
    }

    /// Returns the names of all zones in the program.
    #[must_use]
    pub fn names() -> Vec<String> {
        embedded().available().map(|name| name.as_str().to_owned()).collect()
    }

    /// Returns the name, such as `Europe/Berlin`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        &self.0.name
    }

    pub(crate) fn time_zone(&self) -> &'static TimeZone {
        &self.0.time_zone
    }

    /// Returns the position in the order in which zones were loaded.
    pub(crate) fn number(&self) -> usize {
        self.0.number
    }
}

impl Default for Zone {
    /// Returns UTC.
    fn default() -> Self {
        Self(&UTC)
    }
}

impl PartialEq for Zone {
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self.0, other.0)
    }
}

impl Eq for Zone {}

impl Hash for Zone {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.number.hash(state);
    }
}

impl std::fmt::Debug for Zone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Loads a zone from the folder that `TZDIR` names, or from the program.
fn load(name: &str) -> Option<TimeZone> {
    if let Some(Ok(folder)) = folder()
        && let Ok(time_zone) = folder.get(name)
    {
        return Some(time_zone);
    }
    embedded().get(name).ok()
}

/// Returns the database in the folder that `TZDIR` names, or why it cannot be read. Returns `None` if the variable is not set.
fn folder() -> Option<&'static Result<TimeZoneDatabase, String>> {
    static FOLDER: OnceLock<Option<Result<TimeZoneDatabase, String>>> = OnceLock::new();
    FOLDER.get_or_init(|| std::env::var_os("TZDIR").map(|path| read_folder(path.as_ref()))).as_ref()
}

fn read_folder(path: &Path) -> Result<TimeZoneDatabase, String> {
    let database = TimeZoneDatabase::from_dir(path).map_err(|error| error.to_string())?;
    if database.is_definitively_empty() {
        return Err(format!("{} contains no time zones", path.display()));
    }
    Ok(database)
}

fn embedded() -> &'static TimeZoneDatabase {
    static EMBEDDED: OnceLock<TimeZoneDatabase> = OnceLock::new();
    EMBEDDED.get_or_init(TimeZoneDatabase::bundled)
}
