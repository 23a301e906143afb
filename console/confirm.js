// Dialogs with a form: one that repeats what will be changed before it is changed, and what all of them share.
import { html, useState } from "./base.js";
import { Alert, Dialog, Field } from "./parts.js";
import { visible } from "./format.js";

// A dialog that closes when `run` has succeeded, and otherwise shows the error.
export function FormDialog({ title, action, isComplete = true, run, close, test, children }) {
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await run();
      close();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} close=${close} test=${test}><form onSubmit=${submit}>
    ${children}<${Alert} error=${error} />
    <div class="buttons"><button class="primary" data-test="confirm" disabled=${isBusy || !isComplete}>${action}</button>
      <button type="button" onClick=${close}>Cancel</button></div></form></${Dialog}>`;
}

// `run(reason)` makes the change; with `asksReason`, the operator has to give a reason first.
export function ConfirmDialog({ title, sentence, action, run, close, asksReason = false }) {
  const [reason, setReason] = useState("");
  return html`<${FormDialog} title=${title} action=${action} isComplete=${!asksReason || reason.trim()} run=${() => run(reason.trim())}
      close=${close} test="confirm-dialog">
    <p data-test="confirm-sentence"><bdi class="foreign">${visible(sentence)}.</bdi></p>
    ${asksReason && html`<${Field} label="Reason" hint="Kept in the audit log">
      <input name="reason" required maxlength="500" value=${reason} onInput=${(event) => setReason(event.target.value)} /></${Field}>`}
  </${FormDialog}>`;
}
