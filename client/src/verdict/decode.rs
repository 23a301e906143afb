//! Decodes a [`Verdict`] from `sluicegate.v1`, without intermediate messages.

use std::time::Duration;

use sluicegate_proto::{envoy::service::ratelimit::v3::rate_limit_response::rate_limit, sluicegate::v1};
use sluicegate_wire::{Fields, Malformed};

use super::{DecidedBy, GrantOffer, Limit, Status, Verdict};

impl Verdict {
    /// Decodes a `sluicegate.v1.Verdict`: `allowed`, `statuses`, `response_headers_to_add`.
    ///
    /// A verdict is large, so it is decoded in place.
    pub(crate) fn read(fields: Fields<'_>) -> Result<Box<Self>, Malformed> {
        let mut verdict = Box::new(Self::empty(false, DecidedBy::Server));
        let mut headers = Vec::new();
        for field in fields {
            match field? {
                (1, value) => verdict.allowed = value.number()? != 0,
                (2, value) => {
                    verdict.statuses.push(Status::default());
                    if let Some(status) = verdict.statuses.last_mut() {
                        status.read(value.message()?)?;
                    }
                }
                (3, value) => headers.push(read_header(value.message()?)?),
                _ => {}
            }
        }
        if !headers.is_empty() {
            verdict.headers = headers.into();
        }
        Ok(verdict)
    }
}

/// Decodes a `sluicegate.v1.Header`: `name`, `value`.
fn read_header(fields: Fields<'_>) -> Result<(String, String), Malformed> {
    let mut header = (String::new(), String::new());
    for field in fields {
        match field? {
            (1, value) => header.0 = value.text()?.to_owned(),
            (2, value) => header.1 = value.text()?.to_owned(),
            _ => {}
        }
    }
    Ok(header)
}

impl Status {
    /// Decodes a `sluicegate.v1.Status`: `allowed`, `limit`, `remaining`, `reset_us`, `retry_after_us`, `delay_us`,
    /// `soft`, `decider`, `denial_counts`, `grant`, `shed`, `elastic`, `override_kind`.
    fn read(&mut self, fields: Fields<'_>) -> Result<(), Malformed> {
        for field in fields {
            match field? {
                (1, value) => self.allowed = value.number()? != 0,
                (2, value) => self.limit = Some(Limit::read(value.message()?)?),
                (3, value) => self.remaining = value.number()?,
                (4, value) => self.reset = Some(Duration::from_micros(value.number()?)),
                (5, value) => self.retry_after = Some(Duration::from_micros(value.number()?)),
                (6, value) => self.delay = Duration::from_micros(value.number()?),
                (7, value) => self.soft = value.number()? != 0,
                (8, value) => self.fallback = value.number()? == v1::Decider::Fallback as u64,
                (9, value) => self.denial_counts = value.number()? != 0,
                (10, value) => self.grant = Some(GrantOffer::read(value.message()?)?),
                (11, value) => self.shed = value.number()? != 0,
                (12, value) => self.elastic = value.number()? != 0,
                (13, value) => self.overridden = value.number()? != v1::OverrideKind::None as u64,
                _ => {}
            }
        }
        Ok(())
    }
}

impl GrantOffer {
    /// Decodes a `sluicegate.v1.Grant`: `hits`, `ttl_us`, `id`.
    fn read(fields: Fields<'_>) -> Result<Self, Malformed> {
        let mut hits = 0;
        let mut ttl = Duration::ZERO;
        let mut id = "";
        for field in fields {
            match field? {
                (1, value) => hits = value.number()?,
                (2, value) => ttl = Duration::from_micros(value.number()?),
                (3, value) => id = value.text()?,
                _ => {}
            }
        }
        Ok(Self { hits, ttl, id: id.into() })
    }
}

impl Limit {
    /// Decodes a `sluicegate.v1.Limit`: `requests_per_unit`, `unit`, `unit_multiplier`, `name`.
    fn read(fields: Fields<'_>) -> Result<Self, Malformed> {
        let mut requests_per_unit = 0;
        let mut unit = 0;
        let mut multiplier = 0;
        let mut name = "";
        for field in fields {
            match field? {
                (1, value) => requests_per_unit = value.number()? as u32,
                (2, value) => unit = value.number()? as i32,
                (3, value) => multiplier = value.number()? as u32,
                (4, value) => name = value.text()?,
                _ => {}
            }
        }
        Ok(Self::new(requests_per_unit, rate_limit::Unit::try_from(unit).unwrap_or_default(), multiplier, name))
    }
}
