//! [`CallerSpan`]: the span of the caller, from the headers of W3C (`traceparent`, `tracestate`) or of B3.
//!
//! The order is that of envoyproxy/ratelimit, which reads W3C first and lets B3 replace it: the header `b3`, then the
//! headers `x-b3-…`, then `traceparent`. Headers that are not valid count as missing, so they never fail a request. The
//! crate `opentelemetry-zipkin` has a propagator for B3 as well, but it depends on an exporter that is not needed here.

use opentelemetry::{
    Context,
    propagation::{Extractor, TextMapPropagator},
    trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState},
};
use opentelemetry_sdk::propagation::TraceContextPropagator;

const SINGLE: &str = "b3";
const TRACE_ID: &str = "x-b3-traceid";
const SPAN_ID: &str = "x-b3-spanid";
const PARENT_SPAN_ID: &str = "x-b3-parentspanid";
const SAMPLED: &str = "x-b3-sampled";
const FLAGS: &str = "x-b3-flags";

/// The span of the caller, as the parent of the span of a decision.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum CallerSpan {
    /// The headers contain no span. The decision can start a trace.
    None,
    /// The headers contain no span, and a header of B3 forbids sampling.
    NotSampled,
    /// The span, with the caller's sampling decision.
    Remote(SpanContext),
}

impl CallerSpan {
    /// Reads the headers of a request.
    pub(super) fn read(headers: &dyn Extractor) -> Self {
        if let Some(span) = read_single(headers).or_else(|| read_multiple(headers)) {
            return Self::Remote(span);
        }
        let context = TraceContextPropagator::new().extract_with_context(&Context::new(), headers);
        if context.has_active_span() {
            return Self::Remote(context.span().span_context().clone());
        }
        if is_denied(headers) {
            return Self::NotSampled;
        }
        Self::None
    }

    /// Returns the context in which the span of the decision starts, or `None` if it must not start.
    pub(super) fn context(self) -> Option<Context> {
        match self {
            Self::None => Some(Context::new()),
            Self::NotSampled => None,
            Self::Remote(span) => Some(Context::new().with_remote_span_context(span)),
        }
    }
}

/// Reads the header `b3: {trace ID}-{span ID}-{sampling state}-{parent span ID}`. The last two fields are optional.
fn read_single(headers: &dyn Extractor) -> Option<SpanContext> {
    let mut fields = headers.get(SINGLE)?.splitn(5, '-');
    let trace_id = parse_trace_id(fields.next()?)?;
    let span_id = parse_span_id(fields.next()?)?;
    // Without a sampling state, envoyproxy/ratelimit does not record the trace either.
    let is_sampled = match fields.next() {
        None | Some("0") => false,
        Some("1" | "d") => true,
        Some(_) => return None,
    };
    if let Some(parent) = fields.next() {
        parse_span_id(parent)?;
    }
    if fields.next().is_some() {
        return None;
    }
    Some(span_context(trace_id, span_id, is_sampled))
}

/// Reads the headers `x-b3-traceid`, `x-b3-spanid`, `x-b3-sampled`, `x-b3-flags` and `x-b3-parentspanid`.
fn read_multiple(headers: &dyn Extractor) -> Option<SpanContext> {
    let trace_id = parse_trace_id(headers.get(TRACE_ID)?)?;
    let span_id = parse_span_id(headers.get(SPAN_ID)?)?;
    let is_sampled = match headers.get(SAMPLED) {
        None | Some("") => false,
        Some(text) => parse_sampled(text)?,
    };
    if let Some(parent) = headers.get(PARENT_SPAN_ID).filter(|text| !text.is_empty()) {
        parse_span_id(parent)?;
    }
    Some(span_context(trace_id, span_id, is_sampled || is_debug(headers)))
}

/// Returns whether headers of B3 without a span forbid sampling.
fn is_denied(headers: &dyn Extractor) -> bool {
    if headers.get(SINGLE) == Some("0") {
        return true;
    }
    let has_span = headers.get(TRACE_ID).is_some() || headers.get(SPAN_ID).is_some();
    let is_sampled = headers.get(SAMPLED).and_then(parse_sampled);
    !has_span && is_sampled == Some(false) && !is_debug(headers)
}

fn is_debug(headers: &dyn Extractor) -> bool {
    headers.get(FLAGS) == Some("1")
}

fn span_context(trace_id: TraceId, span_id: SpanId, is_sampled: bool) -> SpanContext {
    let flags = if is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    SpanContext::new(trace_id, span_id, flags, true, TraceState::default())
}

fn parse_sampled(text: &str) -> Option<bool> {
    if text == "1" || text.eq_ignore_ascii_case("true") {
        return Some(true);
    }
    if text == "0" || text.eq_ignore_ascii_case("false") {
        return Some(false);
    }
    None
}

/// Parses a trace ID in hexadecimal digits: of 128 bits, or of 64 bits, which become the lower ones.
fn parse_trace_id(text: &str) -> Option<TraceId> {
    if !matches!(text.len(), 16 | 32) {
        return None;
    }
    parse_hex(text).map(TraceId::from)
}

fn parse_span_id(text: &str) -> Option<SpanId> {
    if text.len() != 16 {
        return None;
    }
    let id = u64::try_from(parse_hex(text)?).ok()?;
    Some(SpanId::from(id))
}

/// Parses a hexadecimal number in lower case. Returns `None` for 0 and for other texts.
fn parse_hex(text: &str) -> Option<u128> {
    if !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    u128::from_str_radix(text, 16).ok().filter(|id| *id != 0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const LONG_ID: &str = "0af7651916cd43dd8448eb211c80319c";
    const SHORT_ID: &str = "8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";
    const W3C: &str = "00-11111111111111111111111111111111-2222222222222222-01";

    fn read(headers: &[(&str, &str)]) -> CallerSpan {
        let headers: HashMap<String, String> =
            headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        CallerSpan::read(&headers)
    }

    fn remote(trace_id: &str, is_sampled: bool) -> CallerSpan {
        CallerSpan::Remote(span_context(
            TraceId::from_hex(trace_id).unwrap(),
            SpanId::from_hex(SPAN).unwrap(),
            is_sampled,
        ))
    }

    #[test]
    fn the_single_header_contains_the_span_and_the_sampling_decision() {
        for (rest, is_sampled) in
            [("", false), ("-0", false), ("-1", true), ("-d", true), ("-1-00000000000000aa", true)]
        {
            assert_eq!(read(&[(SINGLE, &format!("{LONG_ID}-{SPAN}{rest}"))]), remote(LONG_ID, is_sampled), "{rest}");
            assert_eq!(read(&[(SINGLE, &format!("{SHORT_ID}-{SPAN}{rest}"))]), remote(SHORT_ID, is_sampled), "{rest}");
        }
    }

    #[test]
    fn multiple_headers_contain_the_span_and_the_sampling_decision() {
        for (more, is_sampled) in [
            (&[][..], false),
            (&[(SAMPLED, "0")], false),
            (&[(SAMPLED, "false")], false),
            (&[(SAMPLED, "")], false),
            (&[(SAMPLED, "1")], true),
            (&[(SAMPLED, "True")], true),
            (&[(FLAGS, "1")], true),
            (&[(FLAGS, "1"), (SAMPLED, "0")], true),
            (&[(FLAGS, "0"), (SAMPLED, "0")], false),
            (&[(SAMPLED, "1"), (PARENT_SPAN_ID, "00000000000000aa")], true),
        ] {
            for id in [LONG_ID, SHORT_ID] {
                let headers = [&[(TRACE_ID, id), (SPAN_ID, SPAN)], more].concat();
                assert_eq!(read(&headers), remote(id, is_sampled), "{headers:?}");
            }
        }
    }

    #[test]
    fn b3_replaces_the_headers_of_w3c_and_a_single_header_the_others() {
        let single = format!("{LONG_ID}-{SPAN}-1");
        let multiple = [(TRACE_ID, SHORT_ID), (SPAN_ID, SPAN), (SAMPLED, "1")];
        let w3c = [("traceparent", W3C)];
        let all = [&[(SINGLE, single.as_str())], &multiple[..], &w3c].concat();
        assert_eq!(read(&all), remote(LONG_ID, true));
        assert_eq!(read(&all[1..]), remote(SHORT_ID, true));
        let CallerSpan::Remote(span) = read(&w3c) else { panic!("no span") };
        assert_eq!(span.trace_id(), TraceId::from_hex(&W3C[3..35]).unwrap());
        assert!(span.is_sampled() && span.is_remote());
    }

    #[test]
    fn headers_that_are_not_valid_count_as_missing() {
        let without_state = format!("{LONG_ID}-{SPAN}-");
        let upper_case = format!("{}-{SPAN}-1", LONG_ID.to_uppercase());
        let with_parent_only = format!("{LONG_ID}-{SPAN}-{SPAN}");
        let too_long = format!("{LONG_ID}-{SPAN}-1-{SPAN}-1");
        let many = "-".repeat(8_000);
        for value in [
            "",
            "-",
            "1",
            "d",
            "x",
            LONG_ID,
            "0000000000000000-b7ad6b7169203331-1",
            "0af7651916cd43dd8448eb211c80319c-0000000000000000-1",
            "0af7651916cd43dd8448eb211c80319c-b7ad6b716920333-1",
            "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-2",
            "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1-x",
            "+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1",
            "0af7651916cd43dd8448eb211c8031é-b7ad6b7169203331-1",
            &without_state,
            &upper_case,
            &with_parent_only,
            &too_long,
            &many,
        ] {
            assert_eq!(read(&[(SINGLE, value)]), CallerSpan::None, "{value:?}");
            let with_others = [(SINGLE, value), (TRACE_ID, SHORT_ID), (SPAN_ID, SPAN), (SAMPLED, "1")];
            assert_eq!(read(&with_others), remote(SHORT_ID, true), "{value:?}");
        }
        for headers in [
            &[(TRACE_ID, LONG_ID)][..],
            &[(SPAN_ID, SPAN)],
            &[(TRACE_ID, LONG_ID), (SPAN_ID, "")],
            &[(TRACE_ID, "x"), (SPAN_ID, SPAN)],
            &[(TRACE_ID, LONG_ID), (SPAN_ID, SPAN), (SAMPLED, "2")],
            &[(TRACE_ID, LONG_ID), (SPAN_ID, SPAN), (PARENT_SPAN_ID, "2")],
            &[(SAMPLED, "1")],
            &[(FLAGS, "1")],
            &[("traceparent", "00-x")],
        ] {
            assert_eq!(read(headers), CallerSpan::None, "{headers:?}");
        }
    }

    #[test]
    fn a_decision_against_a_trace_needs_no_span() {
        for headers in [&[(SINGLE, "0")][..], &[(SAMPLED, "0")], &[(SAMPLED, "false")]] {
            assert_eq!(read(headers), CallerSpan::NotSampled, "{headers:?}");
            assert!(read(headers).context().is_none());
            // As in envoyproxy/ratelimit, only a B3 header with a span replaces `traceparent`.
            let with_w3c = [headers, &[("traceparent", W3C)]].concat();
            assert!(matches!(read(&with_w3c), CallerSpan::Remote(_)), "{headers:?}");
        }
        assert_eq!(read(&[(SAMPLED, "0"), (FLAGS, "1")]), CallerSpan::None);
        assert_eq!(read(&[(SAMPLED, "0"), (TRACE_ID, "x")]), CallerSpan::None);
    }
}
