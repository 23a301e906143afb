// The activity of the last hour, kept up to date by the stream while the page is visible.
import { createStore, useStore } from "./base.js";
import { ApiError } from "./api.js";
import { integer } from "./format.js";
import { loadSession } from "./session.js";
import { watchActivity } from "./stream.js";

const HOUR_MS = 3_600_000;
const HIDDEN_MS = 10_000;
const EMPTY = {
  periods: [], current: null, servers: [], events: [], instances: [], connected: false, lostSince: null,
  lostMessage: "", everConnected: false, freshEvents: [],
};
const activity = createStore(EMPTY);
export const useActivity = () => useStore(activity);

// Changes with each set of rules, each override and each new connection, so that pages load their data anew.
const rulesVersion = createStore("");
export const useRulesVersion = () => useStore(rulesVersion);

let allInstances = false;
let stop = null;
let lastMessage = new Date();
let knownVersion = null;
let connections = 0;
let hiddenTimer = 0;

const COUNTS = ["requests", "errors", "requested", "denied", "nearLimit", "shadow", "storeCalls", "decidedByLease",
  "decidedByEventualCounter", "decidedByDenyCache", "storeErrors", "latencyP50Us", "latencyP99Us", "deniedRequests"];

// Turns a period of the API into numbers.
function readPeriod(period) {
  const result = { start: new Date(period.start).getTime(), seconds: (period.lengthMs ?? 0) / 1000 };
  for (const name of COUNTS) result[name] = integer(period[name]);
  result.classes = (period.classes ?? []).map((entry) => ({
    name: entry.class ?? "", allowed: integer(entry.allowed), denied: integer(entry.denied), shed: integer(entry.shed),
  }));
  return result;
}

// Adds periods to those that are known. A period replaces one with the same start.
function merge(known, added, oldest) {
  const byStart = new Map([...known, ...added].map((period) => [period.start, period]));
  return [...byStart.values()].filter(({ start }) => start >= oldest).sort((a, b) => a.start - b.start);
}

// The numbers of events begin anew with each process.
export const eventKey = (event) => `${event.instance ?? ""}/${event.id ?? 0}/${event.at}`;

function addEvents(known, added) {
  const keys = new Set(known.map(eventKey));
  const fresh = added.filter((event) => !keys.has(eventKey(event)));
  const all = [...known, ...fresh].sort((a, b) => new Date(b.at) - new Date(a.at) || integer(b.id) - integer(a.id));
  return { all: all.slice(0, 500), fresh };
}

function received(message, isFirst) {
  const before = activity.get();
  lastMessage = new Date();
  const session = isFirst ? loadSession() : null;
  const added = (message.periods ?? []).map(readPeriod);
  const oldest = Date.now() - HOUR_MS - 10_000;
  // A process that has restarted does not know what was before. The page keeps what it has received.
  const isReconnected = isFirst && before.lostSince !== null;
  const known = isFirst && !isReconnected ? [] : before.periods;
  const periods = added.length || isFirst ? merge(known, added, oldest) : before.periods;
  const { all, fresh } = addEvents(isFirst ? [] : before.events, message.events ?? []);
  const freshAgain = isFirst && before.everConnected ? addEvents(before.events, message.events ?? []).fresh : [];
  const version = String(message.rulesVersion ?? "0");
  if (isReconnected) {
    connections += 1;
    // The role can be another one, and decides which calls are possible.
    session.then(() => rulesVersion.set(`${version}/${connections}`));
  } else if (knownVersion !== null && version !== knownVersion) {
    rulesVersion.set(`${version}/${connections}`);
  }
  knownVersion = version;
  activity.set({
    periods,
    current: message.current ? readPeriod(message.current) : null,
    servers: message.servers ?? [],
    instances: message.instances ?? [],
    events: all,
    freshEvents: isFirst ? freshAgain : fresh,
    connected: true, everConnected: true, lostSince: null, lostMessage: "",
  });
}

// Reports whether what the page shows is old, because the connection is lost.
export const isLost = ({ connected, lostSince }) => !connected && lostSince !== null;

function lost(error) {
  const before = activity.get();
  const lostMessage = error instanceof ApiError ? error.message : before.lostMessage;
  if (error?.status === 401) loadSession();
  activity.set({ ...before, connected: false, lostSince: before.lostSince ?? lastMessage, lostMessage });
}

function start() {
  stop?.();
  stop = watchActivity(allInstances, received, lost);
}

function visibilityChanged() {
  clearTimeout(hiddenTimer);
  if (document.visibilityState === "visible") {
    if (!stop) start();
    return;
  }
  hiddenTimer = setTimeout(() => {
    stop?.();
    stop = null;
  }, HIDDEN_MS);
}

// Starts the stream; call it once.
export function startActivity() {
  document.addEventListener("visibilitychange", visibilityChanged);
  start();
}

// Opens the stream again, because another token applies.
export function restartActivity() {
  if (stop) start();
}

// Chooses between the activity of this instance and of all instances.
export function watchAllInstances(all) {
  if (all === allInstances) return;
  allInstances = all;
  activity.set(EMPTY);
  if (stop) start();
}
