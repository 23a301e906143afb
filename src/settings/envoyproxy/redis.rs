//! [`Redis`]: the address of Redis, which envoyproxy/ratelimit configures by several variables.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{Environment, VariableError, values};

/// Names of the variables of one of the two stores.
#[derive(Clone, Copy)]
pub(super) struct Redis {
    socket_type: &'static str,
    kind: &'static str,
    url: &'static str,
    auth: &'static str,
    pub(super) auth_file: &'static str,
    tls: &'static str,
    pub(super) timeout: &'static str,
    pub(super) sentinel_auth: &'static str,
}

impl Redis {
    pub(super) const MAIN: Self = Self {
        socket_type: "REDIS_SOCKET_TYPE",
        kind: "REDIS_TYPE",
        url: "REDIS_URL",
        auth: "REDIS_AUTH",
        auth_file: "REDIS_AUTH_FILE",
        tls: "REDIS_TLS",
        timeout: "REDIS_TIMEOUT",
        sentinel_auth: "REDIS_SENTINEL_AUTH",
    };
    /// Variables of the store for limits with the unit `second`.
    pub(super) const PER_SECOND: Self = Self {
        socket_type: "REDIS_PERSECOND_SOCKET_TYPE",
        kind: "REDIS_PERSECOND_TYPE",
        url: "REDIS_PERSECOND_URL",
        auth: "REDIS_PERSECOND_AUTH",
        auth_file: "REDIS_PERSECOND_AUTH_FILE",
        tls: "REDIS_PERSECOND_TLS",
        timeout: "REDIS_PERSECOND_TIMEOUT",
        sentinel_auth: "REDIS_PERSECOND_SENTINEL_AUTH",
    };

    /// Returns the address in the format of the setting `store`.
    pub(super) fn address(&self, environment: &Environment<'_>) -> Result<String, VariableError> {
        let url = environment.text(self.url);
        let (url_scheme, remaining) = match url.split_once("://") {
            Some((scheme, remaining)) => (Some(scheme), remaining),
            None => (None, url),
        };
        let tls = match url_scheme {
            None | Some("redis") => environment.is_true(self.tls)?,
            Some("rediss") => true,
            Some(_) => return Err(environment.error(self.url, "is neither host:port nor redis://host:port")),
        };
        let scheme = if tls { "rediss" } else { "redis" };
        if environment.is_set(self.auth) && environment.is_set(self.auth_file) {
            return Err(environment.error(self.auth_file, format!("cannot be combined with {}", self.auth)));
        }
        let (user, password) = match environment.value(self.auth) {
            Some(auth) => auth.split_once(':').unwrap_or(("", auth)),
            None => ("", ""),
        };
        let kind = environment.text(self.kind).to_lowercase();
        if !matches!(kind.as_str(), "single" | "sentinel" | "cluster") {
            return Err(environment.error(self.kind, "is not single, sentinel or cluster"));
        }
        let socket_type = environment.text(self.socket_type).to_lowercase();
        if !matches!(socket_type.as_str(), "unix" | "tcp" | "tcp4" | "tcp6") {
            return Err(environment.error(self.socket_type, "is neither tcp nor unix"));
        }
        if kind == "single" && url_scheme.is_none() && socket_type == "unix" {
            if !remaining.starts_with('/') {
                let reason = format!(
                    "is not the path of a Unix socket; for host:port set {}=tcp, as its default is unix",
                    self.socket_type
                );
                return Err(environment.error(self.url, reason));
            }
            let mut parameters = Vec::new();
            for (name, value) in [("pass", password), ("user", user)] {
                if !value.is_empty() {
                    parameters.push(format!("{name}={}", encode(value)));
                }
            }
            let separator = if parameters.is_empty() { "" } else { "?" };
            return Ok(format!("redis+unix://{remaining}{separator}{}", parameters.join("&")));
        }
        let (url_credentials, hosts) = match remaining.rsplit_once('@') {
            Some((credentials, hosts)) => (Some(credentials), hosts),
            None => (None, remaining),
        };
        let credentials = match (password, url_credentials) {
            ("", None) => String::new(),
            ("", Some(url_credentials)) => format!("{url_credentials}@"),
            (password, _) => format!("{}:{}@", encode(user), encode(password)),
        };
        if credentials.contains(['/', '?', '#', '[', ']']) || credentials.contains(char::is_whitespace) {
            return Err(environment.error(
                self.url,
                "has a user or a password with a character that must be percent-encoded, as / by %2F",
            ));
        }
        match kind.as_str() {
            "cluster" => {
                let (servers, database) = hosts.split_once('/').unwrap_or((hosts, ""));
                check_servers(servers).map_err(|reason| environment.error(self.url, reason))?;
                if !matches!(database, "" | "0") {
                    return Err(environment.error(self.url, "selects a database; a cluster has only database 0"));
                }
                Ok(format!("{scheme}+cluster://{credentials}{hosts}"))
            }
            "sentinel" => {
                let Some((master, servers)) = hosts.split_once(',').filter(|(master, _)| !master.is_empty()) else {
                    let reason = "is not master,host:port,… as required for sentinels";
                    return Err(environment.error(self.url, reason));
                };
                check_servers(servers).map_err(|reason| environment.error(self.url, reason))?;
                Ok(format!("{scheme}+sentinel://{credentials}{servers}/{master}"))
            }
            _ => {
                let (server, path) = match hosts.find(['/', '?']) {
                    Some(end) => hosts.split_at(end),
                    None => (hosts, ""),
                };
                values::check_endpoint(server, true).map_err(|reason| environment.error(self.url, reason))?;
                let database = path.trim_start_matches('/').split('?').next().unwrap_or_default();
                if !database.is_empty() && database.parse::<u32>().is_err() {
                    return Err(environment.error(self.url, "has a path that is not the number of a database"));
                }
                Ok(format!("{scheme}://{credentials}{hosts}"))
            }
        }
    }
}

/// Percent-encodes a user or a password.
fn encode(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Checks a list of servers.
fn check_servers(servers: &str) -> Result<(), String> {
    let mut servers = servers.split(',').filter(|server| !server.is_empty()).peekable();
    if servers.peek().is_none() {
        return Err("contains no host".into());
    }
    servers.try_for_each(|server| values::check_endpoint(server, true))
}
