//! `/json`: decides a request in proto3 JSON.

use std::{
    borrow::Cow,
    sync::{Arc, LazyLock},
};

use axum::{
    body::Bytes,
    extract::State,
    http::{
        HeaderMap, HeaderName, HeaderValue, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use serde_json::json;
use sluicegate_proto::FILE_DESCRIPTOR_SET;

use super::{
    Handlers,
    json_text::{bytes_of, has_too_many_values, repair},
};
use crate::{
    engine::{
        Code, Verdict,
        headers::{MAX_COST, waits},
    },
    service::DecisionError,
    transport::{
        ResponseSettings,
        decisions::{decode, each_header, encode},
        errors::RequestError,
        texts,
    },
};

const MALFORMED: &str = "the body is not a valid RateLimitRequest in JSON";

/// The descriptors of the messages that are read and written as JSON.
struct Messages {
    request: MessageDescriptor,
    response: MessageDescriptor,
}

/// The descriptors of the messages. Never `None`, because the descriptor set is embedded in the program.
static MESSAGES: LazyLock<Option<Messages>> = LazyLock::new(|| {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).ok()?;
    let request = pool.get_message_by_name("envoy.service.ratelimit.v3.RateLimitRequest")?;
    let response = pool.get_message_by_name("envoy.service.ratelimit.v3.RateLimitResponse")?;
    Some(Messages { request, response })
});

/// Handles a request to `/json`.
///
/// The status is 200 if the request is allowed, 429 if it is denied, 503 if it is shed, 400 if it is invalid, and 500
/// if there is no decision. A rule can have another status for its denials. A caller that accepts problem descriptions
/// receives one in place of the message of a denial.
pub(super) async fn check(State(handlers): State<Arc<Handlers>>, headers: HeaderMap, body: Bytes) -> Response {
    let message = match transcode(&body) {
        Ok(message) => message,
        Err(error) => {
            // The error can quote values, which the log does not contain.
            handlers.errors.record(&RequestError::malformed(MALFORMED));
            return error_response(StatusCode::BAD_REQUEST, &error);
        }
    };
    drop(body);
    let request = match decode(&message, &handlers.limits) {
        Ok(request) => request,
        Err(error) => return reject(&handlers, &error),
    };
    let verdict = match handlers.decisions.decide(&request).await {
        Ok(verdict) => verdict,
        Err(error) => {
            handlers.errors.record(&error.into());
            return error_response(code(&error), &crate::metrics::chain(&error));
        }
    };
    let mut code = match verdict.overall {
        Code::Ok => StatusCode::OK,
        Code::OverLimit if verdict.is_shed() => StatusCode::SERVICE_UNAVAILABLE,
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
    };
    let denial = verdict.denial_response();
    if let Some(status) = denial.as_ref().and_then(|denial| denial.status)
        && let Ok(status) = StatusCode::from_u16(status)
    {
        code = status;
    }
    let mut response = Vec::new();
    encode(&verdict, &message, &handlers.response, &mut response);
    let Some(text) = to_json(&response) else {
        return error_response(StatusCode::INTERNAL_SERVER_ERROR, "cannot write the response as JSON");
    };
    let mut response = (code, [(CONTENT_TYPE, "application/json")], text).into_response();
    if verdict.is_denied() && accepts_problem(&headers) {
        let message = denial.as_ref().map(|denial| denial.message.as_str()).unwrap_or_default();
        response = (code, [(CONTENT_TYPE, PROBLEM)], problem(&verdict, code, message)).into_response();
    }
    add_headers(&verdict, &handlers.response, response.headers_mut());
    if let Some(denial) = denial {
        for (name, value) in denial.headers {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                response.headers_mut().insert(name, value);
            }
        }
    }
    response
}

/// The media type of a problem description (RFC 9457).
const PROBLEM: &str = "application/problem+json";

/// Returns whether a request names the media type of problem descriptions. `*/*` does not, because envoyproxy/ratelimit
/// has none.
fn accepts_problem(headers: &HeaderMap) -> bool {
    for value in headers.get_all(ACCEPT) {
        let ranges = value.to_str().unwrap_or_default();
        for range in ranges.split(',') {
            let media_type = range.split(';').next().unwrap_or_default();
            if media_type.trim().eq_ignore_ascii_case(PROBLEM) {
                return true;
            }
        }
    }
    false
}

/// Returns the problem description of a denied request, with a type of draft-ietf-httpapi-ratelimit-headers. `message` is
/// that of the rule, which may be empty.
fn problem(verdict: &Verdict, code: StatusCode, message: &str) -> String {
    let (kind, title) = if verdict.is_shed() {
        ("temporary-reduced-capacity", "Overloaded")
    } else {
        ("quota-exceeded", "Too many requests")
    };
    let detail = match verdict.retry_after() {
        _ if !message.is_empty() => message.to_owned(),
        Some(wait) => format!("Retry in {} s.", wait.ceil_secs().max(1)),
        None => "A request of this cost will not be allowed.".to_owned(),
    };
    let problem = json!({
        "type": format!("https://iana.org/assignments/http-problem-types#{kind}"),
        "title": title,
        "status": code.as_u16(),
        "detail": detail,
    });
    format!("{problem}\n")
}

/// Adds the headers about the limits, if they are enabled. Otherwise adds only `Retry-After` to shed requests, and the
/// largest cost that fits to requests that cost more.
///
/// Denials by envoyproxy/ratelimit have no `Retry-After`. Without the largest cost, the time in the status would make
/// the caller repeat a request that never fits.
fn add_headers(verdict: &Verdict, settings: &ResponseSettings, headers: &mut HeaderMap) {
    let mut add = |name: &str, value: &str| {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            headers.insert(name, value);
        }
    };
    if settings.headers {
        return each_header(verdict, settings, add);
    }
    for (name, value) in waits(verdict) {
        if name == MAX_COST || verdict.is_shed() {
            add(settings.header_name(name), &value);
        }
    }
}

/// Counts the error of a caller, and returns the response to it.
fn reject(handlers: &Handlers, error: &RequestError) -> Response {
    handlers.errors.record(error);
    error_response(StatusCode::BAD_REQUEST, &error.message)
}

fn code(error: &DecisionError) -> StatusCode {
    match error {
        DecisionError::NoDomain | DecisionError::NoDescriptors => StatusCode::BAD_REQUEST,
        DecisionError::Undecided(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn error_response(code: StatusCode, message: &str) -> Response {
    (code, format!("{message}\n")).into_response()
}

/// Converts a request in JSON to its encoded form. Accepts control characters and backslashes that JSON does not allow in
/// a text, and escapes bytes that are not UTF-8 ([`texts::text_of`]).
fn transcode(body: &[u8]) -> Result<Vec<u8>, String> {
    if has_too_many_values(body) {
        return Err("the body has more values than any valid request".into());
    }
    let error = match read(body) {
        Ok(message) => return texts::readable(&message).map(Cow::into_owned).map_err(|error| error.to_string()),
        Err(error) => error,
    };
    let Ok(message) = read(repair(body).as_bytes()) else {
        // The error about the caller's own text has the right position.
        return Err(error);
    };
    texts::rewritten(&message, &original_text).map_err(|error| error.to_string())
}

/// Returns the text that stands for the original bytes of a text that [`repair`] has changed.
fn original_text(repaired: &[u8]) -> String {
    texts::text_of(&bytes_of(repaired)).into_owned()
}

fn read(body: &[u8]) -> Result<Vec<u8>, String> {
    let Some(messages) = &*MESSAGES else {
        return Err("JSON is not available".into());
    };
    let mut json = serde_json::Deserializer::from_slice(body);
    let message = DynamicMessage::deserialize(messages.request.clone(), &mut json);
    let message = message.and_then(|message| json.end().map(|()| message));
    let message = message.map_err(|error| format!("{MALFORMED}: {error}"))?;
    Ok(message.encode_to_vec())
}

fn to_json(response: &[u8]) -> Option<String> {
    let messages = MESSAGES.as_ref()?;
    let message = DynamicMessage::decode(messages.response.clone(), response).ok()?;
    serde_json::to_string(&message).ok()
}
