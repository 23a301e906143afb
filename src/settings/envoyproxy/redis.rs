//! [`Redis`]: the address of Redis, which envoyproxy/ratelimit configures by several variables.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{Environment, VariableError};

/// Names of the variables of one of the two stores.
#[derive(Clone, Copy)]
pub(super) struct Redis {
    socket_type: &'static str,
    kind: &'static str,
    url: &'static str,
    auth: &'static str,
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
        tls: "REDIS_PERSECOND_TLS",
        timeout: "REDIS_PERSECOND_TIMEOUT",
        sentinel_auth: "REDIS_PERSECOND_SENTINEL_AUTH",
    };

    /// Returns the address in the format of the setting `store`.
    pub(super) fn address(&self, environment: &Environment<'_>) -> Result<String, VariableError> {
        let url = environment.text(self.url);
        let (url_scheme, remaining) =
            url.split_once("://").map_or((None, url), |(scheme, remaining)| (Some(scheme), remaining));
        let tls = match url_scheme {
            None | Some("redis") => environment.is_true(self.tls)?,
            Some("rediss") => true,
            Some(_) => return Err(environment.error(self.url, "is neither host:port nor redis://host:port")),
        };
        let scheme = if tls { "rediss" } else { "redis" };
        let (user, password) = match environment.value(self.auth) {
            Some(auth) => auth.split_once(':').unwrap_or(("", auth)),
            None => ("", ""),
        };
        let encode = |text| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let kind = environment.text(self.kind).to_lowercase();
        if kind == "single" && url_scheme.is_none() && environment.text(self.socket_type) == "unix" {
            let parameters = [("pass", password), ("user", user)].into_iter().filter(|(_, value)| !value.is_empty());
            let parameters: Vec<_> = parameters.map(|(name, value)| format!("{name}={}", encode(value))).collect();
            let separator = if parameters.is_empty() { "" } else { "?" };
            return Ok(format!("redis+unix://{remaining}{separator}{}", parameters.join("&")));
        }
        let (url_credentials, hosts) =
            remaining.rsplit_once('@').map_or((None, remaining), |(before, hosts)| (Some(before), hosts));
        let credentials = match (password, url_credentials) {
            ("", None) => String::new(),
            ("", Some(url_credentials)) => format!("{url_credentials}@"),
            (password, _) => format!("{}:{}@", encode(user), encode(password)),
        };
        match kind.as_str() {
            "single" => Ok(format!("{scheme}://{credentials}{hosts}")),
            "cluster" => Ok(format!("{scheme}+cluster://{credentials}{hosts}")),
            "sentinel" => match hosts.split_once(',') {
                Some((master, hosts)) => Ok(format!("{scheme}+sentinel://{credentials}{hosts}/{master}")),
                None => Err(environment.error(self.url, "is not master,host:port,… as required for sentinels")),
            },
            _ => Err(environment.error(self.kind, "is not single, sentinel or cluster")),
        }
    }
}
