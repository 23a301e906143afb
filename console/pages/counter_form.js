// The form that resets the counter of an entity or refunds hits to it: the counter now, the confirmation, and the result.
import { html, useState } from "../base.js";
import { call } from "../api.js";
import { ConfirmDialog } from "../confirm.js";
import { hitsText, integer, limitText, plural } from "../format.js";
import { useKnownRules } from "../known_names.js";
import { Alert, EntityLink, Field, Loading, Text, useCall } from "../parts.js";
import { targetText } from "../words.js";
import { DescriptorFields, Reason, readDescriptor, wordsOf } from "./change_fields.js";

const ACTIONS = {
  reset: { title: "Reset the counter", sentence: (name) => `Reset the counter of ${name}, as if it had never been used` },
  refund: { title: "Refund hits", sentence: (name, hits) => `Return ${plural(Number(hits), "hit")} to the counter of ${name}` },
};

const CounterText = ({ counter }) => html`${hitsText(integer(counter.used), counter.currency)} used, ${hitsText(integer(counter.remaining), counter.currency)} remaining, of
  ${" "}<${Text} value=${limitText(counter.limit)} />`;

// The counter before the action, and the action with its result.
function CounterSteps({ action, descriptor, hits, reason, done, close }) {
  const { data, error, reload } = useCall("Inspect", { descriptor });
  const [isOpen, setOpen] = useState(false);
  const [before, setBefore] = useState(null);
  const sentence = ACTIONS[action].sentence(targetText({ limit: descriptor }), hits);
  const run = async () => {
    if (action === "reset") await call("ResetCounter", { descriptor, reason });
    else await call("Refund", { descriptor, hits, reason });
    setBefore(data.counter);
    await reload();
    done();
  };
  return html`<section class="card" data-test="counter-steps"><h2>${before ? "Result" : "Preview"}</h2><${Alert} error=${error} />
    ${!data && !error && html`<${Loading} />`}
    ${data && !data.counter && html`<div class="alert" role="alert" data-test="alert">This descriptor has no counter: no rule limits it.</div>`}
    ${data?.counter && html`<p><bdi class="foreign">${sentence}.</bdi> This cannot be undone.</p>
      ${before && html`<p role="status" class="up" data-test="result"><span aria-hidden="true">●</span> Done.</p><p>Before: <${CounterText} counter=${before} /></p>`}
      <p data-test="counter-now">Now: <${CounterText} counter=${data.counter} />. <${EntityLink} descriptor=${descriptor} /></p>`}
    <div class="buttons">${data?.counter && !before && html`<button type="button" class="primary" data-test="apply" onClick=${() => setOpen(true)}>Apply</button>`}
      <button type="button" onClick=${close}>${before ? "Close" : "Cancel"}</button></div>
    ${isOpen && html`<${ConfirmDialog} title=${`${ACTIONS[action].title}?`} sentence=${sentence} action=${ACTIONS[action].title} run=${run}
      close=${() => setOpen(false)} />`}</section>`;
}

export function CounterForm({ params, isAllowed, done }) {
  const [descriptor, setDescriptor] = useState(readDescriptor(params));
  const [action, setAction] = useState("reset");
  const [hits, setHits] = useState("");
  const [reason, setReason] = useState("");
  const [steps, setSteps] = useState(null);
  const rows = useKnownRules(wordsOf(descriptor));
  const submit = (event) => {
    event.preventDefault();
    setSteps({ id: (steps?.id ?? 0) + 1, action, descriptor, hits, reason: reason.trim() });
  };
  return html`<form class="card form-grid" onSubmit=${submit} data-test="counter-form"><fieldset disabled=${!isAllowed} class="plain"><legend class="unseen">Counter of an entity</legend>
      <${DescriptorFields} descriptor=${descriptor} rows=${rows} change=${setDescriptor} />
      <${Field} label="Action"><select name="action" value=${action} onChange=${(event) => setAction(event.target.value)}>
        ${Object.entries(ACTIONS).map(([name, { title }]) => html`<option key=${name} value=${name}>${title}</option>`)}</select></${Field}>
      ${action === "refund" && html`<${Field} label="Hits" hint="At most those that are used"><input name="hits" type="number" min="1" required value=${hits}
        onInput=${(event) => setHits(event.target.value)} /></${Field}>`}
      <${Reason} reason=${reason} change=${setReason} />
      <div class="buttons"><button class="primary" data-test="preview">Preview</button></div></fieldset></form>
    ${steps && html`<${CounterSteps} key=${steps.id} ...${steps} done=${done} close=${() => setSteps(null)} />`}`;
}
