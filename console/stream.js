// Reads the stream of activity (server-sent events over fetch, because EventSource cannot send a token) and connects again
// after a failure.
import { post, readError } from "./api.js";

const SILENCE_MS = 2500;
const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 3000;

// Splits the text of a stream into messages. Lines that begin with a colon only keep the connection open.
export function createParser(receive) {
  let rest = "";
  return (text) => {
    rest += text;
    const blocks = rest.split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (data.length) receive(JSON.parse(data.map((line) => line.slice(5)).join("\n")));
    }
  };
}

// Watches the activity. Calls `received(message, isFirst)` and `lost(error)`; returns a function that ends it.
export function watchActivity(allInstances, received, lost) {
  let stopped = false;
  let controller = null;
  let wake = () => {};

  async function readOnce(onMessage) {
    controller = new AbortController();
    let silence = 0;
    const expectMessage = () => {
      clearTimeout(silence);
      silence = setTimeout(() => {
        if (!stopped) lost(null);
        controller.abort();
      }, SILENCE_MS);
    };
    expectMessage();
    try {
      const response = await post("WatchActivity", { allInstances }, controller.signal);
      if (!response.ok) throw await readError(response);
      const reader = response.body.getReader();
      const decoder = new TextDecoder();
      let isFirst = true;
      const parse = createParser((message) => {
        if (message.code && !message.at) throw new Error(message.message);
        if (stopped) return;
        expectMessage();
        onMessage(message, isFirst);
        isFirst = false;
      });
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        parse(decoder.decode(value, { stream: true }));
      }
    } finally {
      clearTimeout(silence);
      controller.abort();
    }
  }

  async function run() {
    let wait = FIRST_WAIT_MS;
    while (!stopped) {
      let error = null;
      try {
        await readOnce((message, isFirst) => {
          wait = FIRST_WAIT_MS;
          received(message, isFirst);
        });
      } catch (failure) {
        error = failure;
      }
      if (stopped) return;
      lost(error);
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, wait);
      });
      wait = Math.min(wait * 1.5, LONGEST_WAIT_MS);
    }
  }

  run();
  return () => {
    stopped = true;
    controller?.abort();
    wake();
  };
}
