//! `sluicegate health`: checks the health of the local service, for containers without another HTTP client.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context;
use sluicegate_ctl::println;

/// Timeout of the connection, and of the response.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Prints the status of `/healthcheck` and returns exit code 1 unless it is 200.
pub(super) fn run(addr: SocketAddr) -> anyhow::Result<ExitCode> {
    let code = status(loopback_if_unspecified(addr)).with_context(|| format!("no response from {addr}"))?;
    println!("{code}");
    Ok(if code == "200 OK" { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Replaces the unspecified address, on which a service listens on all interfaces, by the loopback address.
fn loopback_if_unspecified(mut addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(socket) if socket.ip().is_unspecified() => addr.set_ip(Ipv4Addr::LOCALHOST.into()),
        SocketAddr::V6(socket) if socket.ip().is_unspecified() => addr.set_ip(Ipv6Addr::LOCALHOST.into()),
        SocketAddr::V4(_) | SocketAddr::V6(_) => {}
    }
    addr
}

/// Returns the status code and reason of `/healthcheck` at `addr`, such as `200 OK`.
fn status(addr: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect_timeout(&addr, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    write!(stream, "GET /healthcheck HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let (_, code) = line.trim_end().split_once(' ').context("the response is not HTTP")?;
    Ok(code.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unspecified_address_is_replaced() {
        for (addr, expected) in [
            ("0.0.0.0:1", "127.0.0.1:1"),
            ("10.0.0.1:1", "10.0.0.1:1"),
            ("[::]:1", "[::1]:1"),
            ("[2001:db8::1]:1", "[2001:db8::1]:1"),
        ] {
            assert_eq!(loopback_if_unspecified(addr.parse().unwrap()).to_string(), expected);
        }
    }
}
