//! [`Recorder`]: writes a sample of the requests to files for `sluicegate simulate`.
//!
//! The sample consists of entities: all requests of an entity are recorded, or none. The first descriptor identifies
//! the entity, or the entries that `record.entity_keys` names. The workers send requests to one thread that compresses
//! and writes them. If this thread falls behind, the workers skip requests.

use std::{
    fs, io,
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sluicegate_placement::Identity;

use super::read_hash_key;
use crate::{
    engine::{Micros, Request, Verdict},
    metrics::{Counter, Meter, Registrar, WorkerId},
    traffic::{Writer, encode},
};

/// Capacity of the queue between the workers and the thread, in requests.
const QUEUE_CAPACITY: usize = 8_192;
/// Time without a request after which buffered requests are flushed to the file.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time that the shutdown waits for the disk.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings for recording requests.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// The directory for the files. Without it, nothing is recorded.
    pub dir: Option<PathBuf>,
    /// Fraction of the entities whose requests are recorded, from 0 to 1.
    pub share: f64,
    /// Keys of the entries that identify an entity. If empty, the whole first descriptor identifies the entity.
    pub entity_keys: Vec<String>,
    /// Size in bytes at which a new file is started.
    pub max_file_bytes: u64,
    /// Maximum size of all files in bytes. The oldest files are removed.
    pub max_total_bytes: u64,
    /// A file with a secret key of at least 16 bytes. If set, entry values are replaced by 64 bits of a hash with this
    /// key.
    pub hash_key_file: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            dir: None,
            share: 0.01,
            entity_keys: Vec::new(),
            max_file_bytes: 64 << 20,
            max_total_bytes: 1 << 30,
            hash_key_file: None,
        }
    }
}

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if !(0.0..=1.0).contains(&self.share) {
            return Some("record.share must be between 0 and 1");
        }
        None
    }
}

/// A message to the recording thread.
enum Message {
    /// An encoded request.
    Request(Vec<u8>),
    /// A request to reply when all earlier messages are written.
    Finish(SyncSender<()>),
}

/// Records a sample of the requests.
pub struct Recorder {
    /// The fraction of recorded entities, as the upper bound of a 32-bit hash.
    max_hash: u64,
    entity_keys: Vec<String>,
    hash_key: Option<Vec<u8>>,
    sender: SyncSender<Message>,
    recorded: Counter,
    skipped: Arc<Counter>,
}

impl Recorder {
    /// Starts the recording thread. Returns `None` if no directory is configured.
    ///
    /// # Errors
    ///
    /// Returns an error if the directory cannot be created, the key cannot be read or is too short, or the thread cannot
    /// be started.
    pub fn start(settings: &Settings, workers: usize, now: Micros) -> io::Result<Option<Arc<Self>>> {
        let Some(directory) = settings.dir.clone() else {
            return Ok(None);
        };
        fs::create_dir_all(&directory)?;
        let hash_key = settings.hash_key_file.as_deref().map(read_hash_key).transpose()?;
        let (sender, receiver) = sync_channel(QUEUE_CAPACITY);
        let writer = Writer::new(directory, settings.max_file_bytes, settings.max_total_bytes, now.get());
        let skipped = Arc::new(Counter::new(workers));
        let lost = Arc::clone(&skipped);
        thread::Builder::new().name("recorder".into()).spawn(move || write(writer, &receiver, &lost))?;
        Ok(Some(Arc::new(Self {
            max_hash: (settings.share.clamp(0.0, 1.0) * (1_u64 << 32) as f64) as u64,
            entity_keys: settings.entity_keys.clone(),
            hash_key,
            sender,
            recorded: Counter::new(workers),
            skipped,
        })))
    }

    /// Records a decided request if its entity is in the sample.
    pub fn record(&self, worker: WorkerId, request: &Request<'_>, verdict: Option<&Verdict>, at: Micros) {
        if u64::from(self.entity_hash(request) as u32) >= self.max_hash {
            return;
        }
        let mut message = Vec::with_capacity(128);
        encode(at, request, verdict, |value| self.hashed(value), &mut message);
        match self.sender.try_send(Message::Request(message)) {
            Ok(()) => self.recorded.add(worker, 1),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.skipped.add(worker, 1),
        }
    }

    /// Returns the hash of the entity that the request belongs to.
    fn entity_hash(&self, request: &Request<'_>) -> u128 {
        let mut identity = Identity::new(request.domain);
        if self.entity_keys.is_empty()
            && let Some(first) = request.descriptors.first()
        {
            for entry in &first.entries {
                identity.add(entry.key, entry.value);
            }
        }
        for key in &self.entity_keys {
            let mut entries = request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
            if let Some(entry) = entries.find(|entry| *entry.key == **key) {
                identity.add(entry.key, entry.value);
            }
        }
        identity.finish()
    }

    /// Waits until all requests passed to [`record`](Self::record) are written, at most `FINISH_TIMEOUT`.
    pub fn finish(&self) {
        let (sender, receiver) = sync_channel(1);
        if self.sender.send(Message::Finish(sender)).is_ok() {
            let _ = receiver.recv_timeout(FINISH_TIMEOUT);
        }
    }

    fn hashed(&self, value: &str) -> Option<String> {
        let key = self.hash_key.as_ref()?;
        let mut digest = Sha256::new();
        digest.update((key.len() as u64).to_le_bytes());
        digest.update(key);
        digest.update(value.as_bytes());
        let digest = digest.finalize();
        Some(digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect())
    }

    /// Registers the metrics of the recorder with `meter`.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let registrar = Registrar { meter, source: self };
        registrar
            .counter("sluicegate_recorded_requests_total", "Number of requests recorded", |this| this.recorded.get());
        registrar.counter(
            "sluicegate_recording_skipped_requests_total",
            "Number of sampled requests that were not recorded because the disk was too slow or full",
            |this| this.skipped.get(),
        );
    }
}

/// Writes messages until all senders are dropped. Counts messages that could not be written.
fn write(mut writer: Writer, receiver: &Receiver<Message>, lost: &Counter) {
    // Number of messages that are buffered.
    let mut buffered = 0;
    // Whether the last write has failed, which was logged.
    let mut has_failed = false;
    loop {
        let written = match receiver.recv_timeout(FLUSH_INTERVAL) {
            Ok(Message::Request(message)) => {
                buffered += 1;
                writer.add(&message)
            }
            Ok(Message::Finish(sender)) => {
                let written = writer.flush();
                let _ = sender.send(());
                written
            }
            Err(RecvTimeoutError::Timeout) => writer.flush(),
            Err(RecvTimeoutError::Disconnected) => {
                let _ = writer.flush();
                return;
            }
        };
        if writer.has_buffered() || buffered == 0 {
            continue;
        }
        match written {
            Ok(()) => has_failed = false,
            Err(error) => {
                lost.add(WorkerId(0), buffered);
                if !std::mem::replace(&mut has_failed, true) {
                    tracing::error!(%error, "cannot write recorded requests to record.dir, so they are not recorded");
                }
            }
        }
        buffered = 0;
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_testing::test_log::TestLog;
    use smallvec::smallvec;

    use super::*;
    use crate::{engine::Descriptor, rules::Entry};

    #[test]
    fn finish_waits_until_all_requests_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings { dir: Some(folder.path().to_owned()), share: 1.0, ..Settings::default() };
        let recorder = Recorder::start(&settings, 1, Micros::ZERO).unwrap().unwrap();
        let entries = smallvec![Entry { key: "user", value: "bob" }];
        let descriptors = smallvec![Descriptor::new(entries)];
        recorder.record(WorkerId(0), &Request { domain: "api", descriptors, feedback: Vec::new() }, None, Micros::ZERO);
        recorder.finish();
        let file = fs::read_dir(folder.path()).unwrap().next().expect("a file").unwrap();
        assert!(file.metadata().unwrap().len() > 0);
    }

    #[test]
    fn rejects_a_key_that_can_be_guessed() {
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("key");
        let settings = Settings {
            dir: Some(folder.path().join("traffic")),
            hash_key_file: Some(key.clone()),
            ..Settings::default()
        };
        for (text, is_valid) in [("", false), ("fifteen bytes..", false), ("sixteen bytes...", true)] {
            fs::write(&key, text).unwrap();
            assert_eq!(Recorder::start(&settings, 1, Micros::ZERO).is_ok(), is_valid, "{text:?}");
        }
    }

    #[test]
    fn the_configured_keys_identify_the_entity() {
        let folder = tempfile::tempdir().unwrap();
        let entity_keys = vec!["org".to_owned(), "user".to_owned()];
        let settings = Settings { dir: Some(folder.path().to_owned()), entity_keys, ..Settings::default() };
        let recorder = Recorder::start(&settings, 1, Micros::ZERO).unwrap().unwrap();
        let entity = |entries: &[(&str, &str)]| {
            let descriptors = entries.iter().map(|(key, value)| Descriptor {
                entries: smallvec![Entry { key, value }],
                hits: 1,
                refund: false,
                requested_limit: None,
            });
            recorder.entity_hash(&Request { domain: "api", descriptors: descriptors.collect(), feedback: Vec::new() })
        };
        let bob = entity(&[("org", "a"), ("user", "bob")]);
        assert_eq!(bob, entity(&[("path", "/x"), ("user", "bob"), ("org", "a")]));
        assert_ne!(bob, entity(&[("org", "a"), ("user", "eve")]));
        assert_ne!(bob, entity(&[("org", "b"), ("user", "bob")]));
    }

    #[test]
    fn requests_that_cannot_be_written_are_logged_once() {
        let folder = tempfile::tempdir().unwrap();
        let no_directory = folder.path().join("file");
        fs::write(&no_directory, "").unwrap();
        let writer = Writer::new(no_directory, 1 << 20, 1 << 20, 0);
        let (sender, receiver) = sync_channel(3);
        for _ in 0..3 {
            // A message of this size is written immediately.
            assert!(sender.send(Message::Request(vec![0; 1 << 20])).is_ok());
        }
        drop(sender);
        let log = TestLog::start();
        let lost = Counter::new(1);
        write(writer, &receiver, &lost);
        let log = log.text();
        assert_eq!(lost.get(), 3);
        assert_eq!(log.matches("cannot write recorded requests").count(), 1, "{log}");
    }
}
