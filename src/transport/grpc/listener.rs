//! [`Listener`]: accepts connections on a TCP port or a Unix socket.

use std::{io, net::SocketAddr, path::PathBuf};

use tokio::net::{TcpListener, TcpStream};

use super::unix_socket::{StdUnixStream, UnixSocket, UnixStream};

/// A TCP port or a Unix socket.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixSocket),
}

/// A connection that is registered with the runtime of this thread.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection that is passed from one runtime to another.
pub(super) enum PassedStream {
    Tcp(std::net::TcpStream),
    Unix(StdUnixStream),
}

impl Listener {
    pub(super) async fn tcp(addr: SocketAddr) -> io::Result<Self> {
        TcpListener::bind(addr).await.map(Self::Tcp)
    }

    pub(super) fn unix(path: PathBuf) -> io::Result<Self> {
        UnixSocket::bind(path).map(Self::Unix)
    }

    /// Returns the address with the actual port, or the path, for log messages.
    pub(super) fn address(&self) -> io::Result<String> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(|addr| addr.to_string()),
            Self::Unix(socket) => Ok(socket.path().display().to_string()),
        }
    }

    /// Waits for a connection. Returns it with the address of its peer, which a Unix socket does not have.
    pub(super) async fn accept(&self) -> io::Result<(Stream, Option<SocketAddr>)> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, peer)| (Stream::Tcp(stream), Some(peer))),
            Self::Unix(socket) => socket.accept().await.map(|stream| (Stream::Unix(stream), None)),
        }
    }
}

impl Stream {
    /// Removes the connection from this runtime.
    pub(super) fn pass(self) -> io::Result<PassedStream> {
        match self {
            Self::Tcp(stream) => {
                // Responses are small, and must not wait for Nagle's algorithm.
                stream.set_nodelay(true)?;
                stream.into_std().map(PassedStream::Tcp)
            }
            Self::Unix(stream) => stream.into_std().map(PassedStream::Unix),
        }
    }
}

impl PassedStream {
    /// Registers the connection with the current runtime.
    pub(super) fn take(self) -> io::Result<Stream> {
        match self {
            Self::Tcp(stream) => TcpStream::from_std(stream).map(Stream::Tcp),
            Self::Unix(stream) => UnixStream::from_std(stream).map(Stream::Unix),
        }
    }
}
