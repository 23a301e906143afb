// The steps of a change: the preview, the confirmation, and the result with its effect and a way to undo it.
import { html, useEffect, useRef, useState } from "../base.js";
import { call } from "../api.js";
import { changeSentence, checkPlan, pathOfScope, periodText, undoOf } from "../change_model.js";
import { ConfirmDialog } from "../confirm.js";
import { limitText, visible } from "../format.js";
import { Alert, Loading, Text, useCall } from "../parts.js";
import { begunTarget, modeWord, sameTarget, targetKind, targetText } from "../words.js";
import { Effect } from "./effect.js";
import { SimulationSummary } from "./simulation_report.js";

// An override or its absence, in words.
export function OverrideText({ override }) {
  if (!override || !override.value) return html`<span class="muted">none</span>`;
  const hasPeriod = override.until || override.target?.planned;
  return html`<strong><${Text} value=${modeWord(override.value)} length=${100} /></strong>${hasPeriod && html`
    <span class="muted"> ${periodText(override.target, override.until)}</span>`}`;
}

export const BeforeAfter = ({ changes, note }) => html`<table data-test="before-after"><thead><tr><th scope="col">Kind</th><th scope="col">Target</th>
  <th scope="col">Before</th><th scope="col">After</th></tr></thead><tbody>${changes.map(({ target, before, after }, index) => html`<tr key=${index}>
  <td>${targetKind(target)}</td><td><${Text} value=${targetText(target)} length=${100} /></td>
  <td><${OverrideText} override=${before} />${note && !before && html`<br /><span class="muted">${note}</span>`}</td>
  <td><${OverrideText} override=${after} /></td></tr>`)}</tbody></table>`;

// The path of the rules whose rates show the effect of a change; undefined if there is none yet.
function pathOfEffect(target, rule) {
  if (target.planned) return undefined;
  return target.switch ? pathOfScope(target.switch) : rule?.path;
}

// Loads the overrides that the changes of a plan replace.
function useBefore(plan) {
  const { target } = plan.changes[0];
  const begun = begunTarget(target);
  const descriptor = begun.limit ?? (begun.plan
    ? { domain: begun.plan.domain, entries: [{ key: begun.plan.key, value: begun.plan.value }] } : null);
  const inspect = useCall("Inspect", descriptor ? { descriptor } : null);
  const health = useCall("GetHealth", descriptor ? null : {});
  const { data, error } = descriptor ? inspect : health;
  if (!data) return { error };
  const rule = descriptor ? data.rule : null;
  const inForce = (descriptor ? data.overrides : data.switches) ?? [];
  const planned = (descriptor ? data.planned : data.plannedSwitches) ?? [];
  const origin = plan.thisInstance ? "ORIGIN_INSTANCE" : "ORIGIN_STORE";
  const isMatch = (override) => sameTarget(override.target, target) && (!target.switch || (override.origin ?? "ORIGIN_STORE") === origin);
  return {
    before: [...inForce, ...planned].find(isMatch),
    isLoaded: true,
    path: pathOfEffect(target, rule),
    note: rule?.limit && !target.planned ? `the rule applies: ${limitText(rule.limit)}` : "",
  };
}

// Asks the API whether it would accept the plan. Returns `{ isValid, problem }`.
function useCheck(plan, allowUnknown) {
  const [state, setState] = useState({ isValid: false, problem: null });
  useEffect(() => {
    let isOver = false;
    const finish = (next) => !isOver && setState(next);
    checkPlan(plan, allowUnknown).then(() => finish({ isValid: true, problem: null }), (problem) => finish({ isValid: false, problem }));
    return () => { isOver = true; };
  }, [plan, allowUnknown]);
  return state;
}

// What would be done. A plan that the API would reject has no button to apply it.
function Preview({ plan, session, apply, close }) {
  const [allowUnknown, setAllowUnknown] = useState(false);
  const { isValid, problem } = useCheck(plan, allowUnknown);
  if (isValid) return html`<${ValidPreview} plan=${plan} session=${session} apply=${apply} close=${close} allowUnknown=${allowUnknown} />`;
  return html`<p data-test="preview-sentence"><bdi class="foreign">${visible(changeSentence(plan.changes[0]))}.</bdi></p>
    ${problem ? html`<${Alert} error=${problem} />` : html`<${Loading} />`}
    ${problem?.isUnknownName && html`<p>It would match nothing: is a name misspelled?</p>`}
    <div class="buttons">${problem?.isUnknownName && html`<button type="button" data-test="apply-anyway" onClick=${() => setAllowUnknown(true)}>
      Continue anyway, for rules that do not exist yet</button>`}
      <button type="button" onClick=${close}>Cancel</button></div>`;
}

function ValidPreview({ plan, session, apply, close, allowUnknown }) {
  const { before, note, path, error, isLoaded } = useBefore(plan);
  const simulation = useCall("Simulate", session.recordsRequests ? { changes: plan.changes } : null);
  // The version of the value that the operator saw: another operator may change it while the dialog is open.
  const [seenVersion, setSeenVersion] = useState(null);
  const change = plan.changes[0];
  const sentence = changeSentence(change);
  const run = async () => {
    const expectedVersion = plan.thisInstance ? undefined : seenVersion;
    const { reason, additive, thisInstance } = plan;
    await apply({ changes: [{ ...change, expectedVersion }], reason, additive, thisInstance, rejectUnknownNames: !allowUnknown }, path);
  };
  return html`<p data-test="preview-sentence"><bdi class="foreign">${visible(sentence)}.</bdi></p><${Alert} error=${error} />
    ${allowUnknown && html`<p class="notice">It matches nothing until the rules have these names.</p>`}
    ${!isLoaded && !error && html`<${Loading} />`}
    ${isLoaded && html`<${BeforeAfter} changes=${[{ target: change.target, before, after: change.value ? change : undefined }]} note=${note} />`}
    ${session.recordsRequests
    ? html`<h3>With the recorded requests</h3><${Alert} error=${simulation.error} />
      ${!simulation.data && !simulation.error && html`<${Loading} what="the simulation" />`}
      ${simulation.data && html`<${SimulationSummary} data=${simulation.data} />`}`
    : html`<p class="muted">No requests are recorded, so the effect cannot be simulated. Set <code>record.dir</code> to record a sample.</p>`}
    <div class="buttons"><button type="button" class="primary" data-test="apply" disabled=${!isLoaded} onClick=${() => setSeenVersion(String(before?.version ?? "0"))}>Apply</button>
      <button type="button" onClick=${close}>Cancel</button></div>
    ${seenVersion !== null && html`<${ConfirmDialog} title="Apply this change?" sentence=${sentence} action="Apply" run=${run}
      close=${() => setSeenVersion(null)} />`}`;
}

function Result({ result, plan, done, close }) {
  const [isOpen, setOpen] = useState(false);
  const [undone, setUndone] = useState(null);
  const changes = result.answer.changes ?? [];
  const restored = undoOf(changes, plan.thisInstance ? undefined : result.answer.version);
  const sentence = restored.map(changeSentence).join(". ");
  const undo = async () => {
    const reason = `undo of ${plan.reason || changeSentence(plan.changes[0])}`.slice(0, 500);
    const answer = await call("PutOverrides", { changes: restored, reason, thisInstance: plan.thisInstance });
    setUndone(answer);
    done();
  };
  return html`<p role="status" class="up" data-test="result"><span aria-hidden="true">●</span> ${undone
    ? `Undone with version ${undone.version ?? "0"}.` : `Applied with version ${result.answer.version ?? "0"}.`}</p>
    ${(result.answer.warnings ?? []).map((warning, index) => html`<p class="notice" key=${index} data-test="warning">Warning: <${Text} value=${warning} length=${500} /></p>`)}
    <${BeforeAfter} changes=${undone?.changes ?? changes} />
    ${result.path !== undefined && html`<${Effect} path=${result.path} baseline=${result.baseline} since=${result.at} />`}
    <div class="buttons">${!undone && restored.length > 0 && html`<button type="button" data-test="undo" onClick=${() => setOpen(true)}>Undo</button>`}
      <button type="button" onClick=${close}>Close</button></div>
    ${isOpen && html`<${ConfirmDialog} title="Undo this change?" sentence=${sentence} action="Undo" run=${undo} close=${() => setOpen(false)} />`}`;
}

export function ChangeSteps({ plan, session, close, done }) {
  const [result, setResult] = useState(null);
  const heading = useRef(null);
  useEffect(() => heading.current.focus(), [result]);
  const apply = async (request, path) => {
    // Without a path, the change applies to all rules, or to none if the path is undefined.
    const baseline = await call("ListRuleActivity", path ? { path } : { pageSize: 500 }).catch(() => null);
    const answer = await call("PutOverrides", request);
    setResult({ answer, path, baseline, at: new Date().toISOString() });
    done();
  };
  return html`<section class="card" data-test="change-steps"><h2 tabindex="-1" ref=${heading}>${result ? "Result" : "Preview"}</h2>
    ${result ? html`<${Result} result=${result} plan=${plan} done=${done} close=${close} />`
    : html`<${Preview} plan=${plan} session=${session} apply=${apply} close=${close} />`}</section>`;
}
