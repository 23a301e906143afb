// The forms for the limit of an entity and for a switch. They end in a plan: `{ id, changes, reason, … }`.
import { html, useState } from "../base.js";
import { endTime } from "../change_model.js";
import { Field } from "../parts.js";
import { useSession } from "../session.js";
import { MODES, spaced } from "../words.js";

let plans = 0;
export const newPlan = (plan) => {
  plans += 1;
  return { id: plans, ...plan };
};

const NEVER = { kind: "never", amount: "1", unit: "hours", at: "" };

// When an override ends.
function EndField({ end, change }) {
  const set = (name) => (event) => change({ ...end, [name]: event.target.value });
  return html`<fieldset class="inline"><legend class="field-label">End</legend>
    <select aria-label="Kind of end" name="end" value=${end.kind} onChange=${set("kind")}>
      <option value="never">No end</option><option value="after">After</option><option value="at">At</option></select>
    ${end.kind === "after" && html`<input aria-label="Amount" name="end-amount" type="number" min="1" required value=${end.amount} onInput=${set("amount")} />
      <select aria-label="Unit" value=${end.unit} onChange=${set("unit")}>
        <option value="minutes">minutes</option><option value="hours">hours</option><option value="days">days</option></select>`}
    ${end.kind === "at" && html`<input aria-label="Date and time" name="end-at" type="datetime-local" required value=${end.at} onInput=${set("at")} />`}
  </fieldset>`;
}

const Reason = ({ reason, change }) => html`<${Field} label="Reason" hint="Kept in the audit log">
  <input name="reason" required maxlength="500" value=${reason} onInput=${(event) => change(event.target.value)} /></${Field}>`;

function readEntries(json) {
  try {
    const pairs = JSON.parse(json);
    return pairs.map(([key, value]) => ({ key: String(key), value: String(value) }));
  } catch {
    return [{ key: "", value: "" }];
  }
}

function EntryFields({ entries, change }) {
  const set = (index, name) => (event) => change(entries.map((entry, at) => (at === index ? { ...entry, [name]: event.target.value } : entry)));
  return html`<fieldset class="entries"><legend class="field-label">Entries</legend>${entries.map((entry, index) => html`<div class="entry" key=${index}>
      <input name="key" aria-label=${`Key ${index + 1}`} placeholder="user" required value=${entry.key} onInput=${set(index, "key")} />
      <span aria-hidden="true">=</span>
      <input name="value" aria-label=${`Value ${index + 1}`} placeholder="bob" value=${entry.value} onInput=${set(index, "value")} />
      ${entries.length > 1 && html`<button type="button" aria-label=${`Remove entry ${index + 1}`}
        onClick=${() => change(entries.filter((_, at) => at !== index))}>✕</button>`}</div>`)}
    <button type="button" onClick=${() => change([...entries, { key: "", value: "" }])}>Add an entry</button></fieldset>`;
}

export function LimitForm({ params, isAllowed, preview }) {
  const [domain, setDomain] = useState(params.domain ?? "");
  const [entries, setEntries] = useState(readEntries(params.entries ?? ""));
  const [value, setValue] = useState(params.limit ?? "");
  const [end, setEnd] = useState(NEVER);
  const [reason, setReason] = useState("");
  const [additive, setAdditive] = useState(false);
  const submit = (event) => {
    event.preventDefault();
    const change = { target: { limit: { domain: domain.trim(), entries } }, value: value.trim(), until: endTime(end) };
    preview(newPlan({ changes: [change], reason: reason.trim(), additive }));
  };
  return html`<form class="card form-grid" onSubmit=${submit} data-test="limit-form"><fieldset disabled=${!isAllowed} class="plain"><legend class="unseen">Limit for an entity</legend>
    <${Field} label="Domain"><input name="domain" required value=${domain} placeholder="api" onInput=${(event) => setDomain(event.target.value)} /></${Field}>
    <${EntryFields} entries=${entries} change=${setEntries} />
    <${Field} label="Limit" hint="Such as 500/minute, or “unlimited”"><input name="limit" required value=${value} placeholder="500/minute"
      onInput=${(event) => setValue(event.target.value)} /></${Field}>
    <${EndField} end=${end} change=${setEnd} />
    <${Reason} reason=${reason} change=${setReason} />
    <label class="check"><input type="checkbox" name="additive" checked=${additive} onChange=${(event) => setAdditive(event.target.checked)} />
      Make a higher limit available at once, even if the counter is exhausted</label>
    <div class="buttons"><button class="primary" data-test="preview">Preview</button></div></fieldset></form>`;
}

// Reads the scope of a switch from the fields of the form.
function scopeOf({ kind, domain, rule, algorithm }) {
  if (kind === "rule") return { rule: { domain: domain.trim(), rule: rule.trim() } };
  if (kind === "domain") return { domain: domain.trim() };
  if (kind === "algorithm") return { algorithm };
  return { everything: true };
}

export function SwitchForm({ params, isAllowed, preview }) {
  const { algorithms } = useSession();
  const [scope, setScope] = useState({
    kind: params.scope ?? "rule", domain: params.domain ?? "", rule: params.rule ?? "", algorithm: params.algorithm ?? algorithms[0],
  });
  const [mode, setMode] = useState(params.mode ?? "shadow");
  const [end, setEnd] = useState(NEVER);
  const [reason, setReason] = useState("");
  const [onlyHere, setOnlyHere] = useState(false);
  const set = (name) => (event) => setScope({ ...scope, [name]: event.target.value });
  const submit = (event) => {
    event.preventDefault();
    const change = { target: { switch: scopeOf(scope) }, value: mode, until: mode ? endTime(end) : undefined };
    preview(newPlan({ changes: [change], reason: reason.trim(), thisInstance: onlyHere }));
  };
  return html`<form class="card form-grid" onSubmit=${submit} data-test="switch-form"><fieldset disabled=${!isAllowed} class="plain"><legend class="unseen">Switch</legend>
    <${Field} label="Applies to"><select name="scope" value=${scope.kind} onChange=${set("kind")}>
      <option value="rule">A rule</option><option value="domain">A domain</option><option value="algorithm">An algorithm</option>
      <option value="everything">Everything</option></select></${Field}>
    ${(scope.kind === "rule" || scope.kind === "domain") && html`<${Field} label="Domain"><input name="domain" required value=${scope.domain}
      placeholder="api" onInput=${set("domain")} /></${Field}>`}
    ${scope.kind === "rule" && html`<${Field} label="Rule" hint="Its name, or its path without the domain"><input name="rule" required value=${scope.rule}
      placeholder="user" onInput=${set("rule")} /></${Field}>`}
    ${scope.kind === "algorithm" && html`<${Field} label="Algorithm"><select name="algorithm" value=${scope.algorithm} onChange=${set("algorithm")}>
      ${algorithms.map((name) => html`<option key=${name} value=${name}>${name === "shedding" ? "all rules that shed" : spaced(name)}</option>`)}</select></${Field}>`}
    <${Field} label="Switch"><select name="mode" value=${mode} onChange=${(event) => setMode(event.target.value)}>
      ${Object.entries(MODES).map(([name, text]) => html`<option key=${name} value=${name}>${text}</option>`)}
      <option value="">Remove the switch</option></select></${Field}>
    ${mode && html`<${EndField} end=${end} change=${setEnd} />`}
    <${Reason} reason=${reason} change=${setReason} />
    <label class="check"><input type="checkbox" name="this-instance" checked=${onlyHere} onChange=${(event) => setOnlyHere(event.target.checked)} />
      Only on this instance, until its process ends</label>
    <div class="buttons"><button class="primary" data-test="preview">Preview</button></div></fieldset></form>`;
}
