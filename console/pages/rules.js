// The page “Rules”: the tree of all rules with their activity. Only the rows in view are in the document.
import { html, useEffect, useInterval, useLayoutEffect, useRef, useState } from "../base.js";
import { useRulesVersion } from "../activity.js";
import { number, plural } from "../format.js";
import { Alert, Loading, Time } from "../parts.js";
import { ScopeChoice, ScopeLabel, useScope } from "../scope.js";
import { link, open, replaceParams } from "../state.js";
import { useRuleRows } from "../rule_rows.js";
import { RuleGridRow } from "./rule_grid_row.js";

const WIDE_ROW = 32;
const NARROW_ROW = 56;
const MARGIN_ROWS = 8;
const REFRESH_MS = 2000;
const DEBOUNCE_MS = 150;
const narrow = matchMedia("(max-width: 700px)");

const COLUMNS = ["Rule", "Limit", "Algorithm", "Consistency", "Requests /s", "Denied share", "Last hour", "Switch",
  "Overrides", "Candidate", "Source"];

function useRowHeight() {
  const [isNarrow, setNarrow] = useState(narrow.matches);
  useEffect(() => {
    const change = () => setNarrow(narrow.matches);
    narrow.addEventListener("change", change);
    return () => narrow.removeEventListener("change", change);
  }, []);
  return isNarrow ? NARROW_ROW : WIDE_ROW;
}

// The box to search in. The URL follows while the operator types.
function FindBox({ find, order }) {
  const [text, setText] = useState(find);
  const timer = useRef(0);
  useEffect(() => setText((before) => (before.trim() === find ? before : find)), [find]);
  const type = (event) => {
    const { value } = event.target;
    setText(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => replaceParams({ find: value.trim() }), DEBOUNCE_MS);
  };
  return html`<form class="find" role="search" onSubmit=${(event) => event.preventDefault()}>
    <label><span class="field-label">Find</span><input type="search" data-test="find" value=${text} onInput=${type}
      maxlength="300" placeholder="path, name, limit or algorithm" autocomplete="off" spellcheck=${false} /></label>
    <label><span class="field-label">Order</span><select data-test="order" value=${order}
      onChange=${(event) => replaceParams({ order: event.target.value === "file" ? "file" : "" })}>
      <option value="denied">Most denied first</option><option value="file">As in the files</option></select></label></form>`;
}

function NoRules({ totals }) {
  return html`<section class="notice" data-test="no-rules"><h2>No rules are loaded</h2>
    ${totals.lastError && html`<${Alert} error=${{ message: totals.lastError }} />`}
    <p>Put YAML files into the rules folder (setting <code>rules.dir</code>). They are loaded within seconds. The page “Getting started”
      of the documentation has an example.</p></section>`;
}

// The range of rows in view, and how to move to a row.
function useViewport(rowHeight) {
  const scroller = useRef(null);
  const [view, setView] = useState({ first: 0, last: 30 });
  const measure = () => {
    const element = scroller.current;
    if (!element) return;
    const first = Math.floor(element.scrollTop / rowHeight);
    const last = Math.ceil((element.scrollTop + element.clientHeight) / rowHeight);
    setView((before) => (before.first === first && before.last === last ? before : { first, last }));
  };
  useLayoutEffect(() => {
    measure();
    const observer = new ResizeObserver(measure);
    if (scroller.current) observer.observe(scroller.current);
    return () => observer.disconnect();
  }, [rowHeight]);
  return { scroller, view, measure };
}

function Grid({ loader, totals, rowHeight, isStale, scope }) {
  const { scroller, view, measure } = useViewport(rowHeight);
  const [active, setActive] = useState(0);
  const total = totals?.rows ?? 0;
  const first = Math.max(0, view.first - MARGIN_ROWS);
  const last = Math.min(total, view.last + MARGIN_ROWS);

  useEffect(() => {
    scroller.current.scrollTop = 0;
    setActive(0);
  }, [loader.request.find, loader.request.order]);
  useEffect(() => {
    const timer = setTimeout(() => loader.show(first, Math.max(first, last - 1)), loader.totals ? 60 : 0);
    return () => clearTimeout(timer);
  }, [loader, first, last]);
  useInterval(() => loader.show(view.first, Math.min(view.last, Math.max(0, total - 1)), true), REFRESH_MS);

  const move = (index) => {
    const target = Math.max(0, Math.min(total - 1, index));
    setActive(target);
    const element = scroller.current;
    const top = target * rowHeight;
    const space = element.clientHeight - rowHeight;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top > element.scrollTop + space) element.scrollTop = top - space;
  };
  const page = Math.max(1, view.last - view.first - 2);
  const press = (event) => {
    const targets = {
      ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: total - 1,
    };
    if (event.key in targets) {
      event.preventDefault();
      move(targets[event.key]);
    } else if (event.key === "Enter") {
      const row = loader.row(active);
      if (row) open("rule", { path: row.path, scope });
    }
  };
  const indexes = [];
  for (let index = first; index < last; index += 1) indexes.push(index);
  const isActiveShown = active >= first && active < last;
  return html`<div class=${`grid ${isStale ? "stale" : ""}`} role="treegrid" aria-label="Rules" aria-rowcount=${total + 1} aria-colcount=${COLUMNS.length}
      tabindex="0" data-test="rules-grid" ref=${scroller} onScroll=${measure} onKeyDown=${press}
      aria-activedescendant=${isActiveShown && total ? `row-${active}` : undefined}>
    <div role="rowgroup" class="grid-head"><div role="row" class="grid-row head" aria-rowindex="1">${COLUMNS.map((column, index) => html`
      <div role="columnheader" class=${`cell column-${index}`} key=${column}>${column}</div>`)}</div></div>
    <div role="rowgroup" class="grid-body" style=${{ height: `${total * rowHeight}px` }}>
      ${indexes.map((index) => html`<${RuleGridRow} key=${index} index=${index} row=${loader.row(index)} height=${rowHeight}
        scope=${scope} isActive=${index === active} choose=${() => setActive(index)} />`)}</div></div>`;
}

export function Rules({ params }) {
  const rulesVersion = useRulesVersion();
  const rowHeight = useRowHeight();
  const find = params.find ?? "";
  const order = params.order === "file" ? "file" : "denied";
  const all = useScope();
  const scope = all ? "all" : "";
  const request = { find, allInstances: all, order: order === "file" ? "RULE_ORDER_FILE" : "RULE_ORDER_DENIED" };
  const { loader, totals } = useRuleRows(request, rulesVersion);
  const hasNone = totals && totals.all === 0 && totals.rows === 0 && !find;
  return html`<div class="title-row"><h1 tabindex="-1">Rules</h1>
      <span class="muted" role="status" data-test="totals">${totals && !hasNone && (find
    ? `${number(totals.rules)} of ${plural(totals.all, "rule")}` : plural(totals.all, "rule"))}
      ${totals?.loadedAt && html`, loaded <${Time} value=${totals.loadedAt} />`}</span><span class="muted">Numbers <${ScopeLabel} instances=${totals?.instances} /></span><${ScopeChoice} /></div>
    <${Alert} error=${loader.error} />
    ${totals?.lastError && !hasNone && html`<div class="alert" role="alert" data-test="last-error">The latest rules were rejected, and the previous ones
      stay in force: ${totals.lastError}</div>`}
    <${FindBox} find=${find} order=${order} />
    ${!totals && !loader.error && html`<${Loading} what="rules" />`}
    ${hasNone && html`<${NoRules} totals=${totals} />`}
    ${totals && !hasNone && totals.rows === 0 && html`<p class="notice" data-test="none-found">No rule contains these words.
      ${" "}<a href=${link("rules", { order: params.order, scope })}>Show all rules</a></p>`}
    ${!hasNone && html`<${Grid} loader=${loader} totals=${totals} rowHeight=${rowHeight} isStale=${loader.totals === null} scope=${scope} />`}`;
}
