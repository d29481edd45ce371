// Streams /trace: one event for each step of the target, with its tokens and its tree as SVG.
"use strict";

const element = (id) => document.getElementById(id);
let steps = [];
let running = null;

function show(index) {
  const step = steps[index];
  if (!step) return;
  document.querySelectorAll(".step.shown").forEach((old) => old.classList.remove("shown"));
  step.block.classList.add("shown");
  element("number").textContent = `${index + 1}`;
  element("story").textContent = step.story;
  // Parsed as XML: the server escapes all generated text, and the page's policy runs no inline script.
  const svg = new DOMParser().parseFromString(step.svg, "image/svg+xml").documentElement;
  element("tree").replaceChildren(document.importNode(svg, true));
}

function add(event) {
  const index = steps.length;
  const block = document.createElement("span");
  block.className = event.saved ? "step saved" : "step";
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
  element("tau").textContent = (count / steps.length).toFixed(2);
  element("rescued").textContent = `${Math.round((100 * steps.filter((step) => step.saved).length) / steps.length)}%`;
  element("policy").textContent = event.policy;
}

function fail(message) {
  const line = document.createElement("p");
  line.className = "error";
  line.textContent = message;
  element("answer").append(line);
}

async function answer(signal) {
  const headers = { "content-type": "application/json" };
  if (element("key").value) headers.authorization = `Bearer ${element("key").value}`;
  const body = {
    messages: [{ role: "user", content: element("prompt").value }],
    temperature: Number(element("temperature").value),
    seed: Number(element("seed").value),
    max_tokens: Number(element("tokens").value),
  };
  const response = await fetch("trace", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) return fail((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) return fail(event.error.message);
      add(event);
    }
  }
}

element("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) running.abort();
  running = new AbortController();
  steps = [];
  element("answer").replaceChildren();
  element("tree").replaceChildren();
  try {
    await answer(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") fail(String(error));
  }
});

if (new URLSearchParams(location.search).has("go")) element("form").requestSubmit();
