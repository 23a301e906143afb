//! The admin API as JSON: `POST /v1/METHOD` with the messages of the gRPC methods in proto3 JSON. A method that streams
//! responds with server-sent events. Each call becomes a call of the gRPC method in this process, so a new method needs
//! nothing here.

use std::{
    convert::Infallible,
    sync::{Arc, LazyLock},
};

use axum::{
    body::Bytes,
    extract::{self, DefaultBodyLimit, Extension, FromRequest, Path, State},
    http::{
        HeaderName, StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE},
        uri::PathAndQuery,
    },
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use bytes::{Buf, BufMut};
use futures_util::StreamExt;
use http_body::Body;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, MethodDescriptor, ServiceDescriptor};
use sluicegate_proto::{FILE_DESCRIPTOR_SET, sluicegate::admin::v1::admin_service_server::AdminServiceServer};
use tonic::{
    Code, Request, Status, Streaming,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

use super::{
    GRPC_PREFIX, MAX_MESSAGE_BYTES,
    auth::{Caller, Role},
    roles::authorize,
    service::Service,
};

/// Maximum size of the body of a call without a token, in bytes.
const MAX_PUBLIC_BODY_BYTES: usize = 64 * 1024;

/// Size of a response from which on it is converted on another thread, in bytes.
const MIN_LARGE_BYTES: usize = 64 * 1024;

/// The descriptor of the service. Never `None`, because the descriptor set is embedded in the program.
pub(super) static SERVICE: LazyLock<Option<ServiceDescriptor>> = LazyLock::new(|| {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).ok()?;
    pool.get_service_by_name("sluicegate.admin.v1.AdminService")
});

/// Handles a call. The body is read only if the method exists and the caller has the role that it requires.
pub(super) async fn call(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: extract::Request,
) -> Response {
    let mut response = match find_method(&caller, &name) {
        Ok(method) => match read_body(&caller, request).await {
            Ok(body) => answer(service, caller, &method, &body).await.unwrap_or_else(|status| rejection(&status)),
            Err(response) => *response,
        },
        Err(status) => rejection(&status),
    };
    response.headers_mut().insert(CACHE_CONTROL, http::HeaderValue::from_static("no-store"));
    response
}

/// Finds a method and checks the role of the caller.
fn find_method(caller: &Caller, name: &str) -> Result<MethodDescriptor, Status> {
    let method = SERVICE.as_ref().and_then(|service| service.methods().find(|method| method.name() == name));
    let method =
        method.ok_or_else(|| Status::not_found(format!("unknown method {name:?}; /openapi.json lists the methods")))?;
    authorize(caller, name)?;
    Ok(method)
}

async fn read_body(caller: &Caller, mut request: extract::Request) -> Result<Bytes, Box<Response>> {
    let max = if caller.role < Role::Read { MAX_PUBLIC_BODY_BYTES } else { MAX_MESSAGE_BYTES };
    if request.body().size_hint().lower() > max as u64 {
        return Err(reject_size(max));
    }
    DefaultBodyLimit::max(max).apply(&mut request);
    Bytes::from_request(request, &()).await.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => reject_size(max),
        code => reject_body(code, rejection.body_text()),
    })
}

/// Returns the response to a call with a body of more than `max` bytes.
fn reject_size(max: usize) -> Box<Response> {
    reject_body(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {max} bytes"))
}

/// Returns the response to a call with a body that cannot be read.
fn reject_body(code: StatusCode, reason: String) -> Box<Response> {
    Box::new(error_response(code, &Status::invalid_argument(reason)))
}

/// Calls the gRPC method in this process and returns its response as JSON.
async fn answer(
    service: Arc<Service>,
    caller: Caller,
    method: &MethodDescriptor,
    body: &[u8],
) -> Result<Response, Status> {
    let mut request = Request::new(read_message(method, body)?);
    request.extensions_mut().insert(caller.clone());
    let path = PathAndQuery::try_from(format!("{GRPC_PREFIX}{}", method.name()))
        .map_err(|error| Status::internal(error.to_string()))?;
    let server = AdminServiceServer::from_arc(Arc::clone(&service));
    let mut client = Grpc::new(server).max_decoding_message_size(usize::MAX);
    let Ok(()) = client.ready().await;
    let output = method.output();
    if method.is_server_streaming() {
        let messages = client.server_streaming(request, path, Encoded).await?.into_inner();
        return Ok(events(messages, output));
    }
    let bytes = client.unary(request, path, Encoded).await?.into_inner();
    let text = if bytes.len() < MIN_LARGE_BYTES {
        to_json(output, &bytes)?
    } else {
        service.build(&caller, move || to_json(output, &bytes)).await??
    };
    Ok(([(CONTENT_TYPE, "application/json")], text).into_response())
}

/// Reads the message of a call and encodes it.
fn read_message(method: &MethodDescriptor, body: &[u8]) -> Result<Bytes, Status> {
    let body = if body.is_empty() { b"{}" } else { body };
    let mut json = serde_json::Deserializer::from_slice(body);
    let message = DynamicMessage::deserialize(method.input(), &mut json);
    let message = message.and_then(|message| json.end().map(|()| message));
    let message = message.map_err(|error| {
        Status::invalid_argument(format!("the body is not a valid {} in JSON: {error}", method.input().name()))
    })?;
    Ok(message.encode_to_vec().into())
}

/// Responds with an event for each message.
fn events(messages: Streaming<Bytes>, output: MessageDescriptor) -> Response {
    let events = messages.map(move |message| {
        let text = message.and_then(|bytes| to_json(output.clone(), &bytes));
        Ok::<_, Infallible>(match text {
            Ok(text) => Event::default().data(text),
            Err(status) => Event::default().event("error").data(status.message()),
        })
    });
    // nginx must forward each event immediately, and buffers by default.
    let unbuffered = [(HeaderName::from_static("x-accel-buffering"), "no")];
    (unbuffered, Sse::new(events).keep_alive(KeepAlive::default())).into_response()
}

fn to_json(output: MessageDescriptor, bytes: &[u8]) -> Result<String, Status> {
    let response = DynamicMessage::decode(output, bytes).map_err(|error| Status::internal(error.to_string()))?;
    serde_json::to_string(&response).map_err(|error| Status::internal(error.to_string()))
}

/// A codec of messages that are encoded already.
#[derive(Clone, Copy)]
struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// Returns the response to a call that failed.
fn rejection(status: &Status) -> Response {
    error_response(http_code(status), status)
}

/// Returns an error response: `{"code": "ABORTED", "message": "…"}`.
pub(super) fn error_response(code: StatusCode, status: &Status) -> Response {
    let body = serde_json::json!({ "code": code_name(status.code()), "message": status.message() });
    (code, [(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// Returns the status of HTTP for an error.
pub(super) fn http_code(status: &Status) -> StatusCode {
    match status.code() {
        Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::Aborted => StatusCode::CONFLICT,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Returns the name of a code as gRPC specifies it: `INVALID_ARGUMENT`.
fn code_name(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_names_that_grpc_specifies() {
        assert_eq!(code_name(Code::InvalidArgument), "INVALID_ARGUMENT");
        assert_eq!(code_name(Code::Aborted), "ABORTED");
    }

    #[test]
    fn an_error_has_the_http_status_of_its_code() {
        for (code, expected) in [
            (Code::InvalidArgument, 400),
            (Code::FailedPrecondition, 400),
            (Code::Unauthenticated, 401),
            (Code::PermissionDenied, 403),
            (Code::NotFound, 404),
            (Code::Aborted, 409),
            (Code::ResourceExhausted, 429),
            (Code::Internal, 500),
            (Code::Unimplemented, 501),
            (Code::Unavailable, 503),
        ] {
            assert_eq!(http_code(&Status::new(code, "")).as_u16(), expected, "{code:?}");
        }
    }
}
