// Words for things of the API: descriptors, targets of overrides, switches, kinds of events, algorithms.
import { integer, limitText } from "./format.js";

const SIMPLE = /^[^\s"'\\{}]+$/;

// Returns a descriptor in the form that the descriptor page reads.
export function descriptorText({ domain = "", entries = [] } = {}) {
  const simple = SIMPLE.test(domain) && domain !== "curl"
    && entries.every(({ key = "", value = "" }) => SIMPLE.test(key) && !key.includes("=") && SIMPLE.test(value));
  if (simple && entries.length) return [domain, ...entries.map(({ key, value }) => `${key}=${value}`)].join(" ");
  return JSON.stringify({ domain, descriptors: [{ entries }] });
}

export const entriesText = (entries = []) => entries.map(({ key = "", value = "" }) => `${key}=${value}`).join(" ");

// A scope in words, such as `rule user of domain api`.
export function scopeText(scope = {}) {
  if (scope.rule) return `rule ${scope.rule.rule ?? ""} of domain ${scope.rule.domain ?? ""}`;
  if (scope.algorithm === "shedding") return "all rules that shed";
  if (scope.algorithm) return `all rules with algorithm ${spaced(scope.algorithm)}`;
  if (scope.domain !== undefined) return `domain ${scope.domain}`;
  return "everything";
}

// The target that an override has once it has begun.
export const begunTarget = (target = {}) => target.planned ?? target;

export const targetText = (target = {}) => textOfBegun(begunTarget(target));

// The text of a target that is not planned.
function textOfBegun(target) {
  if (target.limit) return `${target.limit.domain ?? ""} ${entriesText(target.limit.entries)}`;
  if (target.plan) return `${target.plan.domain ?? ""} ${target.plan.key ?? ""}=${target.plan.value ?? ""}`;
  if (target.switch) return scopeText(target.switch);
  return RULE_SETS[target.rules] ?? "rules";
}

const RULE_SETS = {
  RULE_SET_SLOT_CANDIDATE: "candidate rules",
  RULE_SET_SLOT_IN_FORCE: "rules in force",
  RULE_SET_SLOT_PREVIOUS: "previous rules",
};

export function targetKind(target = {}) {
  const kind = kindOfBegun(begunTarget(target));
  return target.planned ? `Planned ${kind.toLowerCase()}` : kind;
}

// The kind of a target that is not planned.
function kindOfBegun(target) {
  if (target.limit) return "Limit";
  if (target.plan) return "Plan";
  if (target.switch) return "Switch";
  return "Rules";
}

// Reports whether two targets are the same.
export const sameTarget = (one, other) => normal(one) === normal(other);
function normal(target = {}) {
  const from = target.planned ? new Date(target.planned.from).getTime() : 0;
  return `${from} ${normalOfBegun(begunTarget(target))}`;
}
function normalOfBegun(target) {
  if (target.limit) return JSON.stringify(["limit", target.limit.domain ?? "", entriesOf(target.limit)]);
  if (target.plan) return JSON.stringify(["plan", target.plan.domain ?? "", target.plan.key ?? "", target.plan.value ?? ""]);
  return JSON.stringify([kindOfBegun(target), textOfBegun(target)]);
}
const entriesOf = ({ entries = [] }) => entries.map(({ key = "", value = "" }) => [key, value]);

// The modes of switches, with what they do.
export const MODES = {
  enforce: "On: the rules deny as written",
  shadow: "Shadow mode: count, but deny nothing",
  off: "Off: count nothing and deny nothing",
  deny: "Deny everything",
};

const MODE_WORDS = { enforce: "on", shadow: "shadow mode", off: "off", deny: "deny everything" };
export const modeWord = (mode) => MODE_WORDS[mode] ?? mode;

// The state of a rule's switch in words; empty if the rule works as written.
export function switchText(rule = {}) {
  if (rule.switch) return modeWord(rule.switch);
  return rule.shadowMode ? "shadow mode" : "";
}

export const deniesNothing = (rule) => ["shadow mode", "off"].includes(switchText(rule));

const STORES = {
  memory: "counters in memory", server: "counters in Redis", sentinel: "counters in Redis with Sentinel", cluster: "counters in Redis Cluster",
  ring: "counters on a ring of Redis servers",
};
export const storeText = (store) => STORES[store] ?? store;

export const spaced = (text = "") => text.replaceAll("_", " ");

// The limit of a rule where its algorithm is shown beside it, or does not matter.
export const shortLimit = ({ limit = "", algorithm }) => limitText(limit).replace(`, ${algorithm}`, "");

export function locationText(rule = {}) {
  if (!rule.file) return "";
  return rule.line ? `${rule.file}:${rule.line}` : rule.file;
}

export const EVENT_KINDS = {
  EVENT_KIND_START: "Started",
  EVENT_KIND_RULES: "Rules loaded",
  EVENT_KIND_RULES_REJECTED: "Rules rejected",
  EVENT_KIND_SWITCH: "Switch",
  EVENT_KIND_LIMIT: "Limit",
  EVENT_KIND_CANDIDATE: "Candidate rules",
  EVENT_KIND_SERVER_DOWN: "Server down",
  EVENT_KIND_SERVER_UP: "Server up",
  EVENT_KIND_SHEDDING: "Shedding",
  EVENT_KIND_ACTION: "Action",
};

// Returns a descriptor that a rule matches, or undefined for a row without the entries of a rule.
export function exampleOf(row) {
  if (!row?.entries?.length) return undefined;
  const entries = row.entries.map(({ key, value = "" }) => ({ key, value: value.replaceAll("*", "1") || "bob" }));
  return { domain: row.rule.domain, entries };
}

// What candidate rules would change, as a sentence.
export function outcomesText(outcomes = {}) {
  const newlyDenied = integer(outcomes.newlyDenied);
  const newlyAllowed = integer(outcomes.newlyAllowed);
  const format = (count) => count.toLocaleString("en-GB");
  if (!integer(outcomes.requested)) return "no hits evaluated";
  if (!newlyDenied && !newlyAllowed) return "the same decisions";
  const parts = [];
  if (newlyDenied) parts.push(`would deny ${format(newlyDenied)} more`);
  if (newlyAllowed) parts.push(`would allow ${format(newlyAllowed)} more`);
  return parts.join(", ");
}
