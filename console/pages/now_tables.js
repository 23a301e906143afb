// The tables of the page “Now”: the rules and the entities with the most denied requests, and descriptors without a rule.
import { html } from "../base.js";
import { canRead, useSession } from "../session.js";
import { integer, number, plural } from "../format.js";
import { EntityLink, Loaded, NeedsRead, RuleLink, ShareBar, Text } from "../parts.js";
import { Period, ScopeLabel, useRange, useScopedCall } from "../scope.js";
import { deniesNothing, shortLimit, switchText } from "../words.js";

const SHOWN = 5;
const CANDIDATES = 20;
const MAX_UNMATCHED = 50;
const REFRESH_MS = 5000;

const deniedOf = ({ activity }) => integer(activity?.deniedRequests);
const NumberCell = ({ value }) => html`<td class="number">${number(value)}</td>`;

const RuleOfTop = ({ row, hasHits }) => html`<tr><td><${RuleLink} path=${row.path} /></td>
  <td>${shortLimit(row.rule)}${deniesNothing(row.rule) && html` <span class="tag">${switchText(row.rule)}</span>`}</td>
  <${NumberCell} value=${deniedOf(row)} />${hasHits && html`<${NumberCell} value=${integer(row.activity.denied)} />`}
  <td><${ShareBar} share=${deniedOf(row) / Math.max(1, integer(row.activity.requests))} pattern="denied-fill" /></td></tr>`;

// The answer has the rules with recent denials first; the table has those of the hour in order.
function TopRules() {
  const state = useScopedCall("ListRuleActivity", { pageSize: CANDIDATES, rulesOnly: true }, REFRESH_MS);
  return html`<${Loaded} state=${state}>${({ rows: all = [], instances }) => {
    const rows = all.filter((row) => deniedOf(row) > 0).sort((a, b) => deniedOf(b) - deniedOf(a)).slice(0, SHOWN);
    if (!rows.length) return html`<p class="muted" data-test="none-denied">No rule denied a request <${Period} />, <${ScopeLabel} instances=${instances} />.</p>`;
    const hasHits = rows.some((row) => integer(row.activity.denied) !== deniedOf(row));
    return html`<div class="scroll compact" tabindex="0" role="region" aria-label="Table of denied rules"><table data-test="denied-rules">
      <caption>Rules with the most denied requests <${Period} />, <${ScopeLabel} instances=${instances} /></caption>
      <thead><tr><th scope="col">Rule</th><th scope="col">Limit</th><th scope="col" class="number">Denied requests</th>
        ${hasHits && html`<th scope="col" class="number">Denied hits</th>`}<th scope="col">Denied share</th></tr></thead>
      <tbody>${rows.map((row) => html`<${RuleOfTop} key=${row.path} row=${row} hasHits=${hasHits} />`)}</tbody></table></div>`;
  }}</${Loaded}>`;
}

const EntityRow = ({ entity, hasHits }) => html`<tr><td><${EntityLink} descriptor=${entity.descriptor} /></td>
  <td>${entity.rulePath ? html`<${RuleLink} path=${entity.rulePath} />` : html`<${Text} value=${entity.rule} length=${40} />`}</td>
  <${NumberCell} value=${integer(entity.requests)} />${hasHits && html`<${NumberCell} value=${integer(entity.hits)} />`}</tr>`;

// A period after “the last”.
function lastText(seconds) {
  const minutes = Math.max(1, Math.round(seconds / 60));
  if (minutes === 60) return "hour";
  return minutes === 1 ? "minute" : `${minutes} minutes`;
}

function TopEntities({ data: { entities = [], periodSeconds, instances } }) {
  const time = lastText(integer(periodSeconds));
  if (!entities.length) return html`<p class="muted">No entity was denied in the last ${time}, <${ScopeLabel} instances=${instances} />.</p>`;
  const hasHits = entities.some((entity) => integer(entity.hits) !== integer(entity.requests));
  return html`<div class="scroll compact" tabindex="0" role="region" aria-label="Table of denied entities"><table data-test="denied-entities">
    <caption>Entities with the most denied requests in the last ${time}, <${ScopeLabel} instances=${instances} /></caption>
    <thead><tr><th scope="col">Entity</th><th scope="col">Rule</th><th scope="col" class="number">Denied requests</th>
      ${hasHits && html`<th scope="col" class="number">Denied hits</th>`}</tr></thead>
    <tbody>${entities.map((entity, index) => html`<${EntityRow} key=${index} entity=${entity} hasHits=${hasHits} />`)}</tbody></table></div>`;
}

function Keys({ group: { unknownDomain, keys = [] } }) {
  if (unknownDomain) return html`<span class="tag">unknown domain</span>`;
  return keys.length ? html`<${Text} value=${keys.join(", ")} />` : html`<span class="muted">various</span>`;
}

function Nearest({ group: { nearestRule, nearestDomain } }) {
  if (nearestRule) return html`<${RuleLink} path=${nearestRule} />`;
  return nearestDomain ? html`<${Text} value=${nearestDomain} length=${80} />` : html`<span class="muted">none</span>`;
}

const UnmatchedRow = ({ group }) => html`<tr><td><${Text} value=${group.domain ?? ""} length=${80} /></td>
  <td><${Keys} group=${group} /></td>
  <${NumberCell} value=${integer(group.recent)} /><${NumberCell} value=${integer(group.total)} />
  <td><${Nearest} group=${group} /></td></tr>`;

// Descriptors without a limit are often a typing error in a key.
function Unmatched({ data: { unmatched = [], instances } }) {
  if (!unmatched.length) return null;
  return html`<section aria-labelledby="unmatched" data-test="unmatched"><h2 id="unmatched">Requests without a rule</h2>
    <p>No rule matches these descriptors, so they have no limit.</p>
    <div class="scroll compact" tabindex="0" role="region" aria-label="Table of descriptors without a rule"><table>
      <caption>Descriptors without a rule, <${ScopeLabel} instances=${instances} /></caption>
      <thead><tr><th scope="col">Domain</th><th scope="col">Keys</th><th scope="col" class="number">Last 5 minutes</th>
        <th scope="col" class="number">Since the start</th><th scope="col">Nearest rule or domain</th></tr></thead>
      <tbody>${unmatched.slice(0, MAX_UNMATCHED).map((group, index) => html`<${UnmatchedRow} key=${index} group=${group} />`)}</tbody></table></div>
    ${unmatched.length > MAX_UNMATCHED && html`<p class="muted">The first ${MAX_UNMATCHED} of ${plural(unmatched.length, "combination")} of keys.</p>`}</section>`;
}

export function Denied() {
  const session = useSession();
  const range = useRange();
  const isAllowed = canRead(session);
  const state = useScopedCall("ListTopEntities", isAllowed ? { maxResults: SHOWN, periodSeconds: range.seconds } : null, REFRESH_MS);
  return html`<section aria-labelledby="who"><h2 id="who">Who is being denied?</h2>
      <div class="columns"><div><${TopRules} /></div><div>
        ${isAllowed ? html`<${Loaded} state=${state}>${(data) => html`<${TopEntities} data=${data} />`}</${Loaded}>` : html`<${NeedsRead} />`}</div></div></section>
    ${isAllowed && state.data && html`<${Unmatched} data=${state.data} />`}`;
}
