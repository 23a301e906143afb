//! What callers of a limited service are told.

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
use tonic::Code;

use crate::{DecidedBy, Verdict};

/// The body of a limited service's response: its own, or why it was not asked. Slots that were taken for the request are held
/// until it ends.
pub struct LimitedBody<R>(Kind<R>);

enum Kind<R> {
    Inner(Pin<Box<R>>, Option<Held>),
    Text(Bytes),
}

/// What is held until a body ends.
type Held = Box<dyn Send + Sync>;

impl<R> LimitedBody<R> {
    pub(super) fn inner(body: R) -> Self {
        Self(Kind::Inner(Box::pin(body), None))
    }

    pub(super) fn holding(body: R, held: impl Send + Sync + 'static) -> Self {
        Self(Kind::Inner(Box::pin(body), Some(Box::new(held))))
    }
}

impl<R> Default for LimitedBody<R> {
    fn default() -> Self {
        Self(Kind::Text(Bytes::new()))
    }
}

impl<R: Body<Data = Bytes>> Body for LimitedBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        match &mut self.get_mut().0 {
            Kind::Inner(body, held) => {
                let frame = body.as_mut().poll_frame(context);
                // Whoever reads to the end need not drop it for that.
                if matches!(frame, Poll::Ready(None | Some(Err(_)))) || body.is_end_stream() {
                    held.take();
                }
                frame
            }
            Kind::Text(text) if text.is_empty() => Poll::Ready(None),
            Kind::Text(text) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(text))))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Inner(body, _) => body.is_end_stream(),
            Kind::Text(text) => text.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Inner(body, _) => body.size_hint(),
            Kind::Text(text) => SizeHint::with_exact(text.len() as u64),
        }
    }
}

pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// A `grpc-timeout`: up to eight digits and a unit.
pub(super) fn grpc_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
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

/// Nobody knows when the limiter is back: soon, as a rule.
const LIMITER_BACK: Duration = Duration::from_secs(1);

/// Why a request does not pass, as its caller is told.
#[derive(Clone, Copy)]
pub(super) struct Reason {
    status: StatusCode,
    code: Code,
    /// Of draft-ietf-httpapi-ratelimit-headers-11.
    kind: &'static str,
    title: &'static str,
}

impl Reason {
    pub(super) const QUOTA: Self = Self {
        status: StatusCode::TOO_MANY_REQUESTS,
        code: Code::ResourceExhausted,
        kind: "quota-exceeded",
        title: "Too many requests",
    };
    pub(super) const SHED: Self = Self {
        status: StatusCode::SERVICE_UNAVAILABLE,
        code: Code::Unavailable,
        kind: "temporary-reduced-capacity",
        title: "Overloaded",
    };
    pub(super) const NO_LIMITER: Self = Self { title: "The rate limit service is out of reach", ..Self::SHED };

    /// The answer to a request, in its protocol.
    pub(super) fn refuse<R>(self, grpc: bool, wait: Option<Duration>, violated: &str) -> Response<LimitedBody<R>> {
        let mut response = if grpc { refuse_call(self, wait) } else { refuse_request(self, wait, violated) };
        if let Some(wait) = wait.filter(|_| !grpc) {
            // In whole seconds, rounded up: 0 would mean now.
            response.headers_mut().insert(header::RETRY_AFTER, seconds(wait).max(1).into());
        }
        response
    }
}

pub(super) fn refuse<R>(verdict: &Verdict, grpc: bool) -> Response<LimitedBody<R>> {
    let (reason, wait) = match verdict.decided_by() {
        DecidedBy::Fallback => (Reason::NO_LIMITER, Some(LIMITER_BACK)),
        _ if verdict.shed() => (Reason::SHED, verdict.retry_after()),
        _ => (Reason::QUOTA, verdict.retry_after()),
    };
    let names: Vec<_> = verdict.statuses().iter().filter(|status| !status.allowed).map(name).map(quoted).collect();
    let mut response = reason.refuse(grpc, wait, &names.join(","));
    add_headers(response.headers_mut(), verdict);
    response
}

/// In the form of RFC 9457. `violated`: the names of policies, in quotes.
fn refuse_request<R>(reason: Reason, wait: Option<Duration>, violated: &str) -> Response<LimitedBody<R>> {
    let Reason { status, kind, title, .. } = reason;
    let mut text = format!(
        "{{\"type\":\"https://iana.org/assignments/http-problem-types#{kind}\",\"title\":\"{title}\",\"status\":{}",
        status.as_u16()
    );
    // Writing to a text cannot fail.
    let _ = match wait {
        Some(wait) => write!(text, ",\"detail\":\"Come back in {} s.\"", seconds(wait).max(1)),
        None => write!(text, ",\"detail\":\"A request of this size will not pass.\""),
    };
    if !violated.is_empty() {
        let _ = write!(text, ",\"violated-policies\":[{violated}]");
    }
    text.push_str("}\n");
    let mut response = Response::new(LimitedBody(Kind::Text(text.into())));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/problem+json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// `google.rpc.Status`, for the details of a gRPC status.
#[derive(Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

/// `google.rpc.RetryInfo`.
#[derive(Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<prost_types::Duration>,
}

fn refuse_call<R>(reason: Reason, wait: Option<Duration>) -> Response<LimitedBody<R>> {
    let (code, message) = (reason.code, reason.title.to_lowercase());
    let retry = wait.and_then(|wait| prost_types::Duration::try_from(wait).ok());
    let details = retry.map(|delay| prost_types::Any {
        type_url: "type.googleapis.com/google.rpc.RetryInfo".into(),
        value: RetryInfo { retry_delay: Some(delay) }.encode_to_vec(),
    });
    let status = RpcStatus { code: code as i32, message: message.clone(), details: details.into_iter().collect() }
        .encode_to_vec();
    tonic::Status::with_details(code, message, status.into()).into_http()
}

/// Those that the service names, or else the draft's two.
pub(super) fn add_headers(headers: &mut HeaderMap, verdict: &Verdict) {
    for (name, value) in verdict.headers() {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name.as_str()), HeaderValue::try_from(value.as_str())) {
            headers.insert(name, value);
        }
    }
    let Some(tightest) = verdict.tightest().filter(|_| verdict.headers().is_empty()) else {
        return;
    };
    let policies: Vec<_> = verdict.statuses().iter().filter_map(policy).collect();
    let mut limit = format!("{};r={}", quoted(name(tightest)), tightest.remaining);
    if let Some(wait) = tightest.retry_after.or(tightest.reset) {
        let _ = write!(limit, ";t={}", seconds(wait));
    }
    for (name, value) in [("ratelimit-policy", policies.join(", ")), ("ratelimit", limit)] {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

fn policy(status: &crate::Status) -> Option<String> {
    let limit = status.limit.as_ref()?;
    let (name, quota) = (quoted(name(status)), limit.requests_per_unit);
    Some(match limit.window.as_secs() {
        0 => format!("{name};q={quota};qu=\"concurrent-requests\""),
        window => format!("{name};q={quota};w={window}"),
    })
}

fn name(status: &crate::Status) -> &str {
    status.limit.as_ref().and_then(|limit| limit.name.as_deref()).unwrap_or("default")
}

/// As a string of structured fields (RFC 9651), which is one of JSON too: no more than visible ASCII.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            ' '..='~' => out.push(letter),
            _ => out.push('?'),
        }
    }
    out + "\""
}

fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_that_the_caller_has_set_is_read() {
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
    fn names_cannot_break_out_of_their_quotes() {
        assert_eq!(quoted("a\"b\\c\r\nd"), r#""a\"b\\c??d""#);
    }
}
