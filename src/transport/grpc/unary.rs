//! One unary gRPC call, framed by hand: collect the message, answer with data and trailers.
//!
//! <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>: a message is a byte that says whether it is
//! compressed, four bytes of length, and the message. What comes compressed by gzip is taken; answers never are.

use std::{
    io::Read,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{BufMut, Bytes, BytesMut};
use flate2::read::GzDecoder;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header::CONTENT_TYPE};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message;
use tonic::Code;

use super::{RequestError, stream::ResponseStream};

/// Of every message: whether it is compressed, and its length.
pub(super) const PREFIX: usize = 5;
/// How what was compressed by gzip begins (RFC 1952).
const GZIP: [u8; 2] = [0x1f, 0x8b];
pub(super) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
/// What `grpc-message` may not hold as it is; utf8_percent_encode escapes all that is not ASCII anyway.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// The body of an answer: of a call of ours, or of one of tonic's services. It tells nobody its size: hyper would make a
/// `content-length` of that, which no gRPC client reads.
pub(super) enum ResponseBody {
    Unary {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
    },
    /// `None` when it has ended.
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
        match self.get_mut() {
            Self::Unary { data, trailers } => {
                let frame = data.take().map(Frame::data).or_else(|| trailers.take().map(Frame::trailers));
                Poll::Ready(frame.map(Ok))
            }
            Self::Stream(answers) => {
                let Some(stream) = answers else {
                    return Poll::Ready(None);
                };
                let frame = ready!(stream.poll_frame(context));
                if matches!(&frame, Some(Ok(frame)) if frame.is_trailers()) {
                    *answers = None;
                }
                Poll::Ready(frame)
            }
            Self::Tonic(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Unary { data, trailers } => data.is_none() && trailers.is_none(),
            Self::Stream(answers) => answers.is_none(),
            Self::Tonic(body) => body.is_end_stream(),
        }
    }
}

/// The one message of a call, without its prefix. Reads to the end, so that the stream closes in order.
pub(super) async fn receive(mut body: Incoming, max: usize) -> Result<Bytes, RequestError> {
    let first = next_data(&mut body).await?.unwrap_or_default();
    check_sizes(&first, max)?;
    // Nearly always that was all of it; else the rest is gathered, each byte copied once however small the frames are.
    let whole = if body.is_end_stream() {
        first
    } else {
        let mut whole = BytesMut::from(first);
        while let Some(data) = next_data(&mut body).await? {
            whole.extend_from_slice(&data);
            check_sizes(&whole, max)?;
        }
        whole.freeze()
    };
    let Some(size) = declared(&whole) else {
        return Err(RequestError::invalid("the call has no message"));
    };
    if whole.len() != PREFIX + size {
        return Err(RequestError::invalid(format!(
            "a message of {size} bytes was announced and {} came",
            whole.len() - PREFIX
        )));
    }
    inflated(&whole, max)
}

/// The first message of a stream's bytes, without its prefix; `None` when it is not all there.
pub(super) fn split_message(received: &mut BytesMut, max: usize) -> Result<Option<Bytes>, RequestError> {
    let Some(size) = declared(received) else {
        return Ok(None);
    };
    check_size(size, max)?;
    if received.len() < PREFIX + size {
        return Ok(None);
    }
    inflated(&received.split_to(PREFIX + size).freeze(), max).map(Some)
}

/// A message without its prefix, and as it was before it was compressed. By what is known from its own bytes: nobody looks for
/// `grpc-encoding` among the headers of all the calls that are not compressed.
fn inflated(whole: &Bytes, max: usize) -> Result<Bytes, RequestError> {
    if whole[0] == 0 {
        return Ok(whole.slice(PREFIX..));
    }
    if whole[0] > 1 || !whole[PREFIX..].starts_with(&GZIP) {
        let message = "of compressed messages those with grpc-encoding gzip are taken".into();
        return Err(RequestError { code: Code::Unimplemented, message });
    }
    let mut message = Vec::new();
    // A byte more, to see that it would go on.
    let mut reader = GzDecoder::new(&whole[PREFIX..]).take(max as u64 + 1);
    reader.read_to_end(&mut message).map_err(|error| RequestError::invalid(format!("this is not gzip: {error}")))?;
    if message.len() > max {
        return Err(RequestError::exhausted(format!("a message is larger than the {max} bytes that are taken")));
    }
    Ok(message.into())
}

async fn next_data(body: &mut Incoming) -> Result<Option<Bytes>, RequestError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| RequestError {
            code: Code::Cancelled,
            message: format!("the request broke off: {error}"),
        })?;
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// Neither what is announced nor what has come may be too large.
fn check_sizes(whole: &[u8], max: usize) -> Result<(), RequestError> {
    check_size(declared(whole).unwrap_or_default().max(whole.len().saturating_sub(PREFIX)), max)
}

pub(super) fn check_size(size: usize, max: usize) -> Result<(), RequestError> {
    if size > max {
        return Err(RequestError::exhausted(format!(
            "a message of {size} bytes is larger than the {max} that are taken"
        )));
    }
    Ok(())
}

/// The length that the prefix announces.
fn declared(whole: &[u8]) -> Option<usize> {
    let [_, a, b, c, d] = *whole.first_chunk::<PREFIX>()?;
    usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()
}

/// A successful answer.
pub(super) fn answer(message: &impl Message) -> Response<ResponseBody> {
    let size = message.encoded_len();
    let mut data = BytesMut::with_capacity(PREFIX + size);
    data.put_u8(0);
    // An answer has a status for each descriptor: far from 4 GiB.
    data.put_u32(u32::try_from(size).unwrap_or(u32::MAX));
    message.encode_raw(&mut data);
    respond(data.freeze())
}

/// A successful answer that has its prefix.
pub(super) fn respond(data: Bytes) -> Response<ResponseBody> {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
    response(ResponseBody::Unary { data: Some(data), trailers: Some(trailers) })
}

/// A status without a message: its trailers are its headers.
pub(super) fn refuse(refusal: &RequestError) -> Response<ResponseBody> {
    let mut response = response(ResponseBody::Unary { data: None, trailers: None });
    write_status(response.headers_mut(), refusal);
    response.headers_mut().insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity,gzip"));
    response
}

pub(super) fn write_status(headers: &mut HeaderMap, refusal: &RequestError) {
    headers.insert(GRPC_STATUS, HeaderValue::from(refusal.code as i32));
    let message = utf8_percent_encode(&refusal.message, ESCAPED).to_string();
    if let Ok(message) = HeaderValue::from_str(&message) {
        headers.insert(GRPC_MESSAGE, message);
    }
}

pub(super) fn response(body: ResponseBody) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}
