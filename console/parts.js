// Small components and hooks that several pages share.
import { html, useState, useEffect, useRef, useCallback, useInterval } from "./base.js";
import { call, isUnreachable } from "./api.js";
import { useRulesVersion } from "./activity.js";
import { useSession } from "./session.js";
import { clock, cut, fullTime, percent, visible } from "./format.js";
import { descriptorText, entriesText } from "./words.js";
import { link, useRoute } from "./state.js";

// Calls a method and renders again with its answer. `request` null: no call. The call is repeated when the request, the
// rules, the role or `version` change, after a lost connection, and every `every` milliseconds. Without a connection, the
// former answer stays. Returns `{ data, error, loading, reload }`.
export function useCall(method, request, every = 0, version = "") {
  const rulesVersion = useRulesVersion();
  const { role, caller } = useSession();
  const [state, setState] = useState({ data: null, error: null, loading: request !== null, key: "" });
  const running = useRef(null);
  const key = request === null ? null : `${method} ${JSON.stringify(request)}`;
  const load = useCallback(async () => {
    if (key === null) return;
    running.current?.abort();
    const controller = new AbortController();
    running.current = controller;
    try {
      const data = await call(method, request, { signal: controller.signal });
      if (!controller.signal.aborted) setState({ data, error: null, loading: false, key });
    } catch (error) {
      if (controller.signal.aborted) return;
      setState((before) => {
        const data = before.key === key ? before.data : null;
        return { data, error: data && isUnreachable(error) ? before.error : error, loading: false, key };
      });
    } finally {
      if (running.current === controller) running.current = null;
    }
  }, [key]);
  useEffect(() => {
    setState((before) => ({ ...before, loading: key !== null }));
    load();
    return () => running.current?.abort();
  }, [load, rulesVersion, role, caller, version]);
  useInterval(() => running.current ?? load(), every);
  if (key === null) return { data: null, error: null, loading: false, reload: load };
  return { ...state, reload: load };
}

// What a call has returned, also if a later one failed: `children` is a function of the answer.
export function Loaded({ state: { data, error }, what, children }) {
  return html`<${Alert} error=${error} />${data ? children(data) : !error && html`<${Loading} what=${what} />`}`;
}

// Foreign text, isolated from the direction of its surroundings, with control characters made visible, cut when long.
export function Text({ value, length = 120 }) {
  const text = visible(value);
  const short = cut(text, length);
  return html`<bdi class="foreign" title=${short === text ? undefined : cut(text, 2000)}>${short}</bdi>`;
}

// Foreign text that can be very long: the whole text is one step away.
export function LongText({ value, length = 300 }) {
  const text = visible(value);
  if (text.length <= length) return html`<bdi class="foreign">${text}</bdi>`;
  return html`<bdi class="foreign">${cut(text, length)}</bdi>
    <details><summary>Whole text, ${text.length.toLocaleString("en-GB")} characters</summary><bdi class="foreign">${text}</bdi></details>`;
}

// The message of an error, as the API wrote it.
export function Alert({ error, children }) {
  if (!error && !children) return null;
  return html`<div class="alert" role="alert" data-test="alert">${visible(error?.message ?? "")}${children}</div>`;
}

export const Time = ({ value }) => html`<time datetime=${value} title=${fullTime(value)}>${clock(value)}</time>`;

// Says that numbers are those of the instance that serves the page, and not of all.
export function OneInstance() {
  const { instance } = useSession();
  return html`<span class="one-instance" data-test="one-instance">on <${Text} value=${instance || "this instance"} length=${40} /> only</span>`;
}

export function EntityLink({ descriptor, length = 80 }) {
  const text = `${descriptor?.domain ?? ""} ${entriesText(descriptor?.entries)}`;
  return html`<a href=${link("descriptor", { d: descriptorText(descriptor) })}><${Text} value=${text} length=${length} /></a>`;
}

// A link to the page of a rule, which shows the same instances.
export function RuleLink({ path, label = path }) {
  const { scope } = useRoute().params;
  return html`<a href=${link("rule", { path, scope })}><${Text} value=${label} length=${90} /></a>`;
}

// Says that an override has no effect, and why; nothing if it has one.
export function MatchesNothing({ override: { matchesNothing = "" } }) {
  if (!matchesNothing) return null;
  return html`<span class="nothing" data-test="matches-nothing"> <span class="tag">matches nothing</span>${" "}<${Text} value=${matchesNothing} length=${300} /></span>`;
}

// A share between 0 and 1, as a number and a bar.
export function ShareBar({ share, pattern = "" }) {
  return html`<span class="share"><span class="share-number">${percent(share)}</span>
    <span class="bar" aria-hidden="true"><span class=${`bar-fill ${pattern}`}
      style=${{ width: `${Math.min(100, share * 100)}%` }}></span></span></span>`;
}

// A small line of the denied (dashed) and of all requests per minute.
export function SparkLine({ requested = [], denied = [] }) {
  if (!requested.length) return html`<span class="muted">–</span>`;
  const highest = Math.max(1, ...requested);
  const points = (values) => values
    .map((value, index) => `${((index * 100) / Math.max(1, values.length - 1)).toFixed(1)},${(19 - (value / highest) * 18).toFixed(1)}`)
    .join(" ");
  return html`<svg class="spark" viewBox="0 0 100 20" preserveAspectRatio="none" aria-hidden="true">
    <polyline class="spark-requested" points=${points(requested)} />
    ${denied.length > 0 && html`<polyline class="spark-denied" points=${points(denied)} />`}
  </svg>`;
}

// Text to copy, with a button.
export function Copyable({ text }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setCopied(true);
      setTimeout(() => setCopied(false), 2000);
    } catch {
      setCopied(false);
    }
  };
  return html`<div class="copyable"><code data-test="curl" tabindex="0">${visible(text)}</code>
    <button type="button" onClick=${copy}>Copy</button><span role="status">${copied ? "Copied" : ""}</span></div>`;
}

// A text field with a list of what exists. `options`: `{ value, text }`; other values are possible, too.
export function ListInput({ name, label, value, options, change, placeholder, required = true }) {
  const list = `list-${(label ?? name).replaceAll(" ", "-")}`;
  return html`<input name=${name} aria-label=${label} required=${required} value=${value} placeholder=${placeholder} list=${list}
      autocomplete="off" spellcheck=${false} onInput=${(event) => change(event.target.value)} />
    <datalist id=${list}>${options.slice(0, 200).map((option) => html`<option key=${option.value} value=${option.value}>${option.text}</option>`)}</datalist>`;
}

// A label above a form control.
export const Field = ({ label, hint, children }) =>
  html`<label class="field"><span class="field-label">${label}</span>${children}${hint && html`<span class="hint">${hint}</span>`}</label>`;

// Moves the focus to a modal dialog while it is open, and closes it with Escape. The browser reports a closed dialog later,
// when another one may be open.
export function Dialog({ title, close, children, test }) {
  const dialog = useRef(null);
  useEffect(() => {
    const element = dialog.current;
    const opener = document.activeElement;
    if (!element.open) element.showModal();
    return () => {
      element.close();
      opener?.focus?.();
    };
  }, []);
  return html`<dialog ref=${dialog} data-test=${test} aria-labelledby="dialog-title"
    onClose=${() => dialog.current && close()} onCancel=${(event) => { event.preventDefault(); close(); }}>
    <h2 id="dialog-title">${title}</h2>${children}</dialog>`;
}

export const Loading = ({ what = "" }) => html`<p class="muted" role="status">Loading${what && ` ${what}`}…</p>`;

// The sentence that replaces what only callers with a role can see.
export const NeedsRead = () =>
  html`<p class="muted" data-test="needs-read">Names of entities are shown to callers with a token, or on this machine (setting
    ${" "}<code>console.entities</code>).</p>`;

// Explains how to get the role that a change requires; nothing if the caller has it.
export function NeedsOperate({ session }) {
  if (session.role === "operate") return null;
  if (!session.acceptsTokens) {
    return html`<p class="notice" data-test="needs-operate">The admin API is off, so this console is read-only. Set
      ${" "}<code>admin.addr</code> and <code>admin.token_file</code> to make changes.</p>`;
  }
  return html`<p class="notice" data-test="needs-operate">To make changes, use “Sign in with a token” at the top of the page, with a
    token of the role <code>operate</code>. ${session.role === "read" && session.caller && "Your token can only read."}</p>`;
}
