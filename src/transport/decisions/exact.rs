//! Encodes the engine's verdict as a `CheckResponse` of `sluicegate.v1`, with exact numbers.

use sluicegate_proto::sluicegate::v1;
use sluicegate_wire::Writer;

use super::{ResponseSettings, encode::unit, headers};
use crate::{
    engine::{Code, CurrentLimit, Decider, Grant, Micros, OverrideKind, Status, Verdict, overrides::Mode},
    transport::errors::RequestError,
};

/// Appends one of the `responses` of a `ResponseFrame`: `id`, and `verdict` or `error`.
pub(in crate::transport) fn encode(
    id: u64,
    outcome: &Result<Verdict, RequestError>,
    settings: &ResponseSettings,
    responses: &mut Vec<u8>,
) {
    Writer(responses).message(1, |response| {
        response.number(1, id);
        match outcome {
            Ok(verdict) => response.message(2, |message| encode_verdict(verdict, settings, message)),
            Err(error) => response.message(3, |message| {
                message.number(1, error.code as u64);
                message.text(2, &error.message);
            }),
        }
    });
}

fn encode_verdict(verdict: &Verdict, settings: &ResponseSettings, message: &mut Writer<'_>) {
    message.number(1, u64::from(verdict.overall == Code::Ok));
    for status in &verdict.statuses {
        message.message(2, |message| encode_status(status, message));
    }
    headers::encode(verdict, settings, message);
    if let Some(denial) = verdict.denial_response() {
        headers::encode_denial(&denial, message);
        message.message(4, |message| {
            message.number(1, denial.status.unwrap_or_default().into());
            message.text(2, &denial.message);
        });
    }
}

fn encode_status(status: &Status, message: &mut Writer<'_>) {
    message.number(1, u64::from(!status.is_over()));
    if let Some(limit) = &status.limit {
        message.message(2, |message| encode_limit(limit, message));
    }
    message.number(3, status.remaining);
    message.optional(4, status.reset.map(Micros::get));
    if status.is_over() {
        message.optional(5, status.retry_after.map(Micros::get));
    }
    message.number(6, status.delay.get());
    message.number(7, status.soft.into());
    let decider = match status.decider {
        Decider::Store | Decider::DenyCache | Decider::Lease | Decider::Eventual => v1::Decider::Store,
        Decider::Fallback => v1::Decider::Fallback,
    };
    message.number(8, decider as u64);
    message.number(9, status.denial_counts.into());
    if let Some(Grant { hits, ttl, id }) = status.grant {
        message.message(10, |message| {
            message.number(1, hits.get().into());
            message.number(2, ttl.get());
            message.text(3, &id.to_string());
        });
    }
    message.number(11, (status.shed && status.is_over()).into());
    message.number(12, status.elastic.into());
    if let Some(kind) = status.override_kind {
        message.number(13, encode_override_kind(kind) as u64);
    }
    for other in &status.others {
        message.message(14, |message| encode_status(other, message));
    }
}

fn encode_override_kind(kind: OverrideKind) -> v1::OverrideKind {
    match kind {
        OverrideKind::Limit => v1::OverrideKind::Limit,
        OverrideKind::Switch(Mode::Off) => v1::OverrideKind::Off,
        OverrideKind::Switch(Mode::Shadow) => v1::OverrideKind::Shadow,
        OverrideKind::Switch(Mode::Enforce) => v1::OverrideKind::Enforce,
        OverrideKind::Switch(Mode::Deny) => v1::OverrideKind::Deny,
    }
}

fn encode_limit(limit: &CurrentLimit, message: &mut Writer<'_>) {
    let (unit, multiplier) = unit(limit.measure);
    message.number(1, limit.requests.min(u32::MAX.into()));
    message.number(2, unit as u64);
    message.number(3, if multiplier == 1 { 0 } else { multiplier.into() });
    message.text(4, limit.name.as_deref().unwrap_or_default());
    message.number(5, if limit.requests > u32::MAX.into() { limit.requests } else { 0 });
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use prost::Message;
    use sluicegate_proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit;

    use super::*;
    use crate::rules::{Measure, Unit};

    /// Encodes an outcome twice under different ids, and decodes it with prost.
    fn round_trip(outcome: &Result<Verdict, RequestError>, settings: &ResponseSettings) -> v1::check_response::Outcome {
        let mut frame = Vec::new();
        encode(0, outcome, settings, &mut frame);
        encode(300, outcome, settings, &mut frame);
        let read = v1::ResponseFrame::decode(&frame[..]).unwrap();
        assert_eq!(read.encode_to_vec(), frame);
        let [first, second] = read.responses.try_into().unwrap();
        assert_eq!((first.id, second.id, &first.outcome), (0, 300, &second.outcome));
        first.outcome.unwrap()
    }

    fn verdict(overall: Code, statuses: Vec<Status>) -> Result<Verdict, RequestError> {
        Ok(Verdict { overall, statuses: statuses.into(), metadata: None })
    }

    fn limit(unit: Unit, multiplier: u32) -> CurrentLimit {
        let (quota, window) = (5, Micros::from_secs(60));
        let measure = Measure::Rate { unit, multiplier };
        CurrentLimit { requests: 5, measure, name: None, policy: None, quota, window }
    }

    #[test]
    fn a_verdict_has_all_fields_of_its_statuses() {
        let named = CurrentLimit { name: Some("few".into()), ..limit(Unit::Week, 3) };
        let allowed = Status {
            limit: Some(named),
            remaining: 7,
            reset: Some(Micros::ZERO),
            retry_after: Some(Micros::new(9)),
            delay: Micros::new(1_000_000),
            soft: true,
            elastic: true,
            shed: true,
            decider: Decider::Fallback,
            denial_counts: true,
            grant: Some(Grant { hits: NonZeroU32::MIN, ttl: Micros::new(70_000), id: u64::MAX }),
            ..Status::NO_LIMIT
        };
        let denied = Status {
            code: Code::OverLimit,
            limit: Some(limit(Unit::Minute, 1)),
            retry_after: Some(Micros::new(1 << 40)),
            shed: true,
            override_kind: Some(OverrideKind::Switch(Mode::Deny)),
            ..Status::NO_LIMIT
        };
        let outcome = verdict(Code::OverLimit, vec![allowed, denied, Status::UNLIMITED]);
        let exact_limit = v1::Limit { requests_per_unit: 5, ..v1::Limit::default() };
        let expected = vec![
            v1::Status {
                allowed: true,
                limit: Some(v1::Limit {
                    unit: rate_limit::Unit::Week.into(),
                    unit_multiplier: 3,
                    name: "few".into(),
                    ..exact_limit.clone()
                }),
                remaining: 7,
                reset_us: Some(0),
                delay_us: 1_000_000,
                soft: true,
                elastic: true,
                decider: v1::Decider::Fallback.into(),
                denial_counts: true,
                grant: Some(v1::Grant { hits: 1, ttl_us: 70_000, id: u64::MAX.to_string() }),
                ..v1::Status::default()
            },
            v1::Status {
                limit: Some(v1::Limit { unit: rate_limit::Unit::Minute.into(), ..exact_limit }),
                retry_after_us: Some(1 << 40),
                shed: true,
                override_kind: v1::OverrideKind::Deny.into(),
                ..v1::Status::default()
            },
            v1::Status { allowed: true, remaining: u32::MAX.into(), ..v1::Status::default() },
        ];
        let expected = v1::Verdict { statuses: expected, ..v1::Verdict::default() };
        let decoded = round_trip(&outcome, &ResponseSettings::default());
        assert_eq!(decoded, v1::check_response::Outcome::Verdict(expected.clone()));
        let decoded = round_trip(&outcome, &ResponseSettings { headers: true, ..ResponseSettings::default() });
        let v1::check_response::Outcome::Verdict(decoded) = decoded else { panic!("{decoded:?}") };
        let header = v1::Header { name: "RateLimit-Limit".into(), value: "5".into() };
        assert_eq!(decoded.response_headers_to_add.first(), Some(&header));
        assert_eq!(decoded.statuses, expected.statuses);
    }

    #[test]
    fn an_error_is_encoded_with_its_code_and_message() {
        let error = v1::Error { code: 3, message: "no".into() };
        let decoded = round_trip(&Err(RequestError::invalid("no")), &ResponseSettings::default());
        assert_eq!(decoded, v1::check_response::Outcome::Error(error));
        let allowed = v1::Verdict { allowed: true, ..v1::Verdict::default() };
        let decoded = round_trip(&verdict(Code::Ok, Vec::new()), &ResponseSettings::default());
        assert_eq!(decoded, v1::check_response::Outcome::Verdict(allowed));
    }
}
