// Reports an error in the browser's log when a page reads a field that the answer's message does not have.
// MESSAGES has the fields of each message, with the name of the field's message or an empty string.
(() => {
  const STREAM = "WatchActivity";
  // The stream looks for these fields to recognize an error, and `await` for `then`.
  const OTHERS = ["code", "message", "then", "toJSON"];

  const check = (value, type) => {
    const fields = MESSAGES[type];
    if (!fields || typeof value !== "object" || value === null) return value;
    if (Array.isArray(value)) return value.map((element) => check(element, type));
    const checked = Object.fromEntries(Object.entries(value).map(([name, field]) => [name, check(field, fields[name])]));
    return new Proxy(checked, {
      get(target, name) {
        if (typeof name === "string" && !(name in fields) && !OTHERS.includes(name)) {
          console.error(`${type} has no field ${name}`);
        }
        return target[name];
      },
    });
  };

  const readJson = Response.prototype.json;
  Response.prototype.json = async function () {
    const value = await readJson.call(this);
    const method = new URL(this.url).pathname.match(/^\/v1\/(\w+)$/)?.[1];
    return this.ok && method ? check(value, ANSWERS[method]) : value;
  };
  const parse = JSON.parse;
  JSON.parse = (text, ...others) => {
    const value = parse(text, ...others);
    return value?.at && value.instances ? check(value, ANSWERS[STREAM]) : value;
  };
})();
