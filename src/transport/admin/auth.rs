//! Who may do what: bearer tokens from a file, or client certificates by the names in them.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use rustls::pki_types::{CertificateDer, ServerName};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use webpki::EndEntityCert;

use super::{AdminServerError, Settings};
use crate::debounce::Debounce;

/// Between two looks at the file.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// A token that is shorter can be guessed.
const MIN_TOKEN_BYTES: usize = 16;

/// What somebody may do. The one behind may do all that the one before may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// Whatever changes nothing.
    Read,
    /// Everything.
    Operate,
}

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) name: String,
    pub(super) role: Role,
}

/// A file of tokens that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use {path} as a file of tokens: {reason}")]
pub struct TokenError {
    path: PathBuf,
    reason: String,
}

struct Token {
    /// Nobody finds the token in a core dump.
    digest: [u8; 32],
    caller: Caller,
}

/// Who there is.
pub(super) struct Authenticator {
    file: Option<PathBuf>,
    tokens: ArcSwap<Vec<Token>>,
    /// Names in certificates.
    certified: Vec<(ServerName<'static>, Caller)>,
}

impl Authenticator {
    pub(super) fn new(settings: &Settings) -> Result<Arc<Self>, AdminServerError> {
        let tokens = settings.token_file.as_deref().map(read).transpose()?.unwrap_or_default();
        let with_role =
            |names: &[String], role| -> Vec<(String, Role)> { names.iter().map(|name| (name.clone(), role)).collect() };
        // Whoever is named for both may do both.
        let named = [with_role(&settings.operate, Role::Operate), with_role(&settings.read, Role::Read)].concat();
        let certified = named.into_iter().map(|(name, role)| {
            let server_name = ServerName::try_from(name.clone()).map_err(|_| AdminServerError::Name(name.clone()))?;
            Ok((server_name, Caller { name, role }))
        });
        let (file, certified) = (settings.token_file.clone(), certified.collect::<Result<_, AdminServerError>>()?);
        Ok(Arc::new(Self { file, tokens: ArcSwap::from_pointee(tokens), certified }))
    }

    /// Follows the file for ever.
    pub(super) async fn follow(self: Arc<Self>) {
        let Some(file) = &self.file else {
            return;
        };
        let fingerprint = || {
            let metadata = fs::metadata(file).ok()?;
            Some((metadata.len(), metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH)))
        };
        let mut settled = Debounce::new(fingerprint());
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if !settled.poll(fingerprint()) {
                continue;
            }
            match read(file) {
                Ok(tokens) => {
                    tracing::info!(tokens = tokens.len(), "tokens reloaded");
                    self.tokens.store(Arc::new(tokens));
                }
                Err(error) => tracing::error!(%error, "the tokens changed and cannot be used; those before stay"),
            }
        }
    }

    /// Whose token it is. Every one is looked at, and each for as long.
    pub(super) fn by_token(&self, token: &str) -> Option<Caller> {
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        let tokens = self.tokens.load();
        let mut found = None;
        for known in tokens.iter() {
            if bool::from(known.digest.ct_eq(&digest)) {
                found = Some(&known.caller);
            }
        }
        found.cloned()
    }

    /// Whose certificate it is; TLS has verified it.
    pub(super) fn by_certificate(&self, certificate: &CertificateDer<'_>) -> Option<Caller> {
        let certificate = EndEntityCert::try_from(certificate).ok()?;
        let is = |name: &ServerName<'_>| certificate.verify_is_valid_for_subject_name(name).is_ok();
        self.certified.iter().find(|(name, _)| is(name)).map(|(_, caller)| caller.clone())
    }
}

/// A line each: `read TOKEN NAME` or `operate TOKEN NAME`; `#` begins a comment.
fn read(path: &Path) -> Result<Vec<Token>, TokenError> {
    let unusable = |reason: String| TokenError { path: path.to_owned(), reason };
    let text = fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
    let mut tokens = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        let (role, token, name) = match words.as_slice() {
            [] => continue,
            ["read", token, name] => (Role::Read, token, name),
            ["operate", token, name] => (Role::Operate, token, name),
            // A token must not be shown, not even a wrong one.
            _ => return Err(unusable(format!("line {} is not `read TOKEN NAME` or `operate TOKEN NAME`", number + 1))),
        };
        if token.len() < MIN_TOKEN_BYTES {
            return Err(unusable(format!("the token of line {} is shorter than {MIN_TOKEN_BYTES} bytes", number + 1)));
        }
        let caller = Caller { name: (*name).to_owned(), role };
        tokens.push(Token { digest: Sha256::digest(token.as_bytes()).into(), caller });
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn callers(text: &str) -> Result<Arc<Authenticator>, AdminServerError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        Authenticator::new(&Settings { token_file: Some(file.path().to_owned()), ..Settings::default() })
    }

    #[test]
    fn a_token_says_who_it_is_and_what_it_may() {
        let callers =
            callers("# ours\nread 0123456789abcdef eve # a dashboard\n\noperate fedcba9876543210 alice\n").unwrap();
        let of = |token: &str| callers.by_token(token).map(|caller| (caller.name, caller.role));
        assert_eq!(of("0123456789abcdef"), Some(("eve".into(), Role::Read)));
        assert_eq!(of("fedcba9876543210"), Some(("alice".into(), Role::Operate)));
        for token in ["", "0123456789abcde", "0123456789abcdef0", "alice"] {
            assert_eq!(of(token), None);
        }
    }

    #[test]
    fn a_name_that_no_certificate_can_have_is_refused() {
        let settings = Settings { operate: vec!["ops team".into()], ..Settings::default() };
        assert!(Authenticator::new(&settings).err().unwrap().to_string().contains("not \"ops team\""));
    }

    #[test]
    fn a_bad_file_says_where_and_shows_no_token() {
        for (text, expected) in [
            ("read 0123456789abcdef", "line 1 is not"),
            ("\nadmin 0123456789abcdef alice", "line 2 is not"),
            ("read 0123456789abcdef alice smith", "line 1 is not"),
            ("read 0123456789abcde alice", "line 1 is shorter"),
        ] {
            let error = callers(text).err().unwrap().to_string();
            assert!(error.contains(expected) && !error.contains("0123456789"), "{error}");
        }
    }
}
