// The box that sends prompts, and the answer.

import { longExample, verdictOn } from "./book.js";
import { byId } from "./dom.js";
import { keep, kept } from "./kept.js";
import { askForKey, keyHeaders, wantsKey } from "./keys.js";
import { offerPlanting } from "./planting.js";
import { addRun, beginRun, drawRuns } from "./runs.js";
import { bySource } from "./sources.js";
import { eventsOf } from "./stream.js";
import { troubleOf } from "./trouble.js";

const BUILT_IN_MODEL = "terrace-built-in";

let model = "";
let running = null;

/** What of the form is kept when the page is loaded again. */
const FIELDS = ["prompt", "max-tokens", "temperature"];

/** Makes the form work. */
export function listenToForm() {
  byId("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask-form").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("long-example").addEventListener("click", () => {
    byId("prompt").value = longExample();
    byId("prompt").scrollTop = 0;
    byId("send").focus();
    keepForm();
  });
  byId("ask-form").addEventListener("input", keepForm);
  restoreForm();
  drawRuns();
  learnModel();
  offerPlanting();
}

function keepForm() {
  keep("form", Object.fromEntries(FIELDS.map((id) => [id, byId(id).value])));
}

/** Shows what was typed, and answered, before the page was loaded again. */
function restoreForm() {
  const form = kept("form") ?? {};
  for (const id of FIELDS) byId(id).value = form[id] ?? byId(id).value;
  byId("answer").textContent = kept("answer") ?? "";
}

/** Asks which model answers here, to say so. */
async function learnModel() {
  try {
    const response = await fetch("/v1/models", { headers: keyHeaders("ask") });
    if (!response.ok) return;
    const { data } = await response.json();
    model = data[0].id;
    byId("model").textContent = model;
    byId("about-model").hidden = model !== BUILT_IN_MODEL;
  } catch (error) {
    console.debug("the model's name is not known yet:", error);
  }
}

/** Sends what the form says, and shows the answer as it comes. */
async function send() {
  running = new AbortController();
  setBusy(true);
  byId("answer").textContent = "";
  sayTrouble("");
  try {
    if (!model) await learnModel();
    const run = beginRun(byId("prompt").value, model);
    const response = await post(running.signal);
    if (wantsKey(response)) {
      sayTrouble(await troubleOf(response));
      // Whoever gives the key wants the prompt sent.
      askForKey("ask").then(() => byId("ask-form").requestSubmit());
    } else if (response.ok) {
      await showAnswer(response, run);
    } else {
      sayTrouble(await troubleOf(response));
    }
  } catch (error) {
    sayTrouble(error.name === "AbortError" ? "Stopped." : `The server cannot be reached: ${error.message}`);
  } finally {
    running = null;
    keep("answer", byId("answer").textContent);
    setBusy(false);
  }
}

function post(signal) {
  return fetch("/v1/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", ...keyHeaders("ask") },
    body: JSON.stringify({
      model,
      prompt: byId("prompt").value,
      max_tokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
}

/** Writes the text as it comes; the usage at its end says where the KV came from. */
async function showAnswer(response, run) {
  const answer = byId("answer");
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const text = chunk.choices?.[0]?.text ?? "";
    if (chunk.choices?.length > 0) run.heard();
    answer.append(text);
    if (chunk.usage) {
      run.verdict = verdictOn(run.prompt, answer.textContent);
      addRun(run, tokensOf(chunk.usage));
    }
  }
}

function tokensOf({ prompt_tokens: promptTokens, prompt_tokens_details: details }) {
  const { device = 0, host = 0, l3 = 0 } = details?.cached_by_tier ?? {};
  return bySource(promptTokens, device, host, l3);
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").disabled = !busy;
  byId("answer").setAttribute("aria-busy", busy);
}

function sayTrouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = text === "";
}
