// The dialog that signs in with a token.
import { html, useState } from "./base.js";
import { restartActivity } from "./activity.js";
import { FormDialog } from "./confirm.js";
import { Field } from "./parts.js";
import { signIn } from "./session.js";

export function SignInDialog({ close }) {
  const [token, setToken] = useState("");
  const run = async () => {
    await signIn(token.trim());
    restartActivity();
  };
  return html`<${FormDialog} title="Sign in with a token" action="Sign in" isComplete=${token.trim()} run=${run} close=${close} test="sign-in-dialog">
    <${Field} label="Token" hint="Kept in this tab until you sign out or close it.">
      <input type="password" name="token" autocomplete="off" spellcheck=${false} required value=${token}
        onInput=${(event) => setToken(event.target.value)} /></${Field}>
  </${FormDialog}>`;
}
