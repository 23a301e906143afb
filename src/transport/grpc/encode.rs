//! Encodes the engine's verdict as Envoy's `RateLimitResponse`.

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

/// Builds the response. `request` is the encoded request, which the dynamic metadata contains.
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
            // Absent for one unit, as in the responses of envoyproxy/ratelimit.
            unit_multiplier: (multiplier != 1).then_some(multiplier),
        }
    });
    // Envoy truncates to whole seconds. They are rounded up here, because Envoy would otherwise show 0.
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

/// Encodes a grant as a quota. The protocol requires a wall clock time for the end of a quota. Its TTL is in the call's
/// metadata.
#[allow(clippy::disallowed_methods, reason = "the end of a quota is a wall clock time")]
fn encode_grant(grant: Grant) -> Quota {
    let end = SystemTime::now() + Duration::from_micros(grant.ttl.get());
    let until = ExpirationSpecifier::ValidUntil(end.into());
    Quota { requests: grant.hits.get(), expiration_specifier: Some(until), id: grant.id.to_string() }
}

/// Returns the unit and its multiplier. The protocol has no unit for requests in flight.
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

/// Builds the dynamic metadata: the request and the rules' metadata, as with `RESPONSE_DYNAMIC_METADATA` of
/// envoyproxy/ratelimit, and the exact numbers of every status.
fn dynamic_metadata(verdict: &Verdict, request: &[u8]) -> Struct {
    // The request was decoded successfully before.
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
    // A top-level field, because Envoy's `local_reply_config` cannot match values in a list.
    if verdict.is_shed() {
        fields.push(("sluicegate.shed", boolean(true)));
    }
    fields.push(("sluicegate.statuses", list(verdict.statuses.iter().map(exact_status))));
    Struct { fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect() }
}

/// Encodes the exact numbers of a status, with times in microseconds. Values that do not apply are omitted.
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
    let flags = [("soft", status.soft), ("elastic", status.elastic), ("shed", status.shed && status.is_over())];
    fields.extend(flags.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| (name, boolean(true))));
    fields.extend(status.override_kind.map(|kind| ("override", text(kind.name().to_owned()))));
    map(fields)
}

fn encode_metadata(metadata: &Metadata) -> Value {
    match metadata {
        Metadata::Null => Value { kind: Some(Kind::NullValue(0)) },
        Metadata::Bool(flag) => boolean(*flag),
        Metadata::Number(value) => number(*value),
        Metadata::Text(value) => text(value.clone()),
        Metadata::List(values) => list(values.iter().map(encode_metadata)),
        Metadata::Map(fields) => map(fields.iter().map(|(name, value)| (name.as_str(), encode_metadata(value)))),
    }
}

fn text(text: String) -> Value {
    Value { kind: Some(Kind::StringValue(text)) }
}

fn boolean(flag: bool) -> Value {
    Value { kind: Some(Kind::BoolValue(flag)) }
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
    #[allow(clippy::disallowed_methods, reason = "the end of a quota is a wall clock time")]
    fn a_quota_ends_at_the_same_time_as_its_grant() {
        let grant = Grant { hits: NonZeroU32::MIN, ttl: Micros::from_secs(60), id: 7 };
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64;
        let Quota { requests: 1, expiration_specifier: Some(ExpirationSpecifier::ValidUntil(end)), id } =
            encode_grant(grant)
        else {
            panic!("expected a quota of one request");
        };
        assert_eq!(id, "7");
        assert!((60..=61).contains(&(end.seconds - since_epoch)), "{end} {since_epoch}");
    }
}
