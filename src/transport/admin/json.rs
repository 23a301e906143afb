//! The same methods as JSON: `POST /v1/METHOD`, the messages in proto3 JSON.

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

/// The service as reflection knows it; `None` cannot be, the descriptor set is part of the program.
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
    match answer(&service, caller, &name, &body).await {
        Ok(text) => ([(CONTENT_TYPE, "application/json")], text).into_response(),
        Err(status) => refuse(code(&status), &status),
    }
}

async fn answer(service: &Service, caller: Caller, name: &str, body: &[u8]) -> Result<String, Status> {
    let method = SERVICE.as_ref().and_then(|service| service.methods().find(|method| method.name() == name));
    let method =
        method.ok_or_else(|| Status::not_found(format!("there is no method {name:?}; /openapi.json lists them")))?;
    let body = if body.is_empty() { b"{}" } else { body };
    let mut json = serde_json::Deserializer::from_slice(body);
    let message = DynamicMessage::deserialize(method.input(), &mut json);
    let message = message.and_then(|message| json.end().map(|()| message));
    let message = message.map_err(|error| {
        Status::invalid_argument(format!("this is not a {} in JSON: {error}", method.input().name()))
    })?;
    let asked = Asked { bytes: message.encode_to_vec(), caller };
    let bytes = match name {
        "PutOverrides" => write(service.put_overrides(asked.read()?).await)?,
        "ListOverrides" => write(service.list_overrides(asked.read()?).await)?,
        "ListAuditLog" => write(service.list_audit_log(asked.read()?).await)?,
        "Inspect" => write(service.inspect(asked.read()?).await)?,
        "Forget" => write(service.reset_counter(asked.read()?).await)?,
        "GiveBack" => write(service.refund(asked.read()?).await)?,
        "ListRules" => write(service.list_rules(asked.read()?).await)?,
        "ListTopEntities" => write(service.list_top_entities(asked.read()?).await)?,
        "GetHealth" => write(service.get_health(asked.read()?).await)?,
        "UploadCandidate" => write(service.upload_candidate(asked.read()?).await)?,
        "DropCandidate" => write(service.drop_candidate(asked.read()?).await)?,
        "GetCandidate" => write(service.get_candidate(asked.read()?).await)?,
        "PromoteCandidate" => write(service.promote_candidate(asked.read()?).await)?,
        "RollbackRules" => write(service.rollback_rules(asked.read()?).await)?,
        _ => return Err(Status::unimplemented(format!("{name} is not there in JSON"))),
    };
    let answer =
        DynamicMessage::decode(method.output(), &bytes[..]).map_err(|error| Status::internal(error.to_string()))?;
    serde_json::to_string(&answer).map_err(|error| Status::internal(error.to_string()))
}

/// A call in the making.
struct Asked {
    bytes: Vec<u8>,
    caller: Caller,
}

impl Asked {
    fn read<T: Message + Default>(self) -> Result<Request<T>, Status> {
        let message = T::decode(&self.bytes[..]).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let mut request = Request::new(message);
        request.extensions_mut().insert(self.caller);
        Ok(request)
    }
}

fn write<T: Message>(answer: Result<tonic::Response<T>, Status>) -> Result<Vec<u8>, Status> {
    Ok(answer?.into_inner().encode_to_vec())
}

/// `{"code": "ABORTED", "message": "…"}`.
pub(super) fn refuse(code: StatusCode, status: &Status) -> Response {
    let body = serde_json::json!({ "code": name(status.code()), "message": status.message() });
    (code, [(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn code(status: &Status) -> StatusCode {
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

/// As the protocol writes them: `INVALID_ARGUMENT`.
fn name(code: Code) -> String {
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
    fn codes_have_the_protocols_names() {
        assert_eq!(name(Code::InvalidArgument), "INVALID_ARGUMENT");
        assert_eq!(name(Code::Aborted), "ABORTED");
    }
}
