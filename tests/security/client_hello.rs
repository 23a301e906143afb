//! [`ClientHello`]: the first message of a TLS handshake (RFC 8446, RFC 5246), byte by byte, for offers that TLS libraries
//! no longer make.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
};

use crate::support::DEADLINE;

pub(super) const TLS_1_0: u16 = 0x0301;
pub(super) const TLS_1_1: u16 = 0x0302;
pub(super) const TLS_1_2: u16 = 0x0303;
pub(super) const TLS_1_3: u16 = 0x0304;

/// The extension with the protocols of the application.
pub(super) const ALPN: u16 = 16;
const SUPPORTED_VERSIONS: u16 = 43;
const HANDSHAKE: u8 = 22;
const ALERT: u8 = 21;
const SERVER_HELLO: u8 = 2;
const X25519: u16 = 0x001d;
const P256: u16 = 0x0017;

/// The offer of a client.
pub(super) struct ClientHello<'a> {
    pub(super) version: u16,
    pub(super) suites: &'a [u16],
    pub(super) compressions: &'a [u8],
    pub(super) protocols: &'a [&'a str],
}

/// The first message of the server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The server ends the handshake, with an alert if it sends one.
    Rejected(Option<u8>),
    Accepted(ServerHello),
}

/// The choice of the server.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ServerHello {
    pub(super) version: u16,
    pub(super) suite: u16,
    pub(super) compression: u8,
    pub(super) extensions: BTreeMap<u16, Vec<u8>>,
}

impl ClientHello<'_> {
    /// Connects, sends the message, and reads the answer.
    pub(super) fn send(&self, address: SocketAddr) -> Answer {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(&self.encode()).unwrap();
        read_answer(&mut stream)
    }

    fn encode(&self) -> Vec<u8> {
        let suites: Vec<u8> = self.suites.iter().flat_map(|suite| suite.to_be_bytes()).collect();
        let hello = [
            &self.version.min(TLS_1_2).to_be_bytes()[..],
            &[7; 32],
            &with_length::<1>(&[9; 32]),
            &with_length::<2>(&suites),
            &with_length::<1>(self.compressions),
            &with_length::<2>(&self.extensions()),
        ]
        .concat();
        let message = [&[1][..], &with_length::<3>(&hello)].concat();
        [&[HANDSHAKE, 3, 1][..], &with_length::<2>(&message)].concat()
    }

    fn extensions(&self) -> Vec<u8> {
        let pairs = |list: &[u16]| with_length::<2>(&list.iter().flat_map(|one| one.to_be_bytes()).collect::<Vec<_>>());
        let protocols: Vec<u8> =
            self.protocols.iter().flat_map(|protocol| with_length::<1>(protocol.as_bytes())).collect();
        let mut extensions = vec![
            (10, pairs(&[X25519, P256])),
            // The uncompressed form of points.
            (11, with_length::<1>(&[0])),
            // ECDSA and RSA with SHA-256, ECDSA with SHA-384, RSA-PSS.
            (13, pairs(&[0x0403, 0x0401, 0x0503, 0x0804])),
            // The extended master secret.
            (23, Vec::new()),
            // No previous handshake on this connection.
            (0xff01, vec![0]),
        ];
        if !self.protocols.is_empty() {
            extensions.push((ALPN, with_length::<2>(&protocols)));
        }
        if self.version == TLS_1_3 {
            let share = [&X25519.to_be_bytes()[..], &with_length::<2>(&[9; 32])].concat();
            extensions.push((SUPPORTED_VERSIONS, with_length::<1>(&TLS_1_3.to_be_bytes())));
            extensions.push((51, with_length::<2>(&share)));
        }
        let encode = |(kind, content): (u16, Vec<u8>)| [&kind.to_be_bytes()[..], &with_length::<2>(&content)].concat();
        extensions.into_iter().flat_map(encode).collect()
    }
}

/// Returns the content after its length in `BYTES` bytes.
fn with_length<const BYTES: usize>(content: &[u8]) -> Vec<u8> {
    let length = content.len().to_be_bytes();
    [&length[length.len() - BYTES..], content].concat()
}

fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut header = [0; 5];
    match stream.read_exact(&mut header) {
        Ok(()) => {}
        Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
            return Answer::Rejected(None);
        }
        Err(error) => panic!("{error}"),
    }
    let mut record = vec![0; usize::from(u16::from_be_bytes([header[3], header[4]]))];
    stream.read_exact(&mut record).unwrap();
    match header[0] {
        ALERT => Answer::Rejected(Some(record[1])),
        HANDSHAKE if record[0] == SERVER_HELLO => Answer::Accepted(read_hello(&record[4..])),
        kind => panic!("a record of the type {kind}: {record:?}"),
    }
}

fn read_hello(mut message: &[u8]) -> ServerHello {
    let message = &mut message;
    let version = u16::from_be_bytes(take(message, 2).try_into().unwrap());
    take(message, 32);
    let length = usize::from(take(message, 1)[0]);
    take(message, length);
    let suite = u16::from_be_bytes(take(message, 2).try_into().unwrap());
    let compression = take(message, 1)[0];
    let mut extensions = BTreeMap::new();
    let mut list = take_vector(message);
    while !list.is_empty() {
        let kind = u16::from_be_bytes(take(&mut list, 2).try_into().unwrap());
        extensions.insert(kind, take_vector(&mut list).to_vec());
    }
    let chosen = extensions.get(&SUPPORTED_VERSIONS).map(|version| u16::from_be_bytes([version[0], version[1]]));
    ServerHello { version: chosen.unwrap_or(version), suite, compression, extensions }
}

fn take<'m>(message: &mut &'m [u8], length: usize) -> &'m [u8] {
    let (taken, rest) = message.split_at(length);
    *message = rest;
    taken
}

/// Takes a part with a length of two bytes.
fn take_vector<'m>(message: &mut &'m [u8]) -> &'m [u8] {
    let length = usize::from(u16::from_be_bytes(take(message, 2).try_into().unwrap()));
    take(message, length)
}
