//! Overrides that begin later. Each instance puts them in force at their second, by its own clock and without the store.
//!
//! A replication holds the overrides of the store, where a planned override and the override of its target are separate
//! entries. A snapshot has the overrides in force at one time ([`in_force_at`]): a planned override that has begun
//! replaces that of its target. The replacement is then written to the store ([`Context::beginnings`]): by one instance
//! to Redis, or by each instance to its own journal.

use std::{collections::BTreeMap, time::Duration};

use super::{
    ChangeInfo, ChangeRequest, POLL_INTERVAL,
    change::NewWrite,
    context::{Context, Published, in_force_at},
    format,
};
use crate::{
    engine::{Override, Overrides, overrides::Target},
    store::overrides::MAX_CHANGES,
};

/// Maximum number of planned overrides that begin in one change. Each needs two writes: one sets the override of the
/// target, and one removes the planned override.
const MAX_BEGINNINGS: usize = MAX_CHANGES / 2;

/// The writes that follow from planned overrides that have begun. Each can be repeated.
#[derive(Debug, Default)]
pub(super) struct Beginnings {
    /// Sets the overrides under their own targets.
    pub(super) set: Vec<NewWrite>,
    /// Removes the planned overrides. Must not be executed before `set`.
    pub(super) remove: Vec<NewWrite>,
}

impl Beginnings {
    pub(super) fn is_empty(&self) -> bool {
        self.remove.is_empty()
    }
}

impl Context {
    /// Puts overrides of the store in force, with the planned ones that have begun.
    pub(super) fn publish(&self, stored: &Overrides) {
        let mut published = self.published.lock();
        published.stored = stored.clone();
        self.publish_again(&mut published);
    }

    /// Publishes a snapshot if planned overrides have begun since the last one, or if the clock was set back to a time
    /// before the beginning of some.
    pub(super) fn publish_beginnings(&self) {
        let mut published = self.published.lock();
        if published.stored.due(self.clock.now()).count() != published.begun {
            self.publish_again(&mut published);
        }
    }

    fn publish_again(&self, published: &mut Published) {
        let now = self.clock.now();
        published.begun = published.stored.due(now).count();
        self.in_force.set_overrides(in_force_at(&published.stored, now, self.options));
    }

    /// Returns the time until the next planned override begins, or until the clock must be read again because it may have
    /// been changed.
    pub(super) fn until_next_beginning(&self) -> Duration {
        let now = self.clock.now();
        let Some(next) = self.published.lock().stored.next_beginning(now) else {
            return POLL_INTERVAL;
        };
        let left = Duration::from_micros(next.get().saturating_sub(now.get()));
        left.clamp(Duration::from_millis(1), POLL_INTERVAL)
    }

    /// Returns the writes for planned overrides that have begun, for at most [`MAX_BEGINNINGS`] of them, the earliest
    /// ones. If there are `requests`, only the overrides of their targets are considered.
    pub(super) fn beginnings(&self, stored: &Overrides, requests: Option<&[ChangeRequest]>) -> Beginnings {
        let now = self.clock.now();
        let mut by_target: BTreeMap<&Target, Vec<&Override>> = BTreeMap::new();
        let mut count = 0;
        for planned in stored.due(now) {
            let target = planned.target.begun();
            if requests.is_some_and(|requests| !concern(requests, target)) {
                continue;
            }
            by_target.entry(target).or_default().push(planned);
            count += 1;
            if count == MAX_BEGINNINGS {
                break;
            }
        }
        let mut beginnings = Beginnings::default();
        for (target, planned) in by_target {
            beginnings.remove.extend(planned.iter().map(|planned| NewWrite::removal(planned)));
            if let Some(begun) = planned.last().and_then(|latest| latest.begun()) {
                beginnings.set.extend(self.beginning(stored, target, begun));
            }
        }
        beginnings
    }

    /// Returns the write that sets an override that has begun; `None` if its target has it, or a newer one.
    fn beginning(&self, stored: &Overrides, target: &Target, begun: Override) -> Option<NewWrite> {
        if stored.is_set_after(target, begun.at) {
            return None;
        }
        if let Err(error) = stored.can_put(&begun, self.options) {
            self.note_unreadable(&target.to_string(), &error.to_string());
            return None;
        }
        let mut version = 0;
        if let Some(before) = stored.get(target) {
            if format::write(&before) == format::write(&begun) {
                return None;
            }
            version = before.version;
        }
        Some(NewWrite { target: target.clone(), entry: Some(begun), expected: Some(version) })
    }

    /// Returns author, reason and time of a change that puts planned overrides in force. The overrides keep their own
    /// authors.
    pub(super) fn beginning_info(&self) -> ChangeInfo {
        ChangeInfo { author: "sluicegate".into(), reason: "began as planned".into(), at: self.clock.now().get() }
    }
}

/// Returns whether one of the requests changes `target`, now or later. `target` must not be that of a planned override.
fn concern(requests: &[ChangeRequest], target: &Target) -> bool {
    requests.iter().any(|request| request.target.begun() == target)
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use super::{
        super::{
            ChangeError, OverrideSync,
            testing::{advance, by_alice, exchange, journal, member, member_with},
        },
        *,
    };
    use crate::{algorithm::Micros, store::overrides::Journal};

    const SWITCH: &str = "switch|everything";

    /// Returns the target of an override that begins after some seconds.
    fn planned(member: &OverrideSync, seconds: u64) -> Target {
        let from = member.context.clock.now() + Micros::from_secs(seconds);
        Target::parse(SWITCH).unwrap().planned(from).unwrap()
    }

    async fn put(member: &OverrideSync, target: &Target, value: Option<&str>) -> Result<(), ChangeError> {
        let value = value.map(str::to_owned);
        let request = ChangeRequest { target: target.clone(), value, until: None, expected: None };
        member.change(&[request], by_alice()).await.map(drop)
    }

    async fn start(path: &Path) -> Arc<OverrideSync> {
        let member = member_with(Journal::new(Some(path.to_owned())));
        member.start().await.unwrap();
        member
    }

    fn mode(member: &OverrideSync) -> Option<&'static str> {
        member.context.in_force.snapshot().load().modes().in_force().first().map(|(_, mode, _)| mode.name())
    }

    /// Returns the overrides in the journal, as targets and values.
    async fn stored(member: &OverrideSync) -> Vec<String> {
        let state = journal(member).state.lock().await;
        state.overrides.iter().map(|entry| format!("{} {}", entry.target, entry.value)).collect()
    }

    #[tokio::test]
    async fn an_override_begins_in_memory_and_is_then_written() {
        let member = member();
        put(&member, &planned(&member, 10), Some("deny")).await.unwrap();
        assert_eq!(member.context.until_next_beginning(), POLL_INTERVAL, "the clock may be changed");
        advance(&member, 9_999_999);
        member.context.publish_beginnings();
        assert_eq!(mode(&member), None);
        assert_eq!(member.context.until_next_beginning(), Duration::from_millis(1));
        advance(&member, 1);
        member.context.publish_beginnings();
        assert_eq!(mode(&member), Some("deny"));
        assert!(stored(&member).await[0].starts_with("planned|"));
        // The clock is set back.
        advance(&member, 1_u64.wrapping_neg());
        member.context.publish_beginnings();
        assert_eq!(mode(&member), None);
        advance(&member, 1);
        journal(&member).poll().await;
        assert_eq!((mode(&member), stored(&member).await), (Some("deny"), vec!["switch|everything deny".to_owned()]));
        // An instance of an earlier version does not read a change with a target that it does not know.
        let changes = journal(&member).changes_after(1).unwrap();
        let targets: Vec<_> = changes.iter().map(|change| change.changes[0].target.starts_with("planned|")).collect();
        assert_eq!(targets, [false, true]);
        let text = changes[0].changes[0].after.as_ref().unwrap();
        assert!(text.contains("alice") && changes[0].info.contains("began as planned"), "{text}");
    }

    #[tokio::test]
    async fn the_latest_of_several_begins_and_a_newer_override_stays() {
        let member = member();
        for (seconds, value) in [(10, "deny"), (12, "shadow"), (11, "off")] {
            put(&member, &planned(&member, seconds), Some(value)).await.unwrap();
        }
        advance(&member, 20_000_000);
        journal(&member).poll().await;
        assert_eq!(stored(&member).await, ["switch|everything shadow"]);
        // Another instance has written a newer override beside the planned one.
        let text = |value: &str, at: u64| format!(r#"{{"w":"{value}","a":"alice","t":{at}}}"#);
        let now = member.context.clock.now();
        let earlier = Target::parse(SWITCH).unwrap().planned(Micros::from_secs(now.floor_secs() - 5)).unwrap();
        let mut state = journal(&member).state.lock().await;
        let planned = (earlier.to_string(), 20, text("deny", 1));
        member.context.insert_stored(&mut state.overrides, &planned);
        let newer = (SWITCH.to_owned(), 21, text("enforce", now.get()));
        member.context.insert_stored(&mut state.overrides, &newer);
        drop(state);
        journal(&member).poll().await;
        assert_eq!(
            (mode(&member), stored(&member).await),
            (Some("enforce"), vec!["switch|everything enforce".to_owned()])
        );
    }

    #[tokio::test]
    async fn an_override_in_force_is_replaced_when_the_planned_one_begins() {
        let member = member();
        put(&member, &Target::parse(SWITCH).unwrap(), Some("off")).await.unwrap();
        put(&member, &planned(&member, 10), Some("deny")).await.unwrap();
        advance(&member, 10_000_000);
        journal(&member).poll().await;
        assert_eq!(stored(&member).await, ["switch|everything deny"]);
    }

    /// The change of one target does not wait for the writes of all others that have begun.
    #[tokio::test]
    async fn a_change_first_writes_what_has_begun_for_its_own_target() {
        let member = member();
        let switch = Target::parse(SWITCH).unwrap();
        let from = member.context.clock.now() + Micros::from_secs(10);
        let other = Target::parse("switch|domain|api").unwrap().planned(from).unwrap();
        for target in [&planned(&member, 10), &other] {
            put(&member, target, Some("deny")).await.unwrap();
        }
        advance(&member, 10_000_000);
        put(&member, &switch, Some("shadow")).await.unwrap();
        assert_eq!(stored(&member).await, ["switch|everything shadow".to_owned(), format!("{other} deny")]);
        journal(&member).poll().await;
        let mut stored = stored(&member).await;
        stored.sort();
        assert_eq!(stored, ["switch|domain|api deny", "switch|everything shadow"]);
    }

    #[tokio::test]
    async fn a_removal_after_the_beginning_also_removes_the_planned_override() {
        let member = member();
        let planned = planned(&member, 10);
        let switch = Target::parse(SWITCH).unwrap();
        for (target, is_left) in [(&switch, false), (&planned, true)] {
            put(&member, &planned, Some("deny")).await.unwrap();
            advance(&member, 10_000_000);
            member.context.publish_beginnings();
            put(&member, target, None).await.unwrap();
            let expected = if is_left { vec!["switch|everything deny".to_owned()] } else { Vec::new() };
            assert_eq!(stored(&member).await, expected);
            assert_eq!(mode(&member), is_left.then_some("deny"));
            advance(&member, 10_000_000_u64.wrapping_neg());
        }
    }

    #[tokio::test]
    async fn an_override_stays_in_force_until_it_can_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overrides");
        let first = start(&path).await;
        put(&first, &planned(&first, 10), Some("deny")).await.unwrap();
        // The first process holds the journal.
        let second = start(&path).await;
        advance(&second, 10_000_000);
        second.context.publish_beginnings();
        journal(&second).poll().await;
        assert_eq!(mode(&second), Some("deny"));
        assert!(stored(&second).await[0].starts_with("planned|"));
        drop(first);
        journal(&second).poll().await;
        assert_eq!((mode(&second), stored(&second).await), (Some("deny"), vec!["switch|everything deny".to_owned()]));
    }

    #[tokio::test]
    async fn members_that_begin_on_their_own_have_the_same_overrides() {
        let (one, other) = (member(), member());
        put(&one, &planned(&one, 10), Some("deny")).await.unwrap();
        put(&other, &Target::parse("plan|api|user=bob").unwrap(), Some("pro")).await.unwrap();
        for (from, to) in [(&one, &other), (&other, &one)] {
            exchange(to).merge(exchange(from).changes_for_peer(None).await).await.unwrap();
        }
        for member in [&one, &other] {
            advance(member, 10_000_000);
            journal(member).poll().await;
            assert_eq!(mode(member), Some("deny"));
        }
        for (from, to) in [(&one, &other), (&other, &one)] {
            exchange(to).merge(exchange(from).changes_for_peer(None).await).await.unwrap();
        }
        for member in [&one, &other] {
            assert_eq!(stored(member).await, ["plan|api|user=bob pro", "switch|everything deny"]);
            let changes = journal(member).changes_after(0).unwrap();
            assert!(changes.iter().all(|change| !change.info.contains("at the same time")), "{changes:?}");
        }
    }
}
