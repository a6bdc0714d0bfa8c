// The history of the last minutes, for operators: prompt tokens by the source of their KV, and requests that were
// refused or failed.

import { byId, drawList, element, setAttribute, setText } from "./dom.js";
import { count, percent, several } from "./format.js";
import { SOURCES } from "./sources.js";

/** Responses that are no success, by status: the server failed, the request was wrong, the server was busy. */
const ERRORS = [
  { name: "server_errors", label: "5xx" },
  { name: "client_errors", label: "other 4xx" },
  { name: "busy", label: "429" },
];

/** Least height of the vertical axis of the errors, in requests. */
const ERRORS_MAX_LEAST = 4;

/**
 * The two charts for a history. Each has a title, the label of the top of its vertical axis, a summary in words, the
 * series with their totals, and bars from the oldest on: parts as shares of the height, and a hint.
 */
export function chartsOf(history) {
  return [hitChart(history), errorChart(history)];
}

function hitChart(history) {
  const columns = history.prompt_tokens.map((total, index) => {
    const [device, host, l3] = ["device", "host", "l3"].map((tier) => history[tier][index]);
    return { device, host, l3, computed: Math.max(0, total - device - host - l3) };
  });
  const series = SOURCES.map(({ name, label }) => ({ name, label, total: sum(columns, name) }));
  const tokens = series.reduce((all, { total }) => all + total, 0);
  for (const one of series) one.value = tokens > 0 ? percent(one.total / tokens) : "–";
  const bars = columns.map((column, index) => {
    const ofColumn = history.prompt_tokens[index];
    const parts = SOURCES.map(({ name }) => ({ name, share: ofColumn > 0 ? column[name] / ofColumn : 0 }));
    const shares = SOURCES.map(({ name, label }, place) => `${label} ${percent(parts[place].share)}`).join(", ");
    return { parts, hint: ofColumn > 0 ? `${several(ofColumn, "prompt token")}: ${shares}` : "no prompt" };
  });
  const summary = `${several(tokens, "prompt token")}: ${series.map(({ label, value }) => `${label} ${value}`).join(", ")}`;
  return { key: "hits", title: "Prompt tokens by source", top: "100 %", series, bars, summary };
}

function errorChart(history) {
  const columns = history.busy.map((_, index) => Object.fromEntries(ERRORS.map(({ name }) => [name, history[name][index]])));
  const series = ERRORS.map(({ name, label }) => ({ name, label, total: sum(columns, name) }));
  for (const one of series) one.value = several(one.total, "request");
  const highest = Math.max(...columns.map((column) => ERRORS.reduce((all, { name }) => all + column[name], 0)));
  const most = Math.max(ERRORS_MAX_LEAST, highest);
  const bars = columns.map((column) => {
    const parts = ERRORS.map(({ name }) => ({ name, share: column[name] / most }));
    const hint = ERRORS.map(({ name, label }) => `${label}: ${count(column[name])}`).join(", ");
    return { parts, hint };
  });
  const summary = series.map(({ label, value }) => `${label}: ${value}`).join(", ");
  return { key: "errors", title: "Refused and failed requests", top: several(most, "request"), series, bars, summary };
}

function sum(columns, name) {
  return columns.reduce((total, column) => total + column[name], 0);
}

/** The history that was drawn last, as JSON: four times a second it is mostly the same. */
let drawn = "";

/** Draws the history of a view. */
export function drawHistory({ history }) {
  const json = JSON.stringify(history);
  if (json === drawn) return;
  drawn = json;
  const seconds = history.bucket_s * history.busy.length;
  const begin = seconds % 60 === 0 ? `${seconds / 60} min ago` : `${seconds} s ago`;
  drawList(byId("history"), chartsOf(history), ({ key }) => key, createChart, (chart, item) => drawChart(chart, item, begin));
}

function createChart({ key, title }) {
  const bars = element("div", "bars");
  bars.setAttribute("role", "img");
  return element(
    "figure",
    `chart ${key}`,
    element("figcaption", "", element("h3", "", title), element("ul", "legend")),
    element("div", "plot", element("span", "top"), element("span", "bottom", "0"), bars),
    element("div", "axis", element("span", "begin"), element("span", "", "now")),
  );
}

function drawChart(chart, { title, top, series, bars, summary }, begin) {
  drawList(
    chart.querySelector(".legend"),
    series,
    ({ name }) => name,
    ({ name }) => element("li", `sample ${name}`),
    (item, { label, value }) => setText(item, `${label}: ${value}`),
  );
  setText(chart.querySelector(".top"), top);
  setText(chart.querySelector(".begin"), begin);
  const container = chart.querySelector(".bars");
  setAttribute(container, "aria-label", `${title}, from ${begin} until now. ${summary}`);
  const items = bars.map((bar, index) => ({ ...bar, index }));
  drawList(container, items, ({ index }) => index, createBar, drawBar);
}

function createBar({ parts }) {
  return element("span", "bar", ...parts.map(({ name }) => element("i", name)));
}

function drawBar(bar, { parts, hint }) {
  setAttribute(bar, "title", hint);
  parts.forEach(({ share }, index) => {
    bar.children[index].style.height = `${share * 100}%`;
  });
}
