//! Meta commands of memcached 1.6 ([protocol.txt](https://github.com/memcached/memcached/blob/master/doc/protocol.txt)),
//! and their replies.
//!
//! The client `async-memcached` was not an option: it has neither TLS nor IPv6, and sends one command at a time.

use std::{
    io::{self, Write},
    str,
};

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// Maximum length of the line of a reply, in bytes.
const MAX_LINE_BYTES: u64 = 2_048;
/// Maximum length of a value that is read, in bytes. A server stores at most 1 MiB unless it is configured otherwise.
const MAX_VALUE_BYTES: usize = 8 << 20;
/// Longest relative lifetime in seconds. A larger number is a time since the Unix epoch.
const MAX_RELATIVE_TTL: u64 = 30 * 24 * 60 * 60;
/// Latest time at which an item can expire, in seconds since the Unix epoch: in January 2038. Later times are negative
/// numbers of 32 bits, with which an item expires immediately.
const LATEST_EXPIRY: u64 = i32::MAX as u64;
/// The lifetime of an item that does not expire.
const UNLIMITED: u64 = 0;

/// Commands that are sent together. The server answers them in this order.
#[derive(Default)]
pub(crate) struct Commands {
    bytes: Vec<u8>,
    count: usize,
}

/// Lifetime of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ttl {
    /// Lifetime in seconds, at least 1.
    pub(crate) secs: u64,
    /// The present in seconds since the Unix epoch.
    pub(crate) now_secs: u64,
}

impl Ttl {
    /// Returns the number that the protocol has for this lifetime.
    fn number(self) -> u64 {
        let secs = self.secs.max(1);
        if secs <= MAX_RELATIVE_TTL {
            return secs;
        }
        let expiry = self.now_secs.saturating_add(secs);
        if expiry <= LATEST_EXPIRY { expiry } else { UNLIMITED }
    }
}

impl Commands {
    /// Returns the bytes to send.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the number of commands, which is that of the replies.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Adds a command that does nothing.
    pub(crate) fn add_ping(&mut self) {
        self.write(format_args!("mn\r\n"));
    }

    /// Adds a command that reads an item and its version.
    pub(crate) fn add_get(&mut self, key: &str) {
        self.write(format_args!("mg {key} c v\r\n"));
    }

    /// Adds a command that adds `delta` to a number, or creates it with the value `initial`, and returns the result.
    pub(crate) fn add_increment(&mut self, key: &str, delta: u64, initial: u64, ttl: Ttl) {
        self.write(format_args!("ma {key} c v D{delta} J{initial} N{}\r\n", ttl.number()));
    }

    /// Adds a command that stores an item unless it has changed since this version. `None` means that there was no item.
    pub(crate) fn add_store(&mut self, key: &str, value: &[u8], version: Option<u64>, ttl: Ttl) {
        let length = value.len();
        let ttl = ttl.number();
        match version {
            Some(version) => self.write(format_args!("ms {key} {length} C{version} T{ttl}\r\n")),
            None => self.write(format_args!("ms {key} {length} ME T{ttl}\r\n")),
        }
        self.bytes.extend_from_slice(value);
        self.bytes.extend_from_slice(b"\r\n");
    }

    /// Adds a command that deletes an item.
    pub(crate) fn add_delete(&mut self, key: &str) {
        self.write(format_args!("md {key}\r\n"));
    }

    fn write(&mut self, command: std::fmt::Arguments<'_>) {
        self.count += 1;
        // Writing to a vector cannot fail.
        let _ = self.bytes.write_fmt(command);
    }
}

/// The reply to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// An item.
    Value {
        /// The bytes of the item.
        value: Vec<u8>,
        /// The version of the item, which every change increases.
        version: u64,
    },
    /// The command was executed.
    Done,
    /// There is no such item.
    Missing,
    /// The item was not stored, because it was changed, created or deleted meanwhile.
    Conflict,
    /// The server did nothing and remains usable.
    Rejected(String),
}

impl Reply {
    /// Reads one reply.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection fails, or the reply is invalid. The connection cannot be used afterwards.
    pub(crate) async fn read(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Self> {
        let line = read_line(reader).await?;
        let (code, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match code {
            "HD" | "MN" => Ok(Self::Done),
            "EN" | "NF" => Ok(Self::Missing),
            "EX" | "NS" => Ok(Self::Conflict),
            "VA" => {
                let (length, version) = value_header(rest).ok_or_else(|| invalid(&line))?;
                let mut value = vec![0; length + 2];
                reader.read_exact(&mut value).await?;
                if !value.ends_with(b"\r\n") {
                    return Err(invalid(&line));
                }
                value.truncate(length);
                Ok(Self::Value { value, version })
            }
            "SERVER_ERROR" | "CLIENT_ERROR" => Ok(Self::Rejected(line)),
            _ => Err(invalid(&line)),
        }
    }
}

/// Reads a line without its end.
async fn read_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<String> {
    let mut line = Vec::new();
    reader.take(MAX_LINE_BYTES).read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let text = line.strip_suffix(b"\r\n").and_then(|line| str::from_utf8(line).ok());
    let Some(text) = text else {
        return Err(invalid(&String::from_utf8_lossy(&line)));
    };
    Ok(text.to_owned())
}

/// Reads the length and the version after `VA`.
fn value_header(text: &str) -> Option<(usize, u64)> {
    let mut words = text.split(' ');
    let length: usize = words.next()?.parse().ok()?;
    let version = words.find_map(|word| word.strip_prefix('c'))?.parse().ok()?;
    if length > MAX_VALUE_BYTES {
        return None;
    }
    Some((length, version))
}

fn invalid(line: &str) -> io::Error {
    let line: String = line.chars().take(100).collect();
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("reply {line:?} is not one of the meta protocol of memcached 1.6"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(bytes: &[u8]) -> io::Result<Vec<Reply>> {
        let mut reader = bytes;
        let mut replies = Vec::new();
        while !reader.is_empty() {
            replies.push(Reply::read(&mut reader).await?);
        }
        Ok(replies)
    }

    #[test]
    fn commands_have_the_form_of_the_protocol() {
        let mut commands = Commands::default();
        let ttl = |secs| Ttl { secs, now_secs: 1_000_000_000 };
        commands.add_ping();
        commands.add_get("a");
        commands.add_increment("a", 2, 10, ttl(60));
        commands.add_store("a", b"\r\n", None, ttl(0));
        commands.add_store("a", b"xyz", Some(7), ttl(MAX_RELATIVE_TTL + 1));
        commands.add_store("a", b"", Some(8), ttl(1_147_483_648));
        commands.add_delete("a");
        let expected = "mn\r\nmg a c v\r\nma a c v D2 J10 N60\r\nms a 2 ME T1\r\n\r\n\r\nms a 3 C7 T1002592001\r\nxyz\r\nms a 0 C8 T0\r\n\r\nmd a\r\n";
        assert_eq!(str::from_utf8(commands.bytes()).unwrap(), expected);
        assert_eq!(commands.count(), 7);
        assert_eq!(ttl(MAX_RELATIVE_TTL).number(), MAX_RELATIVE_TTL);
        assert_eq!(ttl(1_147_483_647).number(), LATEST_EXPIRY);
    }

    #[tokio::test]
    async fn replies_are_read_in_order() {
        let bytes =
            b"MN\r\nHD\r\nEN\r\nNF\r\nEX\r\nNS\r\nVA 2 c17\r\n\r\n\r\nVA 0 t5 c1\r\n\r\nSERVER_ERROR out of memory\r\n";
        let value = |value: &[u8], version| Reply::Value { value: value.to_vec(), version };
        let expected = [
            Reply::Done,
            Reply::Done,
            Reply::Missing,
            Reply::Missing,
            Reply::Conflict,
            Reply::Conflict,
            value(b"\r\n", 17),
            value(b"", 1),
            Reply::Rejected("SERVER_ERROR out of memory".into()),
        ];
        assert_eq!(read(bytes).await.unwrap(), expected);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end_or_an_error(bytes: Vec<u8>, head in "(VA|HD|EN) ?[0-9]{0,3}( c[0-9]{0,20})?(\r\n)?") {
            let bytes = [head.as_bytes(), &bytes].concat();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let _ = runtime.block_on(read(&bytes));
        }
    }

    #[tokio::test]
    async fn an_invalid_reply_is_an_error_and_never_waits_or_allocates_for_it() {
        let long_line = [b"HD ", &[b' '; MAX_LINE_BYTES as usize][..], b"\r\n"].concat();
        for bytes in [
            &b"ERROR\r\n"[..],
            b"HD\n",
            b"HD",
            b"\xff\r\n",
            b"VA\r\n",
            b"VA 2\r\nab\r\n",
            b"VA 2 c1\r\nabc\r\n",
            b"VA 9999999999999 c1\r\n",
            b"VA 18446744073709551615 c1\r\n",
            b"VA 5 c1\r\nab",
            b"VA -1 c1\r\n",
            &[b'H'; 10_000],
            &long_line,
        ] {
            assert!(Reply::read(&mut &bytes[..]).await.is_err(), "{}", String::from_utf8_lossy(bytes));
        }
        assert_eq!(value_header("8388608 c1"), Some((MAX_VALUE_BYTES, 1)));
        assert_eq!(value_header("8388609 c1"), None);
    }
}
