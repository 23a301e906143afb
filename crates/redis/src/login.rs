//! [`Login`]: credentials in a file or printed by a command, which change while the service runs.
//!
//! New connections log in with the current credentials, and open ones log in again when they change. Credentials that
//! Redis rejects are read again soon. Until a file can be read or a command succeeds again, the last ones are used.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    thread,
    time::Duration,
};

use redis::RedisConnectionInfo;
use sluicegate_files::{self as files, FileVersion};
use sluicegate_metrics::WorkerId;
use tokio::{
    sync::{Notify, oneshot, watch},
    time::{sleep, timeout},
};

use super::{Health, Settings, SetupError, failure::Failure};

/// Interval at which a file is examined for changes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which a command is ended.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which a command is examined for its end.
const COMMAND_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// First pause before a command runs again after it has failed or Redis has rejected its credentials. It doubles each time.
const MIN_RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Maximum pause before a command runs again after it has failed or Redis has rejected its credentials.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(30);
/// Maximum size of credentials, in bytes. Tokens of cloud providers have about 2,000.
const MAX_BYTES: u64 = 64 * 1024;
/// Maximum length of the part of a command's error output that is logged, in bytes.
const MAX_ERROR_BYTES: u64 = 500;

/// Credentials as a file or a command contains them: `password` or `user:password`.
pub(super) type Secret = Arc<str>;

/// Current credentials of the servers of one address.
pub(super) struct Login {
    source: LoginSource,
    /// The current credentials, or `None` before the command has succeeded for the first time.
    secret: watch::Sender<Option<Secret>>,
    rejected: Notify,
}

/// The place that credentials come from.
enum LoginSource {
    File(PathBuf),
    Command { line: String, max_age: Duration },
}

impl Login {
    /// Creates the login of the settings, and reads the file for the first time. Returns `None` if the credentials are
    /// part of the address.
    pub(super) fn new(settings: &Settings) -> Result<Option<Arc<Self>>, SetupError> {
        if let Some(path) = &settings.password_file {
            return Self::read(path).map(Some);
        }
        let Some(line) = &settings.password_command else {
            return Ok(None);
        };
        let source = LoginSource::Command { line: line.clone(), max_age: settings.password_max_age };
        Ok(Some(Arc::new(Self { source, secret: watch::Sender::new(None), rejected: Notify::new() })))
    }

    /// Creates a login with the credentials in a file.
    pub(super) fn read(path: &Path) -> Result<Arc<Self>, SetupError> {
        let secret = read_secret(path)
            .map_err(|source| SetupError::PasswordFile { path: path.display().to_string(), source })?;
        let source = LoginSource::File(path.to_owned());
        Ok(Arc::new(Self { source, secret: watch::Sender::new(Some(secret)), rejected: Notify::new() }))
    }

    /// Returns the current credentials. Waits for the first ones of a command.
    pub(super) async fn secret(&self) -> Option<Secret> {
        let mut secrets = self.secret.subscribe();
        let secret = secrets.wait_for(Option::is_some).await.ok()?;
        secret.clone()
    }

    /// Returns the current credentials if they differ from `previous`.
    pub(super) fn changed_since(&self, previous: &Secret) -> Option<Secret> {
        self.secret.borrow().clone().filter(|secret| secret != previous)
    }

    /// Requests that the credentials are read again soon, because a server has rejected them.
    pub(super) fn report_rejection(&self) {
        self.rejected.notify_one();
    }

    /// Keeps the credentials up to date. Never returns.
    pub(super) async fn follow(self: Arc<Self>, health: Arc<Health>) {
        match &self.source {
            LoginSource::File(path) => self.follow_file(path).await,
            LoginSource::Command { line, max_age } => self.follow_command(line, *max_age, &health).await,
        }
    }

    async fn follow_file(&self, path: &Path) {
        // The file can have changed since it was read for the first time.
        let mut read_version = None;
        let mut is_failure_logged = false;
        loop {
            let version = FileVersion::of(path);
            if version.is_none() || version != read_version {
                match read_secret(path) {
                    Ok(secret) => {
                        self.publish(secret);
                        read_version = version;
                        is_failure_logged = false;
                    }
                    Err(error) if !is_failure_logged => {
                        let path = path.display();
                        tracing::warn!(%path, %error, "cannot read the password of Redis; the previous one stays in use");
                        is_failure_logged = true;
                    }
                    Err(_) => {}
                }
            }
            let _ = timeout(POLL_INTERVAL, self.rejected.notified()).await;
        }
    }

    async fn follow_command(&self, line: &str, max_age: Duration, health: &Health) {
        let mut pause = MIN_RETRY_PAUSE;
        loop {
            match run_on_thread(line).await {
                Ok(secret) => {
                    self.publish(secret);
                    let was_rejected = timeout(max_age, self.rejected.notified()).await.is_ok();
                    if !was_rejected {
                        pause = MIN_RETRY_PAUSE;
                        continue;
                    }
                }
                Err(error) => {
                    health.count_failure(WorkerId(0), Failure::NoAuth);
                    tracing::warn!(error, "redis.password_command has failed; it runs again soon");
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(MAX_RETRY_PAUSE);
        }
    }

    fn publish(&self, secret: Secret) {
        self.secret.send_replace(Some(secret));
    }
}

/// Splits a secret into its user, if there is one, and its password. `info` contains the user of the address. Without
/// one, the secret can be `user:password`.
pub(super) fn split<'s>(secret: &'s str, info: &'s RedisConnectionInfo) -> (Option<&'s str>, &'s str) {
    if let Some(user) = info.username() {
        return (Some(user), secret);
    }
    match secret.split_once(':') {
        Some(("", password)) => (None, password),
        Some((user, password)) => (Some(user), password),
        None => (None, secret),
    }
}

fn read_secret(path: &Path) -> io::Result<Secret> {
    let text = files::read_to_string(path, MAX_BYTES)?;
    secret(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the file is empty"))
}

/// Returns a text without the end of its last line, or `None` if it is empty.
fn secret(text: &str) -> Option<Secret> {
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() { None } else { Some(text.into()) }
}

/// Runs a command on a thread of its own.
///
/// tokio could run it as well, but with its feature `process` each wait of a worker also looks for ended processes: half a
/// percent more instructions in a decision.
async fn run_on_thread(line: &str) -> Result<Secret, String> {
    let (sender, result) = oneshot::channel();
    let line = line.to_owned();
    let thread = thread::Builder::new().name("password".into());
    let spawned = thread.spawn(move || {
        // The receiver has gone if the service ends.
        let _ = sender.send(run(&line, COMMAND_TIMEOUT));
    });
    spawned.map_err(|error| error.to_string())?;
    result.await.unwrap_or_else(|_| Err("the thread of the command has ended".to_owned()))
}

/// Runs a command and returns the credentials that it prints.
fn run(line: &str, max_time: Duration) -> Result<Secret, String> {
    let mut words = line.split_whitespace();
    let program = words.next().ok_or("the command is empty")?;
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("{program}: {error}"))?;
    let output = read_start(child.stdout.take(), MAX_BYTES);
    let errors = read_start(child.stderr.take(), MAX_ERROR_BYTES);
    let status = wait(&mut child, max_time).map_err(|error| format!("{program}: {error}"))?;
    let Some(status) = status else {
        return Err(format!("{program} has not ended after {} s", max_time.as_secs()));
    };
    // Another process can have inherited the streams.
    let output = output.recv_timeout(max_time).unwrap_or_default();
    if !status.success() {
        let errors = errors.recv_timeout(max_time).unwrap_or_default();
        return Err(format!("{program}: {status}: {}", String::from_utf8_lossy(&errors).trim()));
    }
    if output.len() as u64 == MAX_BYTES {
        return Err(format!("{program} prints more than {MAX_BYTES} bytes"));
    }
    let text = String::from_utf8(output).map_err(|_| format!("{program} prints no valid UTF-8"))?;
    secret(&text).ok_or_else(|| format!("{program} prints nothing"))
}

/// Waits for the end of a process. Kills it after `max_time`, and then returns `None`.
fn wait(child: &mut Child, max_time: Duration) -> io::Result<Option<ExitStatus>> {
    let mut waited = Duration::ZERO;
    while waited < max_time {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(COMMAND_POLL_INTERVAL);
        waited += COMMAND_POLL_INTERVAL;
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

/// Reads a stream to its end on a thread of its own, and sends at most its first `max_bytes`.
fn read_start(stream: Option<impl Read + Send + 'static>, max_bytes: u64) -> Receiver<Vec<u8>> {
    let (sender, start) = channel();
    let thread = thread::Builder::new().name("password".into());
    // Without the thread, nothing is sent, and the command counts as one that prints nothing.
    let _ = thread.spawn(move || {
        let Some(mut stream) = stream else {
            return;
        };
        let mut bytes = Vec::new();
        // What cannot be read is treated as the end.
        let _ = stream.by_ref().take(max_bytes).read_to_end(&mut bytes);
        let _ = io::copy(&mut stream, &mut io::sink());
        let _ = sender.send(bytes);
    });
    start
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_secret_can_contain_the_user_unless_the_address_does() {
        let without_user = RedisConnectionInfo::default();
        let with_user = RedisConnectionInfo::default().set_username("app");
        for (secret, expected) in [
            ("password", (None, "password")),
            ("user:pass:word", (Some("user"), "pass:word")),
            (":password", (None, "password")),
        ] {
            assert_eq!(split(secret, &without_user), expected);
            assert_eq!(split(secret, &with_user), (Some("app"), secret));
        }
    }

    #[test]
    fn only_the_end_of_the_line_is_removed() {
        for (text, expected) in [("a\r\n", Some("a")), (" a b \n\n", Some(" a b ")), ("\n", None), ("", None)] {
            assert_eq!(secret(text).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn a_file_that_is_empty_or_missing_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        let error =
            |path: &Path| Login::read(path).err().map(|error| sluicegate_metrics::chain(&error)).unwrap_or_default();
        assert!(error(&path).contains("No such file"), "{}", error(&path));
        fs::write(&path, "\n").unwrap();
        assert!(error(&path).ends_with("password: the file is empty"), "{}", error(&path));
    }

    #[test]
    fn a_command_must_succeed_and_print_a_text() {
        let run = |line| run(line, Duration::from_secs(60));
        assert_eq!(&*run("echo -n a:b").unwrap(), "a:b");
        for (line, expected) in [
            ("", "the command is empty"),
            ("/nowhere/token", "/nowhere/token: No such file"),
            ("true", "true prints nothing"),
            ("ls /nowhere", "ls: exit status: 2: ls: "),
            ("head -c 700000 /dev/zero", "head prints more than 65536 bytes"),
        ] {
            let error = run(line).unwrap_err();
            assert!(error.starts_with(expected), "{line}: {error}");
        }
    }

    #[test]
    fn a_command_that_does_not_end_is_killed() {
        let command = |time: &mut Command| time.arg("1000").stdout(Stdio::null()).spawn().unwrap();
        let mut child = command(&mut Command::new("sleep"));
        assert_eq!(wait(&mut child, Duration::from_millis(40)).unwrap(), None);
        assert!(child.try_wait().unwrap().is_some_and(|status| !status.success()));
        assert_eq!(run("sleep 1000", Duration::from_millis(40)).unwrap_err(), "sleep has not ended after 0 s");
    }
}
