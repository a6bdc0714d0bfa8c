// The form that sends prompts, and the answer.

import { EXAMPLE_QUESTION, MORE_QUESTIONS, exampleBook, promptOf, verdictOn } from "./book.js";
import { byId, element } from "./dom.js";
import { keep, kept } from "./kept.js";
import { askForKey, keyHeaders, wantsKey } from "./keys.js";
import { BUILT_IN_LIMITS, BUILT_IN_MODEL } from "./model_limits.js";
import { addRun, beginRun, drawRuns } from "./runs.js";
import { bySource } from "./sources.js";
import { eventsOf } from "./stream.js";
import { troubleOf } from "./trouble.js";

let model = "";
let running = null;

/** The fields of the form whose values survive a reload. */
const FIELDS = ["book", "question", "max-tokens", "temperature"];

/** Copies of the example are numbered at random, so that a new one is hardly ever in the cache. */
const COPY_NUMBERS = 100_000;

/** Makes the form work. */
export function listenToForm() {
  byId("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
  byId("book").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) requestSend();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("long-example").addEventListener("click", () => {
    showExample({ isNew: false });
    byId("send").focus();
  });
  byId("ask-form").addEventListener("input", keepForm);
  byId("questions").append(
    ...[EXAMPLE_QUESTION, ...MORE_QUESTIONS].map((question) => {
      const option = element("option");
      option.value = question;
      return option;
    }),
  );
  restoreForm();
  drawRuns();
  learnModel();
}

/** Sends the form, if it is valid and nothing is being sent. */
export function requestSend() {
  byId("ask-form").requestSubmit();
}

/** Whether an answer is under way. */
export function isSending() {
  return running !== null;
}

/** The prompt that the form would send. */
export function promptOfForm() {
  return promptOf(byId("book").value, byId("question").value);
}

/** Fills in the example, or a new copy of it that is not in the cache. */
export function showExample({ isNew }) {
  byId("book").value = exampleBook(isNew ? 1 + Math.floor(Math.random() * COPY_NUMBERS) : 0);
  byId("book").scrollTop = 0;
  byId("question").value = EXAMPLE_QUESTION;
  byId("ask-form").dispatchEvent(new Event("input"));
}

function keepForm() {
  keep("form", Object.fromEntries(FIELDS.map((id) => [id, byId(id).value])));
}

/** Shows the form and the answer as they were before the page was reloaded; at first the example. */
function restoreForm() {
  const form = kept("form") ?? { book: exampleBook(), question: EXAMPLE_QUESTION };
  for (const id of FIELDS) byId(id).value = form[id] ?? byId(id).value;
  byId("answer").textContent = kept("answer") ?? "";
}

/** Asks for the model's name and shows it. */
async function learnModel() {
  try {
    const response = await fetch("/v1/models", { headers: keyHeaders("ask") });
    if (!response.ok) return;
    const { data } = await response.json();
    model = data[0].id;
    byId("model").textContent = model;
    byId("about-model").textContent = BUILT_IN_LIMITS;
    byId("about-model").hidden = model !== BUILT_IN_MODEL;
  } catch (error) {
    console.debug("cannot find out the name of the model:", error);
  }
}

/** Sends the prompt of the form, and shows the answer as it arrives. */
async function send() {
  setRunning(new AbortController());
  for (const id of ["answer", "cache-result"]) byId(id).textContent = "";
  sayTrouble("");
  try {
    if (!model) await learnModel();
    const settings = {
      maxTokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
    };
    const run = beginRun(promptOfForm(), model, settings);
    const response = await post(run, running.signal);
    if (wantsKey(response)) {
      sayTrouble(await troubleOf(response));
      // The prompt is sent again once the key is there.
      askForKey("ask").then(requestSend);
    } else if (response.ok) {
      await showAnswer(response, run);
    } else {
      sayTrouble(await troubleOf(response));
    }
  } catch (error) {
    sayTrouble(inWords(error));
  } finally {
    keep("answer", byId("answer").textContent);
    setRunning(null);
  }
}

/** The server ended the answer with an error. */
class Unfinished extends Error {}

function inWords(error) {
  if (error.name === "AbortError") return "Stopped.";
  if (error instanceof Unfinished) return error.message;
  return `The server cannot be reached: ${error.message}`;
}

function post({ prompt, settings }, signal) {
  return fetch("/v1/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", ...keyHeaders("ask") },
    body: JSON.stringify({
      model,
      prompt,
      max_tokens: settings.maxTokens,
      temperature: settings.temperature,
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
}

/** Writes the text as it arrives; the usage at its end says where the KV came from. */
async function showAnswer(response, run) {
  const answer = byId("answer");
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Unfinished(chunk.error.message);
    const text = chunk.choices?.[0]?.text ?? "";
    if (chunk.choices?.length > 0) run.heard();
    answer.append(text);
    if (chunk.usage) {
      run.answer = answer.textContent;
      run.verdict = verdictOn(run.prompt, run.answer);
      addRun(run, tokensOf(chunk.usage));
    }
  }
}

function tokensOf({ prompt_tokens: promptTokens, prompt_tokens_details: details }) {
  const { device = 0, host = 0, l3 = 0 } = details?.cached_by_tier ?? {};
  return bySource(promptTokens, device, host, l3);
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = isSending();
  byId("stop").disabled = !isSending();
  byId("answer").setAttribute("aria-busy", isSending());
  byId("ask-form").dispatchEvent(new Event("busychange"));
}

function sayTrouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = text === "";
}
