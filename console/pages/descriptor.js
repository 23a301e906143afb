// The page “Descriptor”: reads descriptors from text, and shows for each the rule, the decision and the counter. A single
// word is the value of a customer, whose entities are searched.
import { html, useEffect, useState } from "../base.js";
import { Alert, Field, Loading, LongText, NeedsRead, useCall } from "../parts.js";
import { plural } from "../format.js";
import { canRead, useSession } from "../session.js";
import { link, open } from "../state.js";
import { descriptorText, entriesText, exampleOf } from "../words.js";
import { Customer } from "./customer.js";
import { Inspection } from "./inspection.js";

const MAX_SHOWN = 20;
const MAPPING = "domain: api\ntime: start_time\ndescriptors:\n- [{ key: user, field: x_user }]\n";

// A descriptor has a space or a bar after its domain, and requests are longer.
const VALUE = /^[^\s=|{}]+$/;

function Examples() {
  const { data } = useCall("ListRuleActivity", { pageSize: 30, rulesOnly: true });
  const found = (data?.rows ?? []).map(exampleOf).filter(Boolean).map(descriptorText).filter((text) => text.length <= 80);
  const texts = found.length ? found.slice(0, 4) : ["api user=bob"];
  return html`<section data-test="examples"><h2>Examples</h2><p class="muted">A descriptor shows its rule and its counter. A single word, such as <code>bob</code>, finds the entities with this
    value in all domains. Nothing is changed, and no hits are counted.</p>
    <div class="buttons">${texts.map((text) => html`<a class="button" key=${text} href=${link("descriptor", { d: text })}>${text}</a>`)}</div></section>`;
}

function Found({ text, mapping, lookUp }) {
  const session = useSession();
  const { data, error, loading } = useCall("ReadDescriptors", { text, mapping });
  if (error) return html`<${Alert} error=${error} />`;
  if (!data || !session.loaded || (loading && !data.descriptors)) return html`<${Loading} what="the descriptors" />`;
  const descriptors = data.descriptors ?? [];
  if (!descriptors.length) return html`<p class="notice" data-test="no-descriptors">This text contains no descriptor.</p>`;
  return html`<p class="muted" role="status">${plural(descriptors.length, "descriptor")} found.
      ${descriptors.length > MAX_SHOWN && ` The first ${MAX_SHOWN} are shown.`}</p>
    ${!canRead(session) && html`<${NeedsRead} />
      <p class="muted">Without one, see the <a href=${link("rules", { find: descriptors[0].domain })}>rules of the domain</a>.</p>`}
    ${descriptors.slice(0, MAX_SHOWN).map((descriptor, index) => html`<article class="card" key=${`${index} ${lookUp}`} data-test="descriptor">
      <h2><${LongText} value=${`${descriptor.domain ?? ""} ${entriesText(descriptor.entries)}`} /></h2>
      <p><a href=${changeLink("limit", descriptor)} data-test="set-limit">Set a limit for this entity</a> ·
        ${" "}<a href=${changeLink("counter", descriptor)} data-test="change-counter">Reset its counter, or refund hits</a></p>
      ${canRead(session) && html`<${Inspection} descriptor=${descriptor} />`}</article>`)}`;
}

const changeLink = (tab, { domain, entries = [] }) => link("change", {
  tab, domain, entries: JSON.stringify(entries.map(({ key = "", value = "" }) => [key, value])),
});

function Answer({ text, mapping, isPrefix, lookUp }) {
  if (!text) return html`<${Examples} />`;
  if (VALUE.test(text)) return html`<${Customer} value=${text} isPrefix=${isPrefix} lookUp=${lookUp} />`;
  return html`<${Found} text=${text} mapping=${mapping} lookUp=${lookUp} />`;
}

export function DescriptorPage({ params }) {
  const given = params.d ?? "";
  const [text, setText] = useState(given);
  const [mapping, setMapping] = useState(params.mapping ?? "");
  const [lookUp, setLookUp] = useState(0);
  useEffect(() => setText(given), [given]);
  useEffect(() => setMapping(params.mapping ?? ""), [params.mapping]);
  const submit = (event) => {
    event.preventDefault();
    open("descriptor", { d: text.trim(), mapping: mapping.trim() ? mapping : "" });
    setLookUp(lookUp + 1);
  };
  const press = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !text.includes("\n")) submit(event);
  };
  return html`<h1 tabindex="-1">Descriptor</h1>
    <p class="muted">Which rule applies to a request, and where does its counter stand? Which entities does a customer have?</p>
    <form onSubmit=${submit} data-test="descriptor-form">
      <${Field} label="Descriptor or request" hint="A descriptor (domain key=value …), a request in JSON, a curl command, a line of an access log, or the value of a customer">
        <textarea name="descriptor" rows="3" spellcheck=${false} required value=${text} onKeyDown=${press}
          onInput=${(event) => setText(event.target.value)} placeholder="api user=bob"></textarea></${Field}>
      <details open=${mapping !== ""}><summary>Mapping, for lines of an access log</summary>
        <${Field} label="Mapping in YAML" hint="How fields of the access log become descriptors">
          <textarea name="mapping" rows="5" spellcheck=${false} value=${mapping} placeholder=${MAPPING}
            onInput=${(event) => setMapping(event.target.value)}></textarea></${Field}></details>
      <div class="buttons"><button class="primary" disabled=${!text.trim()}>Look up</button></div></form>
    <${Answer} text=${given} mapping=${params.mapping ?? ""} isPrefix=${params.prefix === "1"} lookUp=${lookUp} />`;
}
