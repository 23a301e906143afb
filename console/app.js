// Starts the console: the frame of all pages, the banner about the connection, and the choice of the page.
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./base.js";
import { isLost, startActivity, restartActivity, useActivity } from "./activity.js";
import { clock, visible } from "./format.js";
import { Text } from "./parts.js";
import { loadSession, signOut, useSession } from "./session.js";
import { useLastScope, useWatchedScope } from "./scope.js";
import { SignInDialog } from "./sign_in.js";
import { link, useRoute } from "./state.js";
import { storeText } from "./words.js";
import { Now } from "./pages/now.js";
import { Rules } from "./pages/rules.js";
import { RulePage } from "./pages/rule.js";
import { DescriptorPage } from "./pages/descriptor.js";
import { Change } from "./pages/change.js";
import { Simulate } from "./pages/simulate.js";

// A page without a place in the menu has the name of the page that lists its subjects.
const PAGES = {
  now: { title: "Now", component: Now },
  rules: { title: "Rules", component: Rules },
  rule: { title: "Rule", component: RulePage, list: "rules" },
  descriptor: { title: "Descriptor", component: DescriptorPage },
  change: { title: "Change", component: Change },
  simulate: { title: "Simulate", component: Simulate },
};

const ROLES = { read: "Read only", operate: "Operator" };

// Who is signed in, with the button to sign in or out.
function Role({ session }) {
  const [isOpen, setOpen] = useState(false);
  const leave = async () => {
    await signOut();
    restartActivity();
  };
  const word = ROLES[session.role] ?? "Not signed in";
  const isSignedIn = session.caller !== "";
  return html`<div class="role">
    <span data-test="role">${word}${session.caller && html`: <${Text} value=${session.caller} length=${30} />`}</span>
    ${session.acceptsTokens && !isSignedIn
    && html`<button type="button" data-test="sign-in" onClick=${() => setOpen(true)}>Sign in with a token</button>`}
    ${isSignedIn && html`<button type="button" data-test="sign-out" onClick=${leave}>Sign out</button>`}
    ${isOpen && html`<${SignInDialog} close=${() => setOpen(false)} />`}
  </div>`;
}

function Banner({ session }) {
  const activity = useActivity();
  const isShown = isLost(activity) && !session.needsToken;
  const { lostSince, lostMessage } = activity;
  return html`<div role="status" id="banner" data-test="banner" class=${isShown ? "banner" : "banner-empty"}>
    ${isShown && `No connection to the instance since ${clock(lostSince)}: the page shows what was known then. ${visible(lostMessage)} Trying again…`}</div>`;
}

// The last events, for screen readers, as they happen.
function Announcer() {
  const { freshEvents } = useActivity();
  const [text, setText] = useState("");
  useEffect(() => {
    if (freshEvents.length) setText(freshEvents.slice(-3).map((event) => visible(event.text)).join(". "));
  }, [freshEvents]);
  return html`<div class="unseen" aria-live="polite" data-test="announcer">${text}</div>`;
}

function Navigation({ page, scopeOf }) {
  const items = Object.entries(PAGES).filter(([, { list }]) => !list);
  const currentOf = (name) => (name === page ? "page" : PAGES[page].list === name || undefined);
  return html`<nav aria-label="Pages"><ul>${items.map(([name, { title }]) => html`<li key=${name}>
    <a href=${link(name, { scope: scopeOf(name) })} aria-current=${currentOf(name)}>${title}</a></li>`)}</ul></nav>`;
}

// Stands for every page until the operator has signed in.
const NeedsToken = () => html`<h1 tabindex="-1">Sign in</h1>
  <p data-test="needs-token">This address answers only callers with a token of <code>admin.token_file</code> or a client certificate.
    Use “Sign in with a token”, or open the console at the address of <code>http.addr</code>, which needs no token.</p>`;

// The main part of the page, which is dimmed while the connection is lost.
function Main({ holder, page, children }) {
  const activity = useActivity();
  return html`<main id="main" ref=${holder} data-page=${page} class=${isLost(activity) ? "old" : ""}>${children}</main>`;
}

function App() {
  const { page, params } = useRoute();
  const session = useSession();
  const scopeOf = useLastScope();
  useWatchedScope();
  const main = useRef(null);
  const isFirst = useRef(true);
  const known = PAGES[page] ? page : "now";
  const { title, component: Page } = PAGES[known];

  useLayoutEffect(() => {
    document.title = `${title} · Sluicegate`;
    if (isFirst.current) {
      isFirst.current = false;
      return;
    }
    scrollTo(0, 0);
    main.current.querySelector("h1")?.focus();
  }, [known]);

  const skip = (event) => {
    event.preventDefault();
    main.current.querySelector("h1")?.focus();
  };
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header>
      <a class="brand" href=${link("now", { scope: scopeOf("now") })}>Sluicegate</a>
      <${Navigation} page=${known} scopeOf=${scopeOf} />
      <div class="instance"><span data-test="instance"><${Text} value=${session.instance} length=${40} /></span>
        ${session.store && html`<span class="tag" data-test="store">${storeText(session.store)}</span>`}</div>
      <${Role} session=${session} />
    </header>
    <${Banner} session=${session} /><${Announcer} />
    <${Main} holder=${main} page=${known}>
      ${session.needsToken ? html`<${NeedsToken} />` : html`<${Page} key=${known} params=${params} />`}</${Main}>
    <footer class="muted">Sluicegate ${session.version}</footer>`;
}

loadSession();
startActivity();
const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
