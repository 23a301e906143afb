//! What can go wrong with a call, by what it means: for the call, for the server, and for those who operate it.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::store::StoreError;

/// The kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection could not be made, or broke.
    Io,
    /// No answer within the deadline.
    Timeout,
    /// An answer that is not one of Redis' protocol, or not one of the program.
    Garbage,
    /// The server is reading its data set.
    Loading,
    /// It became a replica.
    ReadOnly,
    /// It is a replica that lost its master.
    MasterDown,
    /// It wants credentials, or others.
    NoAuth,
    /// Its user may not do this.
    NoPerm,
    /// It did not know the program (which is then brought to it).
    NoScript,
    /// The slot is another server's.
    Moved,
    /// The slot is on its way to another server.
    Ask,
    /// Some of the keys are on their way.
    TryAgain,
    /// The server does not take keys of several slots in one call.
    CrossSlot,
    /// The cluster does not serve this slot, or any.
    ClusterDown,
    /// It has no memory left.
    Oom,
    /// Somebody's script runs, and has run for too long.
    Busy,
    /// It does not write since it could not save.
    Misconf,
    /// It does not write since too few replicas follow.
    NoReplicas,
    /// Something else is stored under a counter's key.
    WrongType,
    /// Any other error.
    Other,
}

/// What follows for the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HealthEffect {
    /// It is asked on: it answers at once, and may answer better next time.
    None,
    /// It is not asked until a new connection has conversed.
    Down,
    /// The same when it happens several times in a row.
    DownIfRepeated,
}

impl Failure {
    pub(crate) const ALL: [Self; 20] = [
        Self::Io,
        Self::Timeout,
        Self::Garbage,
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

    /// A word for metrics.
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            Self::Io => "io",
            Self::Timeout => "timeout",
            Self::Garbage => "garbage",
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

    pub(super) fn of(error: &RedisError) -> Self {
        if error.is_timeout() {
            return Self::Timeout;
        }
        match error.kind() {
            ErrorKind::Io => Self::Io,
            ErrorKind::Parse => Self::Garbage,
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

    /// What a command inside the program was refused for comes as a plain error, with its own code inside the text.
    fn of_script(detail: &str) -> Self {
        let known = [
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
        known.into_iter().find(|(words, _)| detail.contains(words)).map_or(Self::Other, |(_, failure)| failure)
    }

    pub(super) const fn health_effect(self) -> HealthEffect {
        match self {
            Self::Timeout => HealthEffect::DownIfRepeated,
            Self::Io | Self::Garbage | Self::Loading | Self::ReadOnly | Self::MasterDown | Self::NoAuth => {
                HealthEffect::Down
            }
            _ => HealthEffect::None,
        }
    }

    /// Whether the map of servers may be out of date.
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

    /// What the caller of a call that failed is told.
    pub(super) const fn error(self) -> StoreError {
        match (self, self.health_effect()) {
            (Self::Timeout, _) => StoreError::Timeout,
            (Self::Io | Self::Garbage, _) => StoreError::Broken,
            (_, HealthEffect::Down) => StoreError::Unavailable,
            _ => StoreError::Rejected,
        }
    }
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;

    /// As the server writes it.
    fn answered(line: &str) -> Failure {
        let Ok(Value::ServerError(error)) = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()) else {
            panic!("{line} is no error");
        };
        Failure::of(&error.into())
    }

    #[test]
    fn what_the_network_says_is_told_from_what_the_server_says() {
        let io = |kind| Failure::of(&std::io::Error::from(kind).into());
        for kind in [std::io::ErrorKind::ConnectionReset, std::io::ErrorKind::PermissionDenied] {
            assert_eq!(io(kind), Failure::Io, "{kind}");
        }
        assert_eq!(io(std::io::ErrorKind::TimedOut), Failure::Timeout);
    }

    #[test]
    fn every_answer_that_is_an_error_has_a_kind() {
        for (line, expected) in [
            ("LOADING Redis is loading the dataset in memory", Failure::Loading),
            ("READONLY You can't write against a read only replica.", Failure::ReadOnly),
            (
                "ERR READONLY You can't write against a read only replica. script: 1, on @user_script:1.",
                Failure::ReadOnly,
            ),
            ("MASTERDOWN Link with MASTER is down", Failure::MasterDown),
            ("NOAUTH Authentication required.", Failure::NoAuth),
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
            assert_eq!(answered(line), expected, "{line}");
        }
        let io = |kind| Failure::of(&std::io::Error::from(kind).into());
        assert_eq!(io(std::io::ErrorKind::TimedOut), Failure::Timeout);
        assert_eq!(io(std::io::ErrorKind::ConnectionReset), Failure::Io);
        assert_eq!(Failure::of(&redis::parse_redis_value(b"?nonsense\r\n").unwrap_err()), Failure::Garbage);
    }

    #[test]
    fn words_differ_and_the_list_is_in_the_order_of_the_kinds() {
        for (place, failure) in Failure::ALL.into_iter().enumerate() {
            assert_eq!(failure as usize, place);
            assert!(Failure::ALL[..place].iter().all(|known| known.kind() != failure.kind()));
        }
    }

    #[test]
    fn a_server_that_answers_is_asked_on_and_one_that_cannot_decide_is_not() {
        for (failure, consequence, error) in [
            (Failure::Io, HealthEffect::Down, StoreError::Broken),
            (Failure::Loading, HealthEffect::Down, StoreError::Unavailable),
            (Failure::ReadOnly, HealthEffect::Down, StoreError::Unavailable),
            (Failure::Garbage, HealthEffect::Down, StoreError::Broken),
            (Failure::Timeout, HealthEffect::DownIfRepeated, StoreError::Timeout),
            (Failure::ClusterDown, HealthEffect::None, StoreError::Rejected),
            (Failure::Oom, HealthEffect::None, StoreError::Rejected),
            (Failure::Busy, HealthEffect::None, StoreError::Rejected),
            (Failure::Moved, HealthEffect::None, StoreError::Rejected),
        ] {
            assert_eq!((failure.health_effect(), failure.error()), (consequence, error), "{failure:?}");
        }
    }
}
