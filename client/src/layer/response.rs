//! Responses to denied requests, rate limit headers, and [`LimitedBody`].

use std::{
    fmt::Write,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use prost::Message;
use sluicegate_wire::response_headers;
use tonic::Code;

use crate::{DecidedBy, Denial, Descriptor, Verdict, verdict::retry_after_seconds};

/// Response body of a rate-limited service: the body of the inner service, or the reason of a denial.
///
/// A slot that was acquired for the request is held until the body ends or is dropped.
pub struct LimitedBody<R>(BodyKind<R>);

enum BodyKind<R> {
    Inner(Pin<Box<R>>, Option<Guard>),
    Text(Bytes),
}

/// Permit, slot or other guard that is dropped when a body ends.
type Guard = Box<dyn Send + Sync>;

impl<R> LimitedBody<R> {
    pub(super) fn new(body: R) -> Self {
        Self(BodyKind::Inner(Box::pin(body), None))
    }

    /// Wraps a body and drops `guard` when the body ends.
    pub(super) fn with_guard(body: R, guard: impl Send + Sync + 'static) -> Self {
        Self(BodyKind::Inner(Box::pin(body), Some(Box::new(guard))))
    }
}

impl<R> Default for LimitedBody<R> {
    fn default() -> Self {
        Self(BodyKind::Text(Bytes::new()))
    }
}

impl<R: Body<Data = Bytes>> Body for LimitedBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        match &mut self.get_mut().0 {
            BodyKind::Inner(body, guard) => {
                let frame = body.as_mut().poll_frame(context);
                // A body that has been read to its end may be dropped much later.
                if matches!(frame, Poll::Ready(None | Some(Err(_)))) || body.is_end_stream() {
                    guard.take();
                }
                frame
            }
            BodyKind::Text(text) if text.is_empty() => Poll::Ready(None),
            BodyKind::Text(text) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(text))))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            BodyKind::Inner(body, _) => body.is_end_stream(),
            BodyKind::Text(text) => text.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            BodyKind::Inner(body, _) => body.size_hint(),
            BodyKind::Text(text) => SizeHint::with_exact(text.len() as u64),
        }
    }
}

pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// Parses a `grpc-timeout` header: up to eight digits and a unit.
pub(super) fn grpc_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3_600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Retry-after if the rate limit service is unavailable. How long an outage lasts is unknown, but most are short.
const FALLBACK_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Reason of a denial, as sent to the caller.
#[derive(Clone, Copy)]
pub(super) struct DenialReason {
    status: StatusCode,
    code: Code,
    /// Problem type of draft-ietf-httpapi-ratelimit-headers-11.
    problem_type: &'static str,
    title: &'static str,
}

impl DenialReason {
    pub(super) const QUOTA_EXCEEDED: Self = Self {
        status: StatusCode::TOO_MANY_REQUESTS,
        code: Code::ResourceExhausted,
        problem_type: "quota-exceeded",
        title: "Too many requests",
    };
    pub(super) const OVERLOADED: Self = Self {
        status: StatusCode::SERVICE_UNAVAILABLE,
        code: Code::Unavailable,
        problem_type: "temporary-reduced-capacity",
        title: "Overloaded",
    };
    pub(super) const SERVICE_UNAVAILABLE: Self = Self { title: "Rate limit service unavailable", ..Self::OVERLOADED };

    /// Builds the response to a denied request in its protocol, HTTP or gRPC. `violated` are the quoted names of the
    /// violated policies, separated by commas.
    pub(super) fn response<R>(
        self,
        grpc: bool,
        retry_after: Option<Duration>,
        violated: &str,
    ) -> Response<LimitedBody<R>> {
        let mut response =
            if grpc { grpc_response(self, retry_after) } else { http_response(self, retry_after, violated) };
        if !grpc && let Some(retry_after) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, retry_after_seconds(retry_after).into());
        }
        response
    }
}

/// Builds the response to a request that `verdict` denies, with its rate limit headers.
pub(super) fn denied_response<R>(
    verdict: &Verdict,
    descriptors: &[Descriptor<'_>],
    grpc: bool,
) -> Response<LimitedBody<R>> {
    let (reason, retry_after) = match verdict.decided_by() {
        DecidedBy::Fallback => (DenialReason::SERVICE_UNAVAILABLE, Some(FALLBACK_RETRY_AFTER)),
        _ if verdict.shed() => (DenialReason::OVERLOADED, verdict.retry_after()),
        _ => (DenialReason::QUOTA_EXCEEDED, verdict.retry_after()),
    };
    let mut violated = String::new();
    for (index, status) in verdict.statuses().iter().enumerate() {
        if status.allowed {
            continue;
        }
        if !violated.is_empty() {
            violated.push(',');
        }
        response_headers::append_quoted(&mut violated, &verdict.limit_name(index, descriptors));
    }
    let mut response = reason.response(grpc, retry_after, &violated);
    let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
    add_headers(response.headers_mut(), verdict, descriptors);
    match verdict.denial() {
        Some(denial) if !grpc => apply_denial(&mut response, denial, content_type),
        // The type of a message is not that of a gRPC response.
        _ => set_content_type(&mut response, content_type),
    }
    response
}

/// Gives the response the status and the message of the rule that denies the request. Without a message, the body stays
/// the problem description, and `content_type` is its type.
fn apply_denial<R>(response: &mut Response<LimitedBody<R>>, denial: &Denial, content_type: Option<HeaderValue>) {
    if let Some(status) = denial.status.and_then(|status| StatusCode::from_u16(status).ok()) {
        *response.status_mut() = status;
    }
    if denial.message.is_empty() {
        return set_content_type(response, content_type);
    }
    *response.body_mut() = LimitedBody(BodyKind::Text(denial.message.clone().into()));
}

fn set_content_type<R>(response: &mut Response<LimitedBody<R>>, content_type: Option<HeaderValue>) {
    if let Some(content_type) = content_type {
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    }
}

/// Builds an HTTP response with a problem description (RFC 9457).
fn http_response<R>(reason: DenialReason, retry_after: Option<Duration>, violated: &str) -> Response<LimitedBody<R>> {
    let DenialReason { status, problem_type: kind, title, .. } = reason;
    let mut text = format!(
        "{{\"type\":\"https://iana.org/assignments/http-problem-types#{kind}\",\"title\":\"{title}\",\"status\":{}",
        status.as_u16()
    );
    // Writing to a `String` cannot fail.
    let _ = match retry_after {
        Some(retry_after) => write!(text, ",\"detail\":\"Retry in {} s.\"", retry_after_seconds(retry_after)),
        None => write!(text, ",\"detail\":\"A request of this cost will not be allowed.\""),
    };
    if !violated.is_empty() {
        let _ = write!(text, ",\"violated-policies\":[{violated}]");
    }
    text.push_str("}\n");
    let mut response = Response::new(LimitedBody(BodyKind::Text(text.into())));
    *response.status_mut() = status;
    let content_type = HeaderValue::from_static("application/problem+json");
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

/// The message `google.rpc.Status`, for the details of a gRPC status.
#[derive(Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

/// The message `google.rpc.RetryInfo`.
#[derive(Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<prost_types::Duration>,
}

/// Builds a gRPC response with a `RetryInfo`.
fn grpc_response<R>(reason: DenialReason, retry_after: Option<Duration>) -> Response<LimitedBody<R>> {
    let code = reason.code;
    let message = reason.title.to_lowercase();
    let retry_delay = retry_after.and_then(|time| prost_types::Duration::try_from(time).ok());
    let details = retry_delay.map(|delay| prost_types::Any {
        type_url: "type.googleapis.com/google.rpc.RetryInfo".into(),
        value: RetryInfo { retry_delay: Some(delay) }.encode_to_vec(),
    });
    let status = RpcStatus { code: code as i32, message: message.clone(), details: details.into_iter().collect() }
        .encode_to_vec();
    tonic::Status::with_details(code, message, status.into()).into_http()
}

/// Adds the headers that the service sent, or else `RateLimit-Policy` and `RateLimit` of the draft. `descriptors` are
/// those of the check.
pub(super) fn add_headers(headers: &mut HeaderMap, verdict: &Verdict, descriptors: &[Descriptor<'_>]) {
    let computed =
        if verdict.headers.get().is_some() { Vec::new() } else { verdict.compute_rate_limit_headers(descriptors) };
    for (name, value) in verdict.headers.get().unwrap_or(&computed) {
        if let Ok(name) = HeaderName::try_from(name.as_str())
            && let Ok(value) = HeaderValue::try_from(value.as_str())
        {
            headers.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, task::Waker};

    use super::*;
    use crate::Status;

    #[test]
    fn a_grpc_timeout_is_parsed() {
        for (text, time) in [
            ("100m", Some(Duration::from_millis(100))),
            ("2S", Some(Duration::from_secs(2))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3_600))),
            ("7u", Some(Duration::from_micros(7))),
            ("7n", Some(Duration::from_nanos(7))),
            ("1M", Some(Duration::from_secs(60))),
            ("123456789m", None),
            ("m", None),
            ("", None),
            ("5", None),
            ("5ä", None),
            ("-5m", None),
        ] {
            assert_eq!(grpc_timeout(text), time, "{text}");
        }
    }

    #[test]
    fn a_guard_is_dropped_with_the_last_frame() {
        let text: LimitedBody<axum::body::Body> = LimitedBody(BodyKind::Text("denied".into()));
        let guard = Arc::new(());
        let mut body = LimitedBody::with_guard(text, Arc::clone(&guard));
        assert_eq!((body.is_end_stream(), body.size_hint().exact(), Arc::strong_count(&guard)), (false, Some(6), 2));
        let frame = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(frame, Poll::Ready(Some(Ok(_)))));
        assert_eq!((body.is_end_stream(), body.size_hint().exact(), Arc::strong_count(&guard)), (true, Some(0), 1));
    }

    #[test]
    fn a_denial_has_the_status_and_the_message_of_its_rule() {
        let response = |message: &str, grpc| {
            let denial = Denial { status: Some(402), message: message.to_owned() };
            let headers =
                vec![("content-type".to_owned(), "text/plain".to_owned()), ("x-upgrade".to_owned(), "yes".to_owned())];
            let verdict = Verdict {
                denial: Some(Box::new(denial)),
                headers: headers.into(),
                ..Verdict::empty(false, DecidedBy::Server)
            };
            let response = denied_response::<axum::body::Body>(&verdict, &[], grpc);
            let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
            assert_eq!(response.headers()["x-upgrade"], "yes");
            let body = match &response.body().0 {
                BodyKind::Text(text) => String::from_utf8_lossy(text).into_owned(),
                BodyKind::Inner(..) => String::new(),
            };
            (response.status().as_u16(), kind, body)
        };
        assert_eq!(response("pay", false), (402, "text/plain".to_owned(), "pay".to_owned()));
        let (status, kind, body) = response("", false);
        assert_eq!((status, kind.as_str()), (402, "application/problem+json"));
        assert!(body.contains("quota-exceeded"));
        let (status, kind, _) = response("pay", true);
        assert_eq!((status, kind.as_str()), (200, "application/grpc"));
    }

    #[test]
    fn the_cause_of_a_denial_determines_the_status() {
        let status = |by, shed| {
            let statuses = [Status { shed, ..Status::default() }].into_iter().collect();
            let verdict = Verdict { statuses, ..Verdict::empty(false, by) };
            denied_response::<axum::body::Body>(&verdict, &[], false).status().as_u16()
        };
        assert_eq!((status(DecidedBy::Server, false), status(DecidedBy::Server, true)), (429, 503));
        assert_eq!(status(DecidedBy::Fallback, false), 503);
    }
}
