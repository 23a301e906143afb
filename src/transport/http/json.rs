//! `/json`: a decision in proto3 JSON.

use std::sync::{Arc, LazyLock};

use axum::{
    body::Bytes,
    extract::State,
    http::{
        StatusCode,
        header::{CONTENT_TYPE, RETRY_AFTER},
    },
    response::{IntoResponse, Response},
};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use sluicegate_proto::{FILE_DESCRIPTOR_SET, envoy::service::ratelimit::v3::RateLimitResponse};

use super::Handlers;
use crate::{engine::Code, service::CheckError, transport::grpc};

/// The two messages as reflection knows them; `None` cannot be, the descriptor set is part of the program.
static MESSAGES: LazyLock<Option<(MessageDescriptor, MessageDescriptor)>> = LazyLock::new(|| {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).ok()?;
    let message = |name| pool.get_message_by_name(&format!("envoy.service.ratelimit.v3.{name}"));
    Some((message("RateLimitRequest")?, message("RateLimitResponse")?))
});

/// 200 or 429 with the answer, or 503 when it is overload that refuses; 400 for what is not a request, 500 when there is no decision.
pub(super) async fn check(State(handlers): State<Arc<Handlers>>, body: Bytes) -> Response {
    let message = match parse(&body) {
        Ok(message) => message,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, &error),
    };
    let request = match grpc::decode(&message, &handlers.limits) {
        Ok(request) => request,
        Err(refusal) => return refuse(StatusCode::BAD_REQUEST, &refusal.message),
    };
    let verdict = match handlers.check.check(&request).await {
        Ok(verdict) => verdict,
        Err(error) => return refuse(code(&error), &crate::errors::chain(&error)),
    };
    let code = match verdict.overall {
        Code::Ok => StatusCode::OK,
        Code::OverLimit if verdict.is_shed() => StatusCode::SERVICE_UNAVAILABLE,
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
    };
    // The peer's refusals have no such header.
    let wait = verdict.retry_after().filter(|_| verdict.is_shed());
    let wait = wait.map(|wait| [(RETRY_AFTER, wait.ceil_secs().max(1).to_string())]);
    match print(&grpc::encode(&verdict, &message, &handlers.response)) {
        Some(text) => match wait {
            Some(wait) => (code, wait, [(CONTENT_TYPE, "application/json")], text).into_response(),
            None => (code, [(CONTENT_TYPE, "application/json")], text).into_response(),
        },
        None => refuse(StatusCode::INTERNAL_SERVER_ERROR, "the answer cannot be written as JSON"),
    }
}

fn code(error: &CheckError) -> StatusCode {
    match error {
        CheckError::NoDomain | CheckError::NoDescriptors => StatusCode::BAD_REQUEST,
        CheckError::Undecided(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn refuse(code: StatusCode, message: &str) -> Response {
    (code, format!("{message}\n")).into_response()
}

/// The request as gRPC would have it.
fn parse(body: &[u8]) -> Result<Vec<u8>, String> {
    let Some((descriptor, _)) = &*MESSAGES else {
        return Err("the service has no JSON".into());
    };
    let mut json = serde_json::Deserializer::from_slice(body);
    let message = DynamicMessage::deserialize(descriptor.clone(), &mut json);
    let message = message.and_then(|message| json.end().map(|()| message));
    let message = message.map_err(|error| format!("this is not a RateLimitRequest in JSON: {error}"))?;
    Ok(message.encode_to_vec())
}

fn print(answer: &RateLimitResponse) -> Option<String> {
    let (_, descriptor) = MESSAGES.as_ref()?;
    let mut message = DynamicMessage::new(descriptor.clone());
    message.transcode_from(answer).ok()?;
    serde_json::to_string(&message).ok()
}
