//! Decodes a [`Verdict`] from `sluicegate.v1`, without intermediate messages.

use std::time::Duration;

use sluicegate_proto::{envoy::service::ratelimit::v3::rate_limit_response::rate_limit, sluicegate::v1};
use sluicegate_wire::{Fields, Malformed, Value};

use super::{DecidedBy, Denial, GrantOffer, Limit, Status, Verdict};

impl Verdict {
    /// Decodes a `sluicegate.v1.Verdict`: `allowed`, `statuses`, `response_headers_to_add`, `denial`.
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
                (4, value) => verdict.denial = Some(Box::new(Denial::read(value.message()?)?)),
                _ => {}
            }
        }
        if !headers.is_empty() {
            verdict.headers = headers.into();
        }
        Ok(verdict)
    }
}

impl Denial {
    /// Decodes a `sluicegate.v1.Denial`: `status`, `message`.
    fn read(fields: Fields<'_>) -> Result<Self, Malformed> {
        let mut denial = Self::default();
        for field in fields {
            match field? {
                (1, value) => denial.status = u16::try_from(value.number()?).ok().filter(|status| *status > 0),
                (2, value) => denial.message = value.text()?.to_owned(),
                _ => {}
            }
        }
        Ok(denial)
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

/// Number of the field `others`.
const OTHERS: u32 = 14;

impl Status {
    /// Decodes a `sluicegate.v1.Status`: `allowed`, `limit`, `remaining`, `reset_us`, `retry_after_us`, `delay_us`,
    /// `soft`, `decider`, `denial_counts`, `grant`, `shed`, `elastic`, `override_kind`, `others`.
    ///
    /// A status in `others` has no `others` of its own.
    fn read(&mut self, fields: Fields<'_>) -> Result<(), Malformed> {
        for field in fields {
            let (number, value) = field?;
            if number == OTHERS {
                self.others.push(Self::read_other(value.message()?)?);
            } else {
                self.read_field(number, value)?;
            }
        }
        Ok(())
    }

    fn read_field(&mut self, number: u32, value: Value<'_>) -> Result<(), Malformed> {
        match number {
            1 => self.allowed = value.number()? != 0,
            2 => self.limit = Some(Limit::read(value.message()?)?),
            3 => self.remaining = value.number()?,
            4 => self.reset = Some(Duration::from_micros(value.number()?)),
            5 => self.retry_after = Some(Duration::from_micros(value.number()?)),
            6 => self.delay = Duration::from_micros(value.number()?),
            7 => self.soft = value.number()? != 0,
            8 => self.fallback = value.number()? == v1::Decider::Fallback as u64,
            9 => self.denial_counts = value.number()? != 0,
            10 => self.grant = Some(GrantOffer::read(value.message()?)?),
            11 => self.shed = value.number()? != 0,
            12 => self.elastic = value.number()? != 0,
            13 => self.overridden = value.number()? != v1::OverrideKind::None as u64,
            _ => {}
        }
        Ok(())
    }

    /// Decodes a status of the field `others`. Ignores the `others` in it, so that a hostile message cannot nest them.
    fn read_other(fields: Fields<'_>) -> Result<Self, Malformed> {
        let mut status = Self::default();
        for field in fields {
            let (number, value) = field?;
            if number != OTHERS {
                status.read_field(number, value)?;
            }
        }
        Ok(status)
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
