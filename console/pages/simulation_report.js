// The report of a simulation: a summary, the numbers, a chart over time, and a table of rules.
import { html, useState } from "../base.js";
import { Chart } from "../chart.js";
import { fullTime, integer, limitText, minute, number, plural } from "../format.js";
import { RuleLink, Text } from "../parts.js";
import { outcomesText } from "../words.js";

const change = (outcomes = {}) => integer(outcomes.newlyDenied) + integer(outcomes.newlyAllowed);

// The effect in one sentence.
function effectText(data) {
  const requests = integer(data.requests);
  const more = integer(data.denied) - integer(data.deniedBefore);
  const total = plural(requests, "recorded request");
  if (requests === 0) return "There are no recorded requests to simulate.";
  if (more === 0) return `Of ${total}, as many would be denied as before.`;
  return `Of ${total}, ${number(Math.abs(more))} ${more > 0 ? "more" : "fewer"} would be denied.`;
}

// The time of the requests, as a sentence with a space in front.
function periodText({ series }) {
  const steps = Math.max(series?.allowed?.length ?? 0, series?.denied?.length ?? 0);
  if (!steps || !series.start) return "";
  const end = new Date(series.start).getTime() + steps * integer(series.stepMs);
  return ` Requests from ${fullTime(series.start)} to ${fullTime(new Date(end))}.`;
}

const Incomplete = ({ data }) => (data.incomplete
  ? html`<p class="notice" data-test="incomplete">Only the first part of the requests was replayed, because all would have taken too long.</p>` : null);

// What a preview shows: the sentence and the rules whose decisions change.
export function SimulationSummary({ data }) {
  const rules = (data.rules ?? []).filter(({ outcomes }) => change(outcomes) > 0);
  return html`<p data-test="simulation-summary"><strong>${effectText(data)}</strong>
      <span class="muted">${periodText(data)}</span></p><${Incomplete} data=${data} />
    ${rules.length > 0 && html`<ul>${rules.slice(0, 10).map(({ rule, outcomes }, index) => html`<li key=${index}>
      ${rule ? html`<${RuleLink} path=${rule.path || rule.name} />` : "no rule"}: ${outcomesText(outcomes)} ${integer(outcomes.newlyDenied) + integer(outcomes.newlyAllowed) === 1 ? "hit" : "hits"}</li>`)}</ul>`}
    ${rules.length > 10 && html`<p class="muted">and ${rules.length - 10} more rules</p>`}`;
}

function Numbers({ data }) {
  const sum = (name) => (data.rules ?? []).reduce((total, { outcomes }) => total + integer(outcomes?.[name]), 0);
  const figures = [
    ["requests", "Requests", integer(data.requests)], ["denied-before", "Denied before", integer(data.deniedBefore)],
    ["denied-after", "Denied after", integer(data.denied)], ["newly-denied", "Newly denied hits", sum("newlyDenied")],
    ["newly-allowed", "Newly allowed hits", sum("newlyAllowed")], ["skipped", "Skipped", integer(data.skipped)],
  ];
  return html`<dl class="figures small">${figures.map(([test, label, value]) => html`<div class="figure" key=${test} data-test=${`simulated-${test}`}>
    <dt>${label}</dt><dd><span class="figure-value">${number(value)}</span></dd></div>`)}</dl>
    ${integer(data.unknownBefore) > 0 && html`<p class="muted">${plural(integer(data.unknownBefore), "request")} had no decision before and
      count as allowed before.</p>`}`;
}

function SeriesChart({ series, title, test }) {
  const allowed = (series?.allowed ?? []).map(integer);
  const deniedValues = series?.denied ?? [];
  const length = Math.max(allowed.length, deniedValues.length);
  if (length < 2) return null;
  const start = new Date(series.start).getTime();
  const step = integer(series.stepMs);
  const times = Array.from({ length }, (_, index) => start + index * step);
  const lines = [
    { label: "Allowed", values: times.map((_, index) => allowed[index] ?? 0), colour: "accent" },
    { label: "Denied", values: times.map((_, index) => integer(deniedValues[index])), colour: "denied", dash: [6, 3] },
  ];
  const summaries = lines.map(({ label, values }) => {
    const top = values.indexOf(Math.max(...values));
    return `${label}: highest ${number(values[top])} at ${minute(times[top])}`;
  });
  return html`<${Chart} title=${title} times=${times} series=${lines} format=${number} summaries=${summaries} height=${180} test=${test} />`;
}

function RuleRow({ simulated }) {
  const [isOpen, setOpen] = useState(false);
  const { rule, outcomes = {}, mostDenied = [] } = simulated;
  const cell = (value) => html`<td class="number">${number(integer(value))}</td>`;
  return html`<tr data-test="simulated-rule"><td>${rule ? html`<${RuleLink} path=${rule.path || rule.name} />` : html`<span class="muted">no rule</span>`}</td>
      <td>${rule && html`<${Text} value=${limitText(rule.limit)} length=${60} />`}</td>
      ${cell(outcomes.requested)}${cell(outcomes.denied)}${cell(outcomes.newlyDenied)}${cell(outcomes.newlyAllowed)}
      <td class="number">${number(integer(simulated.entitiesDenied))} of ${number(integer(simulated.entities))}</td>
      <td>${mostDenied.length > 0 && html`<button type="button" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>Entities</button>`}</td></tr>
    ${isOpen && html`<tr class="details"><td colspan="8"><table><caption>Entities with the most denied hits</caption>
      <thead><tr><th scope="col">Entity</th><th scope="col" class="number">Requested</th><th scope="col" class="number">Denied</th><th scope="col" class="number">Newly denied</th></tr></thead>
      <tbody>${mostDenied.map((entity, index) => html`<tr key=${index}><td><${Text} value=${entity.name ?? ""} /></td>
        ${cell(entity.outcomes?.requested)}${cell(entity.outcomes?.denied)}${cell(entity.outcomes?.newlyDenied)}</tr>`)}</tbody></table></td></tr>`}`;
}

export function SimulationReport({ data }) {
  const rules = data.rules ?? [];
  return html`<section data-test="report" aria-labelledby="report"><h2 id="report">Report</h2>
    <p class="muted">${periodText(data)}</p><${Incomplete} data=${data} />
    <${Numbers} data=${data} />
    <${SeriesChart} series=${data.series} title="Requests over time" test="chart-simulation" />
    ${rules.length > 0 && html`<h3>Rules</h3><div class="scroll" tabindex="0" role="region" aria-label="Table of rules"><table data-test="simulated-rules">
      <thead><tr><th scope="col">Rule</th><th scope="col">Limit</th><th scope="col" class="number">Requested</th><th scope="col" class="number">Denied</th>
        <th scope="col" class="number">Newly denied</th><th scope="col" class="number">Newly allowed</th><th scope="col" class="number">Entities denied</th>
        <th scope="col"><span class="unseen">Details</span></th></tr></thead>
      <tbody>${rules.slice(0, 200).map((simulated, index) => html`<${RuleRow} key=${index} simulated=${simulated} />`)}</tbody></table></div>`}
    ${rules.length > 200 && html`<p class="muted">The first 200 of ${number(rules.length)} rules.</p>`}</section>`;
}
