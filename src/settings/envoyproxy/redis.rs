//! The address of Redis, of which the peer has the parts in many variables.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{Environment, VariableError};

/// The variables of one of the two stores.
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
    /// Of unit second.
    pub(super) const PER_SECOND: Self = Self {
        socket_type: "REDIS_PERSECOND_SOCKET_TYPE",
        kind: "REDIS_PERSECOND_TYPE",
        url: "REDIS_PERSECOND_URL",
        auth: "REDIS_PERSECOND_AUTH",
        tls: "REDIS_PERSECOND_TLS",
        timeout: "REDIS_PERSECOND_TIMEOUT",
        sentinel_auth: "REDIS_PERSECOND_SENTINEL_AUTH",
    };

    /// As our setting `store` has it.
    pub(super) fn address(&self, environment: &Environment<'_>) -> Result<String, VariableError> {
        let url = environment.text(self.url);
        let (given, rest) = url.split_once("://").map_or((None, url), |(scheme, rest)| (Some(scheme), rest));
        let tls = match given {
            None | Some("redis") => environment.is_true(self.tls)?,
            Some("rediss") => true,
            Some(_) => return Err(environment.wrong(self.url, "is neither host:port nor redis://host:port")),
        };
        let scheme = if tls { "rediss" } else { "redis" };
        let (user, password) = match environment.value(self.auth) {
            Some(auth) => auth.split_once(':').unwrap_or(("", auth)),
            None => ("", ""),
        };
        let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let kind = environment.text(self.kind).to_lowercase();
        if kind == "single" && given.is_none() && environment.text(self.socket_type) == "unix" {
            let words = [("pass", password), ("user", user)].into_iter().filter(|(_, word)| !word.is_empty());
            let words: Vec<_> = words.map(|(name, word)| format!("{name}={}", encoded(word))).collect();
            let mark = if words.is_empty() { "" } else { "?" };
            return Ok(format!("redis+unix://{rest}{mark}{}", words.join("&")));
        }
        let (in_url, hosts) = rest.rsplit_once('@').map_or((None, rest), |(before, hosts)| (Some(before), hosts));
        let credentials = match (password, in_url) {
            ("", None) => String::new(),
            ("", Some(in_url)) => format!("{in_url}@"),
            (password, _) => format!("{}:{}@", encoded(user), encoded(password)),
        };
        match kind.as_str() {
            "single" => Ok(format!("{scheme}://{credentials}{hosts}")),
            "cluster" => Ok(format!("{scheme}+cluster://{credentials}{hosts}")),
            "sentinel" => match hosts.split_once(',') {
                Some((master, hosts)) => Ok(format!("{scheme}+sentinel://{credentials}{hosts}/{master}")),
                None => Err(environment.wrong(self.url, "is not master,host:port,… as sentinels need it")),
            },
            _ => Err(environment.wrong(self.kind, "is none of single, sentinel and cluster")),
        }
    }
}
