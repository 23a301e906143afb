// The dialog that repeats what will be changed before it is changed.
import { html, useState } from "./base.js";
import { Alert, Dialog, Field } from "./parts.js";
import { visible } from "./format.js";

// `run(reason)` makes the change; with `asksReason`, the operator has to give a reason first.
export function ConfirmDialog({ title, sentence, action, run, close, asksReason = false }) {
  const [reason, setReason] = useState("");
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await run(reason.trim());
      close();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} close=${close} test="confirm-dialog"><form onSubmit=${submit}>
    <p data-test="confirm-sentence"><bdi class="foreign">${visible(sentence)}.</bdi></p>
    ${asksReason && html`<${Field} label="Reason" hint="Kept in the audit log">
      <input name="reason" required maxlength="500" value=${reason} onInput=${(event) => setReason(event.target.value)} /></${Field}>`}
    <${Alert} error=${error} />
    <div class="buttons"><button class="primary" data-test="confirm" disabled=${isBusy || (asksReason && !reason.trim())}>${action}</button>
      <button type="button" onClick=${close}>Cancel</button></div></form></${Dialog}>`;
}
