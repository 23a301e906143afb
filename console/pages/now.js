// The page “Now”: the activity of the last hour, who is denied, the health of the store, and the events.
import { html, useEffect, useMemo } from "../base.js";
import { useActivity, watchAllInstances } from "../activity.js";
import { canRead, useSession } from "../session.js";
import { integer, latency, number, percent, plural, rate } from "../format.js";
import { Copyable, EntityLink, Loaded, NeedsRead, OneInstance, RuleLink, ShareBar, Text, Time, useCall, useStart } from "../parts.js";
import { EVENT_KINDS, deniesNothing, exampleOf, shortLimit, switchText } from "../words.js";
import { link, replaceParams } from "../state.js";
import { ActivityCharts } from "./now_charts.js";

function ScopeChoice({ scope, session, instances }) {
  const isShared = session.store !== "" && session.store !== "memory";
  const choose = (event) => replaceParams({ scope: event.target.value === "all" ? "all" : "" });
  return html`<fieldset class="choice" data-test="scope"><legend class="unseen">Instances</legend>
    <label><input type="radio" name="scope" value="one" checked=${scope !== "all"} onChange=${choose} /> This instance
      ${" "}<span class="muted">(<${Text} value=${session.instance} length=${40} />)</span></label>
    <label class=${isShared ? "" : "muted"}><input type="radio" name="scope" value="all" checked=${scope === "all"}
      disabled=${!isShared} onChange=${choose} /> All instances</label>
    ${scope === "all" && html`<span class="muted" data-test="instances" title=${instances.map(({ name }) => name).join(", ")}>
      ${plural(instances.length, "instance")}</span>`}
    ${!isShared && session.store && html`<span class="muted">Counters in memory are not shared with other instances.</span>`}
  </fieldset>`;
}

const Figure = ({ label, value, note, test, isBad }) => html`<div class="figure" data-test=${test}>
  <dt>${label}</dt><dd><span class=${`figure-value ${isBad ? "down" : ""}`}>${value}</span><span class="figure-note">${note}</span></dd></div>`;

// The errors of the last hour. The last ten seconds (`current`) have some that no period has yet, and some that are in both.
function errorsOf(periods, current) {
  const sum = (list) => list.reduce((total, { errors }) => total + errors, 0);
  const finished = periods.filter(({ start, seconds }) => current && start + seconds * 1000 <= current.start);
  return Math.max(sum(periods), sum(finished) + (current?.errors ?? 0));
}

// The rates of the last ten seconds (`current`), and the errors of the last hour.
function Figures({ periods, current }) {
  const count = (name) => current?.[name] ?? 0;
  const perSecond = (name) => rate(count(name) / (current?.seconds || 1));
  const isBusy = count("requests") > 0;
  const errors = errorsOf(periods, current);
  return html`<dl class="figures" data-test="figures">
    <${Figure} test="decisions" label="Decisions per second" value=${perSecond("requests")} note=${`${perSecond("requested")} hits/s`} />
    <${Figure} test="denied" label="Denied share of hits" value=${percent(count("denied") / (count("requested") || 1))}
      note=${`${perSecond("denied")} hits/s`} />
    <${Figure} test="near-limit" label="Near limit" value=${perSecond("nearLimit")} note="hits/s" />
    <${Figure} test="latency" label="Latency, 99%" value=${isBusy ? latency(current.latencyP99Us) : "–"}
      note=${isBusy ? `50%: ${latency(current.latencyP50Us)}` : "no requests"} />
    <${Figure} test="errors" label="Errors per second" value=${perSecond("errors")} note=${`${number(errors)} in the last hour`}
      isBad=${count("errors") > 0} />
  </dl>`;
}

// Builds a command that matches the first rule that has keys.
function exampleCommand(rows) {
  const { domain, entries } = exampleOf(rows[0]) ?? { domain: "api", entries: [{ key: "user", value: "bob" }] };
  const body = JSON.stringify({ domain, descriptors: [{ entries }] }).replaceAll("'", "'\\''");
  return `curl -H 'content-type: application/json' ${location.host}/json -d '${body}'`;
}

function NoRequests() {
  const { data } = useCall("ListRuleActivity", { pageSize: 1, rulesOnly: true, order: "RULE_ORDER_FILE" });
  return html`<section class="notice" data-test="empty"><h2>No requests in the last hour</h2>
    <p>Send a request from a proxy or an application, or try this command in a terminal:</p>
    <${Copyable} text=${exampleCommand(data?.rows ?? [])} />
    <p class="muted">This note disappears with the first request.</p></section>`;
}

const Period = ({ start }) => (start ? html`since this instance started at <${Time} value=${start} />` : "in the last hour");

const EntityRow = (entity) => html`<tr><td><${EntityLink} descriptor=${entity.descriptor} /></td>
  <td>${entity.rulePath ? html`<${RuleLink} path=${entity.rulePath} />` : html`<${Text} value=${entity.rule} length=${40} />`}</td>
  <td class="number">${number(integer(entity.hits))}</td></tr>`;

function TopEntities() {
  const session = useSession();
  const state = useCall("ListTopEntities", canRead(session) ? { maxResults: 5 } : null, 5000);
  if (!canRead(session)) return html`<${NeedsRead} />`;
  return html`<${Loaded} state=${state}>${({ entities = [], periodSeconds }) => {
    if (!entities.length) return html`<p class="muted">No entity was denied in the last minutes, <${OneInstance} />.</p>`;
    return html`<table data-test="denied-entities"><caption>Entities with the most denied hits in the last
        ${" "}${plural(Math.max(1, Math.round(integer(periodSeconds) / 60)), "minute")}, <${OneInstance} /></caption>
      <thead><tr><th scope="col">Entity</th><th scope="col">Rule</th><th scope="col" class="number">Denied hits</th></tr></thead>
      <tbody>${entities.map(EntityRow)}</tbody></table>`;
  }}</${Loaded}>`;
}

const RuleOfTop = (row) => html`<tr key=${row.path}><td><${RuleLink} path=${row.path} /></td>
  <td>${shortLimit(row.rule)}${deniesNothing(row.rule) && html` <span class="tag">${switchText(row.rule)}</span>`}</td>
  <td class="number">${number(integer(row.activity.denied))}</td>
  <td><${ShareBar} share=${integer(row.activity.denied) / Math.max(1, integer(row.activity.requested))} pattern="denied-fill" /></td></tr>`;

function TopRules({ start }) {
  const state = useCall("ListRuleActivity", { pageSize: 5, rulesOnly: true }, 5000);
  return html`<${Loaded} state=${state}>${(data) => {
    const rows = (data.rows ?? []).filter((row) => integer(row.activity?.denied) > 0);
    if (!rows.length) return html`<p class="muted" data-test="none-denied">No rule denied a hit <${Period} start=${start} />, <${OneInstance} />.</p>`;
    return html`<table data-test="denied-rules"><caption>Rules with the most denied hits <${Period} start=${start} />, <${OneInstance} /></caption>
      <thead><tr><th scope="col">Rule</th><th scope="col">Limit</th><th scope="col" class="number">Denied hits</th><th scope="col">Share</th></tr></thead>
      <tbody>${rows.map(RuleOfTop)}</tbody></table>`;
  }}</${Loaded}>`;
}

function Servers({ servers, store }) {
  if (!servers.length) {
    return store === "memory" ? html`<p class="muted">Counters are in this process's memory.</p>` : html`<p class="muted">No servers yet.</p>`;
  }
  return html`<table data-test="servers"><thead><tr><th scope="col">Server</th><th scope="col">State</th></tr></thead>
    <tbody>${servers.map((server) => html`<tr key=${server.name}><td><${Text} value=${server.name} /></td>
      <td class=${server.up ? "up" : "down"}><span aria-hidden="true">${server.up ? "●" : "✕"}</span> ${server.up ? "up" : "down"}</td></tr>`)}</tbody></table>`;
}

function Events({ events, several }) {
  if (!events.length) return html`<p class="muted">No events yet. Changes of rules, switches, limits and servers appear here.</p>`;
  return html`<ol class="events" data-test="events" tabindex="0" aria-label="Events, newest first">${events.slice(0, 200).map((event) => html`
    <li key=${`${event.instance}/${event.id}`} class=${event.kind === "EVENT_KIND_RULES_REJECTED" || event.kind === "EVENT_KIND_SERVER_DOWN" ? "bad" : ""}>
      <${Time} value=${event.at} /> <span class="tag">${EVENT_KINDS[event.kind] ?? "Event"}</span>
      <span class="event-text"><${Text} value=${event.text} length=${300} />
        ${event.author && html`<span class="muted"> by <${Text} value=${event.author} length=${40} /></span>`}
        ${event.reason && html`<span class="muted">: “<${Text} value=${event.reason} length=${200} />”</span>`}
        ${several && event.instance && html`<span class="muted"> on <${Text} value=${event.instance} length=${40} /></span>`}</span></li>`)}</ol>`;
}

export function Now({ params }) {
  const activity = useActivity();
  const session = useSession();
  const all = params.scope === "all" && session.store !== "memory";
  useEffect(() => {
    watchAllInstances(all);
    return () => watchAllInstances(false);
  }, [all]);
  const { periods, current, servers, events, instances } = activity;
  const requests = useMemo(() => periods.reduce((total, period) => total + period.requests + period.errors, 0), [periods]);
  const isIdle = activity.everConnected && requests + (current?.requests ?? 0) + (current?.errors ?? 0) === 0;
  const start = useStart();
  return html`<div class="title-row"><h1 tabindex="-1">Now</h1>
      <${ScopeChoice} scope=${params.scope} session=${session} instances=${instances} /></div>
    ${isIdle && html`<${NoRequests} />`}
    <${Figures} periods=${periods} current=${current} />
    <section aria-labelledby="who"><h2 id="who">Who is being denied?</h2>
      <div class="columns"><div><${TopRules} start=${start} /></div><div><${TopEntities} /></div></div></section>
    <section aria-labelledby="hour"><h2 id="hour">The last hour</h2>
      <${ActivityCharts} periods=${periods} store=${session.store} />
      <p class="muted" data-test="kept">The last hour is kept in memory.${start && html` This instance started at <${Time} value=${start} />.
        ${!all && periods[0]?.start < new Date(start).getTime() - 5000 && " What is before that, this page has received from the former process."}`}${session.grafanaUrl && html` For more, see <a href=${session.grafanaUrl} rel="noreferrer">Grafana</a>.`}</p>
    </section>
    <div class="columns">
      <section aria-labelledby="events"><h2 id="events">Events <${OneInstance} /></h2><${Events} events=${events} several=${instances.length > 1} /></section>
      <section aria-labelledby="health"><h2 id="health">Store <${OneInstance} /></h2><${Servers} servers=${servers} store=${session.store} /></section>
    </div>
    <p class="muted">See all <a href=${link("rules")}>rules</a>.</p>`;
}
