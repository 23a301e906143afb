//! Concurrency: at most so many in flight at once.
//!
//! Who passes holds a slot until it is given back, or until its end: a holder that has crashed gives nothing back. Slots
//! have names, so that giving back twice, too late, or what was never had frees nothing of anybody else's. Whoever asks
//! again under a name that has a slot keeps it for as long again.
//!
//! The state is 14 bytes a slot, the one that ends first first: its end and its holder. It is a sliding log that is
//! written from its other end, with names.

use smallvec::smallvec;

use super::{Action, Algorithm, Arguments, Ask, CLOCK_SLACK, Decision, Micros, Quota, Rule, Shape, State, Unfit};

/// At most `limit` slots, each for `hold` at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concurrency {
    quota: Quota,
    hold: Micros,
    /// Whose slots are asked for; 0 is nobody in particular.
    holder: u64,
}

/// Bytes of an instant, of a name, and of both.
const END: usize = 7;
const ENTRY: usize = 14;

/// A slot: its end, and who has it.
type Slot = (u64, u64);

impl Concurrency {
    /// The largest limit, soft part included: 14 kB for each counter.
    pub const MOST: u64 = 1_000;
    /// The longest hold: a day.
    pub const LONGEST: Micros = Micros::from_secs(86_400);
    /// Names are numbers up to this one, which Lua's hold exactly.
    pub const LAST_HOLDER: u64 = super::MAX;

    /// `None` for a quota above [`Self::MOST`], and a hold of no length or longer than [`Self::LONGEST`].
    #[must_use]
    pub fn new(quota: Quota, hold: Micros) -> Option<Self> {
        let fits = hold > Micros::ZERO && hold <= Self::LONGEST && quota.ceiling() <= Self::MOST;
        fits.then_some(Self { quota, hold, holder: 0 })
    }

    fn slot(state: &State, place: usize) -> Slot {
        let number = |at| state.number::<END>(at).unwrap_or_default();
        (number(ENTRY * place), number(ENTRY * place + END))
    }

    fn len(state: &State) -> usize {
        state.as_bytes().len() / ENTRY
    }

    /// The latest end.
    fn newest(state: &State) -> Option<u64> {
        Self::len(state).checked_sub(1).map(|last| Self::slot(state, last).0)
    }

    fn push(state: &mut State, (end, holder): Slot) {
        state.push::<END>(end);
        state.push::<END>(holder);
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

    /// The holder's next slot from this place on.
    fn find(&self, state: &State, from: usize) -> Option<usize> {
        let (slots, _) = state.as_bytes().get(ENTRY * from..)?.as_chunks::<ENTRY>();
        let name = |[.., a, b, c, d, e, f, g]: &[u8; ENTRY]| u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, 0]);
        slots.iter().position(|slot| name(slot) == self.holder).map(|place| from + place)
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

    fn give(&self, state: &mut State, ask: Ask, gone: usize) {
        let held = (Self::len(state) - gone) as u64;
        match ask.action {
            Action::Undo(taken) => {
                self.free(state, gone, ask.cost, Some((taken + self.hold).get()));
            }
            // Of those without a name the one that ends first goes: none comes back before its end.
            _ if self.holder == 0 => state.cut_front(ENTRY * (gone as u64 + ask.cost.min(held)) as usize),
            _ => {
                self.free(state, gone, held, None);
            }
        }
    }
}

impl Rule for Concurrency {
    const NAME: &'static str = "concurrency";
    const WORDS: &'static [&'static str] = &["limit", "hold", "holder"];
    const TAG: &'static str = "cc";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["cost", "ceiling", "hold", "slack", "holder"];

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
        let why = "hold must be longer than nothing, and a day at most";
        Ok(Self::new(quota, shape.window).ok_or(Unfit { word: "hold", why })?.into())
    }

    fn arguments(&self, ask: Ask) -> Arguments {
        let cost = ask.cost.min(Self::MOST + 1);
        smallvec![cost, self.quota.ceiling(), self.hold.get(), CLOCK_SLACK.get(), self.holder]
    }

    fn held_by(self, holder: u64) -> Self {
        Self { holder: holder.min(Self::LAST_HOLDER), ..self }
    }

    fn step(&self, state: &mut State, ask: Ask) -> bool {
        self.believe(state, ask.now);
        let ask = Ask { cost: ask.cost.min(Self::MOST + 1), ..ask };
        let gone = Self::gone(state, ask.now);
        if ask.action.gives() {
            self.give(state, ask, gone);
            return true;
        }
        let is_held = self.holder > 0 && self.find(state, gone).is_some();
        let held = (Self::len(state) - gone) as u64;
        let allowed = is_held || held + ask.cost <= self.quota.ceiling();
        if ask.action == Action::Take && allowed {
            let end = Self::newest(state).unwrap_or_default().max((ask.now + self.hold).get());
            let slots = if is_held {
                self.free(state, gone, held, None)
            } else {
                state.cut_front(ENTRY * gone);
                ask.cost
            };
            (0..slots).for_each(|_| Self::push(state, (end, self.holder)));
        }
        allowed
    }

    fn explain(&self, state: &State, ask: Ask, allowed: bool) -> Decision {
        let gone = Self::gone(state, ask.now);
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
            delay: Micros::ZERO,
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
