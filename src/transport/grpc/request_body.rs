//! [`RequestBody`]: the body of a call, received through h2.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::RecvStream;
use http_body::{Body, Frame};

/// The body of a call. Data that has been read is returned to the flow-control window.
pub(super) struct RequestBody(RecvStream);

impl RequestBody {
    pub(super) const fn new(stream: RecvStream) -> Self {
        Self(stream)
    }

    /// Returns whether all data was read.
    pub(super) fn is_complete(&self) -> bool {
        self.0.is_end_stream()
    }

    /// Returns the next data, or `None` at the end.
    pub(super) fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        let data = ready!(self.0.poll_data(context));
        if let Some(Ok(data)) = &data {
            // An error means that the stream was reset, and the next poll returns the reason.
            let _ = self.0.flow_control().release_capacity(data.len());
        }
        Poll::Ready(data)
    }
}

/// For tonic's services.
impl Body for RequestBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        let this = self.get_mut();
        if let Some(data) = ready!(this.poll_data(context)) {
            return Poll::Ready(Some(data.map(Frame::data)));
        }
        this.0.poll_trailers(context).map(|trailers| trailers.transpose().map(|trailers| trailers.map(Frame::trailers)))
    }

    fn is_end_stream(&self) -> bool {
        self.is_complete()
    }
}
