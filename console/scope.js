// The choice between the numbers of this instance and the sum over all instances, and the choice of the time. Both are in the
// URL.
import { html, useEffect } from "./base.js";
import { useActivity, watchAllInstances } from "./activity.js";
import { plural } from "./format.js";
import { OneInstance, Text, Time, useCall } from "./parts.js";
import { useSession } from "./session.js";
import { replaceParams, useRoute } from "./state.js";

const HOUR_MS = 3_600_000;
const SCOPED_PAGES = ["now", "rules", "rule"];
let lastChoice = "";

// Reports whether the numbers of the page are the sum over all instances.
export function useScope() {
  const { page, params } = useRoute();
  const session = useSession();
  const isChosen = SCOPED_PAGES.includes(page) && params.scope === "all";
  return isChosen && (session.hasInstances || !session.loaded);
}

// Opens the stream for the scope of each page. Call it once, above all pages.
export function useWatchedScope() {
  const all = useScope();
  useEffect(() => watchAllInstances(all), [all]);
}

// Returns the choice for links in the menu: the one of the last page that had one.
export function useLastScope() {
  const { page, params } = useRoute();
  if (SCOPED_PAGES.includes(page)) lastChoice = params.scope === "all" ? "all" : "";
  return (name) => (SCOPED_PAGES.includes(name) ? lastChoice : "");
}

// Calls a method for the scope of the page, and again when instances appear or disappear.
export function useScopedCall(method, request, every) {
  const all = useScope();
  const { instances } = useActivity();
  const names = all ? instances.map(({ name }) => name).join() : "";
  const scoped = request && all ? { ...request, allInstances: true } : request;
  return useCall(method, scoped, every, names);
}

// Says which instances the numbers are from. `instances` are the names in the answer of a call.
export function ScopeLabel({ instances = [] }) {
  if (instances.length < 2) return html`<${OneInstance} />`;
  return html`<span class="one-instance" data-test="all-instances" title=${instances.join(", ")}>on all ${instances.length} instances</span>`;
}

// Returns when the numbers of the page begin, if they are not those of the whole last hour, or null.
export function useStart() {
  const all = useScope();
  const { instances } = useActivity();
  const { instance } = useSession();
  const counted = all ? instances : instances.filter(({ name }) => name === instance);
  if (!counted.length) return null;
  const first = Math.min(...counted.map(({ since }) => new Date(since).getTime()));
  return Date.now() - first < HOUR_MS ? new Date(first).toISOString() : null;
}

// The time that the numbers of rules are about, as a part of a sentence.
export function Period() {
  const all = useScope();
  const start = useStart();
  if (!start) return "in the last hour";
  return html`since ${all ? "the first start" : "this instance started"} at <${Time} value=${start} />`;
}

export function ScopeChoice() {
  const session = useSession();
  const { params } = useRoute();
  const { instances } = useActivity();
  const all = useScope();
  const isMissing = session.loaded && !session.hasInstances;
  const choose = (event) => replaceParams({ scope: event.target.value === "all" ? "all" : "" });
  return html`<fieldset class="choice" data-test="scope"><legend class="unseen">Instances</legend>
    <label><input type="radio" name="scope" value="one" checked=${params.scope !== "all" || isMissing} onChange=${choose} /> This instance
      ${" "}<span class="muted">(<${Text} value=${session.instance} length=${40} />)</span></label>
    <label class=${isMissing ? "muted" : ""}><input type="radio" name="scope" value="all" checked=${all}
      disabled=${!session.hasInstances} onChange=${choose} /> All instances</label>
    ${all && instances.length > 0 && html`<span class="muted" data-test="instances" title=${instances.map(({ name }) => name).join(", ")}>
      ${plural(instances.length, "instance")}</span>`}
    ${isMissing && html`<span class="muted" data-test="no-instances">(needs Redis or peers)</span>`}
  </fieldset>`;
}

const RANGES = [
  { value: "5m", seconds: 300, text: "5 minutes", last: "5 minutes" },
  { value: "15m", seconds: 900, text: "15 minutes", last: "15 minutes", isOwnOnly: true },
  { value: "1h", seconds: 3600, text: "1 hour", last: "hour" },
];

// The periods to choose from: each instance reports its entities of five minutes and of an hour to the others.
const rangesOf = (all) => RANGES.filter(({ isOwnOnly }) => !all || !isOwnOnly);

// Returns the chosen time, an hour by default. `last` is its name after “the last”.
export function useRange() {
  const all = useScope();
  const { params } = useRoute();
  return rangesOf(all).find(({ value }) => value === params.range) ?? RANGES.at(-1);
}

export function RangeChoice() {
  const all = useScope();
  const range = useRange();
  const choose = (event) => replaceParams({ range: event.target.value === "1h" ? "" : event.target.value });
  return html`<fieldset class="choice" data-test="range"><legend class="unseen">Time</legend>
    <span class="muted" aria-hidden="true">Last</span>${rangesOf(all).map(({ value, text }) => html`
    <label key=${value}><input type="radio" name="range" value=${value} checked=${range.value === value} onChange=${choose} /> ${text}</label>`)}
  </fieldset>`;
}
