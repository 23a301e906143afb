//! [`Concurrency`]: a limit on the number of requests in flight.
//!
//! An allowed request holds a slot until it releases the slot or until the hold ends, because a crashed holder releases
//! nothing. Slots belong to named holders, so that a release that is repeated, late or without a slot never frees the
//! slot of another holder. A take by a holder that already has a slot renews the slot for another hold.
//!
//! Classes can share the slots: each class has a guaranteed minimum and a maximum. A slot is free for one class if,
//! after it is taken, all other classes can still have their minimums.
//!
//! The state has 14 bytes for each slot, in the order in which they end: the end (7), the holder (6) and the holder's
//! class (1). It is a sliding log that contains ends instead of beginnings, with holders.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, Classes, CounterPart, CounterProgram, Decision, InvalidLimit, LimitSpec,
    Limiter, MaxHits, Micros, Operation, RequestContext, State,
};

/// A limiter that allows at most `limit` slots at once, each for at most `hold`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concurrency {
    max_hits: MaxHits,
    hold: Micros,
    classes: Option<Classes>,
    /// The caller of the next operation: its holder, its class and its sample.
    context: RequestContext,
}

/// Length of a slot's end in bytes.
const END_BYTES: usize = 7;
/// Length of a slot's holder in bytes.
const HOLDER_BYTES: usize = 6;
/// Length of a slot's class in bytes.
const CLASS_BYTES: usize = 1;
/// Length of a slot in bytes.
const SLOT_BYTES: usize = END_BYTES + HOLDER_BYTES + CLASS_BYTES;

/// Number of slots that each class holds.
type SlotsPerClass = [u64; Classes::MAX_CLASSES];

/// A filter that selects the slots of one caller, and optionally only those that end at one instant.
#[derive(Clone, Copy)]
struct SlotFilter {
    /// Bits of a slot's last eight bytes that identify the caller.
    mask: u64,
    /// The masked bits of the caller's slots.
    caller: u64,
    end: Option<u64>,
}

impl SlotFilter {
    /// Creates a filter for the slots of the caller; without a holder, for the slots of its class without a holder.
    fn new(caller: RequestContext, end: Option<u64>) -> Self {
        // The last eight bytes are read as one number: a byte of the end, the holder, the class.
        if caller.holder == 0 {
            Self { mask: !0xFF, caller: u64::from(caller.class) << (8 * (1 + HOLDER_BYTES)), end }
        } else {
            Self { mask: Concurrency::MAX_HOLDER << 8, caller: caller.holder << 8, end }
        }
    }

    /// Returns whether a slot belongs to the caller, regardless of its end.
    fn is_own(self, [.., a, b, c, d, e, f, g, h]: &[u8; SLOT_BYTES]) -> bool {
        u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]) & self.mask == self.caller
    }

    fn matches(self, slot: &[u8; SLOT_BYTES]) -> bool {
        self.is_own(slot) && self.end.is_none_or(|end| end == Concurrency::end(slot))
    }

    /// Returns the index of the first slot in the last run of adjacent slots that match.
    fn start_of_last_run(self, slots: &[[u8; SLOT_BYTES]]) -> Option<usize> {
        let last = slots.iter().rposition(|slot| self.matches(slot))?;
        let start = match slots[..last].iter().rposition(|slot| !self.matches(slot)) {
            Some(other) => other + 1,
            None => 0,
        };
        Some(start)
    }
}

impl Concurrency {
    /// Maximum limit including its soft part: 14 kB for each counter.
    pub const MAX_SLOTS: u64 = 1_000;
    /// Maximum hold: one day.
    pub const MAX_HOLD: Micros = Micros::from_secs(86_400);
    /// Highest number that identifies a holder: 48 bits.
    pub const MAX_HOLDER: u64 = (1 << 48) - 1;

    /// Creates a limiter; `None` if the limit exceeds [`Self::MAX_SLOTS`], or if the hold is zero or exceeds
    /// [`Self::MAX_HOLD`].
    #[must_use]
    pub fn new(max_hits: MaxHits, hold: Micros) -> Option<Self> {
        let fits = hold > Micros::ZERO && hold <= Self::MAX_HOLD && max_hits.ceiling() <= Self::MAX_SLOTS;
        fits.then_some(Self { max_hits, hold, classes: None, context: RequestContext::default() })
    }

    /// Returns the same limiter with another limit.
    pub(super) fn with_limit(self, limit: u64) -> Self {
        Self { max_hits: MaxHits::hard(limit), ..self }
    }

    fn slots(state: &State) -> &[[u8; SLOT_BYTES]] {
        Self::slots_of(state.as_bytes())
    }

    /// Returns the slots in bytes that may be only a part of a state.
    fn slots_of(bytes: &[u8]) -> &[[u8; SLOT_BYTES]] {
        bytes.as_chunks().0
    }

    fn end([a, b, c, d, e, f, g, ..]: &[u8; SLOT_BYTES]) -> u64 {
        u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, 0])
    }

    /// Returns the time until a slot ends, at most the hold and [`CLOCK_SLACK`]. Only a broken state has a later end.
    fn wait(&self, slot: &[u8; SLOT_BYTES], now: Micros) -> Micros {
        (Micros::new(Self::end(slot)) - now).min(self.hold + CLOCK_SLACK)
    }

    fn class([.., class]: &[u8; SLOT_BYTES]) -> usize {
        usize::from(*class) % Classes::MAX_CLASSES
    }

    /// Returns the end of the last slot in `bytes`.
    pub(super) fn expires_at(&self, bytes: &[u8], now: Micros) -> Micros {
        match Self::slots_of(bytes).last() {
            Some(newest) => now + self.wait(newest, now),
            None => now,
        }
    }

    /// Returns the slots in `bytes` that are held, the one that ends first at the front.
    pub(super) fn held_slots(&self, bytes: &[u8], now: Micros) -> Vec<CounterPart> {
        let slots = Self::slots_of(bytes);
        let mut parts = Vec::new();
        for slot in &slots[Self::expired(slots, now)..] {
            let until = Micros::new(Self::end(slot));
            parts.push(CounterPart { from: until - self.hold, until, hits: 1 });
        }
        parts
    }

    /// Returns the number of slots that are held.
    pub(super) fn in_flight(state: &State, now: Micros) -> u64 {
        let slots = Self::slots(state);
        (slots.len() - Self::expired(slots, now)) as u64
    }

    /// Appends slots of the caller.
    fn push(&self, state: &mut State, end: u64, slots: u64) {
        let mut slot = [0; SLOT_BYTES];
        slot[..8].copy_from_slice(&end.to_le_bytes());
        slot[END_BYTES..END_BYTES + HOLDER_BYTES].copy_from_slice(&self.context.holder.to_le_bytes()[..HOLDER_BYTES]);
        slot[SLOT_BYTES - CLASS_BYTES] = self.context.class;
        for _ in 0..slots {
            state.append(&slot);
        }
    }

    /// Returns the number of slots that have ended, which is usually zero.
    fn expired(slots: &[[u8; SLOT_BYTES]], now: Micros) -> usize {
        match slots.first() {
            Some(first) if Self::end(first) <= now.get() => slots.partition_point(|slot| Self::end(slot) <= now.get()),
            Some(_) | None => 0,
        }
    }

    /// Lets all slots end within a hold from now if one ends more than [`CLOCK_SLACK`] later, because a clock was far
    /// ahead or the hold was much longer.
    fn clamp_future(&self, state: &mut State, now: Micros) {
        let end = (now + self.hold).get();
        if Self::slots(state).last().is_none_or(|newest| Self::end(newest) <= end + CLOCK_SLACK.get()) {
            return;
        }
        let slots = Self::slots(state).to_vec();
        state.clear();
        for mut slot in slots {
            let end = Self::end(&slot).min(end);
            slot[..END_BYTES].copy_from_slice(&end.to_le_bytes()[..END_BYTES]);
            if end > now.get() {
                state.append(&slot);
            }
        }
    }

    /// Returns whether the caller has a slot. It compares eight slots without a branch, because callers rarely have
    /// one.
    fn has_slot(&self, slots: &[[u8; SLOT_BYTES]]) -> bool {
        let own = SlotFilter::new(self.context, None);
        slots.chunks(8).any(|chunk| chunk.iter().fold(false, |found, slot| found | own.is_own(slot)))
    }

    /// Removes at most `max_slots` slots of the caller, only those that end at `end` if it is given, and expired slots.
    /// Returns the number of the caller's slots that were removed. If there are none, expired slots stay as well.
    ///
    /// The slots of one holder are adjacent, because they are taken together and renewed together.
    fn free(&self, state: &mut State, expired: usize, max_slots: u64, end: Option<u64>) -> u64 {
        let filter = SlotFilter::new(self.context, end);
        let slots = &Self::slots(state)[expired..];
        let index = if self.context.holder == 0 {
            slots.iter().position(|slot| filter.matches(slot))
        } else {
            // A holder usually releases a recent slot, so the search begins at the end.
            filter.start_of_last_run(slots)
        };
        let Some(index) = index else {
            return 0;
        };
        let adjacent = slots[index..].iter().take_while(|slot| filter.matches(slot)).count();
        let mut freed = adjacent.min(max_slots as usize);
        state.cut(SLOT_BYTES * (expired + index), SLOT_BYTES * freed);
        // Without a holder, more slots may follow after those of other callers.
        while self.context.holder == 0
            && (freed as u64) < max_slots
            && let Some(index) = Self::slots(state)[expired..].iter().position(|slot| filter.matches(slot))
        {
            state.cut(SLOT_BYTES * (expired + index), SLOT_BYTES);
            freed += 1;
        }
        state.cut_front(SLOT_BYTES * expired);
        freed as u64
    }

    /// Returns the number of slots that are free for the caller.
    fn free_slots(&self, slots: &[[u8; SLOT_BYTES]], expired: usize) -> u64 {
        match &self.classes {
            None => self.max_hits.ceiling().saturating_sub((slots.len() - expired) as u64),
            Some(classes) => self.free_slots_of_class(classes, &Self::held(&slots[expired..])),
        }
    }

    /// Returns the number of slots that each class holds.
    fn held(slots: &[[u8; SLOT_BYTES]]) -> SlotsPerClass {
        let mut held = SlotsPerClass::default();
        for slot in slots {
            held[Self::class(slot)] += 1;
        }
        held
    }

    /// Returns the number of free slots that are not guaranteed to other classes, up to the class's maximum.
    fn free_slots_of_class(&self, classes: &Classes, held: &SlotsPerClass) -> u64 {
        let class = usize::from(self.context.class);
        let mut taken = 0;
        for (other, slots) in held.iter().enumerate() {
            taken += if other == class { *slots } else { classes.min(other).max(*slots) };
        }
        let free = self.max_hits.ceiling().saturating_sub(taken);
        free.min(classes.max(class).saturating_sub(held[class]))
    }

    fn explain_class(
        &self,
        classes: &Classes,
        slots: &[[u8; SLOT_BYTES]],
        operation: Operation,
        allowed: bool,
    ) -> Decision {
        let class = usize::from(self.context.class);
        let mut held = Self::held(slots);
        let free_slots = self.free_slots_of_class(classes, &held);
        let used = held[class];
        let full = self.free_slots_of_class(classes, &SlotsPerClass::default());
        let wanted = if allowed { free_slots } else { operation.cost };
        let reset = match slots.iter().rfind(|slot| Self::class(slot) == class) {
            Some(last) => self.wait(last, operation.now),
            None => Micros::ZERO,
        };
        let mut next = None;
        let mut retry = None;
        // The loop simulates the slots ending one after the other.
        for slot in slots {
            held[Self::class(slot)] -= 1;
            let later = self.free_slots_of_class(classes, &held);
            if next.is_none() && later > free_slots {
                next = Some(self.wait(slot, operation.now));
            }
            if retry.is_none() && later >= wanted {
                retry = Some(self.wait(slot, operation.now));
            }
            if next.is_some() && retry.is_some() {
                break;
            }
        }
        Decision {
            allowed,
            shed: !allowed && operation.cost <= classes.max(class).saturating_sub(used),
            limit: Some(classes.max(class) as u32),
            remaining: free_slots,
            used,
            reset,
            next: next.unwrap_or_default(),
            retry_after: if allowed || operation.cost > full { None } else { retry },
            ..Decision::default()
        }
    }

    /// Returns the time until the first `count` slots have ended, if none is released before.
    fn time_until_ended(&self, slots: &[[u8; SLOT_BYTES]], count: u64, now: Micros) -> Micros {
        if count == 0 {
            return Micros::ZERO;
        }
        match slots.get(count as usize - 1) {
            Some(slot) => self.wait(slot, now),
            None => Micros::ZERO,
        }
    }

    /// Computes the decision from slots that may be only a part of a state.
    pub(super) fn explain_slots(&self, bytes: &[u8], operation: Operation, allowed: bool) -> Decision {
        let slots = Self::slots_of(bytes);
        let slots = &slots[Self::expired(slots, operation.now)..];
        if let Some(classes) = &self.classes {
            return self.explain_class(classes, slots, operation, allowed);
        }
        let used = slots.len() as u64;
        let limit = self.max_hits.limit();
        let next = if limit > 0 {
            self.time_until_ended(slots, used.min(used.saturating_sub(limit) + 1), operation.now)
        } else {
            Micros::ZERO
        };
        let retry_after = match self.max_hits.ceiling().checked_sub(operation.cost) {
            Some(room) if !allowed => Some(self.time_until_ended(slots, used.saturating_sub(room), operation.now)),
            Some(_) | None => None,
        };
        Decision {
            allowed,
            soft: allowed && operation.is_soft(used, self.max_hits),
            remaining: self.max_hits.remaining(used),
            used,
            reset: self.time_until_ended(slots, used, operation.now),
            next,
            retry_after,
            ..Decision::default()
        }
    }

    fn release(&self, state: &mut State, operation: Operation, expired: usize) {
        let held = (Self::slots(state).len() - expired) as u64;
        match operation.action {
            Action::RollBack(taken) => {
                self.free(state, expired, operation.cost, Some((taken + self.hold).get()));
            }
            // Without a holder, the slot that ends first is released, so that none is returned before its end.
            _ if self.context.holder == 0 && self.classes.is_some() => {
                self.free(state, expired, operation.cost, None);
            }
            _ if self.context.holder == 0 => {
                state.cut_front(SLOT_BYTES * (expired as u64 + operation.cost.min(held)) as usize);
            }
            _ => {
                self.free(state, expired, held, None);
            }
        }
    }
}

impl CounterProgram for Concurrency {
    const TAG: &'static str = "cc";
    /// The script, which [`super::adaptive`] uses as well.
    const SCRIPT: &'static str = concat!(include_str!("../adaptive/learn.lua"), include_str!("script.lua"));
    const ARGUMENTS: &'static [&'static str] =
        &["cost", "ceiling", "hold", "slack", "holder", "class", "count", "method"];

    fn arguments(&self, operation: Operation) -> Arguments {
        let cost = operation.cost.min(Self::MAX_SLOTS + 1);
        let RequestContext { holder, class, .. } = self.context;
        let count = match self.classes {
            Some(classes) => classes.count() as u64,
            None => 0,
        };
        let mut arguments: Arguments = smallvec![
            cost,
            self.max_hits.ceiling(),
            self.hold.get(),
            CLOCK_SLACK.get(),
            holder,
            class.into(),
            count,
            0
        ];
        arguments.extend(self.classes.iter().flat_map(Classes::numbers));
        arguments
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        self.clamp_future(state, operation.now);
        let operation = Operation { cost: operation.cost.min(Self::MAX_SLOTS + 1), ..operation };
        let expired = Self::expired(Self::slots(state), operation.now);
        if operation.action.releases() {
            self.release(state, operation, expired);
            return true;
        }
        let slots = Self::slots(state);
        let already_holds = self.context.holder > 0 && self.has_slot(&slots[expired..]);
        let held = (slots.len() - expired) as u64;
        let allowed = already_holds || operation.cost <= self.free_slots(slots, expired);
        if operation.action == Action::Take && allowed {
            let mut end = (operation.now + self.hold).get();
            if let Some(newest) = slots.last() {
                end = end.max(Self::end(newest));
            }
            let slots = if already_holds {
                self.free(state, expired, held, None)
            } else {
                state.cut_front(SLOT_BYTES * expired);
                operation.cost
            };
            self.push(state, end, slots);
        }
        allowed
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        self.explain_slots(state.as_bytes(), operation, allowed)
    }

    /// Returns `true`, because a slot may be released at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        self.expires_at(state.as_bytes(), now)
    }
}

impl Limiter for Concurrency {
    const NAME: &'static str = "concurrency";
    const KEYWORDS: &'static [&'static str] = &["limit", "hold", "holder", "capacity", "class", "shares", "reserve"];

    /// Builds a limiter. `spec.window` is the hold.
    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let max_hits = spec.max_hits(spec.requests);
        if spec.counts_denied() {
            return Err(InvalidLimit {
                keyword: "count_denied",
                reason: "count_denied is not supported with concurrency: a denied request holds no slot",
            });
        }
        if max_hits.ceiling() > Self::MAX_SLOTS {
            let reason = "concurrency stores every slot: limit must be at most 1000, including its soft part";
            return Err(InvalidLimit { keyword: "limit", reason });
        }
        if spec.classes.is_some() && spec.soft.is_some() {
            return Err(InvalidLimit { keyword: "soft", reason: "soft is not supported with shared capacities" });
        }
        let reason = "hold must be greater than 0 and at most 1 day";
        let this = Self::new(max_hits, spec.window).ok_or(InvalidLimit { keyword: "hold", reason })?;
        Ok(Self { classes: spec.classes, ..this }.into())
    }

    fn with_context(self, context: RequestContext) -> Self {
        let last_class = match self.classes {
            Some(classes) => classes.count() as u8 - 1,
            None => 0,
        };
        let holder = context.holder.min(Self::MAX_HOLDER);
        let class = context.class.min(last_class);
        Self { context: RequestContext { holder, class, ..context }, ..self }
    }

    fn parts(&self, state: &State, now: Micros) -> Vec<CounterPart> {
        self.held_slots(state.as_bytes(), now)
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
