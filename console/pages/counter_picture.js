// Pictures of a counter: the hits it stores on a line of time, and the remaining hits from now on.
import { html } from "../base.js";
import { clock, duration, integer, number, plural } from "../format.js";

const MAX_PARTS = 24;
const ROW = 14;
const LEFT = 12;
const RIGHT = 88;

const relative = (microseconds) => {
  if (Math.abs(microseconds) < 1000) return "now";
  return microseconds < 0 ? `${duration(-microseconds)} ago` : `in ${duration(microseconds)}`;
};
const at = (microseconds) => clock(new Date(microseconds / 1000));

// A horizontal position in percent.
const place = (value, first, last) => LEFT + ((value - first) / Math.max(1, last - first)) * (RIGHT - LEFT);

function Parts({ parts, now }) {
  const shown = parts.slice(0, MAX_PARTS);
  const first = Math.min(now, ...shown.map((part) => part.from));
  const last = Math.max(now, ...shown.map((part) => part.until));
  const height = shown.length * ROW + 26;
  const x = (value) => place(value, first, last);
  return html`<figure class="picture" data-test="counter-parts">
    <figcaption>Stored hits: each bar begins when its hits count, and ends when they stop counting.</figcaption>
    <svg width="100%" height=${height} aria-hidden="true">
      ${shown.map((part, index) => html`<g key=${index}>
        <rect class="part" x=${`${x(part.from)}%`} width=${`${Math.max(0.5, x(part.until) - x(part.from))}%`} y=${index * ROW + 2} height=${ROW - 4} rx="2" />
        <text class="picture-text" x=${`${LEFT - 1}%`} y=${index * ROW + 11} text-anchor="end">${number(part.hits)}</text></g>`)}
      <line class="now-line" x1=${`${x(now)}%`} x2=${`${x(now)}%`} y1="0" y2=${height - 20} />
      ${x(now) > 30 && html`<text class="picture-text" x=${`${LEFT}%`} y=${height - 6}>${relative(first - now)}</text>`}
      <text class="picture-text" x=${`${x(now)}%`} y=${height - 6} text-anchor="middle">now</text>
      ${x(now) < 70 && html`<text class="picture-text" x=${`${RIGHT}%`} y=${height - 6} text-anchor="end">${relative(last - now)}</text>`}
      <text class="picture-text" x="0" y="11">hits</text>
    </svg>
    ${parts.length > MAX_PARTS && html`<p class="muted">The first ${MAX_PARTS} of ${plural(parts.length, "part")}.</p>`}
    <details><summary>As a table</summary><table><thead><tr><th scope="col">From</th><th scope="col">Until</th><th scope="col" class="number">Hits</th></tr></thead>
      <tbody>${parts.slice(0, 500).map((part, index) => html`<tr key=${index}><td>${at(part.from)} (${relative(part.from - now)})</td>
        <td>${at(part.until)} (${relative(part.until - now)})</td><td class="number">${number(part.hits)}</td></tr>`)}</tbody></table></details></figure>`;
}

function Forecast({ forecast }) {
  const last = forecast[forecast.length - 1].after || 1;
  const most = Math.max(1, ...forecast.map((point) => point.remaining));
  const top = 10;
  const height = 96;
  const x = (after) => place(after, 0, last);
  const y = (value) => top + (1 - value / most) * (height - top);
  const steps = forecast.map((point, index) => {
    const next = forecast[index + 1];
    return html`<g key=${index}>
      ${index > 0 && html`<line class="forecast-line" x1=${`${x(point.after)}%`} x2=${`${x(point.after)}%`} y1=${y(forecast[index - 1].remaining)} y2=${y(point.remaining)} />`}
      <line class="forecast-line" x1=${`${x(point.after)}%`} x2=${`${next ? x(next.after) : 100}%`} y1=${y(point.remaining)} y2=${y(point.remaining)} /></g>`;
  });
  return html`<figure class="picture" data-test="counter-forecast">
    <figcaption>Remaining hits over the coming time, if no other requests arrive</figcaption>
    <svg width="100%" height=${height + 22} aria-hidden="true">
      <line class="grid-line" x1=${`${LEFT}%`} x2="100%" y1=${y(most)} y2=${y(most)} />
      <line class="grid-line" x1=${`${LEFT}%`} x2="100%" y1=${height} y2=${height} />
      <text class="picture-text" x=${`${LEFT - 1}%`} y=${y(most) + 4} text-anchor="end">${number(most)}</text>
      <text class="picture-text" x=${`${LEFT - 1}%`} y=${height + 2} text-anchor="end">0</text>
      ${steps}
      <text class="picture-text" x=${`${LEFT}%`} y=${height + 18}>now</text>
      <text class="picture-text" x=${`${RIGHT}%`} y=${height + 18} text-anchor="middle">${relative(last)}</text>
    </svg>
    <details><summary>As a table</summary><table><thead><tr><th scope="col">Time</th><th scope="col" class="number">Remaining hits</th></tr></thead>
      <tbody>${forecast.slice(0, 500).map((point, index) => html`<tr key=${index}><td>${relative(point.after)}</td>
        <td class="number">${number(point.remaining)}</td></tr>`)}</tbody></table></details></figure>`;
}

export function CounterPicture({ counter }) {
  const now = new Date(counter.at ?? Date.now()).getTime() * 1000;
  const parts = (counter.parts ?? []).map((part) => ({ from: integer(part.fromUs), until: integer(part.untilUs), hits: integer(part.hits) }));
  const forecast = (counter.forecast ?? []).map((point) => ({ after: integer(point.afterUs), remaining: integer(point.remaining) }));
  return html`${parts.length > 0 && html`<${Parts} parts=${parts} now=${now} />`}
    ${forecast.length > 1 && html`<${Forecast} forecast=${forecast} />`}`;
}
