// The page “Now”: the activity of the last hour or a part of it, who is denied, the health of the store, and the events.
import { html, useMemo } from "../base.js";
import { eventKey, useActivity } from "../activity.js";
import { useSession } from "../session.js";
import { latency, number, percent, rate } from "../format.js";
import { Copyable, OneInstance, Text, Time, useCall } from "../parts.js";
import { RangeChoice, ScopeChoice, ScopeLabel, useRange, useScope, useStart } from "../scope.js";
import { EVENT_KINDS, exampleOf } from "../words.js";
import { link } from "../state.js";
import { ActivityCharts } from "./now_charts.js";
import { Denied } from "./now_tables.js";

const Figure = ({ label, value, note, test, isBad }) => html`<div class="figure" data-test=${test}>
  <dt>${label}</dt><dd><span class=${`figure-value ${isBad ? "down" : ""}`}>${value}</span><span class="figure-note">${note}</span></dd></div>`;

// The counts of a period are read up to this many milliseconds after its end.
const LATE_MS = 2000;

// The errors of the last hour. The last ten seconds (`current`) have some that no period has yet, and some that are in both.
// A period that may overlap them is left out, so that no error is shown twice.
function errorsOf(periods, current) {
  const sum = (list) => list.reduce((total, { errors }) => total + errors, 0);
  const finished = periods.filter(({ start, seconds }) => current && start + seconds * 1000 + LATE_MS <= current.start);
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
    <${Figure} test="denied" label="Denied share of requests" value=${percent(count("deniedRequests") / (count("requests") || 1))}
      note=${html`${perSecond("deniedRequests")} requests/s${count("denied") !== count("deniedRequests")
    && html`, <span data-test="denied-hits">${perSecond("denied")} hits/s</span>`}`} />
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
    <li key=${eventKey(event)} class=${event.kind === "EVENT_KIND_RULES_REJECTED" || event.kind === "EVENT_KIND_SERVER_DOWN" ? "bad" : ""}>
      <${Time} value=${event.at} /> <span class="tag">${EVENT_KINDS[event.kind] ?? "Event"}</span>
      <span class="event-text"><${Text} value=${event.text} length=${300} />
        ${event.author && html`<span class="muted"> by <${Text} value=${event.author} length=${40} /></span>`}
        ${event.reason && html`<span class="muted">: “<${Text} value=${event.reason} length=${200} />”</span>`}
        ${several && event.instance && html`<span class="muted"> on <${Text} value=${event.instance} length=${40} /></span>`}</span></li>`)}</ol>`;
}

export function Now() {
  const activity = useActivity();
  const session = useSession();
  const all = useScope();
  const range = useRange();
  const { periods, current, servers, events, instances } = activity;
  const requests = useMemo(() => periods.reduce((total, period) => total + period.requests + period.errors, 0), [periods]);
  const isIdle = activity.everConnected && requests + (current?.requests ?? 0) + (current?.errors ?? 0) === 0;
  const start = useStart();
  const names = all ? instances.map(({ name }) => name) : [];
  return html`<div class="title-row"><h1 tabindex="-1">Now</h1><${ScopeChoice} /><${RangeChoice} /></div>
    ${isIdle && html`<${NoRequests} />`}
    <${Figures} periods=${periods} current=${current} />
    <${Denied} />
    <section aria-labelledby="hour"><h2 id="hour">The last ${range.last} <${ScopeLabel} instances=${names} /></h2>
      <${ActivityCharts} periods=${periods} store=${session.store} range=${range} />
      <p class="muted" data-test="kept">The last hour is kept in memory.${start && !all && html` This instance started at <${Time} value=${start} />.
        ${periods[0]?.start < new Date(start).getTime() - 5000 && " What is before that, this page has received from the former process."}`}${session.grafanaUrl && html` For more, see <a href=${session.grafanaUrl} rel="noreferrer">Grafana</a>.`}</p>
    </section>
    <div class="columns">
      <section aria-labelledby="events"><h2 id="events">Events <${ScopeLabel} instances=${names} /></h2><${Events} events=${events} several=${names.length > 1} /></section>
      <section aria-labelledby="health"><h2 id="health">Store <${OneInstance} /></h2><${Servers} servers=${servers} store=${session.store} /></section>
    </div>
    <p class="muted">See all <a href=${link("rules", { scope: all ? "all" : "" })}>rules</a>.</p>`;
}
