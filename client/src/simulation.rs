//! What a client holds, without its network: the service's simulation runs it in virtual time. No part of the API.

use std::time::Duration;

use crate::{
    check_request::{CheckRequest, Descriptor, Feedback},
    grants::{GrantOffer, Grants},
    verdict::{DecidedBy, Status, Verdict},
};

/// The grants of one client.
pub struct Holder(Grants);

/// What is said of a descriptor: hits that are wanted, and of which grant how many were spent.
pub type Told = (u64, Option<(u64, u64)>);

/// What is granted: hits, for how long, under which number.
pub type Granted = (u64, Duration, u64);

impl Default for Holder {
    fn default() -> Self {
        Self(Grants::new(true))
    }
}

impl Holder {
    /// Whether a check of these descriptors needs no call.
    #[must_use]
    pub fn spend(&self, keys: &[&str], hits: u32, now: Duration) -> bool {
        let ask = ask(keys, hits);
        self.0.spend(&ask, &ask.identities().collect(), now).is_some()
    }

    /// What to say with the call, for each descriptor; or nothing.
    #[must_use]
    pub fn tell(&self, keys: &[&str], hits: u32, now: Duration) -> Vec<Told> {
        let number = |(id, spent): (std::sync::Arc<str>, u64)| Some((id.parse().ok()?, spent));
        let holds = self.0.holds(&ask(keys, hits), now);
        holds.into_iter().map(|hold| (hold.demand, hold.reports.and_then(number))).collect()
    }

    /// The answer to a call with which that was told, and which was sent then.
    pub fn keep(&self, keys: &[&str], told: &[Told], granted: &[Option<Granted>], sent: Duration) {
        let offer = |(hits, life, id): Granted| GrantOffer { hits, ttl: life, id: id.to_string().into() };
        let status = |granted: &Option<Granted>| Status { grant: granted.map(offer), ..Status::default() };
        let statuses = granted.iter().map(status).collect();
        let holds = told.iter().map(|(wants, _)| Feedback { demand: *wants, ..Feedback::default() }).collect();
        self.0.keep(
            &CheckRequest { holds, ..ask(keys, 1) },
            &Verdict { statuses, ..Verdict::empty(true, DecidedBy::Server) },
            sent,
        );
    }

    /// What to say of the rest at the end: of which descriptor, of which grant, how many were spent.
    #[must_use]
    pub fn end(&self, now: Duration) -> Vec<(String, u64, u64)> {
        let rest = self.0.take_all(now).into_iter().filter_map(|rest| {
            let (key, _) = rest.descriptor.entries().next()?;
            let (id, spent) = rest.hold.reports?;
            Some((key.to_owned(), id.parse().ok()?, spent))
        });
        rest.collect()
    }
}

fn ask<'a>(keys: &[&'a str], hits: u32) -> CheckRequest<'a> {
    let descriptors = keys.iter().map(|key| Descriptor::new().entry(*key, "x")).collect();
    CheckRequest { domain: "d".into(), descriptors, hits, traceparent: None, holds: Vec::new() }
}
