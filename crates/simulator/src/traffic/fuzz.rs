//! Fuzz targets: access logs, recorded requests, and descriptors that operators paste.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::io::Read;

use flate2::bufread::MultiGzDecoder;

use super::{RecordedRequest, access_log::Mapping, decode, encode, file, text};

/// The mapping for input without a mapping.
const MAPPING: &str = "
domain: api
time: time
hits: cost
descriptors:
- [{ key: user, field: user }]
- [{ key: path, field: path, cut: query }, { key: address, field: address, cut: port }]
- [{ key: generic_key, value: shop }]
";
/// Maximum number of messages that are read. Even in short input, compressed messages can have 16 MiB each.
const MAX_MESSAGES: usize = 10;
/// Maximum number of lines that are converted. Even a short line takes the time that the whole mapping needs.
const MAX_LINES: usize = 16;
/// Separates a mapping from log lines.
const SEPARATOR: &str = "\n---\n";

/// Converts lines of an access log, after a mapping and `---` or with a fixed mapping. A converted request must be
/// readable.
pub fn access_log(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let (mapping, lines) = text.split_once(SEPARATOR).unwrap_or((MAPPING, &text));
    let Ok(mapping) = Mapping::read(mapping) else {
        return;
    };
    for line in lines.lines().take(MAX_LINES) {
        let mut bytes = Vec::new();
        if mapping.encode(line, &mut bytes) == Ok(true) {
            let request = decode(&bytes).map(|recorded| recorded.request);
            assert!(request.is_ok_and(|request| !request.descriptors.is_empty()), "{line:?}");
        }
    }
}

/// Reads recorded requests, compressed or not. A request that can be read must be the same after it is written again.
pub fn recorded_traffic(input: &[u8]) {
    let compressed = input.starts_with(&[0x1F, 0x8B]);
    let mut reader: Box<dyn Read + '_> =
        if compressed { Box::new(MultiGzDecoder::new(input)) } else { Box::new(input) };
    let mut message = Vec::new();
    for _ in 0..MAX_MESSAGES {
        if !matches!(file::read(&mut reader, &mut message), Ok(true)) {
            return;
        }
        if let Ok(recorded) = decode(&message) {
            let written = encoded(&recorded);
            assert_eq!(decode(&written).map(|recorded| encoded(&recorded)), Ok(written), "{recorded:?}");
        }
    }
}

fn encoded(recorded: &RecordedRequest<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(recorded.at, &recorded.request, None, |_| None, &mut bytes);
    bytes
}

/// Reads descriptors from the text that an operator pastes.
pub fn descriptor_text(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mapping = Mapping::read(MAPPING).ok();
    for mapping in [None, mapping.as_ref()] {
        if let Ok(descriptors) = text::read(&text, mapping) {
            assert!(descriptors.iter().all(|(domain, entries)| !domain.is_empty() && !entries.is_empty()));
        }
    }
}
