// The page “Change”: forms for limits, plans, switches, counters and candidate rules, each with a preview, then what is in
// force and the audit log.
import { html, useState } from "../base.js";
import { integer } from "../format.js";
import { MatchesNothing, NeedsOperate, Loading, Text, useCall } from "../parts.js";
import { canOperate, canRead, useSession } from "../session.js";
import { link } from "../state.js";
import { modeWord, outcomesText, scopeText } from "../words.js";
import { AuditLog } from "./audit_log.js";
import { Candidate } from "./candidate.js";
import { LimitForm, PlanForm, SwitchForm } from "./change_forms.js";
import { ChangeSteps } from "./change_steps.js";
import { CounterForm } from "./counter_form.js";
import { OverrideList } from "./override_list.js";

const TABS = { limit: "Limit for an entity", plan: "Plan", switch: "Switch", counter: "Reset or refund", candidate: "Candidate rules" };
const FORMS = { limit: LimitForm, plan: PlanForm, switch: SwitchForm, counter: CounterForm };

// What callers without a role may see: switches and the effect of candidate rules.
function PublicState() {
  const health = useCall("GetHealth", {}, 10_000);
  const rules = useCall("ListRuleActivity", { pageSize: 500, rulesOnly: true, order: "RULE_ORDER_FILE" });
  const switches = health.data?.switches ?? [];
  const candidates = (rules.data?.rows ?? []).filter((row) => integer(row.candidate?.requested));
  return html`<section data-test="public-state"><h2>In force now</h2>
    ${!health.data && html`<${Loading} />`}
    ${health.data && switches.length === 0 && html`<p class="muted">No switch is set.</p>`}
    ${switches.length > 0 && html`<ul>${switches.map((override, index) => html`<li key=${index}>Switch of
      ${" "}<${Text} value=${scopeText(override.target?.switch)} />: <strong>${modeWord(override.value)}</strong><${MatchesNothing} override=${override} /></li>`)}</ul>`}
    ${rules.data?.hasCandidate && html`<p>Candidate rules are being evaluated.</p><ul>${candidates.map((row) => html`<li key=${row.path}>
      <${Text} value=${row.path} />: ${outcomesText(row.candidate)}</li>`)}</ul>`}
    ${rules.data && !rules.data.hasCandidate && html`<p class="muted">No candidate rules are being evaluated.</p>`}</section>`;
}

export function Change({ params }) {
  const session = useSession();
  const [plan, setPlan] = useState(null);
  const [changes, setChanges] = useState(0);
  const tab = TABS[params.tab] ? params.tab : "limit";
  const done = () => setChanges((count) => count + 1);
  const isAllowed = canOperate(session);
  const prefilled = JSON.stringify(params);
  const Form = FORMS[tab];
  return html`<h1 tabindex="-1">Change</h1>
    ${session.loaded && html`<${NeedsOperate} session=${session} />`}
    <nav class="tabs" aria-label="Kind of change"><ul>${Object.entries(TABS).map(([name, title]) => html`<li key=${name}>
      <a href=${link("change", { tab: name })} data-test=${`tab-${name}`} aria-current=${tab === name ? "page" : undefined}
        onClick=${() => setPlan(null)}>${title}</a></li>`)}</ul></nav>
    ${Form && html`<${Form} key=${prefilled} params=${params} isAllowed=${isAllowed} preview=${setPlan} done=${done} />`}
    ${tab === "candidate" && canRead(session) && html`<${Candidate} isAllowed=${isAllowed} />`}
    ${plan && html`<${ChangeSteps} key=${plan.id} plan=${plan} close=${() => setPlan(null)} done=${done} session=${session} />`}
    ${session.loaded && !canRead(session) && html`<${PublicState} />`}
    ${canRead(session) && html`<${OverrideList} isAllowed=${isAllowed} version=${changes} preview=${setPlan} />
      <${AuditLog} isAllowed=${isAllowed} version=${changes} done=${done} />`}`;
}
