//! [`RequestBody`]: the body of a call, received through h2.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::RecvStream;
use http_body::{Body, Frame};

use super::input::TONIC_BODY_BYTES;
use crate::{budget::Reservation, transport::errors::RequestError};

/// The body of a call. Received data keeps its part of the flow-control windows until it is released.
pub(crate) struct RequestBody(RecvStream);

impl RequestBody {
    pub(in crate::transport) const fn new(stream: RecvStream) -> Self {
        Self(stream)
    }

    /// Returns whether all data was read.
    pub(in crate::transport) fn is_complete(&self) -> bool {
        self.0.is_end_stream()
    }

    /// Returns the next data, or `None` at the end.
    pub(in crate::transport) fn poll_data(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, h2::Error>>> {
        self.0.poll_data(context)
    }

    /// Returns received bytes to the flow-control windows, so that the caller can send the same number.
    pub(in crate::transport) fn release(&mut self, bytes: usize) {
        // An error means that the stream was reset, and the next poll returns the reason.
        let _ = self.0.flow_control().release_capacity(bytes);
    }
}

/// The body of a call to one of tonic's services, which have only small messages.
pub(in crate::transport) struct TonicBody {
    body: RequestBody,
    /// The size of the whole body, as tonic may hold any part.
    reservation: Reservation,
    unreserved: usize,
}

impl TonicBody {
    pub(in crate::transport) const fn new(body: RequestBody, reservation: Reservation) -> Self {
        Self { body, reservation, unreserved: 0 }
    }
}

impl Body for TonicBody {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        let this = self.get_mut();
        if this.unreserved > 0 {
            if this.reservation.bytes() + this.unreserved > TONIC_BODY_BYTES {
                let message = format!("the messages of a call have more than {TONIC_BODY_BYTES} bytes in total");
                return Poll::Ready(Some(Err(tonic::Status::resource_exhausted(message))));
            }
            if let Err(error) = ready!(this.reservation.poll_grow(this.unreserved, context)) {
                return Poll::Ready(Some(Err(tonic::Status::resource_exhausted(RequestError::from(error).message))));
            }
            this.body.release(this.unreserved);
            this.unreserved = 0;
        }
        let data = this.body.poll_data(context);
        if data.is_pending()
            && let Poll::Ready(error) = this.reservation.poll_evicted(context)
        {
            return Poll::Ready(Some(Err(tonic::Status::resource_exhausted(RequestError::from(error).message))));
        }
        if let Some(data) = ready!(data) {
            return Poll::Ready(Some(match data {
                Ok(data) => {
                    this.unreserved = data.len();
                    Ok(Frame::data(data))
                }
                Err(error) => Err(tonic::Status::cancelled(error.to_string())),
            }));
        }
        // All messages have arrived, so the call only has the memory of an open stream.
        this.reservation.clear();
        let trailers = ready!(this.body.0.poll_trailers(context));
        let trailers = trailers.map_err(|error| tonic::Status::cancelled(error.to_string()));
        Poll::Ready(trailers.transpose().map(|trailers| trailers.map(Frame::trailers)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_complete()
    }
}
