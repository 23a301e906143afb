//! Every port with TLS offers TLS 1.2 and 1.3 with authenticated encryption and forward secrecy, and nothing else.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, TcpListener},
};

use super::client_hello::{ALPN, Answer, ClientHello, ServerHello, TLS_1_0, TLS_1_1, TLS_1_2, TLS_1_3};
use crate::support::{
    Server,
    certificates::{Authority, Files},
    operator::{OPERATE, admin_addr},
};

/// ECDHE with AES-GCM and ChaCha20-Poly1305, by ECDSA and by RSA.
const FORWARD_SECRET_AEAD: [u16; 6] = [0xc02b, 0xc02c, 0xcca9, 0xc02f, 0xc030, 0xcca8];
/// All suites of TLS 1.3 that are in use, and two with a short tag or for small devices.
const TLS_1_3_SUITES: [u16; 5] = [0x1301, 0x1302, 0x1303, 0x1304, 0x1305];
/// Suites without encryption, without authentication, for export, with RC4, DES, 3DES or CBC, with DHE, or without forward
/// secrecy.
const WEAK: [u16; 24] = [
    0x0001, 0x0002, 0x0003, 0x0004, 0x0005, 0x0009, 0x000a, 0x0018, 0x002f, 0x0033, 0x0034, 0x0035, 0x0039, 0x003c,
    0x0067, 0x009c, 0x009d, 0x009e, 0xc007, 0xc009, 0xc00a, 0xc013, 0xc014, 0xc023,
];
/// `no_application_protocol`, RFC 7301.
const NO_APPLICATION_PROTOCOL: u8 = 120;
/// `protocol_version`, RFC 8446.
const PROTOCOL_VERSION: u8 = 70;

/// A port with TLS.
struct Port {
    name: &'static str,
    address: SocketAddr,
    protocols: &'static [&'static str],
}

/// Starts a service with TLS on every port that can have it.
fn start(files: &Files) -> (Server, [Port; 3]) {
    let authority = Authority::new("ours");
    let (certificate, key) = authority.sign();
    let (certificate, key) = (files.write("cert.pem", &certificate), files.write("key.pem", &key));
    let (ca, tokens) =
        (files.write("ca.pem", &authority.pem), files.write("tokens", &format!("operate {OPERATE} alice")));
    let cluster = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut builder = Server::builder()
        .set("admin.addr", "127.0.0.1:0")
        .set("admin.token_file", &tokens)
        .set("cluster.addr", &cluster.to_string())
        .set("cluster.peers", &cluster.to_string())
        .set("cluster.tls.ca_file", &ca);
    for section in ["grpc", "admin", "cluster"] {
        builder = builder
            .set(&format!("{section}.tls.cert_file"), &certificate)
            .set(&format!("{section}.tls.key_file"), &key);
    }
    let server = builder.start();
    let admin = admin_addr(&server).parse().unwrap();
    let ports = [
        Port { name: "grpc", address: server.grpc, protocols: &["h2"] },
        Port { name: "admin", address: admin, protocols: &["h2", "http/1.1"] },
        Port { name: "cluster", address: cluster, protocols: &["h2"] },
    ];
    (server, ports)
}

impl Port {
    fn hello(&self, version: u16, suites: &[u16]) -> Answer {
        ClientHello { version, suites, compressions: &[0], protocols: &["h2"] }.send(self.address)
    }

    fn accepted(&self, hello: &ClientHello<'_>) -> ServerHello {
        match hello.send(self.address) {
            Answer::Accepted(accepted) => accepted,
            rejected @ Answer::Rejected(_) => panic!("{}: {rejected:?}", self.name),
        }
    }

    /// Returns the accepted suites of a list: each is offered until the server accepts none of the others.
    fn suites(&self, version: u16, offered: &[u16]) -> BTreeSet<u16> {
        let (mut offered, mut accepted) = (offered.to_vec(), BTreeSet::new());
        while let Answer::Accepted(hello) = self.hello(version, &offered) {
            assert_eq!(hello.version, version, "{}", self.name);
            assert!(accepted.insert(hello.suite), "{}", self.name);
            offered.retain(|suite| *suite != hello.suite);
        }
        accepted
    }
}

#[test]
fn old_versions_are_rejected() {
    let files = Files::new();
    let (_server, ports) = start(&files);
    let all = [&FORWARD_SECRET_AEAD[..], &WEAK, &TLS_1_3_SUITES].concat();
    for port in &ports {
        for version in [TLS_1_0, TLS_1_1] {
            assert_eq!(
                port.hello(version, &all),
                Answer::Rejected(Some(PROTOCOL_VERSION)),
                "{} {version:x}",
                port.name
            );
        }
        for version in [TLS_1_2, TLS_1_3] {
            let accepted = matches!(port.hello(version, &all), Answer::Accepted(hello) if hello.version == version);
            assert!(accepted, "{} {version:x}", port.name);
        }
    }
}

#[test]
fn only_authenticated_encryption_with_forward_secrecy_is_accepted() {
    let files = Files::new();
    let (_server, ports) = start(&files);
    let of_tls_1_2 = [&WEAK[..], &FORWARD_SECRET_AEAD].concat();
    for port in &ports {
        let accepted = port.suites(TLS_1_2, &of_tls_1_2);
        // The certificate is for ECDSA, so the first three can be used.
        assert_eq!(accepted, BTreeSet::from_iter(FORWARD_SECRET_AEAD[..3].iter().copied()), "{}", port.name);
        assert_eq!(port.suites(TLS_1_3, &TLS_1_3_SUITES), BTreeSet::from([0x1301, 0x1302, 0x1303]), "{}", port.name);
        for suite in WEAK {
            assert!(matches!(port.hello(TLS_1_2, &[suite]), Answer::Rejected(_)), "{} {suite:x}", port.name);
        }
    }
}

#[test]
fn compression_is_not_used_and_the_protocol_is_agreed() {
    const DEFLATE: u8 = 1;
    let files = Files::new();
    let (_server, ports) = start(&files);
    let all = [&FORWARD_SECRET_AEAD[..], &TLS_1_3_SUITES].concat();
    for port in &ports {
        let hello = |compressions, protocols| ClientHello { version: TLS_1_2, suites: &all, compressions, protocols };
        assert_eq!(port.accepted(&hello(&[DEFLATE, 0], &["h2"])).compression, 0, "{}", port.name);
        let only_deflate = hello(&[DEFLATE], &["h2"]).send(port.address);
        assert!(matches!(only_deflate, Answer::Rejected(_)), "{}: {only_deflate:?}", port.name);
        for protocols in [&["h2"], &["http/1.1"], &["spdy/3"]] {
            let (protocol, answer) = (protocols[0], hello(&[0], protocols).send(port.address));
            if port.protocols.contains(&protocol) {
                let Answer::Accepted(accepted) = answer else { panic!("{} {protocol}: {answer:?}", port.name) };
                assert!(accepted.extensions[&ALPN].ends_with(protocol.as_bytes()), "{} {protocol}", port.name);
            } else {
                assert_eq!(answer, Answer::Rejected(Some(NO_APPLICATION_PROTOCOL)), "{} {protocol}", port.name);
            }
        }
    }
}
