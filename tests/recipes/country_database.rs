//! [`country_database`]: a file in the MMDB format, version 2.0, which Envoy's geoip filter reads.

/// Returns the file of a database in which each IPv4 address is in this country.
pub(super) fn country_database(country: &str) -> Vec<u8> {
    // The search tree has one node. Its two records are offsets into the data section, increased by the number of nodes
    // and by the 16 bytes between the sections.
    let record = [0, 0, 17];
    let mut file = [record, record].concat();
    file.extend([0; 16]);
    file.extend(map(&[("country", map(&[("iso_code", text(country))]))]));
    file.extend(b"\xab\xcd\xefMaxMind.com");
    file.extend(map(&[
        ("binary_format_major_version", uint16(2)),
        ("binary_format_minor_version", uint16(0)),
        ("node_count", uint32(1)),
        ("record_size", uint16(24)),
        ("ip_version", uint16(4)),
        ("database_type", text("GeoLite2-Country")),
        ("languages", EMPTY_ARRAY.to_vec()),
        ("description", map(&[])),
        ("build_epoch", UINT64_ONE.to_vec()),
    ]));
    file
}

/// An array without elements: a type above 7 is in the second byte, reduced by 7.
const EMPTY_ARRAY: [u8; 2] = [0, 11 - 7];
/// The number 1 in one byte, as a 64-bit number.
const UINT64_ONE: [u8; 3] = [1, 9 - 7, 1];

/// Returns the first byte of a value: its type, and its length or number of entries.
fn control(kind: u8, size: usize) -> u8 {
    assert!(size < 29, "larger sizes have further bytes");
    kind << 5 | u8::try_from(size).unwrap()
}

fn text(value: &str) -> Vec<u8> {
    let mut bytes = vec![control(2, value.len())];
    bytes.extend(value.bytes());
    bytes
}

fn uint16(value: u16) -> Vec<u8> {
    let mut bytes = vec![control(5, 2)];
    bytes.extend(value.to_be_bytes());
    bytes
}

fn uint32(value: u32) -> Vec<u8> {
    let mut bytes = vec![control(6, 4)];
    bytes.extend(value.to_be_bytes());
    bytes
}

fn map(entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = vec![control(7, entries.len())];
    for (key, value) in entries {
        bytes.extend(text(key));
        bytes.extend(value);
    }
    bytes
}
