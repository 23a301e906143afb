//! Concurrency: at most so many in flight at once.
//!
//! Who passes holds a slot until it is given back, or until its end: a holder that has crashed gives nothing back. Slots
//! have names, so that giving back twice, too late, or what was never had frees nothing of anybody else's. Whoever asks
//! again under a name that has a slot keeps it for as long again.
//!
//! Classes can share the slots: each has so many that are always there for it, and a ceiling. A slot that one class wants
//! is free if, with it, all others can still have what is always there for them.
//!
//! The state is 14 bytes a slot, the one that ends first first: its end (7), its holder (6) and the holder's class (1). It is
//! a sliding log that is written from its other end, with names.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, Classes, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros,
    Operation, RequestContext, State,
};

/// At most `limit` slots, each for `hold` at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concurrency {
    max_hits: MaxHits,
    hold: Micros,
    classes: Option<Classes>,
    /// Whose slots are asked for.
    context: RequestContext,
}

/// Bytes of an instant, of a name, of a class, and of all.
const END: usize = 7;
const NAME: usize = 6;
const CLASS: usize = 1;
const ENTRY: usize = END + NAME + CLASS;

/// How many slots each class has.
type Held = [u64; Classes::MAX_CLASSES];

impl Concurrency {
    /// The largest limit, soft part included: 14 kB for each counter.
    pub const MAX_SLOTS: u64 = 1_000;
    /// The longest hold: a day.
    pub const MAX_HOLD: Micros = Micros::from_secs(86_400);
    /// Names are numbers up to this one.
    pub const LAST_HOLDER: u64 = (1 << 48) - 1;

    /// `None` for a quota above [`Self::MOST`], and a hold of no length or longer than [`Self::LONGEST`].
    #[must_use]
    pub fn new(quota: MaxHits, hold: Micros) -> Option<Self> {
        let fits = hold > Micros::ZERO && hold <= Self::MAX_HOLD && quota.ceiling() <= Self::MAX_SLOTS;
        fits.then_some(Self { max_hits: quota, hold, classes: None, context: RequestContext::default() })
    }

    /// The same with another limit.
    pub(super) fn limited(self, limit: u64) -> Self {
        Self { max_hits: MaxHits::hard(limit), ..self }
    }

    fn slots(state: &State) -> &[[u8; ENTRY]] {
        Self::slots_of(state.as_bytes())
    }

    /// Of bytes that need not be all of a state.
    fn slots_of(bytes: &[u8]) -> &[[u8; ENTRY]] {
        bytes.as_chunks().0
    }

    fn end([a, b, c, d, e, f, g, ..]: &[u8; ENTRY]) -> u64 {
        u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, 0])
    }

    fn class([.., class]: &[u8; ENTRY]) -> usize {
        usize::from(*class) % Classes::MAX_CLASSES
    }

    /// When the last of these ends.
    pub(super) fn expire(bytes: &[u8], now: Micros) -> Micros {
        Self::slots_of(bytes).last().map_or(now, |newest| Micros::new(Self::end(newest)))
    }

    /// How many slots are held.
    pub(super) fn in_flight(state: &State, now: Micros) -> u64 {
        let slots = Self::slots(state);
        (slots.len() - Self::gone(slots, now)) as u64
    }

    /// So many slots of whoever asks.
    fn push(&self, state: &mut State, end: u64, slots: u64) {
        let mut slot = [0; ENTRY];
        slot[..8].copy_from_slice(&end.to_le_bytes());
        slot[END..END + NAME].copy_from_slice(&self.context.holder.to_le_bytes()[..NAME]);
        slot[ENTRY - CLASS] = self.context.class;
        (0..slots).for_each(|_| state.append(&slot));
    }

    /// How many slots have ended: mostly none.
    fn gone(slots: &[[u8; ENTRY]], now: Micros) -> usize {
        match slots.first() {
            Some(first) if Self::end(first) <= now.get() => slots.partition_point(|slot| Self::end(slot) <= now.get()),
            Some(_) | None => 0,
        }
    }

    /// Slots from a clock that was far ahead, or from a rule that held them much longer: they are as if taken now.
    fn believe(&self, state: &mut State, now: Micros) {
        let end = (now + self.hold).get();
        if Self::slots(state).last().is_none_or(|newest| Self::end(newest) <= end + CLOCK_SLACK.get()) {
            return;
        }
        let slots = Self::slots(state).to_vec();
        state.clear();
        for mut slot in slots {
            let end = Self::end(&slot).min(end);
            slot[..END].copy_from_slice(&end.to_le_bytes()[..END]);
            if end > now.get() {
                state.append(&slot);
            }
        }
    }

    /// Whether a slot is of whoever asks; of nobody in particular, if it is of the class.
    fn is_mine(&self) -> impl Fn(&[u8; ENTRY]) -> bool + use<> {
        let RequestContext { holder, class, .. } = self.context;
        // The last eight bytes are one number: a byte of the end, the name, the class.
        let (mask, wanted) = match holder {
            0 => (!0xFF, u64::from(class) << (8 * (1 + NAME))),
            _ => (Self::LAST_HOLDER << 8, holder << 8),
        };
        move |[.., a, b, c, d, e, f, g, h]: &[u8; ENTRY]| {
            u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]) & mask == wanted
        }
    }

    /// Whether whoever asks has a slot. By eights without a branch: nearly always nobody has.
    fn has_slot(&self, slots: &[[u8; ENTRY]]) -> bool {
        let is_mine = self.is_mine();
        slots.chunks(8).any(|few| few.iter().fold(false, |mine, slot| mine | is_mine(slot)))
    }

    /// Takes out what has ended, and at most so many slots of whoever asks, of those with this end if it matters; says how
    /// many. Those of one name stand together: they were taken together, and are renewed together.
    fn free(&self, state: &mut State, gone: usize, most: u64, end: Option<u64>) -> u64 {
        let is_mine = self.is_mine();
        let fits = |slot: &[u8; ENTRY]| is_mine(slot) && end.is_none_or(|end| end == Self::end(slot));
        let slots = &Self::slots(state)[gone..];
        // Whoever gives back has mostly come lately.
        let place = match self.context.holder {
            0 => slots.iter().position(fits),
            _ => slots.iter().rposition(fits).map(|last| {
                let others = slots[..last].iter().rposition(|slot| !fits(slot));
                others.map_or(0, |other| other + 1)
            }),
        };
        let Some(place) = place else {
            return 0;
        };
        let mut freed = slots[place..].iter().take_while(|slot| fits(slot)).count().min(most as usize);
        state.cut(ENTRY * (gone + place), ENTRY * freed);
        // Of nobody in particular there may be more behind others'.
        while self.context.holder == 0
            && (freed as u64) < most
            && let Some(place) = Self::slots(state)[gone..].iter().position(fits)
        {
            state.cut(ENTRY * (gone + place), ENTRY);
            freed += 1;
        }
        state.cut_front(ENTRY * gone);
        freed as u64
    }

    /// How many slots are free for whoever asks.
    fn room(&self, slots: &[[u8; ENTRY]], gone: usize) -> u64 {
        match &self.classes {
            None => self.max_hits.ceiling().saturating_sub((slots.len() - gone) as u64),
            Some(classes) => self.room_of_class(classes, &Self::held(&slots[gone..])),
        }
    }

    /// How many slots each class has.
    fn held(slots: &[[u8; ENTRY]]) -> Held {
        let mut held = Held::default();
        slots.iter().for_each(|slot| held[Self::class(slot)] += 1);
        held
    }

    /// What is not promised to others, up to the ceiling of the class.
    fn room_of_class(&self, classes: &Classes, held: &Held) -> u64 {
        let (class, ceiling) = (usize::from(self.context.class), self.max_hits.ceiling());
        let taken = held.iter().enumerate().map(|(other, held)| match other == class {
            true => *held,
            false => classes.min(other).max(*held),
        });
        ceiling.saturating_sub(taken.sum()).min(classes.max(class).saturating_sub(held[class]))
    }

    fn explain_class(&self, classes: &Classes, slots: &[[u8; ENTRY]], ask: Operation, allowed: bool) -> Decision {
        let class = usize::from(self.context.class);
        let mut held = Self::held(slots);
        let (room, used) = (self.room_of_class(classes, &held), held[class]);
        let full = self.room_of_class(classes, &Held::default());
        let wanted = if allowed { room } else { ask.cost };
        let wait = |slot: &[u8; ENTRY]| Micros::new(Self::end(slot)) - ask.now;
        let reset = slots.iter().rfind(|slot| Self::class(slot) == class).map(wait).unwrap_or_default();
        let (mut next, mut retry) = (None, None);
        // As the slots end, one after the other.
        for slot in slots {
            held[Self::class(slot)] -= 1;
            let later = self.room_of_class(classes, &held);
            next = next.or((later > room).then(|| wait(slot)));
            retry = retry.or((later >= wanted).then(|| wait(slot)));
            if next.is_some() && retry.is_some() {
                break;
            }
        }
        Decision {
            allowed,
            shed: !allowed && ask.cost <= classes.max(class).saturating_sub(used),
            limit: Some(classes.max(class) as u32),
            remaining: room,
            used,
            reset,
            next: next.unwrap_or_default(),
            retry_after: if allowed || ask.cost > full { None } else { retry },
            ..Decision::default()
        }
    }

    /// What to tell, by slots that need not be all of a state.
    pub(super) fn explain_slots(&self, bytes: &[u8], ask: Operation, allowed: bool) -> Decision {
        let slots = Self::slots_of(bytes);
        let slots = &slots[Self::gone(slots, ask.now)..];
        if let Some(classes) = &self.classes {
            return self.explain_class(classes, slots, ask, allowed);
        }
        let used = slots.len() as u64;
        // Until so many of those that are held have ended, if none is given back before.
        let until_free = |many: u64| match many {
            0 => Micros::ZERO,
            many => slots.get(many as usize - 1).map(|slot| Micros::new(Self::end(slot)) - ask.now).unwrap_or_default(),
        };
        let limit = self.max_hits.limit();
        let retry = || {
            let room = self.max_hits.ceiling().checked_sub(ask.cost)?;
            Some(until_free(used.saturating_sub(room)))
        };
        Decision {
            allowed,
            soft: allowed && ask.is_soft(used, self.max_hits),
            remaining: self.max_hits.remaining(used),
            used,
            reset: until_free(used),
            next: if limit > 0 { until_free(used.min(used.saturating_sub(limit) + 1)) } else { Micros::ZERO },
            retry_after: if allowed { None } else { retry() },
            ..Decision::default()
        }
    }

    fn give(&self, state: &mut State, ask: Operation, gone: usize) {
        let held = (Self::slots(state).len() - gone) as u64;
        match ask.action {
            Action::RollBack(taken) => {
                self.free(state, gone, ask.cost, Some((taken + self.hold).get()));
            }
            // Of those without a name the one that ends first goes: none comes back before its end.
            _ if self.context.holder == 0 && self.classes.is_some() => {
                self.free(state, gone, ask.cost, None);
            }
            _ if self.context.holder == 0 => state.cut_front(ENTRY * (gone as u64 + ask.cost.min(held)) as usize),
            _ => {
                self.free(state, gone, held, None);
            }
        }
    }
}

impl Limiter for Concurrency {
    const NAME: &'static str = "concurrency";
    const KEYWORDS: &'static [&'static str] = &["limit", "hold", "holder", "capacity", "class", "shares", "reserve"];
    const TAG: &'static str = "cc";
    /// [`super::adaptive`]'s, too.
    const SCRIPT: &'static str = concat!(include_str!("../adaptive/learn.lua"), include_str!("script.lua"));
    const ARGUMENTS: &'static [&'static str] =
        &["cost", "ceiling", "hold", "slack", "holder", "class", "count", "method"];

    /// The window is the hold.
    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let quota = shape.max_hits(shape.requests.into());
        if shape.counts_denied() {
            return Err(InvalidLimit {
                keyword: "count_denied",
                reason: "whoever is refused holds nothing that could count",
            });
        }
        if quota.ceiling() > Self::MAX_SLOTS {
            let why = "concurrency keeps every slot and takes 1000 at most, its soft part included";
            return Err(InvalidLimit { keyword: "limit", reason: why });
        }
        if shape.classes.is_some() && shape.soft.is_some() {
            return Err(InvalidLimit { keyword: "soft", reason: "a shared capacity has ceilings, and is not soft" });
        }
        let why = "hold must be longer than nothing, and a day at most";
        let this = Self::new(quota, shape.window).ok_or(InvalidLimit { keyword: "hold", reason: why })?;
        Ok(Self { classes: shape.classes, ..this }.into())
    }

    fn arguments(&self, ask: Operation) -> Arguments {
        let cost = ask.cost.min(Self::MAX_SLOTS + 1);
        let RequestContext { holder, class, .. } = self.context;
        let count = self.classes.map_or(0, |classes| classes.count() as u64);
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

    fn with_context(self, asker: RequestContext) -> Self {
        let last = self.classes.map_or(0, |classes| classes.count() as u8 - 1);
        let asker =
            RequestContext { holder: asker.holder.min(Self::LAST_HOLDER), class: asker.class.min(last), ..asker };
        Self { context: asker, ..self }
    }

    fn step(&self, state: &mut State, ask: Operation) -> bool {
        self.believe(state, ask.now);
        let ask = Operation { cost: ask.cost.min(Self::MAX_SLOTS + 1), ..ask };
        let gone = Self::gone(Self::slots(state), ask.now);
        if ask.action.releases() {
            self.give(state, ask, gone);
            return true;
        }
        let slots = Self::slots(state);
        let is_held = self.context.holder > 0 && self.has_slot(&slots[gone..]);
        let held = (slots.len() - gone) as u64;
        let allowed = is_held || ask.cost <= self.room(slots, gone);
        if ask.action == Action::Take && allowed {
            let end = slots.last().map_or(0, Self::end).max((ask.now + self.hold).get());
            let slots = if is_held {
                self.free(state, gone, held, None)
            } else {
                state.cut_front(ENTRY * gone);
                ask.cost
            };
            self.push(state, end, slots);
        }
        allowed
    }

    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        self.explain_slots(state.as_bytes(), ask, allowed)
    }

    /// A slot may come back at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        Self::expire(state.as_bytes(), now)
    }
}

#[cfg(test)]
mod tests;
