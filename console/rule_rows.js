// Loads rows of the tree of rules page by page, and keeps those near the rows in view.
import { useEffect, useMemo, useRef, useState } from "./base.js";
import { call, isUnreachable } from "./api.js";

export const PAGE_ROWS = 50;
const KEPT_PAGES = 40;

// Loads and keeps the rows for one search. Calls `changed` after each answer.
class RowLoader {
  constructor(request, changed) {
    this.request = request;
    this.changed = changed;
    this.pages = new Map();
    this.running = new Map();
    this.totals = null;
    this.error = null;
    this.isClosed = false;
  }

  // Returns the row with an index, or undefined if it is not loaded.
  row(index) {
    return this.pages.get(Math.floor(index / PAGE_ROWS))?.[index % PAGE_ROWS];
  }

  // Loads the pages of a range of rows that are missing; with `again`, those that are known as well.
  show(first, last, again = false) {
    const firstPage = Math.floor(Math.max(0, first) / PAGE_ROWS);
    const lastPage = Math.floor(Math.max(0, last) / PAGE_ROWS);
    for (const [page, controller] of this.running) {
      if (page < firstPage || page > lastPage) controller.abort();
    }
    for (let page = firstPage; page <= lastPage; page += 1) {
      if ((again || !this.pages.has(page)) && !this.running.has(page)) this.load(page);
    }
    const far = [...this.pages.keys()].sort((a, b) => Math.abs(b - firstPage) - Math.abs(a - firstPage));
    far.slice(0, Math.max(0, far.length - KEPT_PAGES)).forEach((page) => this.pages.delete(page));
  }

  async load(page) {
    const controller = new AbortController();
    this.running.set(page, controller);
    try {
      const request = { ...this.request, offset: page * PAGE_ROWS, pageSize: PAGE_ROWS };
      const data = await call("ListRuleActivity", request, { signal: controller.signal });
      if (this.isClosed) return;
      this.pages.set(page, data.rows ?? []);
      this.totals = { rows: data.totalRows ?? 0, rules: data.totalRules ?? 0, all: data.allRules ?? 0, lastError: data.lastError ?? "", loadedAt: data.loadedAt,
        instances: data.instances };
      this.error = null;
    } catch (error) {
      if (this.isClosed || controller.signal.aborted) return;
      // Without a connection, the rows stay, and the banner reports it.
      if (!this.totals || !isUnreachable(error)) this.error = error;
    } finally {
      if (this.running.get(page) === controller) this.running.delete(page);
    }
    this.changed();
  }

  close() {
    this.isClosed = true;
    for (const controller of this.running.values()) controller.abort();
  }
}

// Returns a loader for a search, which renders the component again with each answer. The loader is replaced when the
// search or the rules change; until its first answer, `previous` has the numbers of the former one.
export function useRuleRows(request, rulesVersion) {
  const [, count] = useState(0);
  const previous = useRef(null);
  const key = JSON.stringify([request, rulesVersion]);
  const loader = useMemo(() => new RowLoader(request, () => count((value) => value + 1)), [key]);
  useEffect(() => () => {
    previous.current = loader.totals;
    loader.close();
  }, [loader]);
  return { loader, totals: loader.totals ?? previous.current };
}
