//! Between the protocol's messages and the engine's types. What the protocol allows and the engine cannot use ends
//! here, with a sentence.

use prost_types::{ListValue, Struct, Value, value::Kind};
use sluicegate_proto::envoy::{
    config::core::v3::HeaderValue,
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::RateLimitOverride},
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit},
    },
    r#type::v3::RateLimitUnit,
};

use super::{Limits, Refusal, ResponseSettings};
use crate::{
    engine::{self, Descriptor, Request, Status, Verdict},
    rules::{Entry, Limit, Metadata, Unit},
};

/// The request as the engine reads it, borrowed from the message.
pub(crate) fn decode<'m>(message: &'m RateLimitRequest, limits: &Limits) -> Result<Request<'m>, Refusal> {
    if message.descriptors.len() > limits.max_descriptors {
        let (many, max) = (message.descriptors.len(), limits.max_descriptors);
        return Err(Refusal::invalid(format!("{many} descriptors are more than the {max} a request may have")));
    }
    check_text("domain", &message.domain, limits)?;
    let request_hits = u64::from(message.hits_addend.max(1));
    let descriptors = message.descriptors.iter().map(|descriptor| decode_descriptor(descriptor, request_hits, limits));
    Ok(Request { domain: &message.domain, descriptors: descriptors.collect::<Result<_, _>>()? })
}

fn decode_descriptor<'m>(
    message: &'m RateLimitDescriptor,
    request_hits: u64,
    limits: &Limits,
) -> Result<Descriptor<'m>, Refusal> {
    if message.entries.len() > limits.max_entries {
        let (many, max) = (message.entries.len(), limits.max_entries);
        return Err(Refusal::invalid(format!("{many} entries are more than the {max} a descriptor may have")));
    }
    for entry in &message.entries {
        check_text("key", &entry.key, limits)?;
        check_text("value", &entry.value, limits)?;
    }
    let entries = message.entries.iter().map(|entry| Entry { key: &entry.key, value: &entry.value });
    Ok(Descriptor {
        entries: entries.collect(),
        hits: message.hits_addend.unwrap_or(request_hits),
        give_back: message.is_negative_hits,
        limit: message.limit.as_ref().map(decode_limit).transpose()?,
    })
}

fn check_text(what: &str, text: &str, limits: &Limits) -> Result<(), Refusal> {
    let (len, max) = (text.len(), limits.max_text_bytes);
    if len > max {
        return Err(Refusal::invalid(format!("a {what} of {len} bytes is longer than the {max} it may have")));
    }
    Ok(())
}

fn decode_limit(message: &RateLimitOverride) -> Result<Limit, Refusal> {
    let unit = match RateLimitUnit::try_from(message.unit) {
        Ok(RateLimitUnit::Second) => Unit::Second,
        Ok(RateLimitUnit::Minute) => Unit::Minute,
        Ok(RateLimitUnit::Hour) => Unit::Hour,
        Ok(RateLimitUnit::Day) => Unit::Day,
        Ok(RateLimitUnit::Month) => Unit::Month,
        Ok(RateLimitUnit::Year) => Unit::Year,
        Ok(RateLimitUnit::Unknown) | Err(_) => {
            return Err(Refusal::invalid("a descriptor's limit needs a unit from SECOND to YEAR"));
        }
    };
    let limit = Limit::new(message.requests_per_unit, unit, message.unit_multiplier.unwrap_or(1));
    limit.map_err(|error| Refusal::invalid(format!("a descriptor's limit cannot be counted: {error}")))
}

/// The answer as a message. `request` is what was asked, for those who want it back in the metadata.
pub(crate) fn encode(verdict: &Verdict, request: &RateLimitRequest, settings: &ResponseSettings) -> RateLimitResponse {
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
    let limit = status.limit.as_ref().map(|limit| RateLimit {
        requests_per_unit: limit.requests_per_unit,
        unit: unit(limit.unit).into(),
        name: limit.name.as_deref().unwrap_or_default().to_owned(),
        // Absent for one unit, as the peer's answers are.
        unit_multiplier: (limit.unit_multiplier != 1).then_some(limit.unit_multiplier),
    });
    // Envoy shows whole seconds and cuts the rest off: round up, or it would show 0.
    let reset = status
        .reset
        .map(|reset| prost_types::Duration { seconds: i64::try_from(reset.ceil_secs()).unwrap_or(i64::MAX), nanos: 0 });
    DescriptorStatus {
        code: code(status.code).into(),
        current_limit: limit,
        limit_remaining: status.remaining,
        duration_until_reset: reset,
        quota: None,
    }
}

fn unit(unit: Unit) -> rate_limit::Unit {
    match unit {
        Unit::Second => rate_limit::Unit::Second,
        Unit::Minute => rate_limit::Unit::Minute,
        Unit::Hour => rate_limit::Unit::Hour,
        Unit::Day => rate_limit::Unit::Day,
        Unit::Week => rate_limit::Unit::Week,
        Unit::Month => rate_limit::Unit::Month,
        Unit::Year => rate_limit::Unit::Year,
    }
}

fn headers(verdict: &Verdict, settings: &ResponseSettings) -> Vec<HeaderValue> {
    let Some(binding) = verdict.binding() else {
        return Vec::new();
    };
    let header = |name: &str, value: u64| HeaderValue {
        key: name.to_owned(),
        value: value.to_string(),
        ..HeaderValue::default()
    };
    vec![
        header(&settings.limit_header, binding.limit.into()),
        header(&settings.remaining_header, binding.remaining.into()),
        header(&settings.reset_header, binding.reset_seconds),
    ]
}

/// What was asked, and what the rules have to say: the peer's `RESPONSE_DYNAMIC_METADATA`.
fn dynamic_metadata(verdict: &Verdict, request: &RateLimitRequest) -> Struct {
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
    Struct { fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect() }
}

fn encode_metadata(metadata: &Metadata) -> Value {
    match metadata {
        Metadata::Null => Value { kind: Some(Kind::NullValue(0)) },
        Metadata::Bool(truth) => Value { kind: Some(Kind::BoolValue(*truth)) },
        Metadata::Number(value) => number(*value),
        Metadata::Text(value) => text(value.clone()),
        Metadata::List(values) => list(values.iter().map(encode_metadata)),
        Metadata::Map(fields) => map(fields.iter().map(|(name, value)| (name.as_str(), encode_metadata(value)))),
    }
}

fn text(text: String) -> Value {
    Value { kind: Some(Kind::StringValue(text)) }
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
