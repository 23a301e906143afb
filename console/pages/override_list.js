// The overrides in force and the planned ones, one page at a time.
import { html, useEffect, useState } from "../base.js";
import { fullTime, integer, plural } from "../format.js";
import { Alert, EntityLink, Loading, MatchesNothing, Text, Time, useCall } from "../parts.js";
import { begunTarget, modeWord, targetKind, targetText } from "../words.js";
import { newPlan } from "./change_forms.js";

const PAGE = 50;

function Row({ override, isAllowed, preview }) {
  const { target = {}, value = "", origin = "ORIGIN_STORE" } = override;
  const { limit } = begunTarget(target);
  const isRemovable = isAllowed && target.rules === undefined && origin !== "ORIGIN_FILE";
  const remove = () => preview(newPlan({
    changes: [{ target, value: "" }], reason: `remove the ${targetKind(target).toLowerCase()} of ${targetText(target)}`.slice(0, 300),
    thisInstance: origin === "ORIGIN_INSTANCE",
  }));
  return html`<tr><td>${targetKind(target)}</td>
    <td>${limit ? html`<${EntityLink} descriptor=${limit} />` : html`<${Text} value=${targetText(target)} />`}<${MatchesNothing} override=${override} /></td>
    <td><strong><${Text} value=${modeWord(value)} length=${100} /></strong>${target.planned && html` <span class="tag" data-test="planned">planned from ${fullTime(target.planned.from)}</span>`}
      ${origin === "ORIGIN_FILE" && html` <span class="tag">switch file</span>`}
      ${origin === "ORIGIN_INSTANCE" && html` <span class="tag">this instance</span>`}</td>
    <td>${override.until ? html`<${Time} value=${override.until} />` : html`<span class="muted">no end</span>`}</td>
    <td>${override.at && html`<${Time} value=${override.at} />`} ${override.author && html`by <${Text} value=${override.author} length=${40} />`}</td>
    <td><${Text} value=${override.reason ?? ""} /></td>
    <td>${isRemovable && html`<button type="button" data-test="remove-override" aria-label=${`Remove ${targetKind(target)} ${targetText(target)}`.slice(0, 200)}
      onClick=${remove}>Remove</button>`}</td></tr>`;
}

export function OverrideList({ isAllowed, version, preview }) {
  const [tokens, setTokens] = useState([""]);
  const token = tokens[tokens.length - 1];
  const { data, error, reload } = useCall("ListOverrides", { pageSize: PAGE, pageToken: token });
  useEffect(() => {
    if (version) reload();
  }, [version]);
  const overrides = data?.overrides ?? [];
  return html`<section aria-labelledby="overrides" data-test="overrides"><h2 id="overrides">Overrides in force and planned</h2>
    <${Alert} error=${error} />${!data && !error && html`<${Loading} />`}
    ${data && html`<p class="muted">${plural(integer(data.limits), "limit")}, ${plural(integer(data.plans), "plan")}, ${plural(integer(data.switches), "switch", "switches")}${integer(data.planned) > 0 && `, ${plural(integer(data.planned), "planned override")}`}</p>`}
    ${data && overrides.length === 0 && html`<p class="muted">No override is set: the rules apply as they are written.</p>`}
    ${overrides.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of overrides"><table>
      <thead><tr><th scope="col">Kind</th><th scope="col">Target</th><th scope="col">Value</th><th scope="col">End</th><th scope="col">Set</th><th scope="col">Reason</th>
        <th scope="col"><span class="unseen">Action</span></th></tr></thead>
      <tbody>${overrides.map((override, index) => html`<${Row} key=${index} override=${override} isAllowed=${isAllowed} preview=${preview} />`)}</tbody></table></div>`}
    <div class="buttons">${tokens.length > 1 && html`<button type="button" onClick=${() => setTokens(tokens.slice(0, -1))}>Previous page</button>`}
      ${data?.nextPageToken && html`<button type="button" onClick=${() => setTokens([...tokens, data.nextPageToken])}>Next page</button>`}</div></section>`;
}
