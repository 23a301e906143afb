//! [`TlsMismatch`]: finds out whether a server does not answer because only one side uses TLS.
//!
//! The error of the connection does not show it: Redis without TLS waits for the end of a line in the client's hello, and
//! Redis with TLS closes a connection that begins with a command.

use std::time::Duration;

use redis::ConnectionAddr;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// The command `PING` as a line, which Redis without TLS answers or rejects.
const PING: &[u8] = b"PING\r\n";
/// The beginning of a client's hello with invalid content, so that a TLS server rejects it with an alert. The length of
/// the record is also the end of a line, so that Redis without TLS answers immediately, too.
const CLIENT_HELLO: &[u8] = b"\x16\x03\x01\r\n\x01\x00\x0d\x06";
/// Length of the hello, as its beginning announces it.
const CLIENT_HELLO_BYTES: usize = 5 + 0x0d0a;
/// First byte of a TLS alert.
const ALERT: u8 = 0x15;
/// First byte of a TLS handshake message.
const HANDSHAKE: u8 = 0x16;

/// The only side of a connection that uses TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TlsMismatch {
    /// The address requires TLS, and the port does not have it.
    Client,
    /// The port requires TLS, and the address does not.
    Server,
}

impl TlsMismatch {
    /// Opens another connection to a server and compares the first byte of the answer with its address.
    pub(super) async fn find(address: &ConnectionAddr, deadline: Duration) -> Option<Self> {
        let (host, port, has_tls) = match address {
            ConnectionAddr::Tcp(host, port) => (host, *port, false),
            ConnectionAddr::TcpTls { host, port, .. } => (host, *port, true),
            _ => return None,
        };
        let question = question(has_tls);
        let answer = timeout(deadline, first_byte_of_answer(host, port, &question)).await.ok()?.ok()?;
        match answer {
            b'+' | b'-' if has_tls => Some(Self::Client),
            ALERT | HANDSHAKE if !has_tls => Some(Self::Server),
            _ => None,
        }
    }

    /// Returns the problem and its solution.
    pub(super) const fn description(self) -> &'static str {
        match self {
            Self::Client => "the port does not use TLS: use redis instead of rediss in the address, or Redis' TLS port",
            Self::Server => "the port requires TLS: use rediss instead of redis in the address",
        }
    }
}

/// Returns bytes that a server answers only if it does not agree with the address.
fn question(has_tls: bool) -> Vec<u8> {
    if has_tls {
        return PING.to_vec();
    }
    let mut hello = CLIENT_HELLO.to_vec();
    hello.resize(CLIENT_HELLO_BYTES, 0);
    hello
}

async fn first_byte_of_answer(host: &str, port: u16, bytes: &[u8]) -> std::io::Result<u8> {
    let mut stream = TcpStream::connect((host, port)).await?;
    stream.write_all(bytes).await?;
    stream.read_u8().await
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
        thread,
    };

    use redis::IntoConnectionInfo;

    use super::*;

    /// Returns the mismatch of an address and a server that answers with these bytes.
    async fn mismatch(scheme: &str, answer: &'static [u8]) -> Option<TlsMismatch> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let info = format!("{scheme}://{}", listener.local_addr().unwrap()).into_connection_info().unwrap();
        let mut read = question(scheme == "rediss");
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut read).unwrap();
            stream.write_all(answer).unwrap();
        });
        let found = TlsMismatch::find(info.addr(), Duration::from_secs(10)).await;
        server.join().unwrap();
        found
    }

    #[tokio::test]
    async fn the_first_byte_of_an_answer_shows_whether_a_port_has_tls() {
        for (scheme, answer, expected) in [
            ("rediss", &b"+PONG\r\n"[..], Some(TlsMismatch::Client)),
            ("rediss", b"-NOAUTH Authentication required.\r\n", Some(TlsMismatch::Client)),
            ("rediss", b"\x15\x03\x01\x00\x02\x02\x46", None),
            ("rediss", b"", None),
            ("redis", b"\x15\x03\x01\x00\x02\x02\x32", Some(TlsMismatch::Server)),
            ("redis", b"-ERR unknown command\r\n", None),
            ("redis", b"", None),
        ] {
            assert_eq!(mismatch(scheme, answer).await, expected, "{scheme} {answer:?}");
        }
    }

    #[tokio::test]
    async fn a_server_that_cannot_be_reached_has_no_mismatch() {
        let info = "rediss://127.0.0.1:1".into_connection_info().unwrap();
        assert_eq!(TlsMismatch::find(info.addr(), Duration::from_secs(10)).await, None);
    }
}
