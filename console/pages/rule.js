// The page of one rule: its limit, its activity, its entities, and how much of the limit they use.
import { html, useMemo } from "../base.js";
import { Chart, summarise } from "../chart.js";
import { integer, number, percent, plural, rate, visible } from "../format.js";
import { Alert, EntityLink, Loaded, Loading, LongText, NeedsRead, Text, Time } from "../parts.js";
import { ScopeChoice, ScopeLabel, useScope, useScopedCall, useStart } from "../scope.js";
import { canRead, useSession } from "../session.js";
import { link } from "../state.js";
import { locationText, outcomesText, shortLimit, spaced, switchText } from "../words.js";
import { Usage } from "./usage.js";

// Reports whether the hits of a rule differ from its requests.
const hasCosts = (activity) => integer(activity.requested) !== integer(activity.requests) || integer(activity.denied) !== integer(activity.deniedRequests);

function nowText(activity) {
  const parts = [`${rate(activity.requestRate)} requests/s, ${rate(activity.deniedRequestRate)} denied`];
  if (hasCosts(activity)) parts.push(`${rate(activity.requestedRate)} hits/s, ${rate(activity.deniedRate)} denied`);
  if (activity.shadowRate) parts.push(`${rate(activity.shadowRate)} hits/s over the limit in shadow mode`);
  return parts.join("; ");
}

function totalText(activity) {
  const requests = integer(activity.requests);
  const requested = integer(activity.requested);
  if (!requests && !requested) return "no requests";
  const deniedText = (denied, total) => `${number(denied)} denied (${percent(denied / (total || 1))})`;
  const text = `${plural(requests, "request")}, ${deniedText(integer(activity.deniedRequests), requests)}`;
  return hasCosts(activity) ? `${text}; ${plural(requested, "hit")}, ${deniedText(integer(activity.denied), requested)}` : text;
}

function Facts({ row, loadedAt }) {
  const { rule, activity = {} } = row;
  const start = useStart();
  const all = useScope();
  const fact = (name, value) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`;
  return html`<dl class="facts" data-test="facts">
    ${rule && html`${fact("Limit", html`<strong><${LongText} value=${shortLimit(rule) || "unlimited"} /></strong>`)}
      ${fact("Algorithm", rule.algorithm ? spaced(rule.algorithm) : "none")}
      ${rule.consistency && fact("Consistency", rule.consistency)}
      ${fact("Switch", switchText(rule) || "on, as written")}
      ${fact("Source", html`<${Text} value=${locationText(rule) || "unknown"} />`)}`}
    ${loadedAt && fact("In force since", html`<${Time} value=${loadedAt} />`)}
    ${row.overrides ? fact("Limits set for entities", html`<a href=${link("change")}>${number(row.overrides)}</a>`) : null}
    ${fact("Now", nowText(activity))}
    ${fact(start ? html`Since the ${all ? "first start" : "start"} at <${Time} value=${start} />` : "Last hour", totalText(activity))}
    ${row.candidate && fact("Candidate rules", `${outcomesText(row.candidate)}, of ${plural(integer(row.candidate.requested), "evaluated hit")}`)}
  </dl>`;
}

// The counts of each finished minute; `fields` are the names of the requested and of the denied ones.
function MinuteChart({ activity, fields, title, test }) {
  const [requested, denied] = fields.map((name) => activity[name] ?? []);
  const { length } = requested;
  const start = useStart();
  const thisMinute = Math.floor(Date.now() / 60_000) * 60_000;
  const times = useMemo(() => Array.from({ length }, (_, index) => thisMinute - (length - index) * 60_000), [length, thisMinute]);
  // Nothing is known of the minutes before the start.
  const first = start ? new Date(start).getTime() - 60_000 : 0;
  const valuesOf = (counts) => times.map((time, index) => (time > first ? counts[index] ?? 0 : null));
  const series = [
    { label: "Requested", values: valuesOf(requested), colour: "accent" },
    { label: "Denied", values: valuesOf(denied), colour: "denied", dash: [6, 3] },
  ];
  const summaries = series.map((line) => summarise(line, times, number, "last minute"));
  return html`<${Chart} title=${title} times=${times} series=${series} format=${number} summaries=${summaries} height=${180} test=${test} />`;
}

const REQUESTS = ["requestsPerMinute", "deniedRequestsPerMinute"];
const HITS = ["requestedPerMinute", "deniedPerMinute"];

function MinuteCharts({ activity }) {
  if (!activity.requestsPerMinute?.length) {
    return html`<p class="muted">${integer(activity.requests) ? "The first minute with requests is not over yet." : "No requests in the last hour."}</p>`;
  }
  return html`<div class="charts"><${MinuteChart} activity=${activity} fields=${REQUESTS} title="Requests per minute" test="chart-rule" />
    ${hasCosts(activity) && html`<${MinuteChart} activity=${activity} fields=${HITS} title="Hits per minute" test="chart-rule-hits" />`}</div>`;
}

// `texts`: the caption of the table, and the names of the columns of requests and hits.
function EntityTable({ rule, rankBy, texts, test }) {
  const [caption, requests, hits] = texts;
  const domain = rule.domain ?? "";
  const state = useScopedCall("ListTopEntities", { rankBy, domain, rule: rule.name || rule.path, maxResults: 10 }, 5000);
  return html`<${Loaded} state=${state}>${({ entities = [] }) => {
    const hasHits = entities.some((entity) => integer(entity.hits) !== integer(entity.requests));
    return html`<div data-test=${test}><h3>${caption}</h3>
      ${entities.length === 0 && html`<p class="muted">None in the last 5 minutes.</p>`}
      ${entities.length > 0 && html`<table><thead><tr><th scope="col">Entity</th><th scope="col" class="number">${requests}</th>
        ${hasHits && html`<th scope="col" class="number">${hits}</th>`}</tr></thead>
        <tbody>${entities.map((entity, index) => html`<tr key=${index}><td><${EntityLink} descriptor=${entity.descriptor} /></td>
          <td class="number">${number(integer(entity.requests))}</td>${hasHits && html`<td class="number">${number(integer(entity.hits))}</td>`}</tr>`)}</tbody></table>`}</div>`;
  }}</${Loaded}>`;
}

const DENIED_TEXTS = ["Most denied requests", "Denied requests", "Denied hits"];
const REQUESTED_TEXTS = ["Most requested hits", "Requests", "Hits"];

function Entities({ rule, hasHits }) {
  const requested = hasHits ? REQUESTED_TEXTS : ["Most requests", ...REQUESTED_TEXTS.slice(1)];
  return html`<div class="columns">
    <${EntityTable} rule=${rule} rankBy="RANK_BY_DENIED" texts=${DENIED_TEXTS} test="rule-most-denied" />
    <${EntityTable} rule=${rule} rankBy="RANK_BY_REQUESTED" texts=${requested} test="rule-most-requested" /></div>`;
}

// The switch of a rule is changed by its path without the domain.
const switchLink = (rule) => link("change", {
  tab: "switch", scope: "rule", domain: rule.domain, rule: rule.path?.slice((rule.domain?.length ?? 0) + 1) || rule.name,
});

function RuleDetails({ row, data, session }) {
  const { rule } = row;
  const all = useScope();
  return html`<${Facts} row=${row} loadedAt=${data.loadedAt} />
    ${rule && html`<p><a class="button" data-test="change-switch" href=${switchLink(rule)}>Change this rule's switch</a></p>`}
    <section aria-labelledby="hour"><h2 id="hour">The last hour <${ScopeLabel} instances=${data.instances} /></h2><${MinuteCharts} activity=${row.activity ?? {}} /></section>
    ${rule && html`<section aria-labelledby="entities"><h2 id="entities">Entities <${ScopeLabel} instances=${data.instances} /></h2>
      ${canRead(session) ? html`<${Entities} rule=${rule} hasHits=${hasCosts(row.activity ?? {})} />` : html`<${NeedsRead} />`}</section>
      ${canRead(session) && html`<section aria-labelledby="usage"><h2 id="usage">Share of the limit in use</h2>
        <${Usage} path=${row.path} /></section>`}`}
    ${!rule && html`<p class="muted">This level has no limit of its own. The numbers are those of the
      ${" "}<a href=${link("rules", { find: row.path, scope: all ? "all" : "" })}>rules below</a>.</p>`}`;
}

export function RulePage({ params }) {
  const session = useSession();
  const path = params.path ?? "";
  const all = useScope();
  const { data, error } = useScopedCall("ListRuleActivity", path ? { path } : null, 2000);
  if (!path) {
    return html`<h1 tabindex="-1">Rule</h1><p class="notice">Choose a rule from the <a href=${link("rules")}>list of rules</a>.</p>`;
  }
  const row = (data?.rows ?? []).find((candidate) => candidate.path === path) ?? data?.rows?.[0];
  return html`<div class="title-row"><p class="crumbs"><a href=${link("rules", { scope: all ? "all" : "" })}>Rules</a> ›</p><${ScopeChoice} /></div>
    <h1 tabindex="-1" title=${visible(path).slice(0, 500)}><${Text} value=${path} length=${160} /></h1>
    <${Alert} error=${error} />
    ${!data && !error && html`<${Loading} what="the rule" />`}
    ${data && !row && html`<p class="notice" data-test="unknown-rule">No rule has this path. It may have been removed or renamed.</p>`}
    ${row && html`<${RuleDetails} row=${row} data=${data} session=${session} />`}`;
}
