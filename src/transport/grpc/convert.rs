//! Between the protocol's messages and the engine's types. What the protocol allows and the engine cannot use ends
//! here, with a sentence.

use prost_types::{ListValue, Struct, Value, value::Kind};
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::RateLimitOverride},
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit},
    },
    r#type::v3::RateLimitUnit,
};
use sluicegate_proto::sluicegate::v1;

use super::{Limits, Refusal, ResponseSettings, headers::headers};
use crate::{
    engine::{self, Decider, Descriptor, Micros, Request, Status, Verdict},
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
    // Envoy shows whole seconds and cuts the rest off: they are rounded up, or it would show 0.
    let reset = status
        .reset_seconds()
        .map(|seconds| prost_types::Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 });
    DescriptorStatus {
        code: code(status.code).into(),
        current_limit: limit,
        limit_remaining: status.remaining,
        duration_until_reset: reset,
        quota: None,
    }
}

/// The same for those who can take exact numbers.
pub(super) fn encode_exact(verdict: &Verdict, settings: &ResponseSettings) -> v1::Verdict {
    let headers = if settings.headers { headers(verdict, settings) } else { Vec::new() };
    v1::Verdict {
        allowed: verdict.overall == engine::Code::Ok,
        statuses: verdict.statuses.iter().map(encode_exact_status).collect(),
        response_headers_to_add: headers
            .into_iter()
            .map(|header| v1::Header { name: header.key, value: header.value })
            .collect(),
    }
}

fn encode_exact_status(status: &Status) -> v1::Status {
    let decider = match status.decider {
        Decider::Store => v1::Decider::Store,
        Decider::Fallback => v1::Decider::Fallback,
    };
    v1::Status {
        allowed: !status.is_over(),
        limit: status.limit.as_ref().map(|limit| v1::Limit {
            requests_per_unit: limit.requests_per_unit,
            unit: unit(limit.unit).into(),
            unit_multiplier: if limit.unit_multiplier == 1 { 0 } else { limit.unit_multiplier },
            name: limit.name.as_deref().unwrap_or_default().to_owned(),
        }),
        remaining: status.remaining.into(),
        reset_us: status.reset.map(Micros::get),
        retry_after_us: status.retry_after.filter(|_| status.is_over()).map(Micros::get),
        delay_us: status.delay.get(),
        soft: status.soft,
        decider: decider.into(),
        refusal_counts: status.refusal_counts,
        grant: None,
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

/// What was asked, and what the rules have to say: the peer's `RESPONSE_DYNAMIC_METADATA`. And ours: the exact numbers
/// of every descriptor's answer.
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
    if status.soft {
        fields.push(("soft", boolean(true)));
    }
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
