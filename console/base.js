// The base of all modules: the template function `html`, the hooks of preact, and a small observable store.
import { h, render } from "./vendor/preact.mjs";
import { useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export { h, render, useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback };

// Returns a value that components can observe with `useStore`.
export function createStore(initial) {
  let value = initial;
  const listeners = new Set();
  return {
    get: () => value,
    set(next) {
      value = next;
      for (const listener of [...listeners]) listener(value);
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

// Returns the value of a store, and renders the component again with each change.
export function useStore(store) {
  const [value, setValue] = useState(store.get());
  useLayoutEffect(() => {
    setValue(store.get());
    return store.subscribe(setValue);
  }, [store]);
  return value;
}

// Calls `action` every `milliseconds` while the page is visible; 0 turns it off.
export function useInterval(action, milliseconds) {
  const latest = useRef(action);
  latest.current = action;
  useEffect(() => {
    if (!milliseconds) return undefined;
    const timer = setInterval(() => {
      if (document.visibilityState === "visible") latest.current();
    }, milliseconds);
    return () => clearInterval(timer);
  }, [milliseconds]);
}
