// What came of each prompt that this page has sent: where its KV came from, and how long the first token
// took.

import { byId, drawList, element, setAttribute, setText } from "./dom.js";
import { count, duration } from "./format.js";
import { keep, kept } from "./kept.js";
import { RunLog, timesAsFast } from "./run_log.js";
import { drawSources, inWords } from "./sources.js";

const log = new RunLog(kept("runs") ?? {});

/** A run that begins: a prompt is being sent to a model. */
export function beginRun(prompt, model) {
  const begin = performance.now();
  return {
    prompt,
    model,
    firstTokenMs: null,
    /** Whether its answer is right, where that can be told. */
    verdict: "",
    /** Something of the answer has come. */
    heard() {
      this.firstTokenMs ??= performance.now() - begin;
    },
  };
}

/** Shows what came of a run. */
export function addRun(run, tokens) {
  log.add({ ...run, tokens });
  keep("runs", log);
  drawRuns();
}

/** Draws the runs that are known. */
export function drawRuns() {
  const runs = log.all;
  if (log.latest) describe(log.latest);
  drawTour();
  const table = byId("runs");
  table.hidden = runs.length === 0;
  const slowestMs = Math.max(...runs.map(({ firstTokenMs }) => firstTokenMs ?? 0), 1);
  drawList(
    table.tBodies[0],
    runs,
    ({ number }) => number,
    createRow,
    (row, { number, tokens, firstTokenMs, verdict }) => {
      setText(row.cells[0], String(number));
      drawSources(row.querySelector(".sources"), tokens);
      row.querySelector(".time i").style.width = `${((firstTokenMs ?? 0) / slowestMs) * 100}%`;
      setText(row.querySelector(".time b"), firstTokenMs === null ? "" : duration(firstTokenMs));
      row.cells[3].className = `verdict ${verdict}`;
      setText(row.cells[3], verdict);
    },
  );
}

/** The latest run in words; also as attributes, for those who read the page by program. */
function describe(run) {
  const source = byId("kv-source");
  const verdict = run.verdict && ` The answer is ${run.verdict}.`;
  setText(source, `${inWords(run.tokens)}.${comparison(run)}${verdict}`);
  for (const [name, value] of Object.entries(run.tokens)) source.dataset[name] = value;
  source.dataset.firstTokenMs = Math.round(run.firstTokenMs ?? 0);
  source.dataset.verdict = run.verdict;
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

function factor(times) {
  return times < 10 ? times.toFixed(1) : count(times);
}

/** Ticks off the steps that have been taken; once all are, they have been seen. */
function drawTour() {
  const tour = byId("tour");
  tour.hidden = log.isTourOver;
  log.steps.forEach((isTaken, place) => {
    tour.children[place].classList.toggle("taken", isTaken);
    setAttribute(tour.children[place].querySelector(".tick"), "aria-label", isTaken ? "done" : "to do");
  });
}

function createRow() {
  const bar = element("div", "sources");
  bar.setAttribute("role", "img");
  const time = element("div", "time", element("span", "", element("i")), element("b"));
  return element("tr", "", element("td"), element("td", "", bar), element("td", "", time), element("td"));
}
