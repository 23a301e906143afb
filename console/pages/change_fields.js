// Fields that the forms of changes share: a descriptor with lists of what exists, the beginning and the end of an override,
// and the reason.
import { html } from "../base.js";
import { keysOf, domainsOf, valuesOf } from "../known_names.js";
import { Field, ListInput } from "../parts.js";

// What a form suggests: an override that is made in a hurry should not stay for ever.
export const SUGGESTED_END = { kind: "after", amount: "2", unit: "hours", at: "" };

// When an override begins.
export function BeginField({ begin, change }) {
  const set = (name) => (event) => change({ ...begin, [name]: event.target.value });
  return html`<fieldset class="inline"><legend class="field-label">Begin</legend>
    <select aria-label="Kind of beginning" name="begin" value=${begin.kind} onChange=${set("kind")}>
      <option value="now">At once</option><option value="at">At</option></select>
    ${begin.kind === "at" && html`<input aria-label="Date and time of the beginning" name="begin-at" type="datetime-local" required value=${begin.at}
      onInput=${set("at")} />`}
  </fieldset>`;
}

// When an override ends.
export function EndField({ end, change }) {
  const set = (name) => (event) => change({ ...end, [name]: event.target.value });
  return html`<fieldset class="inline"><legend class="field-label">End</legend>
    <select aria-label="Kind of end" name="end" value=${end.kind} onChange=${set("kind")}>
      <option value="after">After</option><option value="at">At</option><option value="never">No end</option></select>
    ${end.kind === "after" && html`<input aria-label="Amount" name="end-amount" type="number" min="1" required value=${end.amount} onInput=${set("amount")} />
      <select aria-label="Unit" value=${end.unit} onChange=${set("unit")}>
        <option value="minutes">minutes</option><option value="hours">hours</option><option value="days">days</option></select>`}
    ${end.kind === "at" && html`<input aria-label="Date and time" name="end-at" type="datetime-local" required value=${end.at} onInput=${set("at")} />`}
  </fieldset>`;
}

export const Reason = ({ reason, change }) => html`<${Field} label="Reason" hint="Kept in the audit log">
  <input name="reason" required maxlength="500" value=${reason} onInput=${(event) => change(event.target.value)} /></${Field}>`;

export const DomainField = ({ domain, options, change }) => html`<${Field} label="Domain">
  <${ListInput} name="domain" value=${domain} options=${options} placeholder=${options[0]?.value ?? "api"} change=${change} /></${Field}>`;

// Reads a descriptor from the parameters of the page.
export function readDescriptor({ domain = "", entries = "" }) {
  try {
    return { domain, entries: JSON.parse(entries).map(([key, value]) => ({ key: String(key), value: String(value) })) };
  } catch {
    return { domain, entries: [{ key: "", value: "" }] };
  }
}

// The words of a descriptor by which rules are found.
export const wordsOf = ({ domain, entries }) => [domain, ...entries.map(({ key }) => key)].join(" ");

// Fields for a domain and entries. The lists follow what is entered before them.
export function DescriptorFields({ descriptor, rows, change }) {
  const { domain, entries } = descriptor;
  const setEntries = (next) => change({ domain, entries: next });
  const set = (index, name) => (value) => setEntries(entries.map((entry, at) => (at === index ? { ...entry, [name]: value } : entry)));
  return html`<${DomainField} domain=${domain} options=${domainsOf(rows)} change=${(value) => change({ domain: value.trim(), entries })} />
    <fieldset class="entries"><legend class="field-label">Entries</legend>${entries.map((entry, index) => html`<div class="entry" key=${index}>
      <${ListInput} name="key" label=${`Key ${index + 1}`} placeholder="user" value=${entry.key} change=${set(index, "key")}
        options=${keysOf(rows, domain, entries.slice(0, index))} />
      <span aria-hidden="true">=</span>
      <${ListInput} name="value" label=${`Value ${index + 1}`} placeholder="bob" required=${false} value=${entry.value} change=${set(index, "value")}
        options=${valuesOf(rows, domain, entries.slice(0, index), entry.key)} />
      ${entries.length > 1 && html`<button type="button" aria-label=${`Remove entry ${index + 1}`}
        onClick=${() => setEntries(entries.filter((_, at) => at !== index))}>✕</button>`}</div>`)}
    <button type="button" onClick=${() => setEntries([...entries, { key: "", value: "" }])}>Add an entry</button></fieldset>`;
}
