// Runs the page's script against elements that only remember, with answers that are given; prints what a visitor sees.
import { readFileSync } from "node:fs";
import { runInNewContext } from "node:vm";

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], listeners: {}, attributes: {}, style: {}, own: "", value: "", disabled: false });
    this.classList = { add: () => {}, remove: () => {} };
  }
  get textContent() {
    return this.own + this.children.map((child) => child.textContent).join("");
  }
  set textContent(text) {
    this.own = String(text);
    this.children = [];
  }
  append(...added) {
    this.children.push(...added);
  }
  replaceChildren(...added) {
    this.own = "";
    this.children = added;
  }
  addEventListener(kind, listener) {
    this.listeners[kind] = listener;
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  getAttribute(name) {
    return this.attributes[name];
  }
}

const [script, given] = process.argv.slice(2);
const { visits } = JSON.parse(given);
const elements = {};
const element = (id) => (elements[id] ??= new Element(id));
const sent = [];
let visit;

async function fetch(url, { body, headers, signal }) {
  sent.push({ body: JSON.parse(body), headers });
  const { status = 200, json, text = "", hangs } = visit;
  if (hangs) setTimeout(() => element("stop").listeners.click(), 1);
  const stream = new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode(text));
      if (hangs) signal.addEventListener("abort", () => controller.error(signal.reason));
      else controller.close();
    },
  });
  return { ok: status < 400, status, body: stream, json: async () => JSON.parse(json) };
}

runInNewContext(readFileSync(script, "utf-8"), {
  document: {
    getElementById: element,
    querySelectorAll: () => [],
    createElement: (tag) => new Element(tag),
    importNode: (node) => node,
  },
  DOMParser: class {
    parseFromString(text) {
      const parsed = new Element("svg");
      parsed.textContent = text;
      parsed.setAttribute("width", "100");
      return { documentElement: parsed };
    }
  },
  location: { search: "" },
  performance, fetch, AbortController, TextDecoderStream, URLSearchParams,
});

const seen = [];
for (visit of visits) {
  for (const [id, value] of Object.entries(visit.fields ?? {})) element(id).value = value;
  const done = element("form").listeners.submit({ preventDefault() {} });
  const busy = [element("go").disabled, element("stop").disabled];
  await done;
  const texts = Object.fromEntries(Object.entries(elements).map(([id, one]) => [id, one.textContent]));
  const blocks = element("answer").children.map((child) => child.className);
  const widths = element("tree").children.map((tree) => tree.style.minWidth);
  seen.push({ ...texts, busy, idle: [element("go").disabled, element("stop").disabled], blocks, widths });
}
console.log(JSON.stringify({ seen, sent }));
