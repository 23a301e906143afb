//! [`Authenticator`]: identifies callers of the admin API by bearer tokens from a file, or by the names in client
//! certificates.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use rustls::pki_types::{CertificateDer, ServerName};
use sha2::{Digest, Sha256};
use sluicegate_files::{self as files, FileVersion};
use subtle::ConstantTimeEq;
use webpki::EndEntityCert;

use super::{AdminServerError, Settings};
use crate::debounce::Debounce;

/// Interval between two polls of the token file.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum length of a token. Shorter tokens can be guessed.
const MIN_TOKEN_BYTES: usize = 16;

/// Permissions of a caller. Each role includes the permissions of the previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::transport) enum Role {
    /// Methods that return no names of entities and operators.
    Public,
    /// Methods that change nothing.
    Read,
    /// All methods.
    Operate,
}

impl Role {
    /// Returns the name in the API.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Read => "read",
            Self::Operate => "operate",
        }
    }
}

/// A caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::transport) struct Caller {
    /// Name of the token or certificate; empty without one.
    pub(in crate::transport) name: String,
    pub(in crate::transport) role: Role,
}

/// Error returned when the token file cannot be read or is invalid.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the token file {path}: {reason}")]
pub struct TokenError {
    path: PathBuf,
    reason: String,
}

/// SHA-256 of a token, so that the memory of the process does not contain the token.
///
/// It has no `PartialEq`: the only comparison takes constant time. As a digest, it reveals neither the length of a token
/// nor the position of the first different byte.
struct TokenDigest([u8; 32]);

impl TokenDigest {
    fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    /// Compares two digests in constant time.
    fn is_equal(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

pub(super) struct Token {
    digest: TokenDigest,
    caller: Caller,
}

/// The known callers.
pub(super) struct Authenticator {
    file: Option<PathBuf>,
    /// Version of the token file that was read at the start.
    first_version: Option<FileVersion>,
    tokens: ArcSwap<Vec<Token>>,
    /// Callers by the names in their certificates.
    certified: Vec<(ServerName<'static>, Caller)>,
}

impl Authenticator {
    pub(super) fn new(settings: &Settings) -> Result<Arc<Self>, AdminServerError> {
        let first_version = settings.token_file.as_deref().and_then(FileVersion::of);
        let tokens = settings.token_file.as_deref().map(read).transpose()?.unwrap_or_default();
        let mut certified = Vec::new();
        // The names in `operate` come first, so a name in both lists has the role `Operate`.
        for (names, role) in [(&settings.operate, Role::Operate), (&settings.read, Role::Read)] {
            for name in names {
                let server_name =
                    ServerName::try_from(name.clone()).map_err(|_| AdminServerError::Name(name.clone()))?;
                certified.push((server_name, Caller { name: name.clone(), role }));
            }
        }
        Ok(Arc::new(Self {
            file: settings.token_file.clone(),
            first_version,
            tokens: ArcSwap::from_pointee(tokens),
            certified,
        }))
    }

    /// Polls the token file and reloads it when it changes. Returns only if there is no token file.
    pub(super) async fn follow(self: Arc<Self>) {
        let Some(file) = &self.file else {
            return;
        };
        let mut debounce = Debounce::new(self.first_version.clone());
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if !debounce.poll(FileVersion::of(file)) {
                continue;
            }
            match read(file) {
                Ok(tokens) => {
                    tracing::info!(tokens = tokens.len(), "token file reloaded");
                    self.tokens.store(Arc::new(tokens));
                }
                Err(error) => {
                    tracing::error!(%error, "cannot use the changed token file; the previous tokens stay in use");
                }
            }
        }
    }

    /// Returns whether there is a token file.
    pub(super) fn accepts_tokens(&self) -> bool {
        self.file.is_some()
    }

    /// Returns the caller with this token. Compares all tokens, each in constant time.
    pub(super) fn by_token(&self, token: &str) -> Option<Caller> {
        let digest = TokenDigest::of(token);
        let tokens = self.tokens.load();
        let mut found = None;
        for known in tokens.iter() {
            if known.digest.is_equal(&digest) {
                found = Some(&known.caller);
            }
        }
        found.cloned()
    }

    /// Returns the caller with this certificate, which the TLS handshake has verified.
    pub(super) fn by_certificate(&self, certificate: &CertificateDer<'_>) -> Option<Caller> {
        let certificate = EndEntityCert::try_from(certificate).ok()?;
        for (name, caller) in &self.certified {
            if certificate.verify_is_valid_for_subject_name(name).is_ok() {
                return Some(caller.clone());
            }
        }
        None
    }
}

/// Reads the token file. Each line is `read TOKEN NAME` or `operate TOKEN NAME`, and `#` begins a comment.
fn read(path: &Path) -> Result<Vec<Token>, TokenError> {
    let text = files::read_to_string(path, files::MAX_BYTES).map_err(|error| error.to_string());
    let tokens = text.and_then(|text| parse(&text));
    tokens.map_err(|reason| TokenError { path: path.to_owned(), reason })
}

/// Parses the text of a token file. Returns the reason if it is invalid.
pub(super) fn parse(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        let (role, token, name) = match words.as_slice() {
            [] => continue,
            ["read", token, name] => (Role::Read, token, name),
            ["operate", token, name] => (Role::Operate, token, name),
            // The message must not contain the token, not even an invalid one.
            _ => return Err(format!("line {} must be `read TOKEN NAME` or `operate TOKEN NAME`", number + 1)),
        };
        if token.len() < MIN_TOKEN_BYTES {
            return Err(format!("the token in line {} is shorter than {MIN_TOKEN_BYTES} bytes", number + 1));
        }
        let caller = Caller { name: (*name).to_owned(), role };
        tokens.push(Token { digest: TokenDigest::of(token), caller });
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn authenticator(text: &str) -> Result<Arc<Authenticator>, AdminServerError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        Authenticator::new(&Settings { token_file: Some(file.path().to_owned()), ..Settings::default() })
    }

    #[test]
    fn a_token_identifies_its_caller_and_role() {
        let authenticator =
            authenticator("# ours\nread 0123456789abcdef eve # a dashboard\n\noperate fedcba9876543210 alice\n")
                .unwrap();
        let caller = |token: &str| authenticator.by_token(token).map(|caller| (caller.name, caller.role));
        assert_eq!(caller("0123456789abcdef"), Some(("eve".into(), Role::Read)));
        assert_eq!(caller("fedcba9876543210"), Some(("alice".into(), Role::Operate)));
        for token in ["", "0123456789abcde", "0123456789abcdef0", "alice"] {
            assert_eq!(caller(token), None);
        }
    }

    #[test]
    fn rejects_a_name_that_no_certificate_can_have() {
        let settings = Settings { operate: vec!["ops team".into()], ..Settings::default() };
        assert!(Authenticator::new(&settings).err().unwrap().to_string().contains("not \"ops team\""));
    }

    #[test]
    fn the_error_about_an_invalid_file_names_the_line_and_hides_the_token() {
        for (text, expected) in [
            ("read 0123456789abcdef", "line 1 must be"),
            ("\nadmin 0123456789abcdef alice", "line 2 must be"),
            ("read 0123456789abcdef alice smith", "line 1 must be"),
            ("read 0123456789abcde alice", "line 1 is shorter"),
        ] {
            let error = authenticator(text).err().unwrap().to_string();
            assert!(error.contains(expected) && !error.contains("0123456789"), "{error}");
        }
    }

    #[test]
    fn tokens_are_accepted_only_with_a_token_file() {
        assert!(authenticator("read 0123456789abcdef eve").unwrap().accepts_tokens());
        assert!(!Authenticator::new(&Settings::default()).unwrap().accepts_tokens());
    }

    #[tokio::test(start_paused = true)]
    async fn the_token_file_is_read_again_when_it_has_changed_and_only_then() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "read 0123456789abcdef eve\n").unwrap();
        let settings = Settings { token_file: Some(file.path().to_owned()), ..Settings::default() };
        let authenticator = Authenticator::new(&settings).unwrap();
        let following = tokio::spawn(Arc::clone(&authenticator).follow());
        let tokens = authenticator.tokens.load_full();
        tokio::time::sleep(POLL_INTERVAL * 10).await;
        assert!(Arc::ptr_eq(&tokens, &authenticator.tokens.load_full()));
        fs::write(file.path(), "operate fedcba9876543210 alice\n").unwrap();
        tokio::time::sleep(POLL_INTERVAL * 10).await;
        assert!(authenticator.by_token("fedcba9876543210").is_some());
        assert!(authenticator.by_token("0123456789abcdef").is_none());
        following.abort();
    }
}
