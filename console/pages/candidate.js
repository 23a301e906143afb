// Candidate rules: upload, outcomes, promotion, and rollback.
import { html, useRef, useState } from "../base.js";
import { call } from "../api.js";
import { ConfirmDialog } from "../confirm.js";
import { readRuleFiles } from "../files.js";
import { integer, number, percent, plural, visible } from "../format.js";
import { Alert, EntityLink, Field, Loading, OneInstance, RuleLink, Text, Time, useCall } from "../parts.js";
import { useSession } from "../session.js";
import { outcomesText } from "../words.js";
import { SimulationSummary } from "./simulation_report.js";

const ACTIONS = {
  drop: { method: "DropCandidate", label: "Drop", title: "Drop the candidate rules?", sentence: "Stop evaluating the candidate rules and delete them" },
  promote: { method: "PromoteCandidate", label: "Promote", title: "Promote the candidate rules?", sentence: "Put the candidate rules in force on all instances" },
  rollback: { method: "RollbackRules", label: "Roll back", title: "Roll back the rules?", sentence: "Restore the rules that the last promotion replaced, on all instances" },
};

function Entities({ entities, caption }) {
  if (!entities?.length) return null;
  return html`<table><caption>${caption}</caption><thead><tr><th scope="col">Entity</th><th scope="col">Rule</th><th scope="col" class="number">Hits</th></tr></thead>
    <tbody>${entities.slice(0, 10).map((entity, index) => html`<tr key=${index}><td><${EntityLink} descriptor=${entity.descriptor} /></td>
      <td><${Text} value=${entity.rule} length=${60} /></td><td class="number">${number(integer(entity.hits))}</td></tr>`)}</tbody></table>`;
}

function totalOf(data) {
  const sum = (name) => (data.rules ?? []).reduce((total, { outcomes }) => total + integer(outcomes?.[name]), 0);
  return { requested: sum("requested"), newlyDenied: sum("newlyDenied"), newlyAllowed: sum("newlyAllowed") };
}

function Outcomes({ data }) {
  const rules = data.rules ?? [];
  return html`<p>Since <${Time} value=${data.since} />, on ${percent(data.share)} of the counters, <${OneInstance} />: of
      ${" "}${plural(totalOf(data).requested, "hit")}, <strong data-test="candidate-outcomes">${outcomesText(totalOf(data))}</strong>.
      ${integer(data.skippedRequests) > 0 && html` ${plural(integer(data.skippedRequests), "request")} not evaluated.`}</p>
    ${rules.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Outcomes of each rule"><table data-test="candidate-rules">
      <thead><tr><th scope="col">Rule</th><th scope="col" class="number">Requested hits</th><th scope="col">The candidate rules</th></tr></thead>
      <tbody>${rules.slice(0, 50).map(({ rule, outcomes }, index) => html`<tr key=${index}>
        <td>${rule ? html`<${RuleLink} path=${rule.path || rule.name} />` : html`<span class="muted">no rule</span>`}</td>
        <td class="number">${number(integer(outcomes?.requested))}</td><td>${outcomesText(outcomes)}</td></tr>`)}</tbody></table></div>`}
    <div class="columns"><${Entities} entities=${data.mostNewlyDenied} caption="Most newly denied hits" />
      <${Entities} entities=${data.firstNewlyDenied} caption="First newly denied" /></div>`;
}

function UploadForm({ isAllowed, done }) {
  const session = useSession();
  const input = useRef(null);
  const [share, setShare] = useState("10");
  const [reason, setReason] = useState("");
  const [state, setState] = useState({ files: null, simulation: null, error: null });
  const [isOpen, setOpen] = useState(false);
  const [warnings, setWarnings] = useState(null);
  const preview = async (event) => {
    event.preventDefault();
    setWarnings(null);
    setState({ files: null, simulation: null, error: null });
    try {
      const files = await readRuleFiles(input.current.files);
      setState({ files, simulation: null, error: null, isBusy: session.recordsRequests });
      const simulation = session.recordsRequests ? await call("Simulate", { files }) : null;
      setState({ files, simulation, error: null });
    } catch (error) {
      setState((before) => ({ ...before, error, isBusy: false }));
    }
  };
  const upload = async () => {
    const answer = await call("UploadCandidate", { files: state.files, share: Number(share) / 100, reason: reason.trim() });
    setWarnings(answer.warnings ?? []);
    setState({ files: null, simulation: null, error: null });
    done();
  };
  const names = state.files?.map(({ name }) => visible(name)).join(", ") ?? "";
  return html`<form class="card form-grid" onSubmit=${preview} data-test="candidate-form"><fieldset class="plain" disabled=${!isAllowed}><legend class="field-label">Upload candidate rules</legend>
      <${Field} label="Rule files in YAML" hint="All files of the new rules, at most 900 KB in all"><input type="file" name="files" multiple accept=".yaml,.yml" required ref=${input} /></${Field}>
      <${Field} label="Share of counters, in percent"><input type="number" name="share" min="0.1" max="100" step="0.1" required value=${share}
        onInput=${(event) => setShare(event.target.value)} /></${Field}>
      <${Field} label="Reason" hint="Kept in the audit log"><input name="reason" required maxlength="500" value=${reason} onInput=${(event) => setReason(event.target.value)} /></${Field}>
      <div class="buttons"><button class=${state.files ? "" : "primary"} data-test="preview">Preview</button></div></fieldset></form>
    <${Alert} error=${state.error} />
    ${state.isBusy && html`<${Loading} what="the simulation" />`}
    ${state.files && !state.isBusy && html`<section class="card" data-test="candidate-preview"><h3>Preview</h3>
      <p>${plural(state.files.length, "file")}: <bdi class="foreign">${names}</bdi></p>
      ${state.simulation && html`<${SimulationSummary} data=${state.simulation} />`}
      ${!session.recordsRequests && html`<p class="muted">No requests are recorded, so the effect cannot be simulated. Set <code>record.dir</code> to record a sample.</p>`}
      <div class="buttons"><button type="button" class="primary" data-test="apply" onClick=${() => setOpen(true)}>Upload</button></div></section>`}
    ${warnings && html`<div role="status" data-test="candidate-result"><p>The candidate rules are uploaded.</p>
      ${warnings.length > 0 && html`<ul>${warnings.map((warning, index) => html`<li key=${index}><${Text} value=${warning} length=${500} /></li>`)}</ul>`}</div>`}
    ${isOpen && html`<${ConfirmDialog} title="Upload candidate rules?" action="Upload" run=${upload} close=${() => setOpen(false)}
      sentence=${`Evaluate the rules of ${names} on ${share}% of the counters. They deny nothing`} />`}`;
}

export function Candidate({ isAllowed }) {
  const { data, error, reload } = useCall("GetCandidate", {}, 5000);
  const [action, setAction] = useState(null);
  const [done, setDone] = useState("");
  const run = (name) => async (reason) => {
    await call(ACTIONS[name].method, { reason });
    setDone(`${ACTIONS[name].sentence}: done.`);
    reload();
  };
  const button = (name) => html`<button type="button" data-test=${name} disabled=${!isAllowed} onClick=${() => setAction(name)}>${ACTIONS[name].label}</button>`;
  return html`<section aria-labelledby="candidate" data-test="candidate"><h2 id="candidate">Candidate rules</h2>
    <p class="muted">Candidate rules are evaluated on a share of the counters and deny nothing.</p>
    <${Alert} error=${error} />${!data && !error && html`<${Loading} />`}
    ${data?.error && html`<div class="alert" role="alert">${visible(data.error)}</div>`}
    ${data && !data.active && html`<p data-test="no-candidate">No candidate rules are being evaluated.</p>`}
    ${data?.active && html`<${Outcomes} data=${data} />`}
    <p role="status">${done}</p>
    <div class="buttons">${data?.active && html`${button("promote")}${button("drop")}`}${data && button("rollback")}</div>
    ${action && html`<${ConfirmDialog} ...${ACTIONS[action]} action=${ACTIONS[action].label} asksReason=${true} run=${run(action)} close=${() => setAction(null)} />`}
    <${UploadForm} isAllowed=${isAllowed} done=${reload} /></section>`;
}
