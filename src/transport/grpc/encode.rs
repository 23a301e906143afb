//! From the engine's verdict to Envoy's answer.

use std::time::{Duration, SystemTime};

use prost::Message;
use prost_types::{ListValue, Struct, Value, value::Kind};
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::RateLimitDescriptor,
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::{Code, DescriptorStatus, Quota, RateLimit, quota::ExpirationSpecifier, rate_limit},
    },
    r#type::v3::RateLimitUnit,
};

use super::{ResponseSettings, headers::headers};
use crate::{
    engine::{self, Grant, Status, Verdict},
    rules::{Measure, Metadata, Unit},
};

/// The answer as a message. `request` is the message that was asked, for those who want it back in the metadata.
pub(crate) fn encode(verdict: &Verdict, request: &[u8], settings: &ResponseSettings) -> RateLimitResponse {
    let headers = if settings.headers { headers(verdict, settings) } else { Vec::new() };
    RateLimitResponse {
        overall_code: code(verdict.overall).into(),
        statuses: verdict.statuses.iter().map(encode_status).collect(),
        response_headers_to_add: headers,
        dynamic_metadata: settings.dynamic_metadata.then(|| dynamic_metadata(verdict, request)),
        ..RateLimitResponse::default()
    }
}

fn code(code: engine::Code) -> Code {
    match code {
        engine::Code::Ok => Code::Ok,
        engine::Code::OverLimit => Code::OverLimit,
    }
}

fn encode_status(status: &Status) -> DescriptorStatus {
    let limit = status.limit.as_ref().map(|limit| {
        let (unit, multiplier) = unit(limit.measure);
        RateLimit {
            requests_per_unit: limit.requests,
            unit: unit.into(),
            name: limit.name.as_deref().unwrap_or_default().to_owned(),
            // Absent for one unit, as the peer's answers are.
            unit_multiplier: (multiplier != 1).then_some(multiplier),
        }
    });
    // Envoy shows whole seconds and cuts the rest off: they are rounded up, or it would show 0.
    let reset = status
        .reset_seconds()
        .map(|seconds| prost_types::Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 });
    DescriptorStatus {
        code: code(status.code).into(),
        current_limit: limit,
        limit_remaining: status.remaining,
        duration_until_reset: reset,
        quota: status.grant.map(encode_grant),
    }
}

/// Until when is said by the wall's clock, as the protocol has it; the metadata says for how long.
#[allow(clippy::disallowed_methods, reason = "the end of a quota is a time of the wall's clock")]
fn encode_grant(grant: Grant) -> Quota {
    let end = SystemTime::now() + Duration::from_micros(grant.ttl.get());
    let until = ExpirationSpecifier::ValidUntil(end.into());
    Quota { requests: grant.hits.get(), expiration_specifier: Some(until), id: grant.id.to_string() }
}

/// The unit, and how many of them. The protocol has no word for what is in flight.
pub(super) fn unit(measure: Measure) -> (rate_limit::Unit, u32) {
    let Measure::Rate { unit, multiplier } = measure else {
        return (rate_limit::Unit::Unknown, 1);
    };
    let unit = match unit {
        Unit::Second => rate_limit::Unit::Second,
        Unit::Minute => rate_limit::Unit::Minute,
        Unit::Hour => rate_limit::Unit::Hour,
        Unit::Day => rate_limit::Unit::Day,
        Unit::Week => rate_limit::Unit::Week,
        Unit::Month => rate_limit::Unit::Month,
        Unit::Year => rate_limit::Unit::Year,
    };
    (unit, multiplier)
}

/// What was asked, and what the rules have to say: the peer's `RESPONSE_DYNAMIC_METADATA`. And ours: the exact numbers
/// of every descriptor's answer.
fn dynamic_metadata(verdict: &Verdict, request: &[u8]) -> Struct {
    // It has been read before.
    let request = RateLimitRequest::decode(request).unwrap_or_default();
    let descriptor = |descriptor: &RateLimitDescriptor| {
        let entry =
            |entry: &sluicegate_proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry| {
                text(format!("{}={}", entry.key, entry.value))
            };
        let mut fields = vec![("entries", list(descriptor.entries.iter().map(entry)))];
        if let Some(limit) = &descriptor.limit {
            let unit = RateLimitUnit::try_from(limit.unit).unwrap_or_default().as_str_name();
            fields.push(("limit", text(format!("requests_per_unit:{} unit:{unit}", limit.requests_per_unit))));
        }
        if let Some(hits) = descriptor.hits_addend {
            fields.push(("hitsAddend", number(hits as f64)));
        }
        map(fields)
    };
    let mut fields = vec![
        ("domain", text(request.domain.clone())),
        ("descriptors", list(request.descriptors.iter().map(descriptor))),
    ];
    if request.hits_addend != 0 {
        fields.push(("hitsAddend", number(request.hits_addend.into())));
    }
    if let Some(metadata) = &verdict.metadata {
        fields.push(("metadata", encode_metadata(metadata)));
    }
    // By itself: Envoy's local_reply_config can match a value at the top, and none in a list.
    if verdict.is_shed() {
        fields.push(("sluicegate.shed", boolean(true)));
    }
    fields.push(("sluicegate.statuses", list(verdict.statuses.iter().map(exact_status))));
    Struct { fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect() }
}

/// In microseconds; what does not apply is left out.
fn exact_status(status: &Status) -> Value {
    let mut fields = vec![("allowed", boolean(!status.is_over()))];
    if status.limit.is_some() {
        fields.push(("remaining", number(status.remaining.into())));
    }
    fields.extend(status.reset.map(|reset| ("reset_us", number(reset.get() as f64))));
    let retry_after = status.retry_after.filter(|_| status.is_over());
    fields.extend(retry_after.map(|wait| ("retry_after_us", number(wait.get() as f64))));
    if status.delay.get() > 0 {
        fields.push(("delay_us", number(status.delay.get() as f64)));
    }
    let marks = [("soft", status.soft), ("elastic", status.elastic), ("shed", status.shed && status.is_over())];
    fields.extend(marks.into_iter().filter(|(_, is)| *is).map(|(mark, _)| (mark, boolean(true))));
    fields.extend(status.override_kind.map(|directed| ("override", text(directed.name().to_owned()))));
    map(fields)
}

fn encode_metadata(metadata: &Metadata) -> Value {
    match metadata {
        Metadata::Null => Value { kind: Some(Kind::NullValue(0)) },
        Metadata::Bool(truth) => boolean(*truth),
        Metadata::Number(value) => number(*value),
        Metadata::Text(value) => text(value.clone()),
        Metadata::List(values) => list(values.iter().map(encode_metadata)),
        Metadata::Map(fields) => map(fields.iter().map(|(name, value)| (name.as_str(), encode_metadata(value)))),
    }
}

fn text(text: String) -> Value {
    Value { kind: Some(Kind::StringValue(text)) }
}

fn boolean(truth: bool) -> Value {
    Value { kind: Some(Kind::BoolValue(truth)) }
}

fn number(number: f64) -> Value {
    Value { kind: Some(Kind::NumberValue(number)) }
}

fn list(values: impl Iterator<Item = Value>) -> Value {
    Value { kind: Some(Kind::ListValue(ListValue { values: values.collect() })) }
}

fn map<'n>(fields: impl IntoIterator<Item = (&'n str, Value)>) -> Value {
    let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Value { kind: Some(Kind::StructValue(Struct { fields })) }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::engine::Micros;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the end of a quota is a time of the wall's clock")]
    fn a_quota_ends_when_its_grant_does() {
        let grant = Grant { hits: NonZeroU32::MIN, ttl: Micros::from_secs(60), id: 7 };
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64;
        let Quota { requests: 1, expiration_specifier: Some(ExpirationSpecifier::ValidUntil(end)), id } =
            encode_grant(grant)
        else {
            panic!("one request until then");
        };
        assert_eq!(id, "7");
        assert!((60..=61).contains(&(end.seconds - since_epoch)), "{end} {since_epoch}");
    }
}
