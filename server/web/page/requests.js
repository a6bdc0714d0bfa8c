// The requests: the state of each, the time that it spent in each state, and where the KV of its prompt came from.

import { byId, drawList, element, setAttribute, setText } from "./dom.js";
import { count, duration, seconds, several } from "./format.js";
import { bySource, drawSources } from "./sources.js";
import { TimeAxis, endOf, isOver, segmentsOf } from "./timeline.js";

const ROW_PX = 24;
/** Least distance between ticks of the scale. */
const TICK_PX = 60;
/** Number of rows that are drawn even where there is little space. */
const ROWS_MIN = 3;

/** The states in the order of an undisturbed life, with their names for people. */
const STATES = [
  ["Submitted", "waiting"],
  ["Prefetching", "prefetching"],
  ["PrefetchDone", "prefetched"],
  ["Prefilling", "prefilling"],
  ["Decoding", "decoding"],
  ["Retracted", "retracted"],
  ["Draining", "draining"],
  ["WritingBack", "writing back"],
  ["Finished", "finished"],
  ["Aborted", "aborted"],
  ["Failed", "failed"],
];
const WORDS = new Map(STATES);
const MARKS = { Finished: "✓", Aborted: "✕", Failed: "!" };

/** Draws the requests of a view. */
export function drawRequests({ now_us: nowUs, requests }) {
  drawStates(requests);
  const container = byId("requests");
  const head = container.querySelector("thead");
  const rows = Math.floor((container.clientHeight - head.offsetHeight) / ROW_PX);
  const shown = choose(requests, Math.max(ROWS_MIN, rows));
  container.classList.toggle("empty", shown.length === 0);
  const axis = new TimeAxis(shown, nowUs);
  drawAxis(axis);
  drawList(container.querySelector("tbody"), shown, ({ id }) => id, createRow, (row, request) => {
    drawRow(row, request, axis, nowUs);
  });
}

/** Number of requests in each state, for states in which requests still run. */
function drawStates(requests) {
  const living = STATES.filter(([state]) => !isOver({ state }));
  drawList(
    byId("states"),
    living,
    ([state]) => state,
    ([state]) => element("li", `sample state ${state}`),
    (item, [state, words]) => {
      const number = requests.filter((request) => request.state === state).length;
      setText(item, number > 0 ? `${words}: ${several(number, "request")}` : words);
      item.classList.toggle("none", number === 0);
    },
  );
}

/** The latest requests, the latest first. Where there is not enough space, running ones come before ended ones. */
function choose(requests, rows) {
  const latestFirst = [...requests].sort((one, other) => other.id - one.id);
  const living = latestFirst.filter((request) => !isOver(request));
  const ended = latestFirst.filter(isOver);
  const chosen = [...living, ...ended].slice(0, rows);
  return [...chosen].sort((one, other) => other.id - one.id);
}

/** The scale: seconds since the first of the requests that are drawn, without the time that is cut out. */
function drawAxis(axis) {
  const wanted = Math.max(2, Math.floor(byId("time-axis").clientWidth / TICK_PX));
  const ticks = axis.ticks(wanted).map((tick, index) => ({ ...tick, index }));
  drawList(
    byId("time-axis"),
    ticks,
    ({ index }) => index,
    () => element("span"),
    (mark, { place, ms }) => {
      mark.style.left = `${place * 100}%`;
      setText(mark, seconds(ms));
    },
  );
}

function createRow() {
  const bar = element("span", "sources");
  bar.setAttribute("role", "img");
  const life = element("span", "life");
  life.setAttribute("role", "img");
  return element(
    "tr",
    "",
    element("td", "id"),
    element("td", "status"),
    element("td", "tokens"),
    element("td", "from", bar),
    element("td", "took"),
    element("td", "lives", life),
  );
}

function drawRow(row, request, axis, nowUs) {
  const words = WORDS.get(request.state) ?? request.state;
  const tookMs = (endOf(request, nowUs) - request.timeline[0].at_us) / 1000;
  setText(row.querySelector(".id"), `#${request.id}`);
  setText(row.querySelector(".status"), `${MARKS[request.state] ?? "›"} ${words}`);
  setText(row.querySelector(".tokens"), `${count(request.prompt_tokens)} + ${count(request.new_tokens)}`);
  setText(row.querySelector(".took"), seconds(tookMs));
  drawSources(row.querySelector(".sources"), sourcesOf(request));
  drawLife(row.querySelector(".life"), request, axis, nowUs);
  const salt = request.salt ? `, salt ${request.salt}` : "";
  setAttribute(
    row,
    "title",
    `request ${request.id}${salt}: ${several(request.prompt_tokens, "prompt token")}, ` +
      `${several(request.new_tokens, "new token")}, ${words}, ${duration(tookMs)}`,
  );
}

/** Hits are known from the first admission on. */
function sourcesOf({ prompt_tokens: promptTokens, hits, timeline }) {
  const admitted = timeline.some(({ state }) => state === "Prefilling" || state === "Decoding");
  if (!admitted) return bySource(0, 0, 0, 0);
  return bySource(promptTokens, hits.device_tokens, hits.host_tokens, hits.l3_tokens);
}

function drawLife(life, request, axis, nowUs) {
  const items = segmentsOf(request, nowUs).map((segment, index) => ({ ...segment, index }));
  const inWords = ({ state, beginUs, endUs }) => `${WORDS.get(state) ?? state}: ${duration((endUs - beginUs) / 1000)}`;
  setAttribute(life, "aria-label", items.map(inWords).join(", "));
  drawList(
    life,
    items,
    ({ index }) => index,
    () => element("i"),
    (part, segment) => {
      const left = axis.at(segment.beginUs);
      part.className = `state ${segment.state}`;
      part.style.left = `${left * 100}%`;
      part.style.width = `${(axis.at(segment.endUs) - left) * 100}%`;
      setAttribute(part, "title", inWords(segment));
    },
  );
}
