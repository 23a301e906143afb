// The page of one rule: its limit, its activity, its entities, and how much of the limit they use.
import { html, useMemo } from "../base.js";
import { Chart, summarise } from "../chart.js";
import { integer, number, percent, plural, rate, visible } from "../format.js";
import { Alert, EntityLink, Loaded, Loading, LongText, NeedsRead, OneInstance, Text, Time, useCall, useStart } from "../parts.js";
import { canRead, useSession } from "../session.js";
import { link } from "../state.js";
import { locationText, outcomesText, shortLimit, spaced, switchText } from "../words.js";
import { Usage } from "./usage.js";

function Facts({ row, loadedAt }) {
  const { rule, activity = {} } = row;
  const requested = integer(activity.requested);
  const denied = integer(activity.denied);
  const start = useStart();
  const fact = (name, value) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`;
  return html`<dl class="facts" data-test="facts">
    ${rule && html`${fact("Limit", html`<strong><${LongText} value=${shortLimit(rule) || "unlimited"} /></strong>`)}
      ${fact("Algorithm", rule.algorithm ? spaced(rule.algorithm) : "none")}
      ${rule.consistency && fact("Consistency", rule.consistency)}
      ${fact("Switch", switchText(rule) || "on, as written")}
      ${fact("Source", html`<${Text} value=${locationText(rule) || "unknown"} />`)}`}
    ${loadedAt && fact("In force since", html`<${Time} value=${loadedAt} />`)}
    ${row.overrides ? fact("Limits set for entities", html`<a href=${link("change")}>${number(row.overrides)}</a>`) : null}
    ${fact("Now", `${rate(activity.requestedRate)} hits/s requested, ${rate(activity.deniedRate)} hits/s denied${activity.shadowRate ? `, ${rate(activity.shadowRate)} hits/s over the limit in shadow mode` : ""}`)}
    ${fact(start ? html`Since the start at <${Time} value=${start} />` : "Last hour", requested ? `${plural(requested, "hit")} requested, ${number(denied)} denied (${percent(denied / requested)})` : "no hits")}
    ${row.candidate && fact("Candidate rules", `${outcomesText(row.candidate)}, of ${plural(integer(row.candidate.requested), "evaluated hit")}`)}
  </dl>`;
}

function MinuteChart({ activity }) {
  const requested = activity.requestedPerMinute ?? [];
  const denied = activity.deniedPerMinute ?? [];
  const { length } = requested;
  const start = useStart();
  const thisMinute = Math.floor(Date.now() / 60_000) * 60_000;
  const times = useMemo(() => Array.from({ length }, (_, index) => thisMinute - (length - index) * 60_000), [length, thisMinute]);
  if (!length) {
    return html`<p class="muted">${integer(activity.requested) ? "The first minute with hits is not over yet." : "No hits in the last hour."}</p>`;
  }
  // Nothing is known of the minutes before the start.
  const first = start ? new Date(start).getTime() - 60_000 : 0;
  const valuesOf = (counts) => times.map((time, index) => (time > first ? counts[index] ?? 0 : null));
  const series = [
    { label: "Requested", values: valuesOf(requested), colour: "accent" },
    { label: "Denied", values: valuesOf(denied), colour: "denied", dash: [6, 3] },
  ];
  const summaries = series.map((line) => summarise(line, times, number, "last minute"));
  return html`<${Chart} title="Hits per minute" times=${times} series=${series} format=${number} summaries=${summaries} height=${180} test="chart-rule" />`;
}

function EntityTable({ rule, rankBy, caption, test }) {
  const domain = rule.domain ?? "";
  const state = useCall("ListTopEntities", { rankBy, domain, rule: rule.name || rule.path, maxResults: 10 }, 5000);
  return html`<${Loaded} state=${state}>${({ entities = [] }) => html`<div data-test=${test}><h3>${caption}</h3>
    ${entities.length === 0 && html`<p class="muted">None in the last minutes.</p>`}
    ${entities.length > 0 && html`<table><thead><tr><th scope="col">Entity</th><th scope="col" class="number">Hits</th></tr></thead>
      <tbody>${entities.map((entity, index) => html`<tr key=${index}><td><${EntityLink} descriptor=${entity.descriptor} /></td>
        <td class="number">${number(integer(entity.hits))}</td></tr>`)}</tbody></table>`}</div>`}</${Loaded}>`;
}

function Entities({ rule }) {
  return html`<div class="columns">
    <${EntityTable} rule=${rule} rankBy="RANK_BY_DENIED" caption="Most denied hits" test="rule-most-denied" />
    <${EntityTable} rule=${rule} rankBy="RANK_BY_REQUESTED" caption="Most requested hits" test="rule-most-requested" /></div>`;
}

// The switch of a rule is changed by its path without the domain.
const switchLink = (rule) => link("change", {
  tab: "switch", scope: "rule", domain: rule.domain, rule: rule.path?.slice((rule.domain?.length ?? 0) + 1) || rule.name,
});

function RuleDetails({ row, data, session }) {
  const { rule } = row;
  return html`<${Facts} row=${row} loadedAt=${data.loadedAt} />
    ${rule && html`<p><a class="button" data-test="change-switch" href=${switchLink(rule)}>Change this rule's switch</a></p>`}
    <section aria-labelledby="hour"><h2 id="hour">The last hour <${OneInstance} /></h2><${MinuteChart} activity=${row.activity ?? {}} /></section>
    ${rule && html`<section aria-labelledby="entities"><h2 id="entities">Entities <${OneInstance} /></h2>
      ${canRead(session) ? html`<${Entities} rule=${rule} />` : html`<${NeedsRead} />`}</section>
      ${canRead(session) && html`<section aria-labelledby="usage"><h2 id="usage">Share of the limit in use</h2>
        <${Usage} path=${row.path} /></section>`}`}
    ${!rule && html`<p class="muted">This level has no limit of its own. The numbers are those of the
      ${" "}<a href=${link("rules", { find: row.path })}>rules below</a>.</p>`}`;
}

export function RulePage({ params }) {
  const session = useSession();
  const path = params.path ?? "";
  const { data, error } = useCall("ListRuleActivity", path ? { path } : null, 2000);
  if (!path) {
    return html`<h1 tabindex="-1">Rule</h1><p class="notice">Choose a rule from the <a href=${link("rules")}>list of rules</a>.</p>`;
  }
  const row = (data?.rows ?? []).find((candidate) => candidate.path === path) ?? data?.rows?.[0];
  return html`<p class="crumbs"><a href=${link("rules")}>Rules</a> ›</p>
    <h1 tabindex="-1" title=${visible(path).slice(0, 500)}><${Text} value=${path} length=${160} /></h1>
    <${Alert} error=${error} />
    ${!data && !error && html`<${Loading} what="the rule" />`}
    ${data && !row && html`<p class="notice" data-test="unknown-rule">No rule has this path. It may have been removed or renamed.</p>`}
    ${row && html`<${RuleDetails} row=${row} data=${data} session=${session} />`}`;
}
