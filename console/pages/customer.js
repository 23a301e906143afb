// The entities of one customer over all domains, for the page “Descriptor”: those with a value, or with its beginning.
import { html, useEffect } from "../base.js";
import { hitsText, integer, limitText, plural } from "../format.js";
import { EntityLink, Loaded, MatchesNothing, NeedsRead, RuleLink, Text, useCall } from "../parts.js";
import { canRead, useSession } from "../session.js";
import { replaceParams } from "../state.js";
import { modeWord, targetKind } from "../words.js";

const Override = ({ override }) => html`<li>${targetKind(override.target)}: <strong><${Text} value=${modeWord(override.value)} length=${60} /></strong>
  <${MatchesNothing} override=${override} /></li>`;

const Row = ({ entity: { descriptor, rulePath = "", limit = "", counter, overrides = [] } }) => html`<tr><td><${EntityLink} descriptor=${descriptor} /></td>
  <td>${rulePath ? html`<${RuleLink} path=${rulePath} />` : html`<span class="muted">no rule</span>`}</td>
  <td class="number">${counter ? hitsText(integer(counter.used), counter.currency) : html`<span class="muted">–</span>`}</td>
  <td>${limit ? html`<${Text} value=${limitText(limit)} length=${80} />` : html`<span class="muted">no limit</span>`}</td>
  <td>${overrides.length > 0 && html`<ul class="plain-list">${overrides.map((override, index) => html`<${Override} key=${index} override=${override} />`)}</ul>`}</td></tr>`;

const SEARCHED = "Rules with one entry, overrides, and the entities with the most hits of the last hour are searched.";
const SEARCHED_PREFIX = "Overrides and the entities with the most hits of the last hour are searched.";

function Entities({ data: { entities = [], incomplete = false }, value, isPrefix }) {
  const what = html`${isPrefix ? "a value that begins with" : "the value"} <strong><${Text} value=${value} /></strong>`;
  const searched = isPrefix ? SEARCHED_PREFIX : SEARCHED;
  if (!entities.length) {
    return html`<p class="notice" role="status" data-test="no-entities">No entity has ${what}. ${searched}
      ${incomplete && " The search was incomplete."} A descriptor with several entries needs all of them: <code>domain key=value key=value</code>.</p>`;
  }
  return html`<p class="muted" role="status">${plural(entities.length, "entity", "entities")} with ${what}.
      ${incomplete && html` <span data-test="incomplete">There may be more: at most 100 are shown.</span>`} ${searched}</p>
    <div class="scroll compact" tabindex="0" role="region" aria-label="Table of entities"><table data-test="found-entities"><thead><tr><th scope="col">Entity</th>
      <th scope="col">Rule</th><th scope="col" class="number">Used</th><th scope="col">Limit</th><th scope="col">Overrides</th></tr></thead>
      <tbody>${entities.map((entity, index) => html`<${Row} key=${index} entity=${entity} />`)}</tbody></table></div>`;
}

export function Customer({ value, isPrefix, lookUp }) {
  const session = useSession();
  const state = useCall("FindEntities", canRead(session) ? { value, prefix: isPrefix } : null);
  useEffect(() => {
    if (lookUp) state.reload();
  }, [lookUp]);
  if (session.loaded && !canRead(session)) return html`<${NeedsRead} />`;
  return html`<section aria-labelledby="customer" data-test="customer"><h2 id="customer">Entities of <${Text} value=${value} length=${60} /></h2>
    <label class="check"><input type="checkbox" data-test="prefix" checked=${isPrefix}
      onChange=${(event) => replaceParams({ prefix: event.target.checked ? "1" : "" })} /> All values that begin with this text</label>
    <${Loaded} state=${state} what="the entities">${(data) => html`<${Entities} data=${data} value=${value} isPrefix=${isPrefix} />`}</${Loaded}></section>`;
}
