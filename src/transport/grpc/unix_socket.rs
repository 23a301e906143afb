//! [`UnixSocket`]: accepts connections on a Unix socket.

pub(super) use std::os::unix::net::UnixStream as StdUnixStream;
use std::{
    fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

use tokio::net::UnixListener;
pub(super) use tokio::net::UnixStream;

use sluicegate_files::{FileId, file_id};

/// A Unix socket. Its file is removed when the listener is dropped.
pub(super) struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Identity of this socket's file, which the file of another process with the same path does not have.
    id: FileId,
}

impl UnixSocket {
    /// Listens on a Unix socket. Removes a socket on which no process listens, such as after a crash.
    pub(super) fn bind(path: PathBuf) -> io::Result<Self> {
        // Connections to other files are refused as well. A link is not followed: only the link would be removed.
        if fs::symlink_metadata(&path).is_ok_and(|file| !file.file_type().is_socket()) {
            let reason = "the path exists and is not a socket; only a socket is replaced";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, reason));
        }
        let connection = StdUnixStream::connect(&path);
        if connection.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            fs::remove_file(&path)?;
        }
        let listener = UnixListener::bind(&path)?;
        let id = file_id(&fs::symlink_metadata(&path)?)?;
        Ok(Self { listener, path, id })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for a connection.
    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }

    /// Returns whether the path still names the file of this socket.
    fn owns_path(&self) -> bool {
        fs::symlink_metadata(&self.path).and_then(|file| file_id(&file)).is_ok_and(|id| id == self.id)
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        if self.owns_path() {
            let _ = fs::remove_file(&self.path);
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
            let error = UnixSocket::bind(path(name)).err().unwrap().to_string();
            assert!(error.contains("is not a socket"), "{name}: {error}");
            assert!(fs::symlink_metadata(path(name)).is_ok(), "{name} still exists");
        }
        assert_eq!(fs::read_to_string(path("file")).unwrap(), "precious");
        assert!(UnixSocket::bind(path("socket")).is_ok(), "a socket that a crash left behind");
    }

    #[tokio::test]
    async fn only_the_own_socket_file_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = UnixSocket::bind(path.clone()).unwrap();
        // Another process takes the name, for example after an operator has removed the file.
        fs::remove_file(&path).unwrap();
        let second = UnixSocket::bind(path.clone()).unwrap();
        drop(first);
        assert!(path.exists(), "the socket of the second process");
        drop(second);
        assert!(!path.exists());
    }
}
