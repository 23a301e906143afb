//! New TLS connections, viewers of the console, and clients that are slow on purpose.

use std::time::Duration;

use tokio::{io::AsyncReadExt, io::AsyncWriteExt, net::TcpStream, time::timeout};

use crate::{
    features::DOMAIN,
    load::{Context, http::request},
    observer::{Failure, Via},
    site::WITH_TLS,
    support::{
        descriptor,
        http2_frames::{END_HEADERS, HEADERS, call_headers, frame},
        raw_client::{Client, Request},
    },
};

/// Lifetime of the connections of viewers and of slow clients.
const LIFETIME: Duration = Duration::from_secs(20);
/// Slow clients that begin each second, each at another instance.
const SLOW: u64 = 2;
/// The preface of HTTP/2, empty settings, and half of the header of a frame.
const HALF_A_FRAME: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x10";
/// The header of a TLS record of 512 bytes, and the begin of a handshake.
const HALF_A_HANDSHAKE: &[u8] = b"\x16\x03\x01\x02\x00\x01\x00";
const HALF_A_REQUEST: &[u8] = b"POST /json HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{\"domain\":";

pub(super) fn start(context: &Context) {
    context.every_second(1, |_, context| new_tls_connection(context));
    for viewer in 0..context.all().count() {
        context.repeat(Duration::from_secs(1), move |_, context| view(viewer, context));
    }
    context.every_second(SLOW, slow_client);
}

/// Connects with TLS and peeks at a counter. Certificates that were rotated badly must not affect it.
async fn new_tls_connection(context: Context) {
    let target = &context.redis[WITH_TLS].target;
    let call = async {
        let client = Client::connect(target.endpoint.clone()).await?;
        client.check(Request::new(DOMAIN).descriptor(descriptor(&[("fixed", "e0")]).hits(0))).await
    };
    let _ = context.observer.call(Via::NewConnection(target.index), "TLS connection", call).await;
}

/// Receives the activity that the console shows.
async fn view(viewer: usize, context: Context) {
    let target = context.all().nth(viewer).unwrap().target.clone();
    let mut buffer = vec![0; 65_536];
    let call = async {
        let mut stream = request(target.http, "/v1/WatchActivity", None, Some("{}")).await?;
        let read = stream.read(&mut buffer).await?;
        if buffer[..read].starts_with(b"HTTP/1.1 200") {
            Ok(stream)
        } else {
            Err(Failure::Status("WatchActivity".to_owned()))
        }
    };
    let via = Via::NewConnection(target.index);
    if let Ok((mut stream, _)) = context.observer.call(via, "WatchActivity", call).await {
        let read_all = async { while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {} };
        let _ = timeout(LIFETIME, read_all).await;
    }
}

/// Connects, sends a part of a request or an endless header, and reads nothing.
async fn slow_client(number: u64, context: Context) {
    let instance = context.all().nth(number as usize % context.all().count()).unwrap();
    let address = if number.is_multiple_of(2) { instance.target.grpc } else { instance.target.http };
    let Ok(mut stream) = TcpStream::connect(address).await else { return };
    let unfinished_call =
        frame(HEADERS, END_HEADERS, 1, &call_headers("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"));
    let bytes = match (number / 2) % 3 {
        _ if address == context.redis[WITH_TLS].target.grpc => HALF_A_HANDSHAKE.to_vec(),
        0 => HALF_A_FRAME.to_vec(),
        1 => HALF_A_REQUEST.to_vec(),
        _ => [&HALF_A_FRAME[..HALF_A_FRAME.len() - 3], &unfinished_call].concat(),
    };
    let _ = stream.write_all(&bytes).await;
    tokio::time::sleep(LIFETIME).await;
}
