//! Fuzz targets: settings files, and the environment of envoyproxy/ratelimit.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::{cell::RefCell, collections::HashMap, env, fs, process};

use config::{File, FileFormat, Source};

use super::{Flags, Settings, envoyproxy::EnvoyproxySettings};
use crate::yaml::Yaml;

/// Maximum number of settings that [`envoyproxy_environment`] loads.
const MAX_SEEN: usize = 100_000;

thread_local! {
    /// How often each text of settings was loaded.
    static SEEN: RefCell<HashMap<String, u64>> = RefCell::default();
}

/// Loads a settings file, in TOML or, after `#yaml`, in YAML. The printed settings must be a valid file that contains the
/// same settings.
pub fn settings_file(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let is_yaml = text.starts_with("#yaml");
    let parsed =
        if is_yaml { File::from_str(&text, Yaml).collect() } else { File::from_str(&text, FileFormat::Toml).collect() };
    // Most inputs are no valid files, which costs less to see without a file.
    if parsed.is_err() {
        return;
    }
    let extension = if is_yaml { "yaml" } else { "toml" };
    if let Some(settings) = load("settings_file", input, extension) {
        let printed = settings.masked();
        let again = load("settings_file", printed.as_bytes(), "toml").map(|settings| settings.masked());
        assert_eq!(again.as_deref(), Some(printed.as_str()));
    }
}

fn load(target: &str, text: &[u8], extension: &str) -> Option<Settings> {
    let path = env::temp_dir().join(format!("sluicegate-fuzz-{target}-{}.{extension}", process::id()));
    fs::write(&path, text).ok()?;
    Settings::load(Some(&path), Some(HashMap::new()), Flags::default()).ok()
}

/// Loads variables of envoyproxy/ratelimit, one `NAME=value` on each line. The settings that `migrate` prints must be
/// those that the variables have.
pub fn envoyproxy_environment(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let variables = text.lines().filter_map(|line| line.split_once('='));
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let Ok(envoyproxy) = EnvoyproxySettings::read(&variables) else {
        return;
    };
    let printed = envoyproxy.toml();
    // Most inputs lead to the same settings as one before. They are loaded twice, as the memory of an input is measured
    // again if it is too much.
    let is_known = SEEN.with_borrow_mut(|seen| {
        if seen.len() >= MAX_SEEN {
            return true;
        }
        let count = seen.entry(printed.clone()).or_default();
        *count += 1;
        *count > 2
    });
    if is_known {
        return;
    }
    let flags = Flags { envoyproxy: Some(envoyproxy), ..Flags::default() };
    if let Ok(settings) = Settings::load(None, Some(HashMap::new()), flags) {
        let migrated = load("envoyproxy_environment", printed.as_bytes(), "toml").map(|settings| settings.masked());
        assert_eq!(migrated, Some(settings.masked()), "{printed}");
    }
}
