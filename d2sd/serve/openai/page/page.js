// Streams /trace: one event for each step of the target, with its tokens and its tree as SVG.
"use strict";

const element = (id) => document.getElementById(id);
const FIGURES = ["count", "steps", "tau", "rescued", "seconds", "rate", "mix"];
const HINT = "Point at a block of the answer to see its tree.";
let steps = [];
let running = null;

function reset() {
  steps = [];
  element("answer").replaceChildren();
  element("tree").replaceChildren();
  element("legend").replaceChildren();
  element("number").textContent = "a step";
  element("story").textContent = HINT;
  for (const id of FIGURES) element(id).textContent = "–";
}

function show(index) {
  const step = steps[index];
  if (!step) return;
  document.querySelectorAll(".turn.shown").forEach((old) => old.classList.remove("shown"));
  step.block.classList.add("shown");
  element("number").textContent = `step ${index + 1}`;
  element("story").textContent = step.story;
  // Parsed as XML: the server escapes all generated text, and the page's policy runs no inline script.
  const svg = new DOMParser().parseFromString(step.svg, "image/svg+xml").documentElement;
  const tree = document.importNode(svg, true);
  tree.style.minWidth = `${0.9 * tree.getAttribute("width")}px`; // then it scrolls
  element("tree").replaceChildren(tree);
  element("legend").innerHTML = step.key; // holds nothing that was generated
}

// The names of the steps' policies with their shares, the commonest first; one name stands alone.
function mix() {
  const counts = new Map();
  for (const step of steps) counts.set(step.policy, (counts.get(step.policy) ?? 0) + 1);
  if (counts.size === 1) return steps[0].policy;
  const ranked = [...counts].sort((one, other) => other[1] - one[1]);
  return ranked.map(([name, count]) => `${name} ${Math.round((100 * count) / steps.length)}%`).join(", ");
}

function add(event, seconds) {
  const index = steps.length;
  const block = document.createElement("span");
  block.className = `turn${event.shade}`;
  block.title = event.title;
  for (const token of event.tokens) {
    const piece = document.createElement("span");
    piece.className = token.source;
    piece.textContent = token.text;
    block.append(piece);
  }
  block.addEventListener("pointerenter", () => show(index));
  steps.push({ ...event, block });
  element("answer").append(block);
  show(index);
  const count = steps.reduce((sum, step) => sum + step.tokens.length, 0);
  element("count").textContent = count;
  element("steps").textContent = steps.length;
  element("tau").textContent = event.tau.toFixed(2);
  element("rescued").textContent = `${Math.round((100 * steps.filter((step) => step.saved).length) / steps.length)}%`;
  element("seconds").textContent = seconds.toFixed(1);
  element("rate").textContent = (count / seconds).toFixed(1);
  element("mix").textContent = mix();
}

function tell(text, kind) {
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  element("answer").append(line);
}

// What is wrong, found and expected: where it stands in a recipe and how to mend it there is for who runs the server.
function explained(error) {
  const [what, ...lines] = error.message.split("\n");
  const told = lines.map((line) => line.trim()).filter((line) => /^(found|expected): /.test(line));
  const text = [what.replace(/[.]$/, ""), ...told].join("; ");
  const advice = error.param === "max_tokens" ? " Ask for fewer tokens, or shorten the prompt." : "";
  return `${text[0].toUpperCase()}${text.slice(1)}.${advice}`;
}

async function refusal(response) {
  try {
    return explained((await response.json()).error);
  } catch {
    return `The server answered with status ${response.status}.`; // not this server: a proxy before it
  }
}

// A field that is empty is left out: the server has a default for it.
function number(id) {
  const text = element(id).value.trim();
  return text === "" ? undefined : Number(text);
}

async function answer(signal) {
  const begun = performance.now();
  const headers = { "content-type": "application/json" };
  if (element("key").value) headers.authorization = `Bearer ${element("key").value}`;
  const body = {
    messages: [{ role: "user", content: element("prompt").value }],
    speculative: element("policy").value ? { policy: element("policy").value } : undefined,
    temperature: number("temperature"),
    seed: number("seed"),
    max_tokens: number("tokens"),
  };
  const response = await fetch("trace", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) return tell(await refusal(response), "error");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return tell("The connection ended before the answer did.", "error");
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) return tell(explained(event.error), "error");
      add(event, (performance.now() - begun) / 1000);
    }
  }
}

function busy(on) {
  element("go").disabled = on;
  element("go").textContent = on ? "Answering…" : "Answer";
  element("stop").disabled = !on;
  element("answer").setAttribute("aria-busy", `${on}`);
}

element("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  reset();
  busy(true);
  try {
    await answer(running.signal);
  } catch (error) {
    if (error.name === "AbortError") tell("Stopped.", "hint");
    else tell(`The server cannot be reached: ${error.message}.`, "error");
  } finally {
    running = null;
    busy(false);
  }
});

element("stop").addEventListener("click", () => running?.abort());

reset();
if (new URLSearchParams(location.search).has("go")) element("form").requestSubmit();
