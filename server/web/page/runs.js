// The table of the latest runs: where the KV of each prompt came from, how long the first token took, and whether the
// answer is right.

import { byId, drawList, element, setText } from "./dom.js";
import { count, duration } from "./format.js";
import { keep, kept } from "./kept.js";
import { BUILT_IN_MODEL, WHY_WRONG } from "./model_limits.js";
import { RunLog, sameness, timesAsFast } from "./run_log.js";
import { drawSources, inWords } from "./sources.js";

/** The runs of this tab. */
export const log = new RunLog(kept("run-log") ?? {});
/** The instance of the server that sent the latest view. */
let instance = null;

/** Takes down which instance of the server is seen. */
export function noteInstance(seen) {
  instance = seen;
}

/** Begins a run of a prompt. */
export function beginRun(prompt, model, settings) {
  const begin = performance.now();
  return {
    prompt,
    model,
    settings,
    firstTokenMs: null,
    answer: "",
    /** "right", "wrong", or "" if unknown. */
    verdict: "",
    /** Called for each piece of the answer. */
    heard() {
      this.firstTokenMs ??= performance.now() - begin;
    },
  };
}

/** Adds a run that is over. */
export function addRun(run, tokens) {
  log.add({ ...run, tokens, instance });
  changed();
}

/** Takes down that pages were forgotten, "device" or "device-and-host". */
export function noteForgotten(tiers) {
  log.forget(tiers);
  changed();
}

/** Begins the guide anew. */
export function restartGuide() {
  log.restartGuide();
  changed();
}

function changed() {
  keep("run-log", log);
  drawRuns();
  byId("runs").dispatchEvent(new Event("change"));
}

/** Draws the runs that are known. */
export function drawRuns() {
  const runs = log.all;
  if (log.latest) describe(log.latest);
  const table = byId("runs");
  table.hidden = runs.length === 0;
  const slowestMs = Math.max(...runs.map(({ firstTokenMs }) => firstTokenMs ?? 0), 1);
  drawList(
    table.tBodies[0],
    runs,
    ({ number }) => number,
    createRow,
    (row, run) => {
      const { number, tokens, firstTokenMs, verdict } = run;
      setText(row.cells[0], String(number));
      drawSources(row.querySelector(".sources"), tokens);
      row.querySelector(".time i").style.width = `${((firstTokenMs ?? 0) / slowestMs) * 100}%`;
      setText(row.querySelector(".time b"), firstTokenMs === null ? "" : duration(firstTokenMs));
      row.cells[3].className = `verdict ${verdict}`;
      setText(row.cells[3], verdict);
      row.cells[4].className = `sameness ${sameness(run)}`;
      setText(row.cells[4], sameness(run));
    },
  );
}

/** The latest run in words; also as attributes, for programs that read the page. */
function describe(run) {
  const source = byId("kv-source");
  setText(source, `${inWords(run.tokens)}.${comparison(run)}${judgement(run)}`);
  for (const [name, value] of Object.entries(run.tokens)) source.dataset[name] = value;
  source.dataset.firstTokenMs = Math.round(run.firstTokenMs ?? 0);
  source.dataset.verdict = run.verdict;
  source.dataset.sameness = sameness(run);
  source.dataset.run = run.number;
}

/** How the time to the first token compares with computing the prompt. */
function comparison(run) {
  const times = timesAsFast(run);
  if (times === null) return "";
  const computing = `in run ${run.computing.number}, which computed the prompt`;
  if (times >= 1.5) return ` The first token came ${factor(times)} times as fast as ${computing}.`;
  if (times <= 1 / 1.5) return ` The first token took ${factor(1 / times)} times as long as ${computing}.`;
  return ` The first token took about as long as ${computing}.`;
}

/** Whether the answer is right, and what that says about the cache. */
function judgement(run) {
  const same = sameness(run);
  const verdict = run.verdict && ` The answer is ${run.verdict}.`;
  const computed = `computed (run ${run.reference?.number})`;
  if (same === "different") return `${verdict} It is not the answer that was ${computed}: the KV may be wrong.`;
  if (same === "same") {
    const blame = run.verdict === "wrong" ? ` ${whyWrong(run)} The cache is right:` : "";
    return `${verdict}${blame} ${blame ? "it" : "It"} is the same answer as when ${computed}.`;
  }
  if (run.verdict !== "wrong") return verdict;
  const isFirst = run.reference?.number === run.number;
  const check = isFirst ? " Send it again: the same answer from every tier shows that the cache is right." : "";
  return `${verdict} ${whyWrong(run)}${check}`;
}

function whyWrong({ model }) {
  return model === BUILT_IN_MODEL ? WHY_WRONG : "The model may misread the text.";
}

function factor(times) {
  return times < 10 ? times.toFixed(1) : count(times);
}

function createRow() {
  const bar = element("div", "sources");
  bar.setAttribute("role", "img");
  const time = element("div", "time", element("span", "", element("i")), element("b"));
  return element("tr", "", element("td"), element("td", "", bar), element("td", "", time), element("td"), element("td"));
}
