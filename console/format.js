// Turns numbers, durations, times and foreign text into text for people.
const LOCALE = "en-GB";
const whole = new Intl.NumberFormat(LOCALE, { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat(LOCALE, { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const clockFormat = new Intl.DateTimeFormat(LOCALE, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minuteFormat = new Intl.DateTimeFormat(LOCALE, { hour: "2-digit", minute: "2-digit" });
const dayFormat = new Intl.DateTimeFormat(LOCALE, { day: "numeric", month: "short" });
const fullFormat = new Intl.DateTimeFormat(LOCALE, { dateStyle: "long", timeStyle: "long" });

// 64-bit integers are strings in the API, and zero is left out.
export const integer = (value) => Number(value ?? 0);

export const number = (value) => whole.format(value);

// Hits in the currency of their rule, as ctl prints them: `12.50 USD`. Without a currency, their number.
export function hitsText(hits, currency) {
  if (!currency) return number(hits);
  const perUnit = BigInt(currency.hits);
  const decimals = perUnit > 1n ? String(perUnit - 1n).length : 0;
  const units = `${whole.format(BigInt(hits) / perUnit)}`;
  if (decimals === 0) return `${units} ${currency.code}`;
  const fraction = ((BigInt(hits) % perUnit) * 10n ** BigInt(decimals)) / perUnit;
  const digits = String(fraction).padStart(decimals, "0");
  return `${units}.${digits.slice(0, 2)}${digits.slice(2).replace(/0+$/, "")} ${currency.code}`;
}

// A limit with separators of thousands: `100,000 per minute`.
export const limitText = (text = "") => text.replace(/(?<![\w.,])\d{4,}(?![\w.])/g, (digits) => whole.format(BigInt(digits)));

// A limit as the API reads it: without the separators that `limitText` adds.
export const plainLimit = (text) => text.trim().replace(/(?<=\d),(?=\d{3}(?!\d))/g, "");

// A number per second: one decimal below 100.
export function rate(value) {
  if (!value) return "0";
  if (value < 0.05) return "<0.1";
  return value < 99.95 ? tenth.format(value) : whole.format(value);
}

// A share between 0 and 1 in percent.
export function percent(share) {
  if (!share) return "0%";
  if (share < 0.0005) return "<0.1%";
  if (share > 0.9995 && share < 1) return ">99.9%";
  return share === 1 ? "100%" : `${tenth.format(share * 100)}%`;
}

// A short number for axes: 1.2k, 3M.
export function compact(value) {
  if (value >= 1e6) return `${+(value / 1e6).toFixed(1)}M`;
  if (value >= 1e3) return `${+(value / 1e3).toFixed(1)}k`;
  return `${+value.toFixed(value < 1 ? 2 : 1)}`;
}

// A latency with its unit.
export function latency(microseconds) {
  if (microseconds < 1000) return `${whole.format(microseconds)} µs`;
  if (microseconds < 1e6) return `${tenth.format(microseconds / 1000)} ms`;
  return `${tenth.format(microseconds / 1e6)} s`;
}

// A latency for axes, without needless decimals.
export function shortLatency(microseconds) {
  if (microseconds < 1000) return `${whole.format(microseconds)} µs`;
  return microseconds < 1e6 ? `${+(microseconds / 1000).toFixed(1)} ms` : `${+(microseconds / 1e6).toFixed(1)} s`;
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// A duration in words, with at most two units.
export function duration(microseconds) {
  const milliseconds = microseconds / 1000;
  if (milliseconds < 1) return "less than a millisecond";
  if (milliseconds < 995) return plural(Math.round(milliseconds), "millisecond");
  const seconds = Math.round(milliseconds / 1000);
  if (seconds < 60) return plural(seconds, "second");
  const units = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  const [name, size] = units[first];
  const [nextName, nextSize] = units[first + 1];
  const rest = Math.floor((seconds % size) / nextSize);
  const words = plural(Math.floor(seconds / size), name);
  return rest && seconds < 10 * size ? `${words} ${plural(rest, nextName)}` : words;
}

const asDate = (time) => (time instanceof Date ? time : new Date(time));
const isValid = (date) => !Number.isNaN(date.getTime());

// The time of day, with the day if it is not today.
export function clock(time) {
  const date = asDate(time);
  if (!isValid(date)) return "unknown";
  const today = new Date().toDateString() === date.toDateString();
  return today ? clockFormat.format(date) : `${dayFormat.format(date)}, ${minuteFormat.format(date)}`;
}

export const minute = (time) => minuteFormat.format(asDate(time));

export const fullTime = (time) => (isValid(asDate(time)) ? fullFormat.format(asDate(time)) : "");

const NAMED = { 0x00: "NUL", 0x09: "TAB", 0x0a: "LF", 0x0d: "CR", 0x1b: "ESC", 0x7f: "DEL" };
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

// Replaces control characters and those that change the direction of text by visible names in brackets.
export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (character) => {
    const code = character.charCodeAt(0);
    return `⟦${NAMED[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`}⟧`;
  });
}

// Cuts a text after `length` characters, never inside a surrogate pair.
export function cut(text, length) {
  if (text.length <= length) return text;
  const end = /[\ud800-\udbff]/.test(text[length - 1]) ? length - 1 : length;
  return `${text.slice(0, end)}…`;
}
