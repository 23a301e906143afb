// Changes of overrides: what a form asks for, as a request and as a sentence, whether the API accepts it, and how to undo it.
import { call } from "./api.js";
import { duration, fullTime } from "./format.js";
import { begunTarget, modeWord, targetText } from "./words.js";

const SECONDS = { minutes: 60, hours: 3600, days: 86400 };

// The beginning of an override, from a form: `{ kind: "now" | "at", at }`. Undefined for one that is set at once.
export function beginTime(begin) {
  return begin.kind === "at" && begin.at ? new Date(begin.at).toISOString() : undefined;
}

// The target of an override with a beginning.
export const plannedTarget = (target, from) => (from ? { planned: { from, ...target } } : target);

// The end of an override, from a form: `{ kind: "never" | "after" | "at", amount, unit, at }`.
export function endTime(end, from) {
  const beginning = from ? new Date(from).getTime() : Date.now();
  if (end.kind === "after") return new Date(beginning + Number(end.amount) * SECONDS[end.unit] * 1000).toISOString();
  if (end.kind === "at" && end.at) return new Date(end.at).toISOString();
  return undefined;
}

export function endText(until, from) {
  if (!until) return "without an end";
  const left = new Date(until).getTime() - (from ? new Date(from).getTime() : Date.now());
  return `until ${fullTime(until)}${left > 0 ? `, for ${duration(left * 1000)}` : ""}`;
}

// When an override is in force, from its beginning if it has one.
export function periodText(target, until) {
  const from = target?.planned?.from;
  return from ? `from ${fullTime(from)} ${endText(until, from)}` : endText(until);
}

// A change as a sentence without a full stop.
export function changeSentence({ target, value, until }) {
  const name = targetText(target);
  const begun = begunTarget(target);
  const period = periodText(target, until);
  const planned = target.planned ? "planned " : "";
  const beginning = target.planned ? `, which would begin at ${fullTime(target.planned.from)}` : "";
  if (begun.switch) {
    return value ? `Set the switch of ${name} to “${modeWord(value)}”, ${period}` : `Remove the ${planned}switch of ${name}${beginning}`;
  }
  const kind = begun.plan ? "plan" : "limit";
  return value ? `Set the ${kind} of ${name} to ${value}, ${period}` : `Remove the ${planned}${kind} set for ${name}${beginning}`;
}

const UNKNOWN_NAMES = /(?:\w+\|.*?: )?((?:the rules have|domain|there is) .*?); nothing was changed; .*reject_unknown_names.*/s;

// Checks the changes of a plan without making them. Throws what the API objects to; `isUnknownName` is set if they name what
// the rules in force do not have, and the API would accept them with `allowUnknown`.
export async function checkPlan({ changes, reason, additive, thisInstance }, allowUnknown) {
  if (changes.every(({ value }) => !value)) return;
  try {
    await call("PutOverrides", { changes, reason, additive, thisInstance, rejectUnknownNames: !allowUnknown, validateOnly: true });
  } catch (error) {
    const unknown = UNKNOWN_NAMES.exec(error.message);
    if (unknown) {
      error.message = `${unknown[1][0].toUpperCase()}${unknown[1].slice(1)}`;
      error.isUnknownName = true;
    }
    throw error;
  }
}

// Whether a change can be undone: a planned override that has begun cannot be planned again.
function isUndoable({ target }) {
  if (!target || target.rules !== undefined) return false;
  return !target.planned || new Date(target.planned.from).getTime() > Date.now();
}

// Returns the changes that restore what was before. A value whose end has passed is removed instead.
export function undoOf(changes, version) {
  return changes.filter(isUndoable).map(({ target, before, after }) => {
    const isOver = before?.until && new Date(before.until).getTime() <= Date.now();
    const restored = before && !isOver ? { value: before.value, until: before.until } : { value: "" };
    const change = { target, ...restored };
    if (version !== undefined) change.expectedVersion = after ? String(after.version ?? version) : "0";
    return change;
  });
}

// Returns the path of the row of ListRuleActivity that shows the effect of a change; empty if there is none.
export function pathOfScope(scope = {}) {
  if (scope.rule) return `${scope.rule.domain}.${scope.rule.rule}`;
  return scope.domain ?? "";
}
