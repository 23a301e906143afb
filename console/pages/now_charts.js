// The charts of the page “Now”, with one point for each period: five seconds, or 30 with the sum over all instances.
import { html, useMemo } from "../base.js";
import { Chart, summarise } from "../chart.js";
import { latency, percent, rate, shortLatency, visible } from "../format.js";

const COLOURS = ["accent", "denied", "shadow", "muted"];
const DASHES = [undefined, [6, 3], [2, 2], [8, 3, 2, 3]];
const perSecond = (value) => `${rate(value)}/s`;

// Builds the series of one chart from functions of a period. A line has its colour, or the next one.
function seriesOf(periods, lines) {
  return lines.map(({ label, value, colour }, index) => ({
    label, values: periods.map((period) => (period.isGap ? null : value(period))), colour: colour ?? COLOURS[index % 4], dash: DASHES[index % 4],
  }));
}

// Returns the periods of the last seconds.
function inRange(periods, seconds) {
  const oldest = (periods.at(-1)?.start ?? 0) - seconds * 1000;
  return periods.filter(({ start }) => start >= oldest);
}

// Adds an empty point where periods are missing because the instance was not running, so that no line is drawn there.
function withGaps(periods) {
  const points = [];
  for (const period of periods) {
    const last = points.at(-1);
    if (last && period.start - last.start > 3000 * Math.max(5, last.seconds)) {
      points.push({ isGap: true, start: last.start + 1000 * last.seconds, classes: [] });
    }
    points.push(period);
  }
  return points;
}

const each = (name) => (period) => (period.seconds ? period[name] / period.seconds : 0);
const localOperations = (period) => period.decidedByLease + period.decidedByEventualCounter + period.decidedByDenyCache;
const localShare = (period) => {
  const all = localOperations(period) + period.storeCalls;
  return all ? localOperations(period) / all : 0;
};

function ActivityChart({ periods, title, lines, format = perSecond, axisFormat, test, range }) {
  const times = useMemo(() => periods.map((period) => period.start), [periods]);
  const series = useMemo(() => seriesOf(periods, lines), [periods, lines.length]);
  const summaries = series.map((line) => summarise(line, times, format, "now", range.last));
  return html`<${Chart} title=${title} times=${times} series=${series} format=${format} axisFormat=${axisFormat} summaries=${summaries} test=${test} />`;
}

const DECISIONS = [{ label: "Decisions", value: each("requests") }, { label: "Denied", value: each("deniedRequests") }];
const HITS = [{ label: "Requested", value: each("requested") }, { label: "Denied", value: each("denied") }];
const NEAR = [{ label: "Near limit", value: each("nearLimit") }, { label: "Shadow mode", value: each("shadow"), colour: "shadow" }];
const LATENCY = [{ label: "99%", value: (period) => period.latencyP99Us },
  { label: "50%", value: (period) => period.latencyP50Us, colour: "muted" }];
const STORE = [{ label: "Store calls", value: each("storeCalls") }, { label: "Failed calls", value: each("storeErrors"), colour: "bad" }];
const LOCAL = [{ label: "Local", value: localShare }];

// Returns the names of the four classes with the most shed hits.
function mostShed(periods) {
  const totals = new Map();
  for (const { name, shed } of periods.flatMap(({ classes }) => classes)) totals.set(name, (totals.get(name) ?? 0) + shed);
  return [...totals].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name]) => name).sort();
}

// Reports whether hits tell more than requests: a request can have a cost, several descriptors, or no rule.
const hasCosts = (periods) => periods.some(({ requests, requested, denied, deniedRequests }) => requested > requests || denied !== deniedRequests);

export function ActivityCharts({ periods: known, store, range }) {
  const periods = useMemo(() => withGaps(inRange(known, range.seconds)), [known, range.seconds]);
  const classes = useMemo(() => mostShed(periods), [periods]);
  const shed = classes.map((name) => ({
    label: visible(name) || "(none)",
    value: (period) => {
      const found = period.classes.find((entry) => entry.name === name);
      return found && period.seconds ? found.shed / period.seconds : 0;
    },
  }));
  return html`<div class="charts">
    <${ActivityChart} range=${range} test="chart-decisions" periods=${periods} title="Requests per second" lines=${DECISIONS} />
    ${hasCosts(periods) && html`<${ActivityChart} range=${range} test="chart-hits" periods=${periods} title="Hits per second" lines=${HITS} />`}
    <${ActivityChart} range=${range} test="chart-near" periods=${periods} title="Near limit and shadow mode, hits per second" lines=${NEAR} />
    <${ActivityChart} range=${range} test="chart-latency" periods=${periods} title="Latency of decisions" lines=${LATENCY} format=${latency} axisFormat=${shortLatency} />
    ${store === "memory" && html`<div class="chart chart-note" data-test="chart-store"><div class="chart-title">Store calls</div>
      <p>Counters are in this process's memory, so there are no calls to a store.</p></div>`}
    ${store !== "memory" && html`<${ActivityChart} range=${range} test="chart-store" periods=${periods} title="Calls to the store per second" lines=${STORE} />
      <${ActivityChart} range=${range} test="chart-local" periods=${periods} title="Counter operations decided without a call" lines=${LOCAL}
        format=${percent} axisFormat=${percent} />`}
    ${shed.length > 0 && html`<${ActivityChart} key=${classes.join()} range=${range} test="chart-shed" periods=${periods}
      title="Hits shed per second, by class" lines=${shed} />`}
  </div>`;
}
