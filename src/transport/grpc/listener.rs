//! Where connections come from: a TCP port or a Unix socket.

use std::{fs, io, net::SocketAddr, path::PathBuf};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// A port, or a socket in the file system that goes with its listener.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

/// A connection that belongs to this thread's runtime.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection on its way from one runtime to another.
pub(super) enum PassedStream {
    Tcp(std::net::TcpStream),
    Unix(std::os::unix::net::UnixStream),
}

impl Listener {
    pub(super) async fn tcp(addr: SocketAddr) -> io::Result<Self> {
        TcpListener::bind(addr).await.map(Self::Tcp)
    }

    /// A socket that nobody listens on any more, as after a crash, is in the way, and removed.
    pub(super) fn unix(path: PathBuf) -> io::Result<Self> {
        let left = std::os::unix::net::UnixStream::connect(&path);
        if left.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            fs::remove_file(&path)?;
        }
        Ok(Self::Unix(UnixListener::bind(&path)?, path))
    }

    /// For the log, the port settled.
    pub(super) fn address(&self) -> io::Result<String> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(|addr| addr.to_string()),
            Self::Unix(_, path) => Ok(path.display().to_string()),
        }
    }

    pub(super) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, _)| Stream::Tcp(stream)),
            Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| Stream::Unix(stream)),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // Gone already is as good.
            let _ = fs::remove_file(path);
        }
    }
}

impl Stream {
    pub(super) fn pass(self) -> io::Result<PassedStream> {
        match self {
            Self::Tcp(stream) => {
                // Answers are small and wanted at once.
                stream.set_nodelay(true)?;
                stream.into_std().map(PassedStream::Tcp)
            }
            Self::Unix(stream) => stream.into_std().map(PassedStream::Unix),
        }
    }
}

impl PassedStream {
    pub(super) fn take(self) -> io::Result<Stream> {
        match self {
            Self::Tcp(stream) => TcpStream::from_std(stream).map(Stream::Tcp),
            Self::Unix(stream) => UnixStream::from_std(stream).map(Stream::Unix),
        }
    }
}
