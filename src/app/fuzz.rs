//! Fuzz targets: requests to the HTTP listeners of a service with the default settings and the admin API.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::{
    cell::RefCell,
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use tokio::runtime;

use super::{Rules, Service, Tasks, Telemetry};
use crate::settings::Settings;

/// Token of the caller.
const TOKEN: &str = "a-token-for-fuzzing";
/// Time in which the service must start, and answer each request.
const TIMEOUT: Duration = Duration::from_secs(20);

thread_local! {
    static CONNECTION: RefCell<Option<BufReader<TcpStream>>> = const { RefCell::new(None) };
}

/// Sends a request in JSON to `/json`.
pub fn json_request(input: &[u8]) {
    let status = post("/json", input);
    assert!([200, 400, 413, 429].contains(&status), "status {status}");
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
    assert!([200, 400, 404, 413, 429].contains(&status), "status {status}");
}

/// Sends a request to the service of this process, and returns the status.
fn post(path: &str, body: &[u8]) -> u16 {
    CONNECTION.with_borrow_mut(|connection| {
        // The service may close a connection between two requests. A second failure is one of the service.
        let first = connection.as_mut().and_then(|connection| send(connection, path, body).ok());
        if let Some(status) = first {
            return status;
        }
        let stream = TcpStream::connect(service()).and_then(|stream| {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            Ok(stream)
        });
        let connection = connection.insert(BufReader::new(stream.unwrap_or_else(|error| panic!("{error}"))));
        send(connection, path, body).unwrap_or_else(|error| panic!("no response from {path}: {error}"))
    })
}

fn send(connection: &mut BufReader<TcpStream>, path: &str, body: &[u8]) -> io::Result<u16> {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    );
    connection.get_mut().write_all(&[head.as_bytes(), body].concat())?;
    let (mut line, mut status, mut length) = (String::new(), 0, None);
    while line != "\r\n" {
        line.clear();
        if connection.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end().split_once(' ') {
            Some(("HTTP/1.1", code)) => status = code.get(..3).and_then(|code| code.parse().ok()).unwrap_or_default(),
            Some(("content-length:", value)) => length = value.parse().ok(),
            _ => {}
        }
    }
    match length {
        Some(length) => io::copy(&mut connection.take(length), &mut io::sink()).map(|_| status),
        // A stream, which would not end.
        None => connection.get_mut().shutdown(std::net::Shutdown::Both).map(|()| status),
    }
}

/// Starts the service when it is first called, and returns the address of its HTTP server.
fn service() -> SocketAddr {
    static SERVICE: OnceLock<SocketAddr> = OnceLock::new();
    *SERVICE.get_or_init(|| {
        let start = || -> io::Result<SocketAddr> {
            let tokens = std::env::temp_dir().join(format!("sluicegate-fuzz-tokens-{}", std::process::id()));
            std::fs::write(&tokens, format!("operate {TOKEN} fuzzer\n"))?;
            let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
            let any = SocketAddr::from(([127, 0, 0, 1], 0));
            let mut settings = Settings { workers: 1, ..Settings::default() };
            (settings.http.addr, settings.grpc.addr, settings.admin.addr) = (address, any, Some(any));
            settings.admin.token_file = Some(tokens);
            thread::Builder::new().name("service".into()).spawn(move || run(&settings))?;
            let deadline = Instant::now() + TIMEOUT;
            while TcpStream::connect(address).is_err() {
                assert!(Instant::now() < deadline, "the service does not listen");
                thread::yield_now();
            }
            Ok(address)
        };
        start().unwrap_or_else(|error| panic!("cannot start the service: {error}"))
    })
}

/// Serves until the process ends.
fn run(settings: &Settings) {
    let serve = async {
        let (telemetry, mut tasks) = (Telemetry::start(settings)?, Tasks::default());
        let rules = Rules::start(settings, &telemetry, &mut tasks)?;
        let _service = Service::start(settings, telemetry, &rules, &mut tasks).await?;
        std::future::pending::<Result<(), super::AppError>>().await
    };
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let ended = runtime.map(|runtime| runtime.block_on(serve));
    panic!("the service ended: {ended:?}");
}
