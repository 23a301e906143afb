//! `sluicegate health`: asks a service on this machine whether it is well, where there is no other program that could: in a container.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context;

/// For the connection, and for the answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Prints the answer of `/healthcheck`; exit code 1 unless it is 200.
pub(super) fn run(addr: SocketAddr) -> anyhow::Result<ExitCode> {
    let code = status(here(addr)).with_context(|| format!("{addr} does not answer"))?;
    println!("{code}");
    Ok(if code == "200 OK" { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Where to reach what listens on all addresses.
fn here(mut addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(it) if it.ip().is_unspecified() => addr.set_ip(Ipv4Addr::LOCALHOST.into()),
        SocketAddr::V6(it) if it.ip().is_unspecified() => addr.set_ip(Ipv6Addr::LOCALHOST.into()),
        SocketAddr::V4(_) | SocketAddr::V6(_) => {}
    }
    addr
}

/// Code and reason, as in `200 OK`.
fn status(addr: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect_timeout(&addr, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    write!(stream, "GET /healthcheck HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let (_, code) = line.trim_end().split_once(' ').context("that is not HTTP")?;
    Ok(code.to_owned())
}
