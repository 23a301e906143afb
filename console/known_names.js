// The domains, keys, values, rules and plans of the rules in force, for the lists of forms.
import { useEffect, useState } from "./base.js";
import { useCall } from "./parts.js";
import { limitText } from "./format.js";

const MAX_RULES = 500;
const DEBOUNCE_MS = 200;

// Returns the rows of rules to offer names from: all, or with many rules those that contain the words that are typed.
export function useKnownRules(typed) {
  const [find, setFind] = useState(typed);
  useEffect(() => {
    const timer = setTimeout(() => setFind(typed), DEBOUNCE_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  const request = { rulesOnly: true, order: "RULE_ORDER_FILE", pageSize: MAX_RULES };
  const all = useCall("ListRuleActivity", request);
  const isPart = (all.data?.allRules ?? 0) > MAX_RULES;
  const found = useCall("ListRuleActivity", isPart && find.trim() ? { ...request, find: find.trim() } : null);
  return [...(found.data?.rows ?? []), ...(all.data?.rows ?? [])];
}

// Keeps the first option of each value. An option is `{ value, text }`.
const distinct = (options) => [...new Map(options.filter(({ value }) => value).reverse().map((option) => [option.value, option])).values()].reverse();
const inDomain = (rows, domain) => rows.filter(({ rule }) => rule?.domain === domain);
const isPrefix = (entries, levels) => entries.every(({ key, value }, index) => levels[index]?.key === key
  && (!levels[index].value || levels[index].value === value));

export const domainsOf = (rows) => distinct(rows.map(({ rule }) => ({ value: rule?.domain, text: "" })));

// The rules of a domain, by their paths without the domain.
export const rulesOf = (rows, domain) => distinct(inDomain(rows, domain).map(({ path, rule }) => ({
  value: path.slice(domain.length + 1), text: limitText(rule.limit),
})));

// The keys that rules have after the first entries of a descriptor.
export const keysOf = (rows, domain, entries) => distinct(inDomain(rows, domain)
  .filter((row) => isPrefix(entries, levelsOf(row)) && levelsOf(row).length > entries.length)
  .map((row) => ({ value: levelsOf(row)[entries.length].key, text: limitText(row.rule.limit) })));

// The values that rules require for a key after the first entries.
export const valuesOf = (rows, domain, entries, key) => distinct(inDomain(rows, domain)
  .filter((row) => isPrefix([...entries, { key, value: levelsOf(row)[entries.length]?.value }], levelsOf(row)))
  .map((row) => ({ value: levelsOf(row)[entries.length].value, text: limitText(row.rule.limit) })));

// Whether a row is the rule of the default plan: its last entry stands for the plan, and has any value.
function isDefaultPlan({ entries = [], label = "" }) {
  const last = entries.at(-1);
  return last !== undefined && !last.value && label.startsWith(`${last.key}_`);
}
const levelsOf = (row) => (isDefaultPlan(row) ? row.entries.slice(0, -1) : row.entries ?? []);

// The rules of a domain with plans: `{ keys, plans }` with the options of both.
export function plansOf(rows, domain) {
  const keys = [];
  const plans = [];
  for (const standard of inDomain(rows, domain).filter(isDefaultPlan)) {
    const start = `${standard.path.slice(0, -standard.label.length)}${standard.entries.at(-1).key}_`;
    keys.push(...levelsOf(standard).map(({ key }) => ({ value: key, text: "" })));
    for (const row of inDomain(rows, domain)) {
      if (!row.path.startsWith(start) || (row.entries?.length && row !== standard)) continue;
      const text = `${limitText(row.rule.limit)}${row === standard ? ", the default plan" : ""}`;
      plans.push({ value: row.path.slice(start.length), text });
    }
  }
  return { keys: distinct(keys), plans: distinct(plans) };
}
