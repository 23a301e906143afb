// How the entities of a rule are distributed over the share of their limit that they use.
import { html } from "../base.js";
import { integer, number, percent, plural } from "../format.js";
import { EntityLink, Loaded, useCall } from "../parts.js";

const LABELS = [...Array.from({ length: 10 }, (_, index) => `${index * 10}–${(index + 1) * 10}%`), "at least 100%"];
const REFRESH_MS = 10_000;

function Bars({ counts }) {
  const highest = Math.max(1, ...counts);
  return html`<div class="usage-bars" aria-hidden="true">${counts.map((count, index) => html`<div class="usage-bar" key=${index}>
    <span class="usage-count">${count ? number(count) : ""}</span>
    <span class=${`usage-fill ${index === 10 ? "hatch" : ""}`} style=${{ height: `calc((100% - 2.8rem) * ${count / highest})` }}></span>
    <span class="usage-label">${index === 10 ? "≥100%" : `${index * 10}%`}</span></div>`)}</div>`;
}

export function Usage({ path }) {
  const state = useCall("GetRuleUsage", { path }, REFRESH_MS);
  return html`<${Loaded} state=${state}>${(data) => html`<${Shares} data=${data} reload=${state.reload} />`}</${Loaded}>`;
}

function Shares({ data, reload }) {
  const counts = LABELS.map((_, index) => data.entitiesByShare?.[index] ?? 0);
  const read = data.readEntities ?? 0;
  const failed = data.failedEntities ?? 0;
  if (!read) {
    return html`<p class="muted" data-test="usage-empty">No entity of this rule had requests in the last minutes.</p>`;
  }
  return html`<div data-test="usage">
    <p>${plural(read, "entity", "entities")} read, those with the most requested hits.
      ${counts[10] > 0 ? ` ${number(counts[10])} ${counts[10] === 1 ? "uses" : "use"} at least 100% of the limit (hatched).` : " None uses 100% of the limit."}
      ${failed > 0 && ` ${plural(failed, "counter")} could not be read.`}
      ${" "}<button type="button" onClick=${reload}>Refresh</button></p>
    <figure><${Bars} counts=${counts} /><figcaption class="muted">Number of entities by the share of their limit in use</figcaption></figure>
    <details><summary>As a table</summary><table><thead><tr><th scope="col">Share of the limit</th><th scope="col" class="number">Entities</th></tr></thead>
      <tbody>${counts.map((count, index) => html`<tr key=${index}><td>${LABELS[index]}</td><td class="number">${number(count)}</td></tr>`)}</tbody></table></details>
    ${data.entities?.length > 0 && html`<h3>Largest shares</h3><table data-test="usage-entities">
      <thead><tr><th scope="col">Entity</th><th scope="col" class="number">Used</th><th scope="col" class="number">Limit</th><th scope="col" class="number">Share</th></tr></thead>
      <tbody>${data.entities.slice(0, 20).map((entity, index) => {
    const used = integer(entity.used);
    const limit = integer(entity.limit);
    return html`<tr key=${index}><td><${EntityLink} descriptor=${entity.descriptor} /></td><td class="number">${number(used)}</td>
        <td class="number">${number(limit)}</td><td class="number">${limit ? percent(used / limit) : "–"}</td></tr>`;
  })}</tbody></table>`}</div>`;
}
