//! One unary gRPC call, framed by hand: collect the message, answer with data and trailers.
//!
//! <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>: a message is a byte that says whether it is
//! compressed (never here), four bytes of length, and the message.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Response, header::CONTENT_TYPE};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message;
use tonic::Code;

use super::Refusal;

const PREFIX: usize = 5;
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
/// What `grpc-message` may not hold as it is; utf8_percent_encode escapes all that is not ASCII anyway.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// The body of an answer: of a call of ours, or of one of tonic's services.
pub(super) enum AnswerBody {
    Unary { data: Option<Bytes>, trailers: Option<HeaderMap> },
    Tonic(tonic::body::Body),
}

impl Body for AnswerBody {
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
            Self::Tonic(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Unary { data, trailers } => data.is_none() && trailers.is_none(),
            Self::Tonic(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Unary { data, .. } => SizeHint::with_exact(data.as_ref().map_or(0, Bytes::len) as u64),
            Self::Tonic(body) => body.size_hint(),
        }
    }
}

/// The one message of a call, without its prefix. Reads to the end, so that the stream closes in order.
pub(super) async fn receive(mut body: Incoming, max: usize) -> Result<Bytes, Refusal> {
    let first = next_data(&mut body).await?.unwrap_or_default();
    check_size(&first, max)?;
    // Nearly always that was all of it; else the rest is gathered, each byte copied once however small the frames are.
    let whole = if body.is_end_stream() {
        first
    } else {
        let mut whole = BytesMut::from(first);
        while let Some(data) = next_data(&mut body).await? {
            whole.extend_from_slice(&data);
            check_size(&whole, max)?;
        }
        whole.freeze()
    };
    let Some(size) = declared(&whole) else {
        return Err(Refusal::invalid("the call has no message"));
    };
    if whole[0] != 0 {
        let message = "compressed messages are not taken; send them with grpc-encoding identity".into();
        return Err(Refusal { code: Code::Unimplemented, message });
    }
    if whole.len() != PREFIX + size {
        return Err(Refusal::invalid(format!(
            "a message of {size} bytes was announced and {} came",
            whole.len() - PREFIX
        )));
    }
    Ok(whole.slice(PREFIX..))
}

async fn next_data(body: &mut Incoming) -> Result<Option<Bytes>, Refusal> {
    while let Some(frame) = body.frame().await {
        let frame = frame
            .map_err(|error| Refusal { code: Code::Cancelled, message: format!("the request broke off: {error}") })?;
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// Neither what is announced nor what has come may be too large.
fn check_size(whole: &[u8], max: usize) -> Result<(), Refusal> {
    let size = declared(whole).unwrap_or_default().max(whole.len().saturating_sub(PREFIX));
    if size > max {
        return Err(Refusal::exhausted(format!("a message of {size} bytes is larger than the {max} that are taken")));
    }
    Ok(())
}

/// The length that the prefix announces.
fn declared(whole: &[u8]) -> Option<usize> {
    let [_, a, b, c, d] = *whole.first_chunk::<PREFIX>()?;
    usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()
}

/// A successful answer.
pub(super) fn answer(message: &impl Message) -> Response<AnswerBody> {
    let size = message.encoded_len();
    let mut data = BytesMut::with_capacity(PREFIX + size);
    data.put_u8(0);
    // An answer has a status for each descriptor: far from 4 GiB.
    data.put_u32(u32::try_from(size).unwrap_or(u32::MAX));
    message.encode_raw(&mut data);
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
    let body = AnswerBody::Unary { data: Some(data.freeze()), trailers: Some(trailers) };
    response(body)
}

/// A status without a message: its trailers are its headers.
pub(super) fn refuse(refusal: &Refusal) -> Response<AnswerBody> {
    let mut response = response(AnswerBody::Unary { data: None, trailers: None });
    let headers = response.headers_mut();
    headers.insert(GRPC_STATUS, HeaderValue::from(refusal.code as i32));
    let message = utf8_percent_encode(&refusal.message, ESCAPED).to_string();
    if let Ok(message) = HeaderValue::from_str(&message) {
        headers.insert(GRPC_MESSAGE, message);
    }
    response
}

fn response(body: AnswerBody) -> Response<AnswerBody> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}
