//! The threat model of SECURITY.md, one test for each bound that no other test covers.

/// A TLS client that sends a hand-written `ClientHello`.
mod client_hello;
/// Files that the service follows, replaced by pipes.
mod files;
/// Hash tables: which callers can fill, and their random keys.
mod hash_tables;
/// The HTTP listeners: bodies that are not finished, and responses that are not read.
mod http;
/// Names and values with newlines and escape sequences in the log.
mod log_injection;
/// Memory of unfinished messages and unread responses.
mod memory;
/// Texts that are parsed: mappings, rules and limits of callers.
mod parsers;
/// Hashes instead of the values of entries, in Redis and in the log.
mod personal_data;
/// Every port and every method without credentials, with invalid ones, and with each role.
mod ports;
/// The process: core dumps and capabilities.
mod process;
/// Values that look like commands or keys of Redis.
mod redis_injection;
/// Secrets in logs, pages, error messages and printed settings.
mod secrets;
/// All attacks on the memory together, while an honest caller is served.
mod strangers;
/// The profile of system calls in deploy/container.
mod system_calls;
/// The table of SECURITY.md.
mod table;
/// Versions, cipher suites and protocols of the TLS ports.
mod tls;
/// The comparison of tokens.
mod tokens;
