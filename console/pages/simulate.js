// The page “Simulate”: replays recorded requests or an access log with other rules, and changes nothing.
import { html, useEffect, useRef, useState } from "../base.js";
import { call } from "../api.js";
import { readRuleFiles, readTextFile } from "../files.js";
import { Alert, Field, Loading } from "../parts.js";
import { canRead, useSession } from "../session.js";
import { SimulationReport } from "./simulation_report.js";

const MAPPING = "domain: shop\ntime: start_time\ndescriptors:\n- [{ key: user, field: x_user }]\n";

const Choice = ({ name, value, current, change, children, disabled }) => html`<label class=${disabled ? "muted" : ""}>
  <input type="radio" name=${name} value=${value} checked=${current === value} disabled=${disabled} onChange=${() => change(value)} /> ${children}</label>`;

function Requests({ source, setSource, recorded, log, mapping, setMapping }) {
  return html`<fieldset><legend class="field-label">Requests</legend>
    <${Choice} name="requests" value="recorded" current=${source} change=${setSource} disabled=${!recorded}>Recorded by this instance</${Choice}>
    ${!recorded && html`<p class="hint" data-test="nothing-recorded">Nothing is recorded. Set <code>record.dir</code> to record a sample.</p>`}
    <${Choice} name="requests" value="log" current=${source} change=${setSource}>An access log in JSON</${Choice}>
    ${source === "log" && html`<${Field} label="Access log" hint="At most 900 KB. For more, use “sluicegate simulate” in a terminal.">
        <input type="file" name="access-log" required ref=${log} /></${Field}>
      <${Field} label="Mapping in YAML" hint="How fields of the access log become descriptors">
        <textarea name="mapping" rows="5" spellcheck=${false} required value=${mapping} onInput=${(event) => setMapping(event.target.value)}></textarea></${Field}>`}
  </fieldset>`;
}

function RuleChoice({ kind, setKind, rules }) {
  return html`<fieldset><legend class="field-label">Rules</legend>
    <${Choice} name="rules" value="in-force" current=${kind} change=${setKind}>Those in force</${Choice}>
    <${Choice} name="rules" value="files" current=${kind} change=${setKind}>Rule files</${Choice}>
    ${kind === "files" && html`<${Field} label="Rule files in YAML" hint="At most 900 KB in all">
      <input type="file" name="rule-files" multiple accept=".yaml,.yml" required ref=${rules} /></${Field}>`}</fieldset>`;
}

export function Simulate() {
  const session = useSession();
  const [chosen, setSource] = useState("");
  const [kind, setKind] = useState("in-force");
  const [mapping, setMapping] = useState(MAPPING);
  const [state, setState] = useState({ data: null, error: null, isBusy: false });
  const log = useRef(null);
  const rules = useRef(null);
  const running = useRef(null);
  useEffect(() => () => running.current?.abort(), []);
  const source = chosen || (session.recordsRequests ? "recorded" : "log");

  const run = async (event) => {
    event.preventDefault();
    const controller = new AbortController();
    running.current?.abort();
    running.current = controller;
    setState({ data: null, error: null, isBusy: true });
    try {
      const request = {};
      if (source === "log") Object.assign(request, { accessLog: await readTextFile(log.current.files[0]), mapping });
      if (kind === "files") request.files = await readRuleFiles(rules.current.files);
      const data = await call("Simulate", request, { signal: controller.signal });
      setState({ data, error: null, isBusy: false });
    } catch (error) {
      if (!controller.signal.aborted) setState({ data: null, error, isBusy: false });
    }
  };
  return html`<h1 tabindex="-1">Simulate</h1>
    <p class="muted">What would other rules have decided? Nothing is changed.</p>
    ${session.loaded && !canRead(session) && html`<p class="notice" data-test="needs-read">${session.acceptsTokens
    ? "Simulations need a token: use “Sign in with a token” at the top of the page."
    : html`Simulations need a token, which this listener does not accept because the admin API is off. Set <code>admin.addr</code> and <code>admin.token_file</code>.`}</p>`}
    <form class="card" onSubmit=${run} data-test="simulate-form"><fieldset class="plain columns" disabled=${!canRead(session)}><legend class="unseen">Simulation</legend>
      <${Requests} source=${source} setSource=${setSource} recorded=${session.recordsRequests} log=${log} mapping=${mapping} setMapping=${setMapping} />
      <${RuleChoice} kind=${kind} setKind=${setKind} rules=${rules} /></fieldset>
      <div class="buttons"><button class="primary" data-test="run" disabled=${state.isBusy || !canRead(session)}>Run</button></div></form>
    ${state.isBusy && html`<${Loading} what="the simulation" />`}
    <${Alert} error=${state.error} />
    ${state.data && html`<${SimulationReport} data=${state.data} />`}`;
}
