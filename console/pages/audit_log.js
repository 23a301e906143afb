// The audit log: all changes, the latest first, with a way to undo a single one.
import { html, useEffect, useState } from "../base.js";
import { call } from "../api.js";
import { changeSentence, undoOf } from "../change_model.js";
import { ConfirmDialog } from "../confirm.js";
import { Alert, Loading, Text, Time, useCall } from "../parts.js";
import { targetKind, targetText } from "../words.js";
import { OverrideText } from "./change_steps.js";

const PAGE = 25;

function Entry({ entry, isAllowed, undo }) {
  const changes = entry.changes ?? [];
  const isUndoable = isAllowed && changes.length === 1 && undoOf(changes).length === 1;
  return html`<tr data-test="audit-entry"><td><${Time} value=${entry.at} /></td><td><${Text} value=${entry.author ?? ""} length=${40} /></td>
    <td class="wide">${changes.slice(0, 10).map((change, index) => html`<div key=${index}>${targetKind(change.target)} <${Text} value=${targetText(change.target)} length=${100} />:
      ${" "}<${OverrideText} override=${change.before} /> <span aria-label="to">→</span> <${OverrideText} override=${change.after} /></div>`)}
      ${changes.length > 10 && html`<div class="muted">and ${changes.length - 10} more</div>`}
      ${changes.length === 0 && html`<span class="muted">another action</span>`}</td>
    <td><${Text} value=${entry.reason ?? ""} /></td>
    <td>${isUndoable && html`<button type="button" data-test="undo-entry" aria-label=${`Undo change ${entry.version}`} onClick=${() => undo(entry)}>Undo</button>`}</td></tr>`;
}

export function AuditLog({ isAllowed, version, done }) {
  const [starts, setStarts] = useState(["0"]);
  const [undoing, setUndoing] = useState(null);
  const { data, error, reload } = useCall("ListAuditLog", { pageSize: PAGE, beforeVersion: starts[starts.length - 1] });
  useEffect(() => {
    if (version) reload();
  }, [version]);
  const entries = data?.entries ?? [];
  const restored = undoing ? undoOf(undoing.changes, undoing.version) : [];
  const undo = async () => {
    await call("PutOverrides", { changes: restored, reason: `undo of change ${undoing.version}: ${undoing.reason ?? ""}`.slice(0, 500) });
    done();
  };
  return html`<section aria-labelledby="audit" data-test="audit-log"><h2 id="audit">Audit log</h2>
    <${Alert} error=${error} />${!data && !error && html`<${Loading} />`}
    ${data && entries.length === 0 && html`<p class="muted">No changes yet.</p>`}
    ${entries.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of changes"><table>
      <thead><tr><th scope="col">Time</th><th scope="col">Operator</th><th scope="col">Change</th><th scope="col">Reason</th>
        <th scope="col"><span class="unseen">Action</span></th></tr></thead>
      <tbody>${entries.map((entry) => html`<${Entry} key=${entry.version} entry=${entry} isAllowed=${isAllowed} undo=${setUndoing} />`)}</tbody></table></div>`}
    <div class="buttons">${starts.length > 1 && html`<button type="button" onClick=${() => setStarts(starts.slice(0, -1))}>Newer</button>`}
      ${entries.length === PAGE && html`<button type="button" onClick=${() => setStarts([...starts, entries[PAGE - 1].version])}>Older</button>`}</div>
    ${undoing && html`<${ConfirmDialog} title="Undo this change?" sentence=${restored.map(changeSentence).join(". ")} action="Undo"
      run=${undo} close=${() => setUndoing(null)} />`}</section>`;
}
