// The session: the role of the caller and what the instance offers.
import { createStore, useStore } from "./base.js";
import { call, getToken, setToken } from "./api.js";

const PUBLIC = {
  role: "public", caller: "", acceptsTokens: false, needsToken: false, store: "", instance: "", version: "", algorithms: [],
  hasInstances: false, loaded: false,
};
const session = createStore(PUBLIC);

export const useSession = () => useStore(session);

// Fills in what the answer leaves out because it is the default.
const complete = (answer) => ({ ...PUBLIC, grafanaUrl: "", recordsRequests: false, ...answer, loaded: true });

// Loads the session anew. A stored token that is no longer known is deleted. The listener of the admin API answers only
// callers with a token or a certificate.
export async function loadSession() {
  const token = getToken();
  try {
    session.set(complete(await call("GetSession", {})));
  } catch (error) {
    if (error.status !== 401) return;
    if (!token) {
      session.set({ ...PUBLIC, acceptsTokens: true, needsToken: true, loaded: true });
      return;
    }
    setToken("");
    await loadSession();
  }
}

// Signs in with a token. Throws, and keeps the former session, if the token is not known.
export async function signIn(token) {
  try {
    const answer = await call("GetSession", {}, { token });
    setToken(token);
    session.set(complete(answer));
  } catch (error) {
    if (error.status === 401) throw new Error("This token is not known.");
    throw error;
  }
}

export async function signOut() {
  setToken("");
  await loadSession();
}

export const canRead = ({ role }) => role === "read" || role === "operate";
export const canOperate = ({ role }) => role === "operate";
