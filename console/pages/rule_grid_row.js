// One row of the table of rules.
import { html } from "../base.js";
import { integer, limitText, number, rate, visible } from "../format.js";
import { ShareBar, SparkLine, Text } from "../parts.js";
import { link } from "../state.js";
import { locationText, outcomesText, shortLimit, spaced, switchText } from "../words.js";

// What candidate rules would change, in the width of a column.
function shortOutcomes({ newlyDenied, newlyAllowed }) {
  const parts = [];
  if (integer(newlyDenied)) parts.push(`would deny +${number(integer(newlyDenied))}`);
  if (integer(newlyAllowed)) parts.push(`allow +${number(integer(newlyAllowed))}`);
  return parts.join(", ") || "no change";
}

export function RuleGridRow({ index, row, height, isActive, choose, scope }) {
  const place = { transform: `translateY(${index * height}px)`, height: `${height}px` };
  const className = `grid-row ${isActive ? "active" : ""}`;
  if (!row) {
    return html`<div role="row" class=${className} id=${`row-${index}`} aria-rowindex=${index + 2} style=${place}>
      <div role="gridcell" class="cell column-0 muted">…</div></div>`;
  }
  const { rule = null, activity = {}, depth = 0 } = row;
  const requests = integer(activity.requests);
  const share = requests ? integer(activity.deniedRequests) / requests : 0;
  const state = rule ? switchText(rule) : "";
  const cell = (column, content, extra = "") => html`<div role="gridcell" class=${`cell column-${column} ${extra}`}>${content}</div>`;
  return html`<div role="row" class=${className} id=${`row-${index}`} data-test="rule-row" data-path=${row.path} aria-rowindex=${index + 2}
      aria-level=${depth + 1} aria-selected=${isActive} style=${place} onMouseDown=${choose}>
    <div role="gridcell" class=${`cell column-0 ${rule ? "" : "level"}`} style=${{ paddingInlineStart: `${Math.min(depth, 8) * 1.1 + 0.5}rem` }}>
      <a href=${link("rule", { path: row.path, scope })} title=${visible(row.path).slice(0, 500)} tabindex="-1"><${Text} value=${row.label || row.path || "(no name)"} length=${80} /></a></div>
    ${cell(1, rule && html`<span title=${limitText(rule.limit)}><${Text} value=${shortLimit(rule)} length=${80} /></span>`)}
    ${cell(2, rule?.algorithm ? spaced(rule.algorithm) : "")}
    ${cell(3, rule?.consistency ?? "")}
    ${cell(4, html`${rate(activity.requestRate ?? 0)}<span class="narrow-only">/s</span>`, "number")}
    ${cell(5, requests ? html`<${ShareBar} share=${share} pattern="denied-fill" />` : html`<span class="muted">–</span>`)}
    ${cell(6, html`<${SparkLine} requested=${activity.requestsPerMinute} denied=${activity.deniedRequestsPerMinute} />`)}
    ${cell(7, state && html`<span class="tag">${state}</span>`)}
    ${cell(8, row.overrides ? number(row.overrides) : "", "number")}
    ${cell(9, row.candidate ? html`<span class="candidate" title=${outcomesText(row.candidate)}>${shortOutcomes(row.candidate)}</span>` : "")}
    ${cell(10, rule && html`<span title=${locationText(rule)}><${Text} value=${locationText({ ...rule, file: rule.file?.split("/").pop() })} length=${60} /></span>`, "muted")}
  </div>`;
}
