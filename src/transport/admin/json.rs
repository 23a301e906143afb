//! The admin API as JSON: `POST /v1/METHOD` with the messages of the gRPC methods in proto3 JSON. A method that streams
//! responds with server-sent events.

use std::{
    convert::Infallible,
    sync::{Arc, LazyLock},
};

use axum::{
    body::Bytes,
    extract::{Extension, Path, State},
    http::{
        HeaderName, StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE},
    },
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::StreamExt;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, MethodDescriptor, ServiceDescriptor};
use sluicegate_proto::{FILE_DESCRIPTOR_SET, sluicegate::admin::v1::admin_service_server::AdminService};
use tonic::{Code, Request, Status};

use super::{
    auth::{Caller, Role},
    service::Service,
};

/// The methods for callers without a token, with the role `public` in their comments.
const PUBLIC_METHODS: [&str; 6] =
    ["ListRules", "GetHealth", "GetSession", "WatchActivity", "ListRuleActivity", "ReadDescriptors"];

/// The descriptor of the service. Never `None`, because the descriptor set is embedded in the program.
pub(super) static SERVICE: LazyLock<Option<ServiceDescriptor>> = LazyLock::new(|| {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).ok()?;
    pool.get_service_by_name("sluicegate.admin.v1.AdminService")
});

pub(super) async fn call(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    body: Bytes,
) -> Response {
    let answer = match read_call(caller, &name, &body) {
        Ok((method, call)) if method.is_server_streaming() => stream(&service, call, &method).await,
        Ok((method, call)) => {
            let text = dispatch(&service, call, &method).await;
            text.map(|text| ([(CONTENT_TYPE, "application/json")], text).into_response())
        }
        Err(status) => Err(status),
    };
    let mut response = answer.unwrap_or_else(|status| error_response(http_code(&status), &status));
    response.headers_mut().insert(CACHE_CONTROL, http::HeaderValue::from_static("no-store"));
    response
}

/// Reads the message of a call and checks the roles `public` and `read`. Methods that require the role `operate` check it
/// themselves.
fn read_call(caller: Caller, name: &str, body: &[u8]) -> Result<(MethodDescriptor, JsonCall), Status> {
    let method = SERVICE.as_ref().and_then(|service| service.methods().find(|method| method.name() == name));
    let method =
        method.ok_or_else(|| Status::not_found(format!("unknown method {name:?}; /openapi.json lists the methods")))?;
    if caller.role < Role::Read && !PUBLIC_METHODS.contains(&name) {
        return Err(Status::permission_denied(
            "this method requires a token with the role read or operate (authorization: Bearer TOKEN), or the setting \
             console.entities",
        ));
    }
    let body = if body.is_empty() { b"{}" } else { body };
    let mut json = serde_json::Deserializer::from_slice(body);
    let message = DynamicMessage::deserialize(method.input(), &mut json);
    let message = message.and_then(|message| json.end().map(|()| message));
    let message = message.map_err(|error| {
        Status::invalid_argument(format!("the body is not a valid {} in JSON: {error}", method.input().name()))
    })?;
    Ok((method, JsonCall { bytes: message.encode_to_vec(), caller }))
}

async fn dispatch(service: &Service, call: JsonCall, method: &MethodDescriptor) -> Result<String, Status> {
    let bytes = match method.name() {
        "PutOverrides" => write(service.put_overrides(call.read()?).await)?,
        "ListOverrides" => write(service.list_overrides(call.read()?).await)?,
        "ListAuditLog" => write(service.list_audit_log(call.read()?).await)?,
        "Inspect" => write(service.inspect(call.read()?).await)?,
        "ResetCounter" => write(service.reset_counter(call.read()?).await)?,
        "Refund" => write(service.refund(call.read()?).await)?,
        "ListRules" => write(service.list_rules(call.read()?).await)?,
        "ListTopEntities" => write(service.list_top_entities(call.read()?).await)?,
        "GetHealth" => write(service.get_health(call.read()?).await)?,
        "UploadCandidate" => write(service.upload_candidate(call.read()?).await)?,
        "DropCandidate" => write(service.drop_candidate(call.read()?).await)?,
        "GetCandidate" => write(service.get_candidate(call.read()?).await)?,
        "PromoteCandidate" => write(service.promote_candidate(call.read()?).await)?,
        "RollbackRules" => write(service.rollback_rules(call.read()?).await)?,
        "GetSession" => write(service.get_session(call.read()?).await)?,
        "ListRuleActivity" => write(service.list_rule_activity(call.read()?).await)?,
        "GetRuleUsage" => write(service.get_rule_usage(call.read()?).await)?,
        "ReadDescriptors" => write(service.read_descriptors(call.read()?).await)?,
        "Simulate" => write(service.simulate(call.read()?).await)?,
        name => return Err(Status::unimplemented(format!("the method {name} is not available as JSON"))),
    };
    to_json(method.output(), &bytes)
}

/// Responds with an event for each message.
async fn stream(service: &Service, call: JsonCall, method: &MethodDescriptor) -> Result<Response, Status> {
    let updates = service.watch_activity(call.read()?).await?.into_inner();
    let output = method.output();
    let events = updates.map(move |update| {
        let text = update.and_then(|message| to_json(output.clone(), &message.encode_to_vec()));
        Ok::<_, Infallible>(match text {
            Ok(text) => Event::default().data(text),
            Err(status) => Event::default().event("error").data(status.message()),
        })
    });
    // nginx must forward each event immediately, and buffers by default.
    let unbuffered = [(HeaderName::from_static("x-accel-buffering"), "no")];
    Ok((unbuffered, Sse::new(events).keep_alive(KeepAlive::default())).into_response())
}

fn to_json(output: MessageDescriptor, bytes: &[u8]) -> Result<String, Status> {
    let response = DynamicMessage::decode(output, bytes).map_err(|error| Status::internal(error.to_string()))?;
    serde_json::to_string(&response).map_err(|error| Status::internal(error.to_string()))
}

/// A call of a method: the encoded message, and the caller.
struct JsonCall {
    bytes: Vec<u8>,
    caller: Caller,
}

impl JsonCall {
    fn read<T: Message + Default>(self) -> Result<Request<T>, Status> {
        let message = T::decode(&self.bytes[..]).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let mut request = Request::new(message);
        request.extensions_mut().insert(self.caller);
        Ok(request)
    }
}

fn write<T: Message>(response: Result<tonic::Response<T>, Status>) -> Result<Vec<u8>, Status> {
    Ok(response?.into_inner().encode_to_vec())
}

/// Returns an error response: `{"code": "ABORTED", "message": "…"}`.
pub(super) fn error_response(code: StatusCode, status: &Status) -> Response {
    let body = serde_json::json!({ "code": code_name(status.code()), "message": status.message() });
    (code, [(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn http_code(status: &Status) -> StatusCode {
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
    fn the_comments_of_public_methods_name_the_role() {
        let service = SERVICE.as_ref().unwrap();
        let says_so = |method: &MethodDescriptor| {
            super::super::openapi::comment(&method.parent_file(), method.path()).contains("role `public`")
        };
        let public: Vec<_> = service.methods().filter(says_so).map(|method| method.name().to_owned()).collect();
        assert_eq!(public, PUBLIC_METHODS);
    }

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
