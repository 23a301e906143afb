//! [`Failure`]: the kinds of failed calls, and their consequences for the call, for the server and for operators.

use std::{error::Error, io, sync::Arc};

use redis::{ErrorKind, RedisError, ServerErrorKind};
use sluicegate_store::{
    StoreError,
    health::{FailureKind, MetricText},
};

/// Kind of a failed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The connection could not be established, or it broke.
    Io,
    /// TLS cannot be established: only one side uses it, or one does not trust the other's certificate.
    Tls,
    /// The server did not answer within the deadline. Hits of the call may have been counted, and it is not repeated.
    Timeout,
    /// The reply is not valid in Redis' protocol, or is not what the script of this service returns.
    InvalidReply,
    /// The server is loading its data set.
    Loading,
    /// The server is a read-only replica.
    ReadOnly,
    /// The server is a replica and its master is unreachable.
    MasterDown,
    /// The server requires credentials, or rejects those of this service.
    NoAuth,
    /// The user lacks a permission.
    NoPerm,
    /// The server does not have the script, which is then loaded again.
    NoScript,
    /// The slot belongs to another server.
    Moved,
    /// The slot is migrating to another server.
    Ask,
    /// Some of the keys have migrated, others have not.
    TryAgain,
    /// The server rejects keys of several slots in one call.
    CrossSlot,
    /// The cluster does not serve this slot, or no slot at all.
    ClusterDown,
    /// The server is out of memory.
    Oom,
    /// A script of another client has been running for too long.
    Busy,
    /// The server rejects writes because saving its data has failed.
    Misconf,
    /// The server rejects writes because it has too few replicas.
    NoReplicas,
    /// The key of a counter contains other data than the counter's state.
    WrongType,
    /// Any other error.
    Other,
}

/// Effect of a failure on the server's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HealthEffect {
    /// The server keeps receiving calls: it answers quickly, and later calls may succeed.
    None,
    /// The server receives no calls until a new connection has passed its checks.
    Down,
    /// The same as [`HealthEffect::Down`], but only after several such failures in a row.
    DownIfRepeated,
}

impl FailureKind for Failure {
    const ALL: &'static [Self] = &[
        Self::Io,
        Self::Tls,
        Self::Timeout,
        Self::InvalidReply,
        Self::Loading,
        Self::ReadOnly,
        Self::MasterDown,
        Self::NoAuth,
        Self::NoPerm,
        Self::NoScript,
        Self::Moved,
        Self::Ask,
        Self::TryAgain,
        Self::CrossSlot,
        Self::ClusterDown,
        Self::Oom,
        Self::Busy,
        Self::Misconf,
        Self::NoReplicas,
        Self::WrongType,
        Self::Other,
    ];
    const SOFTWARE: &'static str = "Redis";
    const FAILURES: MetricText = MetricText {
        name: "sluicegate_redis_failures_total",
        description: "Number of failed or redirected calls and failed attempts to connect to Redis, by kind",
    };
    const UP: MetricText = MetricText {
        name: "sluicegate_redis_up",
        description: "Whether every worker is connected to the Redis server (1) or not (0)",
    };
    const ROLLBACK_FAILURES: MetricText = MetricText {
        name: "sluicegate_redis_rollback_failures_total",
        description: "Number of takes of denied requests that could not be rolled back",
    };

    fn kind(self) -> &'static str {
        match self {
            Self::Io => "io",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::InvalidReply => "invalid_reply",
            Self::Loading => "loading",
            Self::ReadOnly => "readonly",
            Self::MasterDown => "masterdown",
            Self::NoAuth => "noauth",
            Self::NoPerm => "noperm",
            Self::NoScript => "noscript",
            Self::Moved => "moved",
            Self::Ask => "ask",
            Self::TryAgain => "tryagain",
            Self::CrossSlot => "crossslot",
            Self::ClusterDown => "clusterdown",
            Self::Oom => "oom",
            Self::Busy => "busy",
            Self::Misconf => "misconf",
            Self::NoReplicas => "noreplicas",
            Self::WrongType => "wrongtype",
            Self::Other => "other",
        }
    }

    fn needs_operator(self) -> bool {
        matches!(self, Self::Tls | Self::NoAuth | Self::NoPerm)
    }
}

impl Failure {
    pub(super) fn of(error: &RedisError) -> Self {
        if error.is_timeout() {
            return Self::Timeout;
        }
        if is_tls_error(error) {
            return Self::Tls;
        }
        match error.kind() {
            ErrorKind::Io => Self::Io,
            ErrorKind::Parse => Self::InvalidReply,
            ErrorKind::AuthenticationFailed => Self::NoAuth,
            ErrorKind::Server(kind) => Self::of_server(kind, error.detail().unwrap_or_default()),
            ErrorKind::Extension => match error.code().unwrap_or_default() {
                "NOAUTH" | "WRONGPASS" => Self::NoAuth,
                "OOM" => Self::Oom,
                "BUSY" => Self::Busy,
                "MISCONF" => Self::Misconf,
                "NOREPLICAS" => Self::NoReplicas,
                "WRONGTYPE" => Self::WrongType,
                _ => Self::Other,
            },
            _ if error.is_unrecoverable_error() => Self::Io,
            _ => Self::Other,
        }
    }

    fn of_server(kind: ServerErrorKind, detail: &str) -> Self {
        match kind {
            ServerErrorKind::BusyLoading => Self::Loading,
            ServerErrorKind::ReadOnly => Self::ReadOnly,
            ServerErrorKind::MasterDown => Self::MasterDown,
            ServerErrorKind::NoPerm => Self::NoPerm,
            ServerErrorKind::NoScript => Self::NoScript,
            ServerErrorKind::Moved => Self::Moved,
            ServerErrorKind::Ask => Self::Ask,
            ServerErrorKind::TryAgain => Self::TryAgain,
            ServerErrorKind::CrossSlot => Self::CrossSlot,
            ServerErrorKind::ClusterDown => Self::ClusterDown,
            ServerErrorKind::ResponseError => Self::of_script(detail),
            _ => Self::Other,
        }
    }

    /// Classifies an error of a command inside the script, which Redis reports as a plain error with the code in its
    /// text.
    fn of_script(detail: &str) -> Self {
        let known = [
            // The reply to a first command that is longer than Redis accepts without a password.
            ("unauthenticated", Self::NoAuth),
            ("NOAUTH", Self::NoAuth),
            ("READONLY", Self::ReadOnly),
            ("read only replica", Self::ReadOnly),
            ("OOM ", Self::Oom),
            ("MISCONF", Self::Misconf),
            ("NOREPLICAS", Self::NoReplicas),
            ("cluster is down", Self::ClusterDown),
            ("NOPERM", Self::NoPerm),
            ("ACL failure", Self::NoPerm),
            ("can't run this command or subcommand", Self::NoPerm),
            ("LOADING", Self::Loading),
        ];
        for (pattern, failure) in known {
            if detail.contains(pattern) {
                return failure;
            }
        }
        Self::Other
    }

    pub(super) const fn health_effect(self) -> HealthEffect {
        match self {
            Self::Timeout => HealthEffect::DownIfRepeated,
            Self::Io
            | Self::Tls
            | Self::InvalidReply
            | Self::Loading
            | Self::ReadOnly
            | Self::MasterDown
            | Self::NoAuth => HealthEffect::Down,
            _ => HealthEffect::None,
        }
    }

    /// Returns whether the failure can be the effect of TLS on only one side.
    pub(super) const fn can_be_tls_mismatch(self) -> bool {
        matches!(self, Self::Io | Self::Tls | Self::Timeout | Self::InvalidReply)
    }

    /// Returns the text of an error for operators, which begins with the problem if the error itself does not name it.
    pub(super) fn describe(self, error: &RedisError) -> String {
        let problem = match self {
            Self::NoAuth if error.kind() == ErrorKind::AuthenticationFailed || error.code() == Some("WRONGPASS") => {
                "Redis rejects the user name or the password"
            }
            Self::NoAuth => "Redis requires a password",
            Self::Tls => "TLS cannot be established",
            _ => return error.to_string(),
        };
        format!("{problem}: {error}")
    }

    /// Returns whether the known topology may be out of date.
    pub(super) const fn suggests_topology_change(self) -> bool {
        !matches!(
            self,
            Self::NoScript
                | Self::NoPerm
                | Self::Oom
                | Self::WrongType
                | Self::TryAgain
                | Self::CrossSlot
                | Self::Other
        )
    }

    /// Returns the error for the caller of the store.
    pub(super) const fn error(self) -> StoreError {
        match (self, self.health_effect()) {
            (Self::Timeout, _) => StoreError::Timeout,
            (Self::Io | Self::Tls | Self::InvalidReply, _) => StoreError::Broken,
            (_, HealthEffect::Down) => StoreError::Unavailable,
            _ => StoreError::Rejected,
        }
    }
}

/// Returns whether an error is one of the TLS library. The Redis client wraps it in one of the network.
fn is_tls_error(error: &RedisError) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<Arc<dyn Error + Send + Sync>>());
    let network_error = source.and_then(|source| source.downcast_ref::<io::Error>());
    let inner = network_error.and_then(io::Error::get_ref);
    inner.is_some_and(<dyn Error + Send + Sync>::is::<rustls::Error>)
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;

    /// Classifies an error reply as the server sends it.
    fn failure_of(line: &str) -> Failure {
        let Ok(Value::ServerError(error)) = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()) else {
            panic!("{line} is not an error");
        };
        Failure::of(&error.into())
    }

    #[test]
    fn errors_of_the_network_differ_from_errors_of_the_server() {
        let io = |kind| Failure::of(&io::Error::from(kind).into());
        for kind in [io::ErrorKind::ConnectionReset, io::ErrorKind::PermissionDenied] {
            assert_eq!(io(kind), Failure::Io, "{kind}");
        }
        assert_eq!(io(io::ErrorKind::TimedOut), Failure::Timeout);
    }

    #[test]
    fn every_error_reply_has_a_kind() {
        for (line, expected) in [
            ("LOADING Redis is loading the dataset in memory", Failure::Loading),
            ("READONLY You can't write against a read only replica.", Failure::ReadOnly),
            (
                "ERR READONLY You can't write against a read only replica. script: 1, on @user_script:1.",
                Failure::ReadOnly,
            ),
            ("MASTERDOWN Link with MASTER is down", Failure::MasterDown),
            ("NOAUTH Authentication required.", Failure::NoAuth),
            ("ERR Protocol error: unauthenticated bulk length", Failure::NoAuth),
            ("ERR Protocol error: unauthenticated multibulk length", Failure::NoAuth),
            ("WRONGPASS invalid username-password pair", Failure::NoAuth),
            ("NOPERM this user has no permissions to run the 'evalsha' command", Failure::NoPerm),
            ("ERR The user executing the script can't run this command or subcommand script: 1", Failure::NoPerm),
            ("NOSCRIPT No matching script. Please use EVAL.", Failure::NoScript),
            ("MOVED 3999 127.0.0.1:6381", Failure::Moved),
            ("ASK 3999 127.0.0.1:6381", Failure::Ask),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Failure::TryAgain),
            ("CROSSSLOT Keys in request don't hash to the same slot", Failure::CrossSlot),
            ("CLUSTERDOWN The cluster is down", Failure::ClusterDown),
            ("ERR Script attempted to execute a command while the cluster is down", Failure::ClusterDown),
            ("OOM command not allowed when used memory > 'maxmemory'.", Failure::Oom),
            ("BUSY Redis is busy running a script.", Failure::Busy),
            (
                "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist",
                Failure::Misconf,
            ),
            ("NOREPLICAS Not enough good replicas to write.", Failure::NoReplicas),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Failure::WrongType),
            ("ERR something else", Failure::Other),
        ] {
            assert_eq!(failure_of(line), expected, "{line}");
        }
        let io = |kind| Failure::of(&io::Error::from(kind).into());
        assert_eq!(io(io::ErrorKind::TimedOut), Failure::Timeout);
        assert_eq!(io(io::ErrorKind::ConnectionReset), Failure::Io);
        assert_eq!(Failure::of(&redis::parse_redis_value(b"?nonsense\r\n").unwrap_err()), Failure::InvalidReply);
    }

    #[test]
    fn errors_of_tls_and_of_the_password_name_the_problem() {
        let tls = io::Error::new(io::ErrorKind::InvalidData, rustls::Error::DecryptError);
        let rejected = RedisError::from((ErrorKind::AuthenticationFailed, "Password authentication failed"));
        let missing = redis::parse_redis_value(b"-ERR Protocol error: unauthenticated bulk length\r\n");
        let Ok(Value::ServerError(missing)) = missing else { panic!("not an error") };
        for (error, kind, expected) in [
            (tls.into(), "tls", "TLS cannot be established: "),
            (rejected, "noauth", "Redis rejects the user name or the password: "),
            (missing.into(), "noauth", "Redis requires a password: "),
        ] {
            let failure = Failure::of(&error);
            let description = failure.describe(&error);
            assert!(failure.kind() == kind && description.starts_with(expected), "{kind}: {description}");
        }
    }

    #[test]
    fn kinds_are_unique_and_listed_in_the_order_of_the_variants() {
        for (index, failure) in Failure::ALL.iter().enumerate() {
            assert_eq!(*failure as usize, index);
            assert!(Failure::ALL[..index].iter().all(|known| known.kind() != failure.kind()));
        }
    }

    #[test]
    fn only_failures_that_prevent_decisions_take_a_server_down() {
        for (failure, health_effect, error) in [
            (Failure::Io, HealthEffect::Down, StoreError::Broken),
            (Failure::Tls, HealthEffect::Down, StoreError::Broken),
            (Failure::NoAuth, HealthEffect::Down, StoreError::Unavailable),
            (Failure::Loading, HealthEffect::Down, StoreError::Unavailable),
            (Failure::ReadOnly, HealthEffect::Down, StoreError::Unavailable),
            (Failure::InvalidReply, HealthEffect::Down, StoreError::Broken),
            (Failure::Timeout, HealthEffect::DownIfRepeated, StoreError::Timeout),
            (Failure::ClusterDown, HealthEffect::None, StoreError::Rejected),
            (Failure::Oom, HealthEffect::None, StoreError::Rejected),
            (Failure::Busy, HealthEffect::None, StoreError::Rejected),
            (Failure::Moved, HealthEffect::None, StoreError::Rejected),
        ] {
            assert_eq!((failure.health_effect(), failure.error()), (health_effect, error), "{failure:?}");
        }
    }
}
