// Calls methods of the admin API and keeps the token of the operator in this tab's session storage.
const TOKEN_KEY = "sluicegate-token";
const TIMEOUT_MS = 10_000;
const SIMULATE_TIMEOUT_MS = 120_000;

// An error answer of the API, or a failed connection (`code` is then UNAVAILABLE).
export class ApiError extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

// Reports whether there is no connection, which the banner of the page says.
export const isUnreachable = (error) => error.code === "UNAVAILABLE" && error.status === 0;

export function getToken() {
  try {
    return sessionStorage.getItem(TOKEN_KEY) ?? "";
  } catch {
    return "";
  }
}

export function setToken(token) {
  try {
    if (token) sessionStorage.setItem(TOKEN_KEY, token);
    else sessionStorage.removeItem(TOKEN_KEY);
  } catch {
    // Without storage the token cannot be kept: the caller sees the role `public` again.
  }
}

// Sends a request and returns the response; used for calls and for the stream.
export async function post(method, request, signal, token = getToken()) {
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  return fetch(`/v1/${method}`, {
    method: "POST",
    headers,
    body: JSON.stringify(request),
    credentials: "same-origin",
    cache: "no-store",
    redirect: "error",
    signal,
  });
}

// Returns the error that an answer without success contains.
export async function readError(response) {
  try {
    const { message, code } = await response.json();
    if (message) return new ApiError(message, code, response.status);
  } catch {
    // Not an answer of the API, but of a proxy in between.
  }
  return new ApiError(`The instance answered with status ${response.status}.`, "UNKNOWN", response.status);
}

// Calls a method. Options: `signal` to abort, and `token` instead of the stored one.
export async function call(method, request = {}, { signal, token } = {}) {
  const limit = method === "Simulate" ? SIMULATE_TIMEOUT_MS : TIMEOUT_MS;
  const controller = new AbortController();
  let timedOut = false;
  const timer = setTimeout(() => {
    timedOut = true;
    controller.abort();
  }, limit);
  const forward = () => controller.abort();
  if (signal?.aborted) forward();
  signal?.addEventListener("abort", forward);
  try {
    const response = await post(method, request, controller.signal, token);
    if (!response.ok) throw await readError(response);
    return await response.json();
  } catch (error) {
    if (error instanceof ApiError || signal?.aborted) throw error;
    if (timedOut) throw new ApiError(`The instance did not answer within ${limit / 1000} seconds.`, "DEADLINE_EXCEEDED", 0);
    throw new ApiError("No connection to the instance.", "UNAVAILABLE", 0);
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", forward);
  }
}
