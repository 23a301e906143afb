"""Derives the golden vectors in this folder from the definition of each algorithm, in exact fractions of hits.

The code is neither fast nor shared with the service. A wait is searched for instead of computed: it is the first
microsecond at which the same cost is allowed. `python3 derive.py` writes the files, and
`tests/algorithms/golden_vectors.rs` compares the service with them.
"""

import json
import math
import pathlib
import random
from fractions import Fraction

SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
START = 1_763_672_400_000_000  # a whole number of minutes and of hours


class Limiter:
    """Base class of the algorithms. A subclass computes the hits in use at a time, and takes hits."""

    def __init__(self, limit):
        self.requests, self.window = self.rate(limit)
        self.count_denied = limit.get("count_denied", False)
        self.quota = self.requests
        self.set_up(limit)
        percent = int(limit.get("soft", "0%").rstrip("%"))
        self.ceiling = self.quota + self.quota * percent // 100

    def rate(self, limit):
        return limit["requests_per_unit"], SECONDS[limit["unit"]] * limit.get("unit_multiplier", 1) * 1_000_000

    def set_up(self, limit):
        pass

    def passes(self, cost, at):
        return self.used(at) + cost <= self.ceiling

    def possible(self, cost):
        return cost <= self.ceiling

    def deny(self, cost, at):
        self.take(cost, at)

    def delay(self, cost, at):
        return 0

    def remaining(self, at):
        return max(0, math.floor(self.quota - self.used(at)))

    def restored(self, at):
        return self.used(at) == 0

    def ask(self, action, cost, at):
        answer = {}
        if action == "return":
            self.give_back(cost, at)
            answer["allowed"] = True
        else:
            answer["allowed"] = self.passes(cost, at)
            if answer["allowed"]:
                answer["delay_us"] = self.delay(cost, at)
                answer["soft"] = self.used(at) + cost > self.quota
            if action == "take":
                if answer["allowed"]:
                    self.take(cost, at)
                elif self.count_denied:
                    self.deny(cost, at)
            if not answer["allowed"] and self.possible(cost):
                answer["retry_after_us"] = first(lambda wait: self.passes(cost, at + wait))
        answer["remaining"] = self.remaining(at)
        answer["reset_us"] = self.reset(at)
        return answer

    def reset(self, at):
        return 0 if self.restored(at) else first(lambda wait: self.restored(at + wait))


def first(holds):
    """Returns the smallest wait for which a condition holds that stays true once it is true."""
    high = 1
    while not holds(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


class FixedWindow(Limiter):
    def set_up(self, limit):
        self.count_denied = limit.get("count_denied", True)
        self.counts = {}

    def used(self, at):
        return self.counts.get(at // self.window, 0)

    def take(self, cost, at):
        self.counts[at // self.window] = self.used(at) + cost

    def give_back(self, cost, at):
        self.counts[at // self.window] = max(0, self.used(at) - cost)

    def reset(self, at):
        return self.window - at % self.window


class SlidingWindow(Limiter):
    def set_up(self, limit):
        self.buckets = limit.get("buckets", 1)
        self.strict = limit.get("edge") == "strict"
        assert self.window % self.buckets == 0
        self.width = self.window // self.buckets
        self.counts = {}

    def used(self, at):
        current, into = divmod(at, self.width)
        whole = sum(self.counts.get(current - age, 0) for age in range(self.buckets))
        oldest = self.counts.get(current - self.buckets, 0)
        return whole + (oldest if self.strict else Fraction(oldest * (self.width - into), self.width))

    def take(self, cost, at):
        self.counts[at // self.width] = self.counts.get(at // self.width, 0) + cost

    def give_back(self, cost, at):
        for age in range(self.buckets + 1):
            bucket = at // self.width - age
            given = min(cost, self.counts.get(bucket, 0))
            self.counts[bucket] = self.counts.get(bucket, 0) - given
            cost -= given


class SlidingLog(Limiter):
    def set_up(self, limit):
        self.log = []
        self.interval = {"0": 0, "250ms": 250_000}[limit.get("min_interval", "0")]

    def alive(self, at):
        return [hit for hit in self.log if hit > at - self.window]

    def used(self, at):
        return len(self.alive(at))

    def passes(self, cost, at):
        spaced = cost == 0 or not self.log or at - self.log[-1] >= self.interval
        return super().passes(cost, at) and spaced

    def take(self, cost, at):
        self.log += [at] * cost

    def deny(self, cost, at):
        self.log = (self.alive(at) + [at] * min(cost, self.ceiling))[-self.ceiling :]

    def give_back(self, cost, at):
        self.log = self.alive(at)
        self.log = self.log[: max(0, len(self.log) - cost)]


class Bucket(Limiter):
    """Token bucket, GCRA and leaky bucket: a level that falls by `requests` per window."""

    def set_up(self, limit):
        burst = limit.get("burst", self.requests)
        self.quota = burst + limit.get("queue", 0)
        self.at_once = burst if limit.get("queue") else math.inf
        self.level, self.at = Fraction(0), 0

    def used(self, at):
        return max(Fraction(0), self.level - Fraction((at - self.at) * self.requests, self.window))

    def take(self, cost, at):
        self.level, self.at = self.used(at) + cost, at

    def deny(self, cost, at):
        self.level, self.at = Fraction(self.ceiling), at

    def give_back(self, cost, at):
        self.level, self.at = max(Fraction(0), self.used(at) - cost), at

    def delay(self, cost, at):
        over = self.used(at) + cost - self.at_once
        return math.ceil(over * self.window / self.requests) if over > 0 else 0


class WarmUp(Limiter):
    """Guava's SmoothWarmingUp, in permits: permits stored above the threshold cost more, by the area under the slope."""

    def set_up(self, limit):
        self.stable = Fraction(self.window, self.requests)
        period = {"10s": 10_000_000, "30s": 30_000_000}[limit["warm_up"]]
        self.burst = limit.get("burst", 1)
        self.largest = max(self.burst, self.requests)
        self.threshold = period / self.stable / 2
        self.most = self.threshold + 2 * period / (self.stable + 3 * self.stable)
        self.slope = 2 * self.stable / (self.most - self.threshold)
        self.cool_down = period / self.most
        self.stored, self.free = self.most, 0

    def resync(self, at):
        stored = min(self.most, self.stored + max(0, at - self.free) / self.cool_down)
        return stored, max(self.free, Fraction(at))

    def passes(self, cost, at):
        _, free = self.resync(at)
        return cost <= self.largest and free - at <= max(0, self.burst - cost) * self.stable

    def possible(self, cost):
        return cost <= self.largest

    def used(self, at):
        return 0

    def take(self, cost, at):
        stored, free = self.resync(at)
        spent = min(stored, cost)
        above = max(Fraction(0), stored - self.threshold)
        dear = min(above, cost)
        extra = dear * (above * self.slope + (above - dear) * self.slope) / 2
        self.stored, self.free = stored - spent, free + cost * self.stable + math.ceil(extra)

    def give_back(self, cost, at):
        stored, free = self.resync(at)
        self.stored, self.free = min(self.most, stored + cost), max(Fraction(at), free - cost * self.stable)

    def remaining(self, at):
        _, free = self.resync(at)
        if free == at:
            return self.largest
        return max(0, math.floor(self.burst - (free - at) / self.stable))

    def restored(self, at):
        return self.resync(at)[1] == at


class Concurrency(Limiter):
    def rate(self, limit):
        return limit["limit"], int(limit["hold"].rstrip("s")) * 1_000_000

    def set_up(self, limit):
        self.ends = []

    def used(self, at):
        return sum(1 for end in self.ends if end > at)

    def take(self, cost, at):
        self.ends += [at + self.window] * cost

    def give_back(self, cost, at):
        self.ends = sorted(end for end in self.ends if end > at)[cost:]


class Classes:
    """The classes that share a capacity, by index: the guaranteed minimum and the maximum of each class."""

    def read(self, limit, capacity):
        names = sorted(name for name in limit["shares"] if name != "other")
        self.least = [limit["shares"][name].get("min", 0) for name in names]
        self.most = [limit["shares"][name].get("max", capacity) for name in names]
        self.least.append(0)
        self.most.append(max(1, capacity - sum(self.least)))
        self.asking = 0

    @property
    def classes(self):
        return range(len(self.least))


class Shares(Limiter, Classes):
    """Buckets that refill: one for the minimum of each class, one for all classes, and one for the maximum of each class."""

    def rate(self, limit):
        capacity, unit = limit["capacity"].split("/")
        self.read(limit, int(capacity))
        return int(capacity), {"s": 1, "m": 60}[unit] * 1_000_000

    def set_up(self, limit):
        self.at = START
        self.own = [Fraction(least) for least in self.least]
        self.below = [Fraction(most) for most in self.most]
        self.common = Fraction(self.requests - sum(self.least))
        self.borrowed = [Fraction(0) for _ in self.least]

    def levels(self, at):
        """Returns the level of each bucket at a time, if there are no requests until then."""
        past = Fraction(max(0, at - self.at), self.window)
        own = [min(Fraction(least), has + least * past) for least, has in zip(self.least, self.own)]
        over = self.requests * past - sum(own) + sum(self.own)
        common = min(Fraction(self.requests - sum(self.least)), self.common + over)
        below = [min(Fraction(most), has + most * past) for most, has in zip(self.most, self.below)]
        return own, common, below

    def available(self, at):
        own, common, below = self.levels(at)
        return min(own[self.asking] + common, below[self.asking])

    def full(self):
        return min(self.least[self.asking] + self.requests - sum(self.least), self.most[self.asking])

    def passes(self, cost, at):
        return cost <= self.available(at)

    def possible(self, cost):
        return cost <= self.full()

    def used(self, at):
        return self.full() - self.available(at)

    def remaining(self, at):
        return math.floor(self.available(at))

    def settle(self, at):
        (self.own, self.common, self.below), self.at = self.levels(at), at
        out = self.requests - sum(self.least) - self.common
        self.borrowed = [min(out, borrowed) for borrowed in self.borrowed]

    def take(self, cost, at):
        self.settle(at)
        own = min(self.own[self.asking], Fraction(cost))
        self.own[self.asking] -= own
        self.common -= cost - own
        self.borrowed[self.asking] += cost - own
        self.below[self.asking] -= cost

    def give_back(self, cost, at):
        self.settle(at)
        cost = min(cost, self.requests + 1)
        borrowed = min(self.borrowed[self.asking], Fraction(cost))
        self.borrowed[self.asking] -= borrowed
        self.common += borrowed
        self.own[self.asking] = min(self.own[self.asking] + cost - borrowed, Fraction(self.least[self.asking]))
        self.below[self.asking] = min(self.below[self.asking] + cost, Fraction(self.most[self.asking]))

    def ask(self, action, cost, at):
        return {**super().ask(action, cost, at), "soft": False}


class SharedSlots(Concurrency, Classes):
    """Slots shared by classes: a slot is free for a class if all other classes can still have their minimum."""

    def rate(self, limit):
        self.read(limit, limit["capacity"])
        return limit["capacity"], int(limit["hold"].rstrip("s")) * 1_000_000

    def held(self, at, asking):
        return sum(1 for end, of in self.ends if end > at and of == asking)

    def free(self, at):
        others = sum(max(self.least[of], self.held(at, of)) for of in self.classes if of != self.asking)
        mine = self.held(at, self.asking)
        return max(0, min(self.requests - others - mine, self.most[self.asking] - mine))

    def passes(self, cost, at):
        return cost <= self.free(at)

    def possible(self, cost):
        others = sum(self.least) - self.least[self.asking]
        return cost <= min(self.requests - others, self.most[self.asking])

    def used(self, at):
        return self.held(at, self.asking)

    def remaining(self, at):
        return self.free(at)

    def take(self, cost, at):
        self.ends += [(at + self.window, self.asking)] * cost

    def give_back(self, cost, at):
        self.ends = sorted(slot for slot in self.ends if slot[0] > at)
        for slot in [slot for slot in self.ends if slot[1] == self.asking][:cost]:
            self.ends.remove(slot)

    def ask(self, action, cost, at):
        return {**super().ask(action, cost, at), "soft": False}


KINDS = {
    "fixed_window": FixedWindow,
    "sliding_window": SlidingWindow,
    "sliding_log": SlidingLog,
    "token_bucket": Bucket,
    "leaky_bucket": Bucket,
    "gcra": Bucket,
    "concurrency": Concurrency,
    "shares": Shares,
    "shared_slots": SharedSlots,
}

MINUTE = {"unit": "minute", "requests_per_unit": 10}
SEVEN = {"unit": "second", "requests_per_unit": 7}
LIMITS = [
    MINUTE,
    {**MINUTE, "count_denied": False, "soft": "20%"},
    {**MINUTE, "algorithm": "sliding_window"},
    {**MINUTE, "algorithm": "sliding_window", "edge": "strict", "soft": "20%"},
    {**MINUTE, "algorithm": "sliding_window", "buckets": 6},
    {**MINUTE, "algorithm": "sliding_window", "buckets": 6, "edge": "strict", "count_denied": True},
    {**SEVEN, "algorithm": "sliding_window", "buckets": 2},
    {**MINUTE, "algorithm": "sliding_log"},
    {**MINUTE, "algorithm": "sliding_log", "min_interval": "250ms"},
    {**MINUTE, "algorithm": "sliding_log", "count_denied": True, "soft": "20%"},
    {**MINUTE, "algorithm": "token_bucket"},
    {**SEVEN, "algorithm": "token_bucket", "burst": 20, "soft": "10%"},
    {**MINUTE, "algorithm": "token_bucket", "unit_multiplier": 7, "requests_per_unit": 11, "count_denied": True},
    {**SEVEN, "algorithm": "token_bucket", "requests_per_unit": 10, "warm_up": "10s"},
    {**SEVEN, "algorithm": "token_bucket", "requests_per_unit": 10, "warm_up": "30s", "burst": 4},
    {**SEVEN, "algorithm": "leaky_bucket"},
    {**SEVEN, "algorithm": "leaky_bucket", "burst": 1, "queue": 5},
    {**MINUTE, "algorithm": "leaky_bucket", "burst": 3, "queue": 4, "soft": "50%"},
    {**SEVEN, "algorithm": "gcra", "burst": 5},
    {**MINUTE, "algorithm": "gcra", "burst": 1},
    {"algorithm": "concurrency", "limit": 5, "hold": "60s"},
    {"algorithm": "concurrency", "limit": 10, "hold": "3s", "soft": "20%"},
    {"capacity": "40/s", "class": "plan", "shares": {"free": {"min": 5, "max": 12}, "gold": {"min": 20}}},
    {"capacity": "7/m", "class": "plan", "shares": {"free": {"max": 3}, "gold": {"min": 2, "max": 7}}},
    {"capacity": 8, "hold": "5s", "class": "plan", "shares": {"free": {"max": 4}, "gold": {"min": 3}}},
]


def gaps(limiter):
    """Returns times between steps: whole windows and drops, and one microsecond more or less."""
    drop = limiter.window // limiter.requests
    marks = [0, drop, 2 * drop + 1, limiter.window // 6, limiter.window // 2, limiter.window]
    return [max(0, mark + beside) for mark in marks for beside in (-1, 0, 1)] + [0] * 20


def derive(limit, steps=60):
    kind = limit.get("algorithm", "fixed_window")
    if "capacity" in limit:
        kind = "shares" if isinstance(limit["capacity"], str) else "shared_slots"
    limiter = WarmUp(limit) if "warm_up" in limit else KINDS[kind](limit)
    shared = isinstance(limiter, Classes)
    dice = random.Random(json.dumps(limit, sort_keys=True))
    now, rows, retry = START, [], None
    for _ in range(steps):
        # Half of the steps after a denial are at its retry-after, or one microsecond earlier.
        if retry and dice.random() < 0.5:
            now += retry - dice.choice([0, 1])
        else:
            now += dice.choice(gaps(limiter))
        action = dice.choices(["take", "peek", "return"], [8, 1, 1])[0]
        cost = dice.choice([1, 1, 1, 2, 3, limiter.quota, limiter.ceiling + 1] + [0] * (action == "peek"))
        if shared and not retry:
            limiter.asking = dice.choice(limiter.classes)
        answer = limiter.ask(action, cost, now)
        retry = answer.get("retry_after_us")
        if shared:
            answer["class"] = limiter.asking
        rows.append({"at_us": now - START, "action": action, "cost": cost, **{k: v for k, v in answer.items() if v or k == "allowed" or k in ("remaining", "reset_us")}})
    return {"rate_limit": limit, "steps": rows}


def main():
    folder = pathlib.Path(__file__).parent
    for limit in LIMITS:
        words = ["shared"] if "capacity" in limit else [limit.get("algorithm", "fixed_window")]
        named = (key for key in sorted(limit) if key not in ("algorithm", "unit", "class", "shares"))
        words += [f"{key}-{str(limit[key]).rstrip('%').replace('/', '-per-').lower()}" for key in named]
        text = json.dumps(derive(limit), indent=None).replace('{"at_us"', '\n{"at_us"')
        (folder / ("_".join(words) + ".json")).write_text(text + "\n")


if __name__ == "__main__":
    main()
