// The page and its state, which are in the fragment of the URL: `#/rules?find=api`.
import { createStore, useStore } from "./base.js";

function parse() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { page: path || "now", params: Object.fromEntries(new URLSearchParams(query)) };
}

const route = createStore(parse());
addEventListener("hashchange", () => route.set(parse()));

// Returns `{ page, params }`, and renders the component again when they change.
export const useRoute = () => useStore(route);

// Returns the URL of a page. Parameters without a value are left out.
export function link(page, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== undefined && value !== "" && value !== null);
  const query = new URLSearchParams(given).toString().replaceAll("+", "%20");
  return `#/${page}${query ? `?${query}` : ""}`;
}

// Opens a page, with an entry in the history.
export function open(page, params) {
  location.hash = link(page, params).slice(1);
}

// Changes parameters of the page that is open, without an entry in the history.
export function replaceParams(changes) {
  const { page, params } = route.get();
  history.replaceState(null, "", link(page, { ...params, ...changes }));
  route.set(parse());
}
