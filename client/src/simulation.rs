//! [`GrantCache`]: a client's grants without network calls, for the service's simulation in virtual time. Not part of
//! the API.

use std::time::Duration;

use smallvec::SmallVec;

use crate::{
    check_request::{CheckRequest, Descriptor, Feedback},
    grants::Grants,
    verdict::{DecidedBy, GrantOffer, Status, Verdict},
};

/// Grants of one client. Each key in the arguments stands for a descriptor with this key as its only entry.
pub struct GrantCache(Grants);

/// Feedback about one descriptor: the demand, and the id and used hits of a finished grant.
pub type GrantFeedback = (u64, Option<(u64, u64)>);

/// Grant: hits, lifetime and id.
pub type Grant = (u64, Duration, u64);

impl Default for GrantCache {
    fn default() -> Self {
        Self(Grants::new(true))
    }
}

impl GrantCache {
    /// Takes `hits` from the grants of each descriptor. Returns `true` if the grants have enough hits, so that the
    /// check needs no call.
    #[must_use]
    pub fn spend(&self, keys: &[&str], hits: u32, now: Duration) -> bool {
        let request = request(keys, hits);
        self.0.spend(&request, &request.identities().collect(), now).is_some()
    }

    /// Returns the feedback about each descriptor to send with a check, or an empty list if there is nothing to report.
    #[must_use]
    pub fn feedback(&self, keys: &[&str], hits: u32, now: Duration) -> Vec<GrantFeedback> {
        let mut all = Vec::new();
        for Feedback { demand, finished_grant, .. } in self.0.feedback(&request(keys, hits), now) {
            let finished_grant = finished_grant.and_then(|(id, used)| Some((id.parse().ok()?, used)));
            all.push((demand, finished_grant));
        }
        all
    }

    /// Stores the grants in the response to a call that was sent at `sent_at` with the given feedback.
    pub fn store(&self, keys: &[&str], feedback: &[GrantFeedback], grants: &[Option<Grant>], sent_at: Duration) {
        let mut statuses = SmallVec::new();
        for grant in grants {
            let grant = grant.map(|(hits, ttl, id)| GrantOffer { hits, ttl, id: id.to_string().into() });
            statuses.push(Status { grant, ..Status::default() });
        }
        let feedback = feedback.iter().map(|(demand, _)| Feedback { demand: *demand, ..Feedback::default() }).collect();
        self.0.store(
            &CheckRequest { feedback, ..request(keys, 1) },
            &Verdict { statuses, ..Verdict::empty(true, DecidedBy::Server) },
            sent_at,
        );
    }

    /// Removes all grants. For each grant with unused hits, returns the key of its descriptor, its id and the number
    /// of used hits.
    #[must_use]
    pub fn return_all(&self, now: Duration) -> Vec<(String, u64, u64)> {
        let unspent = self.0.take_all(now).into_iter().filter_map(|grant| {
            let (key, _) = grant.descriptor.entries().next()?;
            let (id, used) = grant.feedback.finished_grant?;
            Some((key.to_owned(), id.parse().ok()?, used))
        });
        unspent.collect()
    }
}

fn request<'a>(keys: &[&'a str], hits: u32) -> CheckRequest<'a> {
    let descriptors = keys.iter().map(|key| Descriptor::new().entry(*key, "x")).collect();
    CheckRequest { domain: "d".into(), descriptors, hits, traceparent: None, feedback: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grants_are_requested_spent_and_returned() {
        let (grants, now) = (GrantCache::default(), Duration::ZERO);
        assert!(!grants.spend(&["a"], 9, now));
        assert_eq!(grants.feedback(&["a"], 9, now), [(9, None)]);
        grants.store(&["a"], &[(9, None)], &[Some((5, Duration::from_secs(1), 7))], now);
        assert!(grants.spend(&["a"], 2, now));
        assert_eq!(grants.feedback(&["a"], 2, now), [(8, None)], "11 hits less the available 3");
        assert_eq!(grants.return_all(now), [("a".to_owned(), 7, 2)]);
    }
}
