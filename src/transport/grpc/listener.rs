//! [`Listener`]: accepts connections on a TCP port or a Unix socket.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// A TCP port, or a Unix socket whose file is removed when the listener is dropped.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// The file of a Unix socket.
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode, to recognize the file of another process with the same path.
    inode: (u64, u64),
}

/// A connection that is registered with the runtime of this thread.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection that is passed from one runtime to another.
pub(super) enum PassedStream {
    Tcp(std::net::TcpStream),
    Unix(std::os::unix::net::UnixStream),
}

impl Listener {
    pub(super) async fn tcp(addr: SocketAddr) -> io::Result<Self> {
        TcpListener::bind(addr).await.map(Self::Tcp)
    }

    /// Listens on a Unix socket. Removes a socket on which no process listens, such as after a crash.
    pub(super) fn unix(path: PathBuf) -> io::Result<Self> {
        // Connections to other files are refused as well. A link is not followed: only the link would be removed.
        if fs::symlink_metadata(&path).is_ok_and(|file| !file.file_type().is_socket()) {
            let reason = "the path exists and is not a socket; only a socket is replaced";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, reason));
        }
        let connection = std::os::unix::net::UnixStream::connect(&path);
        if connection.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            fs::remove_file(&path)?;
        }
        let listener = UnixListener::bind(&path)?;
        let inode = inode(&path)?;
        Ok(Self::Unix(listener, SocketFile { path, inode }))
    }

    /// Returns the address with the actual port, or the path, for log messages.
    pub(super) fn address(&self) -> io::Result<String> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(|addr| addr.to_string()),
            Self::Unix(_, file) => Ok(file.path.display().to_string()),
        }
    }

    /// Waits for a connection. Returns it with the address of its peer, which a Unix socket does not have.
    pub(super) async fn accept(&self) -> io::Result<(Stream, Option<SocketAddr>)> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, peer)| (Stream::Tcp(stream), Some(peer))),
            Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| (Stream::Unix(stream), None)),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, SocketFile { path, inode: own }) = self
            && inode(path).is_ok_and(|current| current == *own)
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// Returns the device and the inode of a file.
fn inode(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "precious").unwrap();
        fs::create_dir(path("folder")).unwrap();
        std::os::unix::fs::symlink(path("file"), path("link")).unwrap();
        std::os::unix::fs::symlink(path("nowhere"), path("dangling")).unwrap();
        drop(std::os::unix::net::UnixListener::bind(path("socket")).unwrap());
        std::os::unix::fs::symlink(path("socket"), path("link_to_socket")).unwrap();
        for name in ["file", "folder", "link", "dangling", "link_to_socket"] {
            let error = Listener::unix(path(name)).err().unwrap().to_string();
            assert!(error.contains("is not a socket"), "{name}: {error}");
            assert!(fs::symlink_metadata(path(name)).is_ok(), "{name} still exists");
        }
        assert_eq!(fs::read_to_string(path("file")).unwrap(), "precious");
        assert!(Listener::unix(path("socket")).is_ok(), "a socket that a crash left behind");
    }

    #[tokio::test]
    async fn only_the_own_socket_file_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = Listener::unix(path.clone()).unwrap();
        // Another process takes the name, for example after an operator has removed the file.
        fs::remove_file(&path).unwrap();
        let second = Listener::unix(path.clone()).unwrap();
        drop(first);
        assert!(path.exists(), "the socket of the second process");
        drop(second);
        assert!(!path.exists());
    }
}
