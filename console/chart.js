// A chart over time: a wrapper around uPlot with direct labels, line styles and a text summary for screen readers. The
// charts of a page show the same time under the pointer.
import { html, useEffect, useRef, useState } from "./base.js";
import { clock, compact, minute } from "./format.js";

const LABEL_WIDTH = 92;
const dark = matchMedia("(prefers-color-scheme: dark)");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Draws the name of each series at its last value, moved apart where lines end close to each other.
function drawLabels(plot, series) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const labels = [];
  plot.series.slice(1).forEach((_, index) => {
    const values = plot.data[index + 1];
    let last = values.length - 1;
    while (last >= 0 && values[last] == null) last -= 1;
    if (last >= 0) labels.push({ ...series[index], y: plot.valToPos(values[last], "y", true) });
  });
  labels.sort((a, b) => a.y - b.y);
  const step = 14 * ratio;
  const bottom = bbox.top + bbox.height;
  labels.forEach((label, index) => {
    if (index > 0) label.y = Math.max(label.y, labels[index - 1].y + step);
  });
  for (let index = labels.length - 1, limit = bottom; index >= 0; index -= 1, limit -= step) {
    labels[index].y = Math.min(labels[index].y, limit);
  }
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  for (const label of labels) {
    ctx.fillStyle = colour(label.colour);
    ctx.fillText(label.label, bbox.left + bbox.width + 6 * ratio, label.y, (LABEL_WIDTH - 8) * ratio);
  }
  ctx.restore();
}

// Seconds between two ticks.
const TICKS = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 86_400];
const SECONDS_WIDTH = 64;
const MINUTES_WIDTH = 44;

// The least pixels between ticks: texts with seconds are wider.
function tickSpace(plot, axis, first, last, width) {
  return ((last - first) / width) * SECONDS_WIDTH <= 30 ? SECONDS_WIDTH : MINUTES_WIDTH;
}

// The texts of ticks, with seconds if they are less than a minute apart.
function timeTicks(plot, splits, axis, space, seconds) {
  return splits.map((split) => (seconds < 60 ? clock : minute)(split * 1000));
}

function options(series, width, height, format, onCursor) {
  const axis = { stroke: colour("muted"), font: "11px system-ui, sans-serif", grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height,
    padding: [8, LABEL_WIDTH, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { show: false }, sync: { key: "page", setSeries: false } },
    scales: { y: { range: (_, __, highest) => [0, highest > 0 ? highest * 1.08 : 1] } },
    axes: [
      { ...axis, size: 24, values: timeTicks, incrs: TICKS, space: tickSpace },
      { ...axis, size: 52, values: (_, splits) => splits.map(format), space: 30 },
    ],
    series: [{}, ...series.map((line) => ({
      label: line.label, stroke: colour(line.colour), width: 1.5, dash: line.dash, points: { show: false }, spanGaps: false,
    }))],
    hooks: {
      draw: [(plot) => drawLabels(plot, series)],
      setCursor: [(plot) => onCursor(plot.cursor.idx ?? null)],
    },
  };
}

// The style of a line, for the key above the chart.
const Swatch = ({ line }) => html`<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">
  <line x1="0" y1="4" x2="22" y2="4" style=${{ stroke: `var(--${line.colour})` }} stroke-width="2" stroke-dasharray=${line.dash?.join(" ")} /></svg>`;

// `series`: `{ label, values, colour, dash }`; `times`: milliseconds; `format`: text for a value with its unit.
export function Chart({ title, times, series, format, axisFormat = compact, summaries, height = 150, test }) {
  const holder = useRef(null);
  const plot = useRef(null);
  const [theme, setTheme] = useState(dark.matches);
  const [cursor, setCursor] = useState(null);
  const data = [times.map((time) => time / 1000), ...series.map((line) => line.values)];
  const latest = useRef(data);
  latest.current = data;
  const shape = series.map((line) => `${line.label} ${line.colour} ${line.dash}`).join("|");

  useEffect(() => {
    const change = () => setTheme(dark.matches);
    dark.addEventListener("change", change);
    return () => dark.removeEventListener("change", change);
  }, []);

  useEffect(() => {
    const element = holder.current;
    const width = () => Math.max(160, Math.floor(element.clientWidth));
    const created = new globalThis.uPlot(options(series, width(), height, axisFormat, setCursor), latest.current, element);
    plot.current = created;
    const observer = new ResizeObserver(() => {
      if (created.width !== width()) created.setSize({ width: width(), height });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      created.destroy();
      plot.current = null;
    };
  }, [shape, height, theme]);

  useEffect(() => plot.current?.setData(latest.current), [times, series]);

  const hasCursor = cursor !== null && times[cursor] !== undefined;
  return html`<figure class="chart" data-test=${test}>
    <div class="chart-title">${title}${hasCursor && html`<span class="cursor-time" aria-hidden="true">at ${clock(times[cursor])}</span>`}</div>
    <figcaption>${series.map((line, index) => html`<div key=${line.label}><${Swatch} line=${line} />
      ${hasCursor && html`<span aria-hidden="true">${line.label}: ${line.values[cursor] == null ? "–" : format(line.values[cursor])}</span>`}
      <span class=${hasCursor ? "unseen" : ""}>${summaries[index]}</span></div>`)}</figcaption>
    <div class="plot" ref=${holder} aria-hidden="true"></div>
  </figure>`;
}

// The summary of a series in words: its last value, and the highest of the time that the chart shows, with its own time.
export function summarise({ label, values }, times, format, word = "now", period = "hour") {
  let top = values.findIndex((value) => value !== null);
  values.forEach((value, index) => {
    if (value > values[top]) top = index;
  });
  if (top < 0) return `${label}: nothing yet`;
  return html`${label}: ${word} ${format(values[values.length - 1])}, highest${" "}<span class="unseen">in the last ${period}${" "}</span>
    ${format(values[top])} at ${minute(times[top])}`;
}
