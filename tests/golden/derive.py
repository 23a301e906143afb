"""Derives the golden vectors in this folder from the definition of each algorithm, in exact fractions of hits.

The code is neither fast nor shared with the service. A wait is searched for instead of computed: it is the first
microsecond at which the same cost is allowed. `python3 derive.py` writes the files, and
`tests/algorithms/golden_vectors.rs` compares the service with them.
"""

import calendar
import json
import math
import pathlib
import random
from datetime import datetime, time, timedelta
from fractions import Fraction
from zoneinfo import ZoneInfo

SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "month": 30 * 86400, "year": 365 * 86400}
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

    def allows(self, cost, at):
        return self.used(at) + cost <= self.ceiling

    def can_ever_allow(self, cost):
        return cost <= self.ceiling

    def deny(self, cost, at):
        self.take(cost, at)

    def delay(self, cost, at):
        return 0

    def remaining(self, at):
        return max(0, math.floor(self.quota - self.used(at)))

    def has_full_limit(self, at):
        return self.used(at) == 0

    def decide(self, action, cost, at):
        decision = {}
        if action == "return":
            self.refund(cost, at)
            decision["allowed"] = True
        else:
            decision["allowed"] = self.allows(cost, at)
            if decision["allowed"]:
                decision["delay_us"] = self.delay(cost, at)
                decision["soft"] = self.used(at) + cost > self.quota
            if action == "take":
                if decision["allowed"]:
                    self.take(cost, at)
                elif self.count_denied:
                    self.deny(cost, at)
            if not decision["allowed"] and self.can_ever_allow(cost):
                decision["retry_after_us"] = first_wait(lambda wait: self.allows(cost, at + wait))
        decision["remaining"] = self.remaining(at)
        decision["reset_us"] = self.reset(at)
        return decision

    def reset(self, at):
        return 0 if self.has_full_limit(at) else first_wait(lambda wait: self.has_full_limit(at + wait))


def first_wait(condition):
    """Returns the smallest wait for which the condition is true. It must stay true from then on."""
    high = 1
    while not condition(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if condition(middle) else (middle, high)
    return high


class FixedWindow(Limiter):
    def set_up(self, limit):
        self.count_denied = limit.get("count_denied", True)
        self.counts = {}

    def used(self, at):
        return self.counts.get(at // self.window, 0)

    def take(self, cost, at):
        self.counts[at // self.window] = self.used(at) + cost

    def refund(self, cost, at):
        self.counts[at // self.window] = max(0, self.used(at) - cost)

    def reset(self, at):
        return self.window - at % self.window


class CalendarWindow(FixedWindow):
    """A fixed window of the calendar: the last day or hour, of those that begin one, that is not after the time."""

    def set_up(self, limit):
        super().set_up(limit)
        self.limit = limit
        self.zone = ZoneInfo(limit.get("zone", "UTC"))
        self.known = (0, 0)

    def begins_window(self, day):
        months = {"month": 1, "year": 12}.get(self.limit["unit"], 0) * self.limit.get("unit_multiplier", 1)
        if self.limit["unit"] == "week":
            return day.strftime("%A").lower() == self.limit.get("week_starts", "monday")
        if months == 0:
            return True
        if (day.month - self.limit.get("month", 1)) % months:
            return False
        last = calendar.monthrange(day.year, day.month)[1]
        return day.day == min(self.limit.get("day", 1), last)

    def boundaries(self, at):
        """Returns the boundaries around a time. Python's fold=0 is RFC 5545's choice of the offset."""
        local = datetime.fromtimestamp(at // 1_000_000, self.zone)
        found = set()
        if self.limit["unit"] == "hour":
            minute = at // 60_000_000 * 60
            for second in range(minute - 7_200, minute + 7_200, 60):
                if datetime.fromtimestamp(second, self.zone).minute == 0:
                    found.add(second * 1_000_000)
        else:
            time_of_day = time.fromisoformat(self.limit.get("at", "00:00"))
            for days in range(-370, 740):
                day = local.date() + timedelta(days)
                if self.begins_window(day):
                    found.add(int(datetime.combine(day, time_of_day, self.zone).timestamp()) * 1_000_000)
        return max(b for b in found if b <= at), min(b for b in found if b > at)

    def window_at(self, at):
        if not self.known[0] <= at < self.known[1]:
            self.known = self.boundaries(at)
        return self.known

    def used(self, at):
        return self.counts.get(self.window_at(at), 0)

    def take(self, cost, at):
        self.counts[self.window_at(at)] = self.used(at) + cost

    def refund(self, cost, at):
        self.counts[self.window_at(at)] = max(0, self.used(at) - cost)

    def reset(self, at):
        return self.window_at(at)[1] - at


class FirstRequest(Limiter):
    """A fixed window that begins with the first hit that counts, and exists as long as hits count."""

    def set_up(self, limit):
        self.count_denied = limit.get("count_denied", True)
        self.start, self.count = 0, 0

    def used(self, at):
        return self.count if at < self.start + self.window else 0

    def take(self, cost, at):
        if self.used(at) == 0:
            self.start, self.count = at, 0
        self.count += cost

    def refund(self, cost, at):
        self.count = max(0, self.used(at) - cost)


class SlidingWindow(Limiter):
    def set_up(self, limit):
        self.buckets = limit.get("buckets", 1)
        self.strict = limit.get("edge") == "strict"
        assert self.window % self.buckets == 0
        self.width = self.window // self.buckets
        self.counts = {}

    def used(self, at):
        current, elapsed = divmod(at, self.width)
        whole = sum(self.counts.get(current - age, 0) for age in range(self.buckets))
        oldest = self.counts.get(current - self.buckets, 0)
        return whole + (oldest if self.strict else Fraction(oldest * (self.width - elapsed), self.width))

    def take(self, cost, at):
        self.counts[at // self.width] = self.counts.get(at // self.width, 0) + cost

    def refund(self, cost, at):
        for age in range(self.buckets + 1):
            bucket = at // self.width - age
            refunded = min(cost, self.counts.get(bucket, 0))
            self.counts[bucket] = self.counts.get(bucket, 0) - refunded
            cost -= refunded


class SlidingLog(Limiter):
    def set_up(self, limit):
        self.log = []
        self.interval = {"0": 0, "250ms": 250_000}[limit.get("min_interval", "0")]

    def live_hits(self, at):
        return [hit for hit in self.log if hit > at - self.window]

    def used(self, at):
        return len(self.live_hits(at))

    def allows(self, cost, at):
        is_spaced = cost == 0 or not self.log or at - self.log[-1] >= self.interval
        return super().allows(cost, at) and is_spaced

    def take(self, cost, at):
        self.log += [at] * cost

    def deny(self, cost, at):
        self.log = (self.live_hits(at) + [at] * min(cost, self.ceiling))[-self.ceiling :]

    def refund(self, cost, at):
        self.log = self.live_hits(at)
        self.log = self.log[: max(0, len(self.log) - cost)]


class Bucket(Limiter):
    """Token bucket, GCRA and leaky bucket: a level that falls by `requests` per window."""

    def set_up(self, limit):
        burst = limit.get("burst", self.requests)
        self.quota = burst + limit.get("queue", 0)
        self.undelayed = burst if limit.get("queue") else math.inf
        self.level, self.at = Fraction(0), 0

    def used(self, at):
        return max(Fraction(0), self.level - Fraction((at - self.at) * self.requests, self.window))

    def take(self, cost, at):
        self.level, self.at = self.used(at) + cost, at

    def deny(self, cost, at):
        self.level, self.at = Fraction(self.ceiling), at

    def refund(self, cost, at):
        self.level, self.at = max(Fraction(0), self.used(at) - cost), at

    def delay(self, cost, at):
        over = self.used(at) + cost - self.undelayed
        return math.ceil(over * self.window / self.requests) if over > 0 else 0


class DebtBucket(Bucket):
    """A bucket that allows a request if nothing is owed, and it then owes at most `debt` hits."""

    def set_up(self, limit):
        super().set_up(limit)
        self.free = self.quota
        self.quota += limit["debt"]

    def allows(self, cost, at):
        return self.used(at) <= self.free and super().allows(cost, at)

    def remaining(self, at):
        return super().remaining(at) if self.used(at) <= self.free else 0


class WarmUp(Limiter):
    """Guava's SmoothWarmingUp, in permits. Stored permits above the threshold cost more: the area under the slope."""

    def set_up(self, limit):
        self.stable = Fraction(self.window, self.requests)
        period = {"10s": 10_000_000, "30s": 30_000_000}[limit["warm_up"]]
        self.burst = limit.get("burst", 1)
        self.max_cost = max(self.burst, self.requests)
        self.threshold = period / self.stable / 2
        self.max_stored = self.threshold + 2 * period / (self.stable + 3 * self.stable)
        self.slope = 2 * self.stable / (self.max_stored - self.threshold)
        self.cool_down = period / self.max_stored
        self.stored, self.next_free = self.max_stored, 0

    def resync(self, at):
        stored = min(self.max_stored, self.stored + max(0, at - self.next_free) / self.cool_down)
        return stored, max(self.next_free, Fraction(at))

    def allows(self, cost, at):
        _, next_free = self.resync(at)
        return cost <= self.max_cost and next_free - at <= max(0, self.burst - cost) * self.stable

    def can_ever_allow(self, cost):
        return cost <= self.max_cost

    def used(self, at):
        return 0

    def take(self, cost, at):
        stored, next_free = self.resync(at)
        used_stored = min(stored, cost)
        above_threshold = max(Fraction(0), stored - self.threshold)
        surcharged = min(above_threshold, cost)
        extra = surcharged * (above_threshold * self.slope + (above_threshold - surcharged) * self.slope) / 2
        self.stored, self.next_free = stored - used_stored, next_free + cost * self.stable + math.ceil(extra)

    def refund(self, cost, at):
        stored, next_free = self.resync(at)
        self.stored = min(self.max_stored, stored + cost)
        self.next_free = max(Fraction(at), next_free - cost * self.stable)

    def remaining(self, at):
        _, next_free = self.resync(at)
        if next_free == at:
            return self.max_cost
        return max(0, math.floor(self.burst - (next_free - at) / self.stable))

    def has_full_limit(self, at):
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

    def refund(self, cost, at):
        self.ends = sorted(end for end in self.ends if end > at)[cost:]


class Classes:
    """The classes that share a capacity, by index: the guaranteed minimum and the maximum of each class."""

    def read(self, limit, capacity):
        names = sorted(name for name in limit["shares"] if name != "other")
        self.minimums = [limit["shares"][name].get("min", 0) for name in names]
        self.maximums = [limit["shares"][name].get("max", capacity) for name in names]
        self.minimums.append(0)
        self.maximums.append(max(1, capacity - sum(self.minimums)))
        self.caller_class = 0

    @property
    def classes(self):
        return range(len(self.minimums))


class Shares(Limiter, Classes):
    """Buckets that refill: one for all classes, and for each class one for its minimum and one for its maximum."""

    def rate(self, limit):
        capacity, unit = limit["capacity"].split("/")
        self.read(limit, int(capacity))
        return int(capacity), {"s": 1, "m": 60}[unit] * 1_000_000

    def set_up(self, limit):
        self.at = START
        self.own = [Fraction(minimum) for minimum in self.minimums]
        self.capped = [Fraction(maximum) for maximum in self.maximums]
        self.common = Fraction(self.requests - sum(self.minimums))
        self.borrowed = [Fraction(0) for _ in self.minimums]

    def levels(self, at):
        """Returns the level of each bucket at a time, if there are no requests until then."""
        windows = Fraction(max(0, at - self.at), self.window)
        own = [min(Fraction(size), level + size * windows) for size, level in zip(self.minimums, self.own)]
        overflow = self.requests * windows - sum(own) + sum(self.own)
        common = min(Fraction(self.requests - sum(self.minimums)), self.common + overflow)
        capped = [min(Fraction(size), level + size * windows) for size, level in zip(self.maximums, self.capped)]
        return own, common, capped

    def available(self, at):
        own, common, capped = self.levels(at)
        return min(own[self.caller_class] + common, capped[self.caller_class])

    def max_available(self):
        common = self.requests - sum(self.minimums)
        return min(self.minimums[self.caller_class] + common, self.maximums[self.caller_class])

    def allows(self, cost, at):
        return cost <= self.available(at)

    def can_ever_allow(self, cost):
        return cost <= self.max_available()

    def used(self, at):
        return self.max_available() - self.available(at)

    def remaining(self, at):
        return math.floor(self.available(at))

    def advance(self, at):
        (self.own, self.common, self.capped), self.at = self.levels(at), at
        used_common = self.requests - sum(self.minimums) - self.common
        self.borrowed = [min(used_common, borrowed) for borrowed in self.borrowed]

    def take(self, cost, at):
        self.advance(at)
        own = min(self.own[self.caller_class], Fraction(cost))
        self.own[self.caller_class] -= own
        self.common -= cost - own
        self.borrowed[self.caller_class] += cost - own
        self.capped[self.caller_class] -= cost

    def refund(self, cost, at):
        self.advance(at)
        index = self.caller_class
        cost = min(cost, self.requests + 1)
        borrowed = min(self.borrowed[index], Fraction(cost))
        self.borrowed[index] -= borrowed
        self.common += borrowed
        self.own[index] = min(self.own[index] + cost - borrowed, Fraction(self.minimums[index]))
        self.capped[index] = min(self.capped[index] + cost, Fraction(self.maximums[index]))

    def decide(self, action, cost, at):
        return {**super().decide(action, cost, at), "soft": False}


class SharedSlots(Concurrency, Classes):
    """Slots shared by classes: a slot is free for a class if all other classes can still have their minimum."""

    def rate(self, limit):
        self.read(limit, limit["capacity"])
        return limit["capacity"], int(limit["hold"].rstrip("s")) * 1_000_000

    def held(self, at, class_):
        return sum(1 for end, holder_class in self.ends if end > at and holder_class == class_)

    def free(self, at):
        others = [other for other in self.classes if other != self.caller_class]
        unavailable = sum(max(self.minimums[other], self.held(at, other)) for other in others)
        held = self.held(at, self.caller_class)
        return max(0, min(self.requests - unavailable - held, self.maximums[self.caller_class] - held))

    def allows(self, cost, at):
        return cost <= self.free(at)

    def can_ever_allow(self, cost):
        others = sum(self.minimums) - self.minimums[self.caller_class]
        return cost <= min(self.requests - others, self.maximums[self.caller_class])

    def used(self, at):
        return self.held(at, self.caller_class)

    def remaining(self, at):
        return self.free(at)

    def take(self, cost, at):
        self.ends += [(at + self.window, self.caller_class)] * cost

    def refund(self, cost, at):
        self.ends = sorted(slot for slot in self.ends if slot[0] > at)
        for slot in [slot for slot in self.ends if slot[1] == self.caller_class][:cost]:
            self.ends.remove(slot)

    def decide(self, action, cost, at):
        return {**super().decide(action, cost, at), "soft": False}


KINDS = {
    "fixed_window": FixedWindow,
    "first_request": FirstRequest,
    "calendar": CalendarWindow,
    "sliding_window": SlidingWindow,
    "sliding_log": SlidingLog,
    "token_bucket": Bucket,
    "leaky_bucket": Bucket,
    "gcra": Bucket,
    "warm_up": WarmUp,
    "debt": DebtBucket,
    "concurrency": Concurrency,
    "shares": Shares,
    "shared_slots": SharedSlots,
}

MINUTE = {"unit": "minute", "requests_per_unit": 10}
SEVEN = {"unit": "second", "requests_per_unit": 7}
LARGE = {"unit": "hour", "requests_per_unit": 999_999_999_999_989}
LIMITS = [
    MINUTE,
    {**MINUTE, "count_denied": False, "soft": "20%"},
    {**MINUTE, "window": "first_request"},
    {**SEVEN, "window": "first_request", "count_denied": False, "soft": "20%"},
    {**MINUTE, "phase": "entity"},  # the entity of the tests has the phase 0
    {**MINUTE, "unit": "hour", "window": "calendar", "zone": "Asia/Kolkata"},
    {**MINUTE, "unit": "day", "window": "calendar", "zone": "America/New_York", "count_denied": False, "soft": "20%"},
    {**MINUTE, "unit": "month", "window": "calendar", "zone": "Europe/Berlin", "day": 31, "at": "06:00"},
    {**MINUTE, "unit": "month", "unit_multiplier": 3, "window": "calendar"},
    {**MINUTE, "unit": "year", "window": "calendar", "month": 4, "day": 6, "zone": "Europe/London"},
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
    {**MINUTE, "algorithm": "token_bucket", "burst": 3, "debt": 5},
    {**SEVEN, "algorithm": "gcra", "burst": 7, "debt": 20},
    {**SEVEN, "algorithm": "token_bucket", "requests_per_unit": 10, "warm_up": "10s"},
    {**SEVEN, "algorithm": "token_bucket", "requests_per_unit": 10, "warm_up": "30s", "burst": 4},
    {**SEVEN, "algorithm": "leaky_bucket"},
    {**SEVEN, "algorithm": "leaky_bucket", "burst": 1, "queue": 5},
    {**MINUTE, "algorithm": "leaky_bucket", "burst": 3, "queue": 4, "soft": "50%"},
    {**SEVEN, "algorithm": "gcra", "burst": 5},
    {**MINUTE, "algorithm": "gcra", "burst": 1},
    {**LARGE, "requests_per_unit": 2**53 - 1, "count_denied": False},
    {**LARGE, "algorithm": "token_bucket"},
    {**LARGE, "algorithm": "token_bucket", "burst": 5_000_000_011, "soft": "10%", "count_denied": True},
    {**LARGE, "algorithm": "token_bucket", "burst": 70_000_000_003, "debt": 5_000_000_000_021},
    {**LARGE, "algorithm": "gcra", "unit": "month", "burst": 2**53 - 1},
    {"algorithm": "concurrency", "limit": 5, "hold": "60s"},
    {"algorithm": "concurrency", "limit": 10, "hold": "3s", "soft": "20%"},
    {"capacity": "40/s", "class": "plan", "shares": {"free": {"min": 5, "max": 12}, "gold": {"min": 20}}},
    {"capacity": "7/m", "class": "plan", "shares": {"free": {"max": 3}, "gold": {"min": 2, "max": 7}}},
    {"capacity": 8, "hold": "5s", "class": "plan", "shares": {"free": {"max": 4}, "gold": {"min": 3}}},
]


def gaps(limiter):
    """Returns times between steps: whole windows and drops, and one microsecond more or less."""
    drop = limiter.window // limiter.requests
    durations = [0, drop, 2 * drop + 1, limiter.window // 6, limiter.window // 2, limiter.window]
    return [max(0, duration + offset) for duration in durations for offset in (-1, 0, 1)] + [0] * 20


def derive(limit, steps=60):
    kind = limit.get("algorithm", "fixed_window")
    if "capacity" in limit:
        kind = "shares" if isinstance(limit["capacity"], str) else "shared_slots"
    kind = limit.get("window", kind)
    kind = next((keyword for keyword in ("warm_up", "debt") if keyword in limit), kind)
    limiter = KINDS[kind](limit)
    shared = isinstance(limiter, Classes)
    rng = random.Random(json.dumps(limit, sort_keys=True))
    now, rows, retry = START, [], None
    for _ in range(steps):
        # Half of the steps after a denial are at its retry-after, or one microsecond earlier.
        if retry and rng.random() < 0.5:
            now += retry - rng.choice([0, 1])
        else:
            now += rng.choice(gaps(limiter))
        action = rng.choices(["take", "peek", "return"], [8, 1, 1])[0]
        cost = rng.choice([1, 1, 1, 2, 3, limiter.quota, limiter.ceiling + 1] + [0] * (action == "peek"))
        if limiter.quota > 2**32 and rng.random() < 0.7:
            cost = rng.randrange(limiter.quota) // rng.choice([1, 3, 1_000])
        if shared and not retry:
            limiter.caller_class = rng.choice(limiter.classes)
        decision = limiter.decide(action, cost, now)
        retry = decision.get("retry_after_us")
        if shared:
            decision["class"] = limiter.caller_class
        # Except in these three fields, 0 and false are omitted.
        fields = {k: v for k, v in decision.items() if v or k in ("allowed", "remaining", "reset_us")}
        rows.append({"at_us": now - START, "action": action, "cost": cost, **fields})
    return {"rate_limit": limit, "steps": rows}


def main():
    folder = pathlib.Path(__file__).parent
    for limit in LIMITS:
        name_parts = ["shared"] if "capacity" in limit else [limit.get("algorithm", "fixed_window")]
        keys = (key for key in sorted(limit) if key not in ("algorithm", "unit", "class", "shares"))
        for key in keys:
            value = str(limit[key]).rstrip("%").replace(":", "").lower()
            name_parts.append(f"{key}-{value.replace('/', '-' if key == 'zone' else '-per-')}")
        text = json.dumps(derive(limit), indent=None).replace('{"at_us"', '\n{"at_us"')
        (folder / ("_".join(name_parts) + ".json")).write_text(text + "\n")


if __name__ == "__main__":
    main()
