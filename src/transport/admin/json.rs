//! The admin API as JSON: `POST /v1/METHOD` with the messages of the gRPC methods in proto3 JSON.

use std::sync::{Arc, LazyLock};

use axum::{
    body::Bytes,
    extract::{Extension, Path, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, ServiceDescriptor};
use sluicegate_proto::{FILE_DESCRIPTOR_SET, sluicegate::admin::v1::admin_service_server::AdminService};
use tonic::{Code, Request, Status};

use super::{auth::Caller, service::Service};

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
    match dispatch(&service, caller, &name, &body).await {
        Ok(text) => ([(CONTENT_TYPE, "application/json")], text).into_response(),
        Err(status) => error_response(http_code(&status), &status),
    }
}

async fn dispatch(service: &Service, caller: Caller, name: &str, body: &[u8]) -> Result<String, Status> {
    let method = SERVICE.as_ref().and_then(|service| service.methods().find(|method| method.name() == name));
    let method =
        method.ok_or_else(|| Status::not_found(format!("unknown method {name:?}; /openapi.json lists the methods")))?;
    let body = if body.is_empty() { b"{}" } else { body };
    let mut json = serde_json::Deserializer::from_slice(body);
    let message = DynamicMessage::deserialize(method.input(), &mut json);
    let message = message.and_then(|message| json.end().map(|()| message));
    let message = message.map_err(|error| {
        Status::invalid_argument(format!("the body is not a valid {} in JSON: {error}", method.input().name()))
    })?;
    let call = JsonCall { bytes: message.encode_to_vec(), caller };
    let bytes = match name {
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
        _ => return Err(Status::unimplemented(format!("the method {name} is not available as JSON"))),
    };
    let response =
        DynamicMessage::decode(method.output(), &bytes[..]).map_err(|error| Status::internal(error.to_string()))?;
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
}
