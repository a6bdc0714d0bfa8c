// The requests: in which state each is, how long it was in which, and what it found in the cache.

import { byId, drawList, element, setAttribute, setText } from "./dom.js";
import { count, duration, several } from "./format.js";
import { bySource, drawSources } from "./sources.js";
import { axisOf, endOf, isOver, segmentsOf } from "./timeline.js";

const ROW_PX = 22;

/** Every state, in the order of a life without trouble, with the words for it. */
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
  const list = byId("requests");
  const shown = choose(requests, Math.max(3, Math.floor(list.clientHeight / ROW_PX)));
  list.classList.toggle("empty", shown.length === 0);
  const axis = axisOf(shown, nowUs);
  drawList(list, shown, ({ id }) => id, createRow, (row, request) => drawRow(row, request, axis, nowUs));
}

/** How many requests are in each state; ended ones are not counted, since only the latest are told. */
function drawStates(requests) {
  const living = STATES.filter(([state]) => !isOver({ state }));
  drawList(
    byId("states"),
    living,
    ([state]) => state,
    ([state]) => element("li", `sample state ${state}`),
    (item, [state, words]) => {
      const number = requests.filter((request) => request.state === state).length;
      setText(item, number > 0 ? `${words} ${number}` : words);
      item.classList.toggle("none", number === 0);
    },
  );
}

/**
 * The latest, the latest first; those that live go before those that have ended if there is not room
 * for all.
 */
function choose(requests, rows) {
  const latestFirst = [...requests].sort((one, other) => other.id - one.id);
  const living = latestFirst.filter((request) => !isOver(request));
  const ended = latestFirst.filter(isOver);
  const chosen = [...living, ...ended].slice(0, rows);
  return [...chosen].sort((one, other) => other.id - one.id);
}

function createRow() {
  const bar = element("span", "sources");
  bar.setAttribute("role", "img");
  return element(
    "li",
    "",
    element("span", "id"),
    element("span", "state"),
    element("span", "tokens"),
    bar,
    element("span", "life"),
  );
}

function drawRow(row, request, axis, nowUs) {
  const words = WORDS.get(request.state) ?? request.state;
  const tookMs = (endOf(request, nowUs) - request.timeline[0].at_us) / 1000;
  setText(row.querySelector(".id"), `#${request.id}`);
  setText(row.querySelector(".state"), `${MARKS[request.state] ?? "›"} ${words}`);
  setText(row.querySelector(".tokens"), `${count(request.prompt_tokens)} + ${count(request.new_tokens)}`);
  drawSources(row.querySelector(".sources"), sourcesOf(request));
  drawLife(row.querySelector(".life"), segmentsOf(request, nowUs), axis);
  const salt = request.salt ? `, salt ${request.salt}` : "";
  setAttribute(
    row,
    "title",
    `request ${request.id}${salt}: ${several(request.prompt_tokens, "prompt token")}, ` +
      `${several(request.new_tokens, "new token")}, ${words}, ${duration(tookMs)}`,
  );
}

/** Hits are known from the first admission on; before that nothing is said. */
function sourcesOf({ prompt_tokens: promptTokens, hits, timeline }) {
  const admitted = timeline.some(({ state }) => state === "Prefilling" || state === "Decoding");
  if (!admitted) return bySource(0, 0, 0, 0);
  return bySource(promptTokens, hits.device_tokens, hits.host_tokens, hits.l3_tokens);
}

function drawLife(life, segments, axis) {
  const items = segments.map((segment, index) => ({ ...segment, index }));
  drawList(
    life,
    items,
    ({ index }) => index,
    () => element("i"),
    (part, { state, beginUs, endUs }) => {
      const left = axis(beginUs);
      part.className = `state ${state}`;
      part.style.left = `${left * 100}%`;
      part.style.width = `${(axis(endUs) - left) * 100}%`;
      setAttribute(part, "title", `${WORDS.get(state) ?? state}: ${duration((endUs - beginUs) / 1000)}`);
    },
  );
}
