//! Fuzz targets: requests to the HTTP listeners of a service with the default settings and the admin API.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::{
    cell::RefCell,
    env, fs, io,
    net::{SocketAddr, TcpListener},
    process, thread,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, copy, sink},
    net::TcpStream,
    runtime::{self, Runtime},
    time::timeout,
};

use super::{AppError, Rules, Service, Tasks, Telemetry};
use crate::settings::Settings;

/// Token of the caller.
const TOKEN: &str = "a-token-for-fuzzing";
/// Time in which the service must answer each request, and start before the first one.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum length of a value in JSON, which is sent with at most two bytes for each byte.
const MAX_VALUE_BYTES: usize = 1 << 20;

thread_local! {
    static CLIENT: RefCell<Option<Client>> = const { RefCell::new(None) };
}

/// Sends a request in JSON to `/json`, and another one that has the input as the value of an entry. The value must be
/// decided, with any bytes.
pub fn json_request(input: &[u8]) {
    let status = post("/json", input);
    assert!([200, 400, 413, 429].contains(&status), "status {status}");
    let mut body = br#"{"domain":"api","descriptors":[{"entries":[{"key":"user","value":""#.to_vec();
    for byte in &input[..input.len().min(MAX_VALUE_BYTES)] {
        // All other bytes are sent as they are.
        if matches!(byte, b'"' | b'\\') {
            body.push(b'\\');
        }
        body.push(*byte);
    }
    body.extend_from_slice(br#""}]}]}"#);
    let status = post("/json", &body);
    assert!([200, 429].contains(&status), "status {status} for a value");
}

/// Calls a method of the admin API: the first line is its name, and the rest is the message in JSON.
pub fn admin_call(input: &[u8]) {
    let end = input.iter().position(|byte| *byte == b'\n').unwrap_or(input.len());
    let (method, message) = input.split_at(end);
    let is_method = !method.is_empty() && method.iter().all(u8::is_ascii_alphabetic);
    let Some(method) = str::from_utf8(method).ok().filter(|_| is_method) else {
        return;
    };
    let status = post(&format!("/v1/{method}"), message);
    assert!([200, 400, 404, 409, 413, 429, 501].contains(&status), "{method}: status {status}");
}

/// Reports the utilization of a resource: the first line is its name, and the rest is the report in JSON.
pub fn resource_report(input: &[u8]) {
    let end = input.iter().position(|byte| *byte == b'\n').unwrap_or(input.len());
    let (name, report) = input.split_at(end);
    let name = percent_encoding::percent_encode(name, percent_encoding::NON_ALPHANUMERIC);
    let status = post(&format!("/resources/{name}"), report);
    assert!([200, 400, 404, 413, 429, 431].contains(&status), "status {status}");
}

/// Sends a request to the service of this thread, and returns the status.
fn post(path: &str, body: &[u8]) -> u16 {
    CLIENT.with_borrow_mut(|client| client.get_or_insert_with(Client::start).post(path, body))
}

/// A service, and a connection to it. The service handles requests while the thread waits for a response.
struct Client {
    runtime: Runtime,
    address: SocketAddr,
    connection: Option<BufReader<TcpStream>>,
    _running: (Service, Tasks),
}

impl Client {
    fn start() -> Self {
        let start = || -> io::Result<Self> {
            let thread = thread::current().id();
            let name = format!("sluicegate-fuzz-tokens-{}-{thread:?}", process::id());
            let tokens = env::temp_dir().join(name);
            fs::write(&tokens, format!("operate {TOKEN} fuzzer\n"))?;
            let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
            let any = SocketAddr::from(([127, 0, 0, 1], 0));
            let mut settings = Settings { workers: 1, ..Settings::default() };
            (settings.http.addr, settings.grpc.addr, settings.admin.addr) = (address, any, Some(any));
            settings.admin.token_file = Some(tokens);
            let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
            let running = runtime.block_on(serve(&settings)).unwrap_or_else(|error| panic!("{error:?}"));
            Ok(Self { runtime, address, connection: None, _running: running })
        };
        start().unwrap_or_else(|error| panic!("cannot start the service: {error}"))
    }

    fn post(&mut self, path: &str, body: &[u8]) -> u16 {
        let Self { runtime, address, connection, .. } = self;
        let answer = async {
            // The service may close a connection between two requests. A second failure is one of the service.
            if let Some(connection) = connection
                && let Ok(status) = send(connection, path, body).await
            {
                return status;
            }
            let connection = connection.insert(BufReader::new(connect(*address).await));
            send(connection, path, body).await.unwrap_or_else(|error| panic!("no response from {path}: {error}"))
        };
        let answer = runtime.block_on(async { timeout(TIMEOUT, answer).await });
        answer.unwrap_or_else(|_| panic!("no response from {path} in time"))
    }
}

async fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).await.unwrap_or_else(|error| panic!("{error}"));
    stream.set_nodelay(true).unwrap_or_else(|error| panic!("{error}"));
    stream
}

async fn send(connection: &mut BufReader<TcpStream>, path: &str, body: &[u8]) -> io::Result<u16> {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    );
    connection.write_all(head.as_bytes()).await?;
    // A body that is too long is not read to its end.
    let sent = connection.write_all(body).await;
    let (mut line, mut status, mut length) = (String::new(), 0, None);
    while line != "\r\n" {
        line.clear();
        if connection.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end().split_once(' ') {
            Some(("HTTP/1.1", code)) => status = code.get(..3).and_then(|code| code.parse().ok()).unwrap_or_default(),
            Some(("content-length:", value)) => length = value.parse().ok(),
            _ => {}
        }
    }
    match length {
        Some(length) if sent.is_ok() => copy(&mut connection.take(length), &mut sink()).await.map(|_| status),
        // A stream, which would not end, or a body that was not read.
        _ => connection.shutdown().await.map(|()| status),
    }
}

/// Starts the service.
async fn serve(settings: &Settings) -> Result<(Service, Tasks), AppError> {
    let (telemetry, mut tasks) = (Telemetry::start(settings)?, Tasks::default());
    let rules = Rules::start(settings, &telemetry, &mut tasks)?;
    let service = Service::start(settings, telemetry, &rules, &mut tasks).await?;
    Ok((service, tasks))
}
