// The dialog that signs in with a token.
import { html, useState } from "./base.js";
import { restartActivity } from "./activity.js";
import { Alert, Dialog, Field } from "./parts.js";
import { signIn } from "./session.js";

export function SignInDialog({ close }) {
  const [token, setToken] = useState("");
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await signIn(token.trim());
      restartActivity();
      close();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} title="Sign in with a token" close=${close} test="sign-in-dialog">
    <form onSubmit=${submit}>
      <${Field} label="Token" hint="Kept in this tab until you sign out or close it.">
        <input type="password" name="token" autocomplete="off" spellcheck=${false} required value=${token}
          onInput=${(event) => setToken(event.target.value)} /></${Field}>
      <${Alert} error=${error} />
      <div class="buttons">
        <button class="primary" disabled=${isBusy || !token.trim()}>Sign in</button>
        <button type="button" onClick=${close}>Cancel</button>
      </div>
    </form></${Dialog}>`;
}
