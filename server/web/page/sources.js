// Where the KV of prompt tokens came from, as a bar of parts. Order and pattern of the parts are always the same, so that
// colour is not the only sign.

import { drawList, element, setAttribute, setText } from "./dom.js";
import { count, percent } from "./format.js";

/** The sources, the fastest first. */
export const SOURCES = [
  { name: "device", label: "device" },
  { name: "host", label: "host" },
  { name: "l3", label: "L3" },
  { name: "computed", label: "computed" },
];

/** Tokens by source, from the number of hits. */
export function bySource(promptTokens, device, host, l3) {
  return { device, host, l3, computed: Math.max(0, promptTokens - device - host - l3) };
}

/** "3,984 of 4,001 prompt tokens from device, 17 computed" */
export function inWords(tokens) {
  const parts = SOURCES.filter(({ name }) => tokens[name] > 0);
  const words = parts.map(({ name, label }, index) => {
    const number = count(tokens[name]);
    const ofAll = index === 0 ? ` of ${count(totalOf(tokens))} prompt tokens` : "";
    return `${number}${ofAll} ${name === "computed" ? label : `from ${label}`}`;
  });
  return words.join(", ") || "no prompt tokens yet";
}

/** Draws the bar. */
export function drawSources(bar, tokens) {
  const total = totalOf(tokens);
  drawList(
    bar,
    SOURCES,
    ({ name }) => name,
    ({ name }) => element("span", `part ${name}`),
    (part, { name }) => {
      part.style.flexGrow = total > 0 ? tokens[name] / total : 0;
    },
  );
  setAttribute(bar, "aria-label", inWords(tokens));
  setAttribute(bar, "title", inWords(tokens));
}

/** Draws the names of the sources with their shares. */
export function drawShares(list, tokens) {
  const total = totalOf(tokens);
  drawList(
    list,
    SOURCES,
    ({ name }) => name,
    ({ name }) => element("li", `sample ${name}`),
    (item, { name, label }) =>
      setText(item, total > 0 ? `${label} ${percent(tokens[name] / total)}` : label),
  );
}

function totalOf(tokens) {
  return SOURCES.reduce((sum, { name }) => sum + tokens[name], 0);
}
