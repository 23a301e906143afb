//! The web console: its files and the access to its data (see docs/guides/console.md).
//!
//! The console uses the admin API as JSON. On the listener of the admin API, calls require authentication; on the HTTP
//! listener, which serves the console, callers without a token receive the same counts as `/metrics`, and names of entities only if
//! [`Settings::entities`] allows it.

mod access;
mod files;

use access::{Access, admit};
use axum::{Router, middleware};
use serde::{Deserialize, Serialize};

use super::{admin::Api, http_server::Connection};

/// Settings of the web console.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Whether `/` of the HTTP listener and of the admin listener is the console.
    pub enabled: bool,
    /// Which callers without a token may read names of entities, counters and the audit log on the HTTP listener: `local`
    /// (callers on this host), `token` (none), or `all`.
    pub entities: Visibility,
    /// Link to a dashboard in Grafana, for more than the last hour.
    pub grafana_url: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { enabled: true, entities: Visibility::default(), grafana_url: None }
    }
}

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        let url = self.grafana_url.as_deref()?;
        if url.starts_with("https://") || url.starts_with("http://") {
            return None;
        }
        Some("console.grafana_url must begin with https:// or http://")
    }
}

/// Which callers without a token may read names of entities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Visibility {
    /// Callers on this host, unless a proxy has forwarded their requests.
    #[default]
    Local,
    /// Only callers with a token.
    Token,
    /// All callers.
    All,
}

/// The console on the HTTP listener.
pub struct Console {
    settings: Settings,
    api: Api,
}

impl Console {
    /// Creates the console. `api` answers its calls.
    #[must_use]
    pub fn new(settings: Settings, api: Api) -> Self {
        Self { settings, api }
    }

    /// Returns the routes of the console's files. Empty if the console is off.
    pub fn pages(&self) -> Router {
        if self.settings.enabled { files::routes() } else { Router::new() }
    }

    /// Returns the routes for a connection. Empty if the console is off.
    pub(super) fn routes(&self, connection: &Connection<'_>) -> Router {
        if !self.settings.enabled {
            return Router::new();
        }
        let access = Access::new(self.api.clone(), self.settings.entities, connection.peer.ip());
        let api = self.api.json_routes().layer(middleware::from_fn_with_state(access, admit));
        api.merge(self.pages())
    }
}
