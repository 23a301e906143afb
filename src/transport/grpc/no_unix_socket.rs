//! The types of `unix_socket.rs` on Windows, where `grpc.uds` is an error at the start: none of them has a value.

use std::{
    io,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub(super) use self::UnixStream as StdUnixStream;

/// A listener that cannot be created.
pub(super) enum UnixSocket {}

impl UnixSocket {
    pub(super) fn bind(_: PathBuf) -> io::Result<Self> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "Unix sockets are not supported on Windows"))
    }

    pub(super) fn path(&self) -> &Path {
        match *self {}
    }

    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        match *self {}
    }
}

/// A connection that cannot exist.
pub(super) enum UnixStream {}

impl UnixStream {
    pub(super) fn into_std(self) -> io::Result<StdUnixStream> {
        match self {}
    }

    pub(super) fn from_std(stream: StdUnixStream) -> io::Result<Self> {
        match stream {}
    }
}

impl AsyncRead for UnixStream {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }
}

impl AsyncWrite for UnixStream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        match *self {}
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }
}
