// The effect of a change: the rates of the rules that it applies to, before and since.
import { html } from "../base.js";
import { percent, rate } from "../format.js";
import { Time, OneInstance, useCall } from "../parts.js";

// Sums the rates of the rows: one row for a path, or all rows without levels above.
function ratesOf(data, path) {
  const rows = (data?.rows ?? []).filter((row) => (path ? row.path === path : !row.depth));
  if (!rows.length) return null;
  const sum = (name) => rows.reduce((total, row) => total + (row.activity?.[name] ?? 0), 0);
  return { requested: sum("requestedRate"), denied: sum("deniedRate") };
}

const Row = ({ name, rates }) => html`<tr><th scope="row">${name}</th><td class="number">${rate(rates.requested)}</td>
  <td class="number">${rate(rates.denied)}</td><td class="number">${rates.requested ? percent(rates.denied / rates.requested) : "–"}</td></tr>`;

export function Effect({ path, baseline, since }) {
  const { data } = useCall("ListRuleActivity", path ? { path } : { pageSize: 500 }, 2000);
  const before = ratesOf(baseline, path);
  const now = ratesOf(data, path);
  if (!before || !now) return html`<p class="muted">There is no activity to compare with.</p>`;
  return html`<h3>Effect since the change</h3><table data-test="effect"><caption>Hits per second, <${OneInstance} />. Changed <${Time} value=${since} />.</caption>
    <thead><tr><th scope="col">Time</th><th scope="col" class="number">Requested</th><th scope="col" class="number">Denied</th>
      <th scope="col" class="number">Denied share</th></tr></thead>
    <tbody><${Row} name="Before" rates=${before} /><${Row} name="Now" rates=${now} /></tbody></table>
    <p class="muted">The rates are those of the last 10 seconds.</p>`;
}
