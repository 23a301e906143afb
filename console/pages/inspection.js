// What applies to one descriptor: the decision, the rule, the steps of the match, and the counter.
import { html, useState } from "../base.js";
import { duration, hitsText, integer, limitText, number, percent } from "../format.js";
import { Alert, Loading, LongText, MatchesNothing, OneInstance, RuleLink, Text, Time, useCall } from "../parts.js";
import { locationText, modeWord, spaced, targetKind, targetText } from "../words.js";
import { OverrideText } from "./change_steps.js";
import { CounterPicture } from "./counter_picture.js";

// Whether the same request would be allowed, as a sentence.
function decisionText({ allowed = false, counter, others = [] }) {
  if (allowed) return "The same request would be allowed now.";
  const waits = [counter, ...others].filter((limit) => limit?.retryAfterUs !== undefined).map((limit) => integer(limit.retryAfterUs));
  if (waits.length > 0) return `The same request would be denied now. It would be allowed in ${duration(Math.max(...waits))}.`;
  return "The same request would be denied, until a limit or a switch changes.";
}

function decidedByText(decidedBy = "") {
  if (decidedBy === "rule") return "by the rule";
  if (decidedBy === "limit") return "by a limit that is set for the entity";
  return decidedBy ? `by a switch: ${modeWord(decidedBy)}` : "";
}

const Fact = ({ name, children }) => html`<div><dt>${name}</dt><dd>${children}</dd></div>`;

function CounterFacts({ counter }) {
  const used = integer(counter.used);
  const remaining = integer(counter.remaining);
  const unit = (hits) => (counter.currency ? "" : hits === 1 ? " hit" : " hits");
  return html`<h3>Counter</h3><dl class="facts" data-test="counter">
    <${Fact} name="Limit"><strong><${LongText} value=${limitText(counter.limit)} /></strong></${Fact}>
    <${Fact} name="Used"><span data-test="used">${hitsText(used, counter.currency)}</span>${unit(used)}</${Fact}>
    <${Fact} name="Remaining"><span data-test="remaining">${hitsText(remaining, counter.currency)}</span>${unit(remaining)}</${Fact}>
    <${Fact} name="Full limit available">${integer(counter.resetUs) ? `in ${duration(integer(counter.resetUs))}` : "now"}</${Fact}>
    ${counter.quotas && html`<${Fact} name="Quotas"><span data-test="quotas">${percent(counter.quotas.share ?? 0)} of the limit, for Envoys that limit requests by themselves (${number(counter.quotas.callers)})</span></${Fact}>`}
    ${counter.algorithm && html`<${Fact} name="Algorithm">${spaced(counter.algorithm)}</${Fact}>`}
    <${Fact} name="Server">${counter.node ? html`<${Text} value=${counter.node} />` : "this process's memory"}</${Fact}>
    ${counter.hashSlot !== undefined && html`<${Fact} name="Hash slot">${counter.hashSlot}</${Fact}>`}
    ${counter.key && html`<${Fact} name="Key"><code><${LongText} value=${counter.key} length=${200} /></code></${Fact}>`}
  </dl><${CounterPicture} counter=${counter} />`;
}

function Rule({ rule, decidedBy }) {
  if (!rule) {
    const isLimited = decidedBy !== "" && decidedBy !== "rule";
    return html`<p data-test="no-rule">No rule applies${isLimited ? `. Decided ${decidedByText(decidedBy)}.` : ", so nothing is limited."}</p>`;
  }
  return html`<p data-test="matched-rule">Rule <${RuleLink} path=${rule.path || rule.name} />: <strong><${Text} value=${limitText(rule.limit)} /></strong>
    ${" "}<span class="muted"><${Text} value=${locationText(rule)} /></span>${decidedBy && html`. Decided ${decidedByText(decidedBy)}.`}</p>`;
}

export function Inspection({ descriptor }) {
  const [isLive, setLive] = useState(false);
  const { data, error, reload } = useCall("Inspect", { descriptor }, isLive ? 1000 : 0);
  if (error && !data) return html`<${Alert} error=${error} />`;
  if (!data) return html`<${Loading} />`;
  return html`<p class=${`verdict ${data.allowed ? "up" : "denied"}`} data-test="decision"><span aria-hidden="true">${data.allowed ? "●" : "✕"}</span> ${decisionText(data)}
      ${data.deniedSince && html`<br /><span class="muted" data-test="first-denial">In the last hour, the first denial was at <${Time} value=${data.deniedSince} />,
        ${" "}<${OneInstance} />. Requests may have been allowed since then.</span>`}</p>
    <${Rule} rule=${data.rule} decidedBy=${data.decidedBy} />
    <div class="buttons"><button type="button" onClick=${reload}>Refresh</button>
      <label><input type="checkbox" data-test="live" checked=${isLive} onChange=${(event) => setLive(event.target.checked)} /> Refresh every second</label></div>
    <${Alert} error=${error} />
    ${data.matchSteps?.length > 0 && html`<h3>How the rule was found</h3><ol class="steps" data-test="steps">
      ${data.matchSteps.map((step, index) => html`<li key=${index}><${LongText} value=${step} /></li>`)}</ol>`}
    ${data.overrides?.length > 0 && html`<h3>Overrides that apply</h3><ul data-test="overrides-that-apply">${data.overrides.map((override, index) => html`
      <li key=${index}>${targetKind(override.target)} for <${Text} value=${targetText(override.target)} />: <strong><${Text} value=${modeWord(override.value)} /></strong>
        ${override.author && html` <span class="muted">by <${Text} value=${override.author} /></span>`}
        ${override.reason && html` <span class="muted">“<${Text} value=${override.reason} />”</span>`}<${MatchesNothing} override=${override} /></li>`)}</ul>`}
    ${data.planned?.length > 0 && html`<h3>Planned overrides</h3><ul data-test="planned-overrides">${data.planned.map((override, index) => html`
      <li key=${index}>${targetKind(override.target)} for <${Text} value=${targetText(override.target)} />: <${OverrideText} override=${override} />
        ${override.author && html` <span class="muted">by <${Text} value=${override.author} /></span>`}<${MatchesNothing} override=${override} /></li>`)}</ul>`}
    ${data.counter && html`<${CounterFacts} counter=${data.counter} />`}
    ${data.others?.map((counter) => html`<${CounterFacts} key=${counter.key} counter=${counter} />`)}`;
}
