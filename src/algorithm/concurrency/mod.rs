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
    Action, Algorithm, Arguments, Ask, Asker, CLOCK_SLACK, Classes, Decision, Micros, Quota, Rule, Shape, State, Unfit,
};

/// At most `limit` slots, each for `hold` at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concurrency {
    quota: Quota,
    hold: Micros,
    classes: Option<Classes>,
    /// Whose slots are asked for.
    asker: Asker,
}

/// Bytes of an instant, of a name, of a class, and of all.
const END: usize = 7;
const NAME: usize = 6;
const CLASS: usize = 1;
const ENTRY: usize = END + NAME + CLASS;

/// A slot: its end, and who has it.
type Slot = (u64, Asker);

/// How many slots each class has.
type Held = [u64; Classes::MOST];

impl Concurrency {
    /// The largest limit, soft part included: 14 kB for each counter.
    pub const MOST: u64 = 1_000;
    /// The longest hold: a day.
    pub const LONGEST: Micros = Micros::from_secs(86_400);
    /// Names are numbers up to this one.
    pub const LAST_HOLDER: u64 = (1 << 48) - 1;

    /// `None` for a quota above [`Self::MOST`], and a hold of no length or longer than [`Self::LONGEST`].
    #[must_use]
    pub fn new(quota: Quota, hold: Micros) -> Option<Self> {
        let fits = hold > Micros::ZERO && hold <= Self::LONGEST && quota.ceiling() <= Self::MOST;
        fits.then_some(Self { quota, hold, classes: None, asker: Asker::default() })
    }

    /// The same with another limit.
    pub(super) fn limited(self, limit: u64) -> Self {
        Self { quota: Quota::hard(limit), ..self }
    }

    fn slot(state: &State, place: usize) -> Slot {
        let at = ENTRY * place;
        let end = state.number::<END>(at).unwrap_or_default();
        let holder = state.number::<NAME>(at + END).unwrap_or_default();
        (end, Asker { holder, class: Self::class(state, place) as u8, sample: None })
    }

    fn class(state: &State, place: usize) -> usize {
        state.number::<CLASS>(ENTRY * place + END + NAME).unwrap_or_default() as usize
    }

    fn len(state: &State) -> usize {
        state.as_bytes().len() / ENTRY
    }

    /// How many slots are held.
    pub(super) fn in_flight(state: &State, now: Micros) -> u64 {
        (Self::len(state) - Self::gone(state, now)) as u64
    }

    /// The latest end.
    fn newest(state: &State) -> Option<u64> {
        Self::len(state).checked_sub(1).map(|last| Self::slot(state, last).0)
    }

    fn push(state: &mut State, (end, asker): Slot) {
        state.push::<END>(end);
        state.push::<NAME>(asker.holder);
        state.push::<CLASS>(asker.class.into());
    }

    /// How many slots have ended: mostly none.
    fn gone(state: &State, now: Micros) -> usize {
        let ended = |place| Self::slot(state, place).0 <= now.get();
        let (mut low, mut high) = (0, Self::len(state));
        if high == 0 || !ended(0) {
            return 0;
        }
        while low < high {
            let middle = usize::midpoint(low, high);
            if ended(middle) { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// Slots from a clock that was far ahead, or from a rule that held them much longer: they are as if taken now.
    fn believe(&self, state: &mut State, now: Micros) {
        let end = (now + self.hold).get();
        if Self::newest(state).is_none_or(|newest| newest <= end + CLOCK_SLACK.get()) {
            return;
        }
        let slots: Vec<_> = (0..Self::len(state)).map(|place| Self::slot(state, place)).collect();
        state.clear();
        let slots = slots.into_iter().map(|slot| (slot.0.min(end), slot.1));
        slots.filter(|slot| slot.0 > now.get()).for_each(|slot| Self::push(state, slot));
    }

    /// The holder's next slot from this place on; of nobody in particular, the next of the class.
    fn find(&self, state: &State, from: usize) -> Option<usize> {
        let (slots, _) = state.as_bytes().get(ENTRY * from..)?.as_chunks::<ENTRY>();
        let Asker { holder, class, .. } = self.asker;
        // The last eight bytes are one number: a byte of the end, the name, the class.
        let last =
            |[.., a, b, c, d, e, f, g, h]: &[u8; ENTRY]| u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]) >> 8;
        let place = match holder {
            0 => slots.iter().position(|slot| last(slot) == u64::from(class) << (8 * NAME)),
            _ => slots.iter().position(|slot| last(slot) << 16 == holder << 16),
        };
        place.map(|place| from + place)
    }

    /// Takes out what has ended, and at most so many of the holder's slots, of those with this end if it matters; says how
    /// many.
    fn free(&self, state: &mut State, gone: usize, most: u64, end: Option<u64>) -> u64 {
        let (mut freed, mut from) = (0, gone);
        while freed < most
            && let Some(place) = self.find(state, from)
        {
            if end.is_none_or(|end| end == Self::slot(state, place).0) {
                state.cut(ENTRY * place, ENTRY);
                (freed, from) = (freed + 1, place);
            } else {
                from = place + 1;
            }
        }
        if freed > 0 {
            state.cut_front(ENTRY * gone);
        }
        freed
    }

    /// How many slots are free for whoever asks.
    fn room(&self, state: &State, gone: usize) -> u64 {
        match &self.classes {
            None => self.quota.ceiling().saturating_sub((Self::len(state) - gone) as u64),
            Some(classes) => self.room_of_class(classes, &Self::held(state, gone)),
        }
    }

    /// How many slots each class has.
    fn held(state: &State, gone: usize) -> Held {
        let mut held = Held::default();
        (gone..Self::len(state)).for_each(|place| held[Self::class(state, place) % Classes::MOST] += 1);
        held
    }

    /// What is not promised to others, up to the ceiling of the class.
    fn room_of_class(&self, classes: &Classes, held: &Held) -> u64 {
        let (class, ceiling) = (usize::from(self.asker.class), self.quota.ceiling());
        let taken = held.iter().enumerate().map(|(other, held)| match other == class {
            true => *held,
            false => classes.least(other).max(*held),
        });
        ceiling.saturating_sub(taken.sum()).min(classes.most(class).saturating_sub(held[class]))
    }

    fn explain_class(&self, classes: &Classes, state: &State, gone: usize, ask: Ask, allowed: bool) -> Decision {
        let class = usize::from(self.asker.class);
        let mut held = Self::held(state, gone);
        let (room, used) = (self.room_of_class(classes, &held), held[class]);
        let full = self.room_of_class(classes, &Held::default());
        let wanted = if allowed { room } else { ask.cost };
        let (mut next, mut retry, mut reset) = (None, None, Micros::ZERO);
        // As the slots end, one after the other.
        for place in gone..Self::len(state) {
            let (end, holder) = Self::slot(state, place);
            let wait = Micros::new(end) - ask.now;
            held[usize::from(holder.class) % Classes::MOST] -= 1;
            let later = self.room_of_class(classes, &held);
            next = next.or((later > room).then_some(wait));
            retry = retry.or((later >= wanted).then_some(wait));
            if holder.class == self.asker.class {
                reset = wait;
            }
        }
        Decision {
            allowed,
            shed: !allowed && ask.cost <= classes.most(class).saturating_sub(used),
            limit: Some(classes.most(class) as u32),
            remaining: room,
            used,
            reset,
            next: next.unwrap_or_default(),
            retry_after: if allowed || ask.cost > full { None } else { retry },
            ..Decision::default()
        }
    }

    fn give(&self, state: &mut State, ask: Ask, gone: usize) {
        let held = (Self::len(state) - gone) as u64;
        match ask.action {
            Action::Undo(taken) => {
                self.free(state, gone, ask.cost, Some((taken + self.hold).get()));
            }
            // Of those without a name the one that ends first goes: none comes back before its end.
            _ if self.asker.holder == 0 && self.classes.is_some() => {
                self.free(state, gone, ask.cost, None);
            }
            _ if self.asker.holder == 0 => state.cut_front(ENTRY * (gone as u64 + ask.cost.min(held)) as usize),
            _ => {
                self.free(state, gone, held, None);
            }
        }
    }
}

impl Rule for Concurrency {
    const NAME: &'static str = "concurrency";
    const WORDS: &'static [&'static str] = &["limit", "hold", "holder", "capacity", "class", "shares", "reserve"];
    const TAG: &'static str = "cc";
    /// [`super::adaptive`]'s, too.
    const SCRIPT: &'static str = concat!(include_str!("../adaptive/learn.lua"), include_str!("script.lua"));
    const ARGUMENTS: &'static [&'static str] =
        &["cost", "ceiling", "hold", "slack", "holder", "class", "count", "method"];

    /// The window is the hold.
    fn build(shape: &Shape) -> Result<Algorithm, Unfit> {
        let quota = shape.quota(shape.requests.into());
        if shape.counts_denied() {
            return Err(Unfit { word: "count_denied", why: "whoever is refused holds nothing that could count" });
        }
        if quota.ceiling() > Self::MOST {
            let why = "concurrency keeps every slot and takes 1000 at most, its soft part included";
            return Err(Unfit { word: "limit", why });
        }
        if shape.classes.is_some() && shape.soft.is_some() {
            return Err(Unfit { word: "soft", why: "a shared capacity has ceilings, and is not soft" });
        }
        let why = "hold must be longer than nothing, and a day at most";
        let this = Self::new(quota, shape.window).ok_or(Unfit { word: "hold", why })?;
        Ok(Self { classes: shape.classes, ..this }.into())
    }

    fn arguments(&self, ask: Ask) -> Arguments {
        let cost = ask.cost.min(Self::MOST + 1);
        let Asker { holder, class, .. } = self.asker;
        let count = self.classes.map_or(0, |classes| classes.count() as u64);
        let mut arguments: Arguments =
            smallvec![cost, self.quota.ceiling(), self.hold.get(), CLOCK_SLACK.get(), holder, class.into(), count, 0];
        arguments.extend(self.classes.iter().flat_map(Classes::numbers));
        arguments
    }

    fn asked_by(self, asker: Asker) -> Self {
        let last = self.classes.map_or(0, |classes| classes.count() as u8 - 1);
        let asker = Asker { holder: asker.holder.min(Self::LAST_HOLDER), class: asker.class.min(last), ..asker };
        Self { asker, ..self }
    }

    fn step(&self, state: &mut State, ask: Ask) -> bool {
        self.believe(state, ask.now);
        let ask = Ask { cost: ask.cost.min(Self::MOST + 1), ..ask };
        let gone = Self::gone(state, ask.now);
        if ask.action.gives() {
            self.give(state, ask, gone);
            return true;
        }
        let is_held = self.asker.holder > 0 && self.find(state, gone).is_some();
        let held = (Self::len(state) - gone) as u64;
        let allowed = is_held || ask.cost <= self.room(state, gone);
        if ask.action == Action::Take && allowed {
            let end = Self::newest(state).unwrap_or_default().max((ask.now + self.hold).get());
            let slots = if is_held {
                self.free(state, gone, held, None)
            } else {
                state.cut_front(ENTRY * gone);
                ask.cost
            };
            (0..slots).for_each(|_| Self::push(state, (end, self.asker)));
        }
        allowed
    }

    fn explain(&self, state: &State, ask: Ask, allowed: bool) -> Decision {
        let gone = Self::gone(state, ask.now);
        if let Some(classes) = &self.classes {
            return self.explain_class(classes, state, gone, ask, allowed);
        }
        let used = (Self::len(state) - gone) as u64;
        // Until so many of those that are held have ended, if none is given back before.
        let until_free = |slots: u64| match slots {
            0 => Micros::ZERO,
            slots => Micros::new(Self::slot(state, gone + slots as usize - 1).0) - ask.now,
        };
        let limit = self.quota.limit();
        let retry = || {
            let room = self.quota.ceiling().checked_sub(ask.cost)?;
            Some(until_free(used.saturating_sub(room)))
        };
        Decision {
            allowed,
            soft: allowed && ask.is_soft(used, self.quota),
            remaining: self.quota.remaining(used),
            used,
            reset: until_free(used),
            next: if limit > 0 { until_free(used.min(used.saturating_sub(limit) + 1)) } else { Micros::ZERO },
            retry_after: if allowed { None } else { retry() },
            ..Decision::default()
        }
    }

    fn counts_denied(&self) -> bool {
        false
    }

    /// A slot may come back at any moment.
    fn refusal_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn counting(&self) -> Algorithm {
        (*self).into()
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        Self::newest(state).map_or(now, Micros::new)
    }
}

#[cfg(test)]
mod tests;
