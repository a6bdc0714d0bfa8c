// What came of each prompt that this page has sent: where its KV came from, and how long the first token
// took.

import { byId, drawList, element, setText } from "./dom.js";
import { count, duration } from "./format.js";
import { drawSources, inWords } from "./sources.js";

/** Earlier runs are forgotten. */
const RUNS_MAX = 4;

let runsSoFar = 0;
let runs = [];

/** A run that begins: a prompt is being sent. */
export function beginRun(prompt) {
  const begin = performance.now();
  return {
    prompt,
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
  const previous = runs.find(({ prompt }) => prompt === run.prompt);
  runsSoFar += 1;
  runs = [{ ...run, number: runsSoFar, tokens }, ...runs].slice(0, RUNS_MAX);
  describe(runs[0], previous);
  drawRuns();
}

/** The latest run in words; also as attributes, for those who read the page by program. */
function describe({ number, firstTokenMs, tokens, verdict }, previous) {
  const source = byId("kv-source");
  const told = verdict && ` The answer is ${verdict}.`;
  source.textContent = `${inWords(tokens)}.${comparison(firstTokenMs, previous)}${told}`;
  for (const [name, value] of Object.entries(tokens)) source.dataset[name] = value;
  source.dataset.firstTokenMs = Math.round(firstTokenMs ?? 0);
  source.dataset.verdict = verdict;
  source.dataset.run = number;
}

/** How the time to the first token compares with the last time that the same prompt was sent. */
function comparison(firstTokenMs, previous) {
  if (!previous?.firstTokenMs || !firstTokenMs) return "";
  const times = previous.firstTokenMs / firstTokenMs;
  if (times >= 1.5) return ` The first token came ${factor(times)} times as fast as the last time.`;
  if (times <= 1 / 1.5) return ` The first token took ${factor(1 / times)} times as long as the last time.`;
  return " The first token took about as long as the last time.";
}

function factor(times) {
  return times < 10 ? times.toFixed(1) : count(times);
}

function drawRuns() {
  const table = byId("runs");
  table.hidden = runs.length === 0;
  byId("tour").hidden = runs.length > 2;
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

function createRow() {
  const bar = element("div", "sources");
  bar.setAttribute("role", "img");
  const time = element("div", "time", element("span", "", element("i")), element("b"));
  return element("tr", "", element("td"), element("td", "", bar), element("td", "", time), element("td"));
}
