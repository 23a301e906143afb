// The forms for the limit of an entity, for its plan, and for a switch. They end in a plan of changes:
// `{ id, changes, reason, … }`.
import { html, useState } from "../base.js";
import { beginTime, endTime, plannedTarget } from "../change_model.js";
import { plainLimit } from "../format.js";
import { domainsOf, plansOf, rulesOf, useKnownRules } from "../known_names.js";
import { Field, ListInput } from "../parts.js";
import { useSession } from "../session.js";
import { MODES, spaced } from "../words.js";
import { BeginField, DescriptorFields, DomainField, EndField, Reason, SUGGESTED_END, readDescriptor, wordsOf } from "./change_fields.js";

let plans = 0;
export const newPlan = (plan) => {
  plans += 1;
  return { id: plans, ...plan };
};

// What all forms have: the beginning, the end, the reason, and the button that leads to the preview. `planOf` receives the
// end and a function that gives a target the beginning.
function ChangeForm({ title, test, isAllowed, hasEnd = true, preview, planOf, children, options }) {
  const [begin, setBegin] = useState({ kind: "now", at: "" });
  const [end, setEnd] = useState(SUGGESTED_END);
  const [reason, setReason] = useState("");
  const submit = (event) => {
    event.preventDefault();
    const from = hasEnd ? beginTime(begin) : undefined;
    const plan = planOf(hasEnd ? endTime(end, from) : undefined, (target) => plannedTarget(target, from));
    preview(newPlan({ ...plan, reason: reason.trim() }));
  };
  return html`<form class="card form-grid" onSubmit=${submit} data-test=${test}><fieldset disabled=${!isAllowed} class="plain"><legend class="unseen">${title}</legend>
    ${children}
    ${hasEnd && html`<${BeginField} begin=${begin} change=${setBegin} />`}
    ${hasEnd && html`<${EndField} end=${end} change=${setEnd} />`}
    <${Reason} reason=${reason} change=${setReason} />
    ${options}
    <div class="buttons"><button class="primary" data-test="preview">Preview</button></div></fieldset></form>`;
}

export function LimitForm({ params, isAllowed, preview }) {
  const [descriptor, setDescriptor] = useState(readDescriptor(params));
  const [value, setValue] = useState(params.limit ?? "");
  const [additive, setAdditive] = useState(false);
  const rows = useKnownRules(wordsOf(descriptor));
  const planOf = (until, planned) => ({ changes: [{ target: planned({ limit: descriptor }), value: plainLimit(value), until }], additive });
  const option = html`<label class="check"><input type="checkbox" name="additive" checked=${additive} onChange=${(event) => setAdditive(event.target.checked)} />
    ${" "}Make a higher limit available at once, even if the counter is exhausted</label>`;
  return html`<${ChangeForm} title="Limit for an entity" test="limit-form" isAllowed=${isAllowed} preview=${preview} planOf=${planOf} options=${option}>
    <${DescriptorFields} descriptor=${descriptor} rows=${rows} change=${setDescriptor} />
    <${Field} label="Limit" hint="Such as 500/minute, “unlimited” or “blocked”"><input name="limit" required value=${value} placeholder="500/minute"
      onInput=${(event) => setValue(event.target.value)} /></${Field}></${ChangeForm}>`;
}

export function PlanForm({ params, isAllowed, preview }) {
  const [target, setTarget] = useState({ domain: params.domain ?? "", key: params.key ?? "", value: params.value ?? "" });
  const [name, setName] = useState(params.plan ?? "");
  const rows = useKnownRules(`${target.domain} ${target.key}`);
  const known = plansOf(rows, target.domain);
  const set = (field) => (value) => setTarget({ ...target, [field]: value });
  const domains = domainsOf(rows).filter(({ value }) => plansOf(rows, value).plans.length > 0);
  const planOf = (until, planned) => ({ changes: [{ target: planned({ plan: target }), value: name.trim(), until }] });
  return html`<${ChangeForm} title="Plan of an entity" test="plan-form" isAllowed=${isAllowed} preview=${preview} planOf=${planOf}>
    ${rows.length > 0 && domains.length === 0 && html`<p class="notice" data-test="no-plans">No rule has plans (keyword <code>by_plan</code>).</p>`}
    <${DomainField} domain=${target.domain} options=${domains} change=${(value) => set("domain")(value.trim())} />
    <fieldset class="entries"><legend class="field-label">Entity</legend><div class="entry">
      <${ListInput} name="key" label="Key" placeholder="tenant" value=${target.key} options=${known.keys} change=${set("key")} />
      <span aria-hidden="true">=</span>
      <input name="value" aria-label="Value" placeholder="acme" required value=${target.value} onInput=${(event) => set("value")(event.target.value)} /></div></fieldset>
    <${Field} label="Plan"><${ListInput} name="plan" value=${name} options=${known.plans} change=${setName} placeholder="pro" /></${Field}></${ChangeForm}>`;
}

// Reads the scope of a switch from the fields of the form.
function scopeOf({ kind, domain, rule, algorithm }) {
  if (kind === "rule") return { rule: { domain, rule: rule.trim() } };
  if (kind === "domain") return { domain };
  if (kind === "algorithm") return { algorithm };
  return { everything: true };
}

export function SwitchForm({ params, isAllowed, preview }) {
  const { algorithms } = useSession();
  const [scope, setScope] = useState({
    kind: params.scope ?? "rule", domain: params.domain ?? "", rule: params.rule ?? "", algorithm: params.algorithm ?? algorithms[0],
  });
  const [mode, setMode] = useState(params.mode ?? "shadow");
  const [onlyHere, setOnlyHere] = useState(false);
  const rows = useKnownRules(`${scope.domain} ${scope.rule}`);
  const set = (name) => (value) => setScope({ ...scope, [name]: value });
  const choose = (name) => (event) => set(name)(event.target.value);
  const planOf = (until, planned) => ({ changes: [{ target: planned({ switch: scopeOf(scope) }), value: mode, until }], thisInstance: onlyHere });
  const option = html`<label class="check"><input type="checkbox" name="this-instance" checked=${onlyHere} onChange=${(event) => setOnlyHere(event.target.checked)} />
    ${" "}Only on this instance, until its process ends</label>`;
  return html`<${ChangeForm} title="Switch" test="switch-form" isAllowed=${isAllowed} hasEnd=${mode !== ""} preview=${preview} planOf=${planOf} options=${option}>
    <${Field} label="Applies to"><select name="scope" value=${scope.kind} onChange=${choose("kind")}>
      <option value="rule">A rule</option><option value="domain">A domain</option><option value="algorithm">An algorithm</option>
      <option value="everything">Everything</option></select></${Field}>
    ${(scope.kind === "rule" || scope.kind === "domain") && html`<${DomainField} domain=${scope.domain} options=${domainsOf(rows)}
      change=${(value) => set("domain")(value.trim())} />`}
    ${scope.kind === "rule" && html`<${Field} label="Rule" hint="Its name, or its path without the domain"><${ListInput} name="rule" value=${scope.rule}
      options=${rulesOf(rows, scope.domain)} placeholder="user" change=${set("rule")} /></${Field}>`}
    ${scope.kind === "algorithm" && html`<${Field} label="Algorithm"><select name="algorithm" value=${scope.algorithm} onChange=${choose("algorithm")}>
      ${algorithms.map((name) => html`<option key=${name} value=${name}>${name === "shedding" ? "all rules that shed" : spaced(name)}</option>`)}</select></${Field}>`}
    <${Field} label="Switch"><select name="mode" value=${mode} onChange=${(event) => setMode(event.target.value)}>
      ${Object.entries(MODES).map(([name, text]) => html`<option key=${name} value=${name}>${text}</option>`)}
      <option value="">Remove the switch</option></select></${Field}></${ChangeForm}>`;
}
