//! Encodes the engine's verdict as Envoy's `RateLimitResponse`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;
use prost_types::{ListValue, Struct, Value, value::Kind};
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::RateLimitDescriptor,
    service::ratelimit::v3::{
        RateLimitRequest,
        rate_limit_response::{Code, rate_limit},
    },
    r#type::v3::RateLimitUnit,
};
use sluicegate_wire::Writer;

use super::{ResponseSettings, headers};
use crate::{
    engine::{self, CurrentLimit, Grant, Status, Verdict, bounded},
    rules::{Measure, Metadata, Unit},
};

/// Appends the encoded response. `request` is the encoded request, which the dynamic metadata contains.
pub(in crate::transport) fn encode(
    verdict: &Verdict,
    request: &[u8],
    settings: &ResponseSettings,
    response: &mut Vec<u8>,
) {
    let mut message = Writer(response);
    message.number(1, code(verdict.overall));
    for status in &verdict.statuses {
        message.message(2, |message| encode_status(status, message));
    }
    headers::encode(verdict, settings, &mut message);
    if let Some(denial) = verdict.denial_response() {
        headers::encode_denial(&denial, &mut message);
        message.text(5, &denial.message);
    }
    if settings.dynamic_metadata {
        let metadata = dynamic_metadata(verdict, request);
        message.message(6, |message| metadata.encode_raw(message.0));
    }
}

fn code(code: engine::Code) -> u64 {
    match code {
        engine::Code::Ok => Code::Ok as u64,
        engine::Code::OverLimit => Code::OverLimit as u64,
    }
}

fn encode_status(status: &Status, message: &mut Writer<'_>) {
    message.number(1, code(status.code));
    if let Some(limit) = &status.limit {
        message.message(2, |message| encode_limit(limit, message));
    }
    // Fields of 32 bits.
    message.number(3, status.remaining.min(u32::MAX.into()));
    // Envoy truncates to whole seconds. They are rounded up here, because Envoy would otherwise show 0.
    if let Some(seconds) = status.reset_seconds() {
        message.message(4, |duration| duration.number(1, seconds));
    }
    if let Some(grant) = status.grant {
        message.message(5, |message| encode_grant(grant, message));
    }
}

fn encode_limit(limit: &CurrentLimit, message: &mut Writer<'_>) {
    let (unit, multiplier) = unit(limit.measure);
    message.number(1, limit.requests.min(u32::MAX.into()));
    message.number(2, unit as u64);
    message.text(3, limit.name.as_deref().unwrap_or_default());
    // Absent for one unit, as in the responses of envoyproxy/ratelimit.
    if multiplier != 1 {
        message.message(4, |message| message.number(1, multiplier.into()));
    }
}

/// Encodes a grant as a quota. The protocol requires a wall clock time for the end of a quota. The TTL of the grant is
/// in the metadata of the response.
#[allow(clippy::disallowed_methods, reason = "the end of a quota is a wall clock time")]
fn encode_grant(grant: Grant, message: &mut Writer<'_>) {
    let end = SystemTime::now() + Duration::from_micros(grant.ttl.get());
    let end = end.duration_since(UNIX_EPOCH).unwrap_or_default();
    message.number(1, grant.hits.get().into());
    message.message(2, |timestamp| {
        timestamp.number(1, end.as_secs());
        timestamp.number(2, end.subsec_nanos().into());
    });
    message.text(3, &grant.id.to_string());
}

/// Returns the unit and its multiplier. The protocol has no unit for requests in flight.
pub(in crate::transport) fn unit(measure: Measure) -> (rate_limit::Unit, u32) {
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
    let mut fields = vec![
        ("domain", text(request.domain.clone())),
        ("descriptors", list(request.descriptors.iter().map(encode_descriptor))),
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
    fields.push(("sluicegate.statuses", list(verdict.statuses.iter().map(|status| map(exact_status(status))))));
    Struct { fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect() }
}

fn encode_descriptor(descriptor: &RateLimitDescriptor) -> Value {
    let entries = descriptor.entries.iter().map(|entry| text(format!("{}={}", entry.key, bounded(&entry.value))));
    let mut fields = vec![("entries", list(entries))];
    if let Some(limit) = &descriptor.limit {
        let unit = RateLimitUnit::try_from(limit.unit).unwrap_or_default().as_str_name();
        fields.push(("limit", text(format!("requests_per_unit:{} unit:{unit}", limit.requests_per_unit))));
    }
    if let Some(hits) = descriptor.hits_addend {
        fields.push(("hitsAddend", number(hits as f64)));
    }
    map(fields)
}

/// Encodes the exact numbers of a status, with times in microseconds. Values that do not apply are omitted.
fn exact_status(status: &Status) -> Vec<(&'static str, Value)> {
    let mut fields = vec![("allowed", boolean(!status.is_over()))];
    if status.limit.is_some() {
        fields.push(("remaining", number(status.remaining as f64)));
    }
    if let Some(reset) = status.reset {
        fields.push(("reset_us", number(reset.get() as f64)));
    }
    if status.is_over()
        && let Some(wait) = status.retry_after
    {
        fields.push(("retry_after_us", number(wait.get() as f64)));
    }
    if status.delay.get() > 0 {
        fields.push(("delay_us", number(status.delay.get() as f64)));
    }
    for (name, is_set) in [
        ("soft", status.soft),
        ("elastic", status.elastic),
        ("shed", status.shed && status.is_over()),
        ("never_fits", status.never_fits),
    ] {
        if is_set {
            fields.push((name, boolean(true)));
        }
    }
    if let Some(kind) = status.override_kind {
        fields.push(("override", text(kind.name().to_owned())));
    }
    if !status.others.is_empty() {
        fields.extend(limit_name(status));
        let others = status.others.iter().map(|other| map(exact_status(other).into_iter().chain(limit_name(other))));
        fields.push(("others", list(others)));
    }
    fields
}

/// Returns the field `name` with the name of the limit of a status, if it has one.
fn limit_name(status: &Status) -> Option<(&'static str, Value)> {
    let name = status.limit.as_ref()?.name.as_ref()?;
    Some(("name", text(name.to_string())))
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

    use sluicegate_proto::envoy::{
        config::core::v3::HeaderValue,
        service::ratelimit::v3::{
            RateLimitResponse,
            rate_limit_response::{DescriptorStatus, Quota, RateLimit, quota::ExpirationSpecifier},
        },
    };

    use super::*;
    use crate::engine::Micros;

    fn status(code: engine::Code, unit: Unit, multiplier: u32) -> Status {
        let measure = Measure::Rate { unit, multiplier };
        let window = Micros::from_secs(60);
        let limit = CurrentLimit { requests: 300, measure, name: Some("few".into()), policy: None, quota: 300, window };
        Status { code, limit: Some(limit), remaining: 200, reset: Some(Micros::from_secs(130)), ..Status::NO_LIMIT }
    }

    /// Encodes a response, and decodes it with prost, which must encode it alike.
    fn round_trip(overall: engine::Code, statuses: Vec<Status>, settings: &ResponseSettings) -> RateLimitResponse {
        let verdict = Verdict { overall, statuses: statuses.into(), metadata: None };
        let mut response = Vec::new();
        encode(&verdict, b"\x0a\x01d", settings, &mut response);
        let read = RateLimitResponse::decode(&response[..]).unwrap();
        assert_eq!(read.encode_to_vec(), response);
        read
    }

    #[test]
    fn a_response_has_all_fields_of_its_statuses() {
        let settings = ResponseSettings { headers: false, dynamic_metadata: false, ..ResponseSettings::default() };
        let statuses = vec![
            status(engine::Code::OverLimit, Unit::Week, 3),
            status(engine::Code::Ok, Unit::Second, 1),
            Status::NO_LIMIT,
        ];
        let response = round_trip(engine::Code::OverLimit, statuses, &settings);
        let expected = |code: Code, unit: rate_limit::Unit, unit_multiplier| DescriptorStatus {
            code: code.into(),
            current_limit: Some(RateLimit {
                requests_per_unit: 300,
                unit: unit.into(),
                name: "few".into(),
                unit_multiplier,
            }),
            limit_remaining: 200,
            duration_until_reset: Some(prost_types::Duration { seconds: 130, nanos: 0 }),
            quota: None,
        };
        let statuses = vec![
            expected(Code::OverLimit, rate_limit::Unit::Week, Some(3)),
            expected(Code::Ok, rate_limit::Unit::Second, None),
            DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() },
        ];
        let overall_code = Code::OverLimit.into();
        assert_eq!(response, RateLimitResponse { overall_code, statuses, ..RateLimitResponse::default() });
    }

    #[test]
    fn a_response_has_headers_and_metadata_if_they_are_enabled() {
        let settings = ResponseSettings { headers: true, dynamic_metadata: true, ..ResponseSettings::default() };
        let response = round_trip(engine::Code::Ok, vec![status(engine::Code::Ok, Unit::Hour, 1)], &settings);
        let has = |name: &str, value: &str| {
            let header = |header: &HeaderValue| header.key == name && header.value == value;
            response.response_headers_to_add.iter().any(header)
        };
        assert!(has(&settings.remaining_header, "200"), "{response:?}");
        let metadata = response.dynamic_metadata.unwrap();
        assert_eq!(metadata.fields["domain"], text("d".into()));
        assert!(metadata.fields.contains_key("sluicegate.statuses"));
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the end of a quota is a wall clock time")]
    fn a_quota_ends_at_the_same_time_as_its_grant() {
        let grant = Grant { hits: NonZeroU32::MIN, ttl: Micros::from_secs(60), id: 7 };
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
        let granted = Status { grant: Some(grant), ..Status::NO_LIMIT };
        let response = round_trip(engine::Code::Ok, vec![granted], &ResponseSettings::default());
        let Some(Quota { requests: 1, expiration_specifier: Some(ExpirationSpecifier::ValidUntil(end)), id }) =
            response.statuses[0].quota.clone()
        else {
            panic!("expected a quota of one request");
        };
        assert_eq!(id, "7");
        assert!((60..=61).contains(&(end.seconds - since_epoch)), "{end} {since_epoch}");
        assert!((0..1_000_000_000).contains(&end.nanos));
    }

    #[test]
    fn only_a_denied_descriptor_is_reported_as_shed() {
        let is_shed = |code, shed| {
            let fields = exact_status(&Status { code, shed, ..Status::NO_LIMIT });
            fields.iter().any(|(name, _)| *name == "shed")
        };
        assert!(is_shed(engine::Code::OverLimit, true));
        assert!(!is_shed(engine::Code::OverLimit, false) && !is_shed(engine::Code::Ok, true));
    }
}
