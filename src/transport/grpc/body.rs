//! [`ResponseBody`]: the body of every response of this server, and the responses of unary calls.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Response, header::CONTENT_TYPE};
use http_body::{Body, Frame};
use prost::Message;

use super::{
    RequestError,
    message::{GRPC_STATUS, PREFIX, write_status},
    send_timeout,
    stream::ResponseStream,
};

const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const GRPC_CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// The body of a response, built by this module or by one of tonic's services.
///
/// The body has no size hint: hyper would write it as `content-length`, which no gRPC client reads.
pub(super) enum ResponseBody {
    Unary {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
    },
    /// `None` after the end of the stream.
    Stream(Option<Box<ResponseStream>>),
    Tonic(tonic::body::Body),
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        let polled = self.get_mut().poll_next_frame(context);
        send_timeout::record_poll(matches!(&polled, Poll::Ready(Some(Ok(frame))) if frame.is_data()));
        polled
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Unary { data, trailers } => data.is_none() && trailers.is_none(),
            Self::Stream(responses) => responses.is_none(),
            Self::Tonic(body) => body.is_end_stream(),
        }
    }
}

impl ResponseBody {
    fn poll_next_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        match self {
            Self::Unary { data, trailers } => {
                let frame = data.take().map(Frame::data).or_else(|| trailers.take().map(Frame::trailers));
                Poll::Ready(frame.map(Ok))
            }
            Self::Stream(responses) => {
                let Some(stream) = responses else {
                    return Poll::Ready(None);
                };
                let frame = ready!(stream.poll_frame(context));
                if matches!(&frame, Some(Ok(frame)) if frame.is_trailers()) {
                    *responses = None;
                }
                Poll::Ready(frame)
            }
            Self::Tonic(body) => Pin::new(body).poll_frame(context),
        }
    }
}

/// Returns a successful response with a message.
pub(super) fn message_response(message: &impl Message) -> Response<ResponseBody> {
    let size = message.encoded_len();
    let mut data = BytesMut::with_capacity(PREFIX + size);
    data.put_u8(0);
    // A response has one status per descriptor, so it is far smaller than 4 GiB.
    data.put_u32(u32::try_from(size).unwrap_or(u32::MAX));
    message.encode_raw(&mut data);
    unary_response(data.freeze())
}

/// Returns a successful response with a message that has its prefix.
pub(super) fn unary_response(data: Bytes) -> Response<ResponseBody> {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
    grpc_response(ResponseBody::Unary { data: Some(data), trailers: Some(trailers) })
}

/// Returns a response with an error status and no message. Its trailers are sent as headers.
pub(super) fn error_response(error: &RequestError) -> Response<ResponseBody> {
    let mut response = grpc_response(ResponseBody::Unary { data: None, trailers: None });
    write_status(response.headers_mut(), error);
    response.headers_mut().insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity,gzip"));
    response
}

/// Returns a response with a body and the headers of every response.
fn grpc_response(body: ResponseBody) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
    response
}

/// Returns the response to a stream.
pub(super) fn stream_response(stream: ResponseStream) -> Response<ResponseBody> {
    grpc_response(ResponseBody::Stream(Some(Box::new(stream))))
}
