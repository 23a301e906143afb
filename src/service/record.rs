//! A sample of the requests, kept in files for `sluicegate simulate`.
//!
//! Whole entities are kept or left out, never single requests: who is kept follows from the first descriptor, or from the
//! entries that `record.entity_keys` names. A thread compresses and writes; a worker hands a request over, and leaves it out
//! when the thread does not keep up.

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

use opentelemetry::metrics::Meter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sluicegate_common::Identity;

use crate::{
    engine::{Micros, Request, Verdict},
    metrics::{Counter, WorkerId, observe_counter},
    traffic::{Writer, encode},
};

/// Requests on their way to the thread.
const WAITING: usize = 8_192;
/// What waits is written after so long, also when nothing follows.
const IDLE: Duration = Duration::from_secs(1);
/// At the end nobody waits longer for the disk.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether requests are kept, and which.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// The directory; without it nothing is kept.
    pub dir: Option<PathBuf>,
    /// Of all entities, so many are kept; from 0 to 1.
    pub share: f64,
    /// Keys of the entries that tell entities apart; empty: all of the first descriptor does.
    pub entity_keys: Vec<String>,
    /// A file of this size is followed by another.
    pub max_file_bytes: u64,
    /// The oldest files are removed when all are larger than this.
    pub max_total_bytes: u64,
    /// A file with a secret: values are replaced by 64 bits of a hash under it.
    pub hash_key_file: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        let (file_bytes, max_bytes) = (64 << 20, 1 << 30);
        Self {
            dir: None,
            share: 0.01,
            entity_keys: Vec::new(),
            max_file_bytes: file_bytes,
            max_total_bytes: max_bytes,
            hash_key_file: None,
        }
    }
}

/// What the thread is told.
enum Message {
    Request(Vec<u8>),
    /// To say when all before is written.
    Finish(SyncSender<()>),
}

/// Keeps requests.
pub struct Recorder {
    share: u64,
    by: Vec<String>,
    key: Option<Vec<u8>>,
    sender: SyncSender<Message>,
    kept: Counter,
    skipped: Counter,
}

impl Recorder {
    /// Starts the thread; `None` where nothing is to be kept.
    pub fn start(settings: &Settings, workers: usize, now: Micros) -> io::Result<Option<Arc<Self>>> {
        let Some(directory) = settings.dir.clone() else {
            return Ok(None);
        };
        fs::create_dir_all(&directory)?;
        let key = settings.hash_key_file.as_ref().map(fs::read).transpose()?;
        let (sender, receiver) = sync_channel(WAITING);
        let writer = Writer::new(directory, settings.max_file_bytes, settings.max_total_bytes, now.get());
        thread::Builder::new().name("recorder".into()).spawn(move || write(writer, &receiver))?;
        Ok(Some(Arc::new(Self {
            share: (settings.share.clamp(0.0, 1.0) * (1_u64 << 32) as f64) as u64,
            by: settings.entity_keys.clone(),
            key,
            sender,
            kept: Counter::new(workers),
            skipped: Counter::new(workers),
        })))
    }

    /// A request has been decided.
    pub fn record(&self, worker: WorkerId, request: &Request<'_>, verdict: Option<&Verdict>, at: Micros) {
        if u64::from(self.entity(request) as u32) >= self.share {
            return;
        }
        let mut message = Vec::with_capacity(128);
        encode(at, request, verdict, |value| self.masked(value), &mut message);
        match self.sender.try_send(Message::Request(message)) {
            Ok(()) => self.kept.add(worker, 1),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.skipped.add(worker, 1),
        }
    }

    /// Whose request it is.
    fn entity(&self, request: &Request<'_>) -> u128 {
        let mut identity = Identity::new(request.domain);
        let all = || request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
        match self.by.as_slice() {
            [] => {
                let first = request.descriptors.first().into_iter().flat_map(|first| &first.entries);
                first.for_each(|entry| identity.add(entry.key, entry.value));
            }
            keys => {
                let named = keys.iter().filter_map(|key| all().find(|entry| *entry.key == **key));
                named.for_each(|entry| identity.add(entry.key, entry.value));
            }
        }
        identity.finish()
    }

    /// Waits until all that was handed over is written.
    pub fn finish(&self) {
        let (sender, receiver) = sync_channel(1);
        if self.sender.send(Message::Finish(sender)).is_ok() {
            let _ = receiver.recv_timeout(PATIENCE);
        }
    }

    fn masked(&self, value: &str) -> Option<String> {
        let key = self.key.as_ref()?;
        let mut digest = Sha256::new();
        digest.update((key.len() as u64).to_le_bytes());
        digest.update(key);
        digest.update(value.as_bytes());
        let digest = digest.finalize();
        Some(digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect())
    }

    /// Shows everything to the meter.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        let this = Arc::clone(self);
        observe_counter(meter, "sluicegate_recorded_requests_total", "Requests that were recorded", move || {
            this.kept.get()
        });
        let this = Arc::clone(self);
        observe_counter(
            meter,
            "sluicegate_recording_skipped_requests_total",
            "Requests that should have been recorded, and were not: the disk did not keep up",
            move || this.skipped.get(),
        );
    }
}

/// Until nobody sends any more.
fn write(mut writer: Writer, receiver: &Receiver<Message>) {
    let mut told = false;
    loop {
        let written = match receiver.recv_timeout(IDLE) {
            Ok(Message::Request(message)) => writer.add(&message),
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
        match written {
            Ok(()) => told = false,
            Err(error) if !told => {
                tracing::error!(%error, "requests cannot be recorded");
                told = true;
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::{engine::Descriptor, rules::Entry};

    #[test]
    fn in_the_end_all_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings { dir: Some(folder.path().to_owned()), share: 1.0, ..Settings::default() };
        let recorder = Recorder::start(&settings, 1, Micros::ZERO).unwrap().unwrap();
        let entries = smallvec![Entry { key: "user", value: "bob" }];
        let descriptors = smallvec![Descriptor { entries, hits: 1, refund: false, requested_limit: None }];
        recorder.record(WorkerId(0), &Request { domain: "api", descriptors, feedback: Vec::new() }, None, Micros::ZERO);
        recorder.finish();
        let file = fs::read_dir(folder.path()).unwrap().next().expect("a file").unwrap();
        assert!(file.metadata().unwrap().len() > 0);
    }

    #[test]
    fn an_entity_is_what_the_named_keys_say() {
        let folder = tempfile::tempdir().unwrap();
        let by = vec!["org".to_owned(), "user".to_owned()];
        let settings = Settings { dir: Some(folder.path().to_owned()), entity_keys: by, ..Settings::default() };
        let recorder = Recorder::start(&settings, 1, Micros::ZERO).unwrap().unwrap();
        let entity = |entries: &[(&str, &str)]| {
            let descriptors = entries.iter().map(|(key, value)| Descriptor {
                entries: smallvec![Entry { key, value }],
                hits: 1,
                refund: false,
                requested_limit: None,
            });
            recorder.entity(&Request { domain: "api", descriptors: descriptors.collect(), feedback: Vec::new() })
        };
        let bob = entity(&[("org", "a"), ("user", "bob")]);
        assert_eq!(bob, entity(&[("path", "/x"), ("user", "bob"), ("org", "a")]));
        assert_ne!(bob, entity(&[("org", "a"), ("user", "eve")]));
        assert_ne!(bob, entity(&[("org", "b"), ("user", "bob")]));
    }
}
