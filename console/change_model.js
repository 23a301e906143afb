// Changes of overrides: what a form asks for, as a request and as a sentence, whether the API accepts it, and how to undo it.
import { call } from "./api.js";
import { duration, fullTime } from "./format.js";
import { modeWord, targetText } from "./words.js";

const SECONDS = { minutes: 60, hours: 3600, days: 86400 };

// The end of an override, from a form: `{ kind: "never" | "after" | "at", amount, unit, at }`.
export function endTime(end) {
  if (end.kind === "after") return new Date(Date.now() + Number(end.amount) * SECONDS[end.unit] * 1000).toISOString();
  if (end.kind === "at" && end.at) return new Date(end.at).toISOString();
  return undefined;
}

export function endText(until) {
  if (!until) return "without an end";
  const left = new Date(until).getTime() - Date.now();
  return `until ${fullTime(until)}${left > 0 ? `, for ${duration(left * 1000)}` : ""}`;
}

// A change as a sentence without a full stop.
export function changeSentence({ target, value, until }) {
  const name = targetText(target);
  if (target.switch) {
    return value ? `Set the switch of ${name} to “${modeWord(value)}”, ${endText(until)}` : `Remove the switch of ${name}`;
  }
  const kind = target.plan ? "plan" : "limit";
  return value ? `Set the ${kind} of ${name} to ${value}, ${endText(until)}` : `Remove the ${kind} set for ${name}`;
}

const UNKNOWN_NAMES = /(?:\w+\|.*?: )?((?:the rules have|domain|there is) .*?); nothing was changed; .*reject_unknown_names.*/s;

// Checks the changes of a plan without making them. Throws what the API objects to; `isUnknownName` is set if they name what
// the rules in force do not have, and the API would accept them with `allowUnknown`.
export async function checkPlan({ changes, reason }, allowUnknown) {
  if (changes.every(({ value }) => !value)) return;
  try {
    await call("PutOverrides", { changes, reason, rejectUnknownNames: !allowUnknown, validateOnly: true });
  } catch (error) {
    const unknown = UNKNOWN_NAMES.exec(error.message);
    if (unknown) {
      error.message = `${unknown[1][0].toUpperCase()}${unknown[1].slice(1)}`;
      error.isUnknownName = true;
    }
    throw error;
  }
}

// Returns the changes that restore what was before. A value whose end has passed is removed instead.
export function undoOf(changes, version) {
  return changes.filter(({ target }) => target && target.rules === undefined).map(({ target, before, after }) => {
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
