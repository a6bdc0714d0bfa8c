// The three tiers: their use, and the transfers between them.

import { byId, drawList, element, setAttribute, setText } from "./dom.js";
import { bytes, count, several, short } from "./format.js";
import { Rate } from "./rates.js";

/** The transfers, each with the gap that it crosses and its direction on a wide screen, where the device is on the left. */
const FLOWS = [
  { field: "load_backs", label: "load-back", gap: "device-host", towards: "left" },
  { field: "write_backs", label: "write-back", gap: "device-host", towards: "right" },
  { field: "prefetches", label: "prefetch", gap: "host-l3", towards: "left" },
  { field: "backups", label: "backup", gap: "host-l3", towards: "right" },
];
const rates = new Map(FLOWS.map(({ field }) => [field, new Rate()]));

/** The parts of a tier's bar, in their order. */
const PARTS = ["in-use", "evictable", "free"];

/** Draws tiers and flows of a view. */
export function drawTiers({ now_us: nowUs, figures, gpu }) {
  for (const [field, rate] of rates) rate.add(nowUs, figures.scheduler[field].sound_pages);
  const { device, host } = figures.scheduler.cache;
  const columns = [
    { key: "device", tier: arenaTier("Device", gpu?.name ?? "the model's memory", device, figures) },
    { key: "device-host", gap: true },
    { key: "host", tier: arenaTier("Host", "main memory", host, figures) },
    { key: "host-l3", gap: true },
    { key: "l3", tier: storeTier(figures) },
  ];
  drawList(byId("tiers"), columns, ({ key }) => key, createColumn, (column, { key, tier }) => {
    if (tier) drawTier(column, tier);
    else drawGap(column, key, figures.scheduler);
  });
}

/** Device and host: pages of an arena. */
function arenaTier(name, hint, use, { page_size: pageSize, page_bytes: pageBytes }) {
  const evictable = use.evictable_pages;
  const inUse = Math.max(0, use.total_pages - use.free_pages - evictable);
  return {
    name,
    hint,
    absent: use.total_pages === 0,
    pages: { "in-use": inUse, evictable, free: use.free_pages },
    pageSize,
    pageBytes,
    note: "",
  };
}

/** L3: objects of a store, one per page. The disk holds all of them; memory above it holds copies. */
function storeTier({ store, page_size: pageSize, page_bytes: pageBytes }) {
  const place = store?.disk ?? store?.memory;
  const total = place ? Math.floor(place.capacity_bytes / pageBytes) : 0;
  const inUse = place ? Math.min(place.hard_pinned, place.objects) : 0;
  const evictable = place ? place.objects - inUse : 0;
  return {
    name: "L3",
    hint: store?.disk ? "disk, survives restarts" : "memory store",
    absent: !place,
    pages: { "in-use": inUse, evictable, free: Math.max(0, total - inUse - evictable) },
    pageSize,
    pageBytes,
    note: troubleOf(store),
  };
}

/** A failure of the store in words, or "". */
function troubleOf(store) {
  switch (store?.guard?.breaker) {
    case "open":
      return "the store fails: its circuit breaker is open";
    case "half-open":
      return "the store failed: checking whether it works again";
    default:
      return "";
  }
}

function createColumn({ key, gap }) {
  if (gap) {
    const flows = FLOWS.filter((flow) => flow.gap === key).map(createFlow);
    return element("div", "gap", ...flows);
  }
  return element(
    "article",
    `tier ${key}`,
    element("h3", "", element("span", "name"), element("span", "hint quiet")),
    element("div", "fill", ...PARTS.map((part) => element("span", `part ${part}`))),
    element("p", "tokens"),
    element("p", "bytes quiet"),
    element("p", "note"),
  );
}

function drawTier(column, { name, hint, absent, pages, pageSize, pageBytes, note }) {
  const total = PARTS.reduce((sum, part) => sum + pages[part], 0);
  const held = pages["in-use"] + pages.evictable;
  const fill = column.querySelector(".fill");
  for (const part of PARTS) {
    fill.querySelector(`.${part}`).style.flexGrow = total > 0 ? pages[part] / total : 0;
  }
  const inWords = absent
    ? "none"
    : `${several(pages["in-use"], "page")} in use, ${count(pages.evictable)} cached and evictable, ` +
      `${count(pages.free)} free`;
  setAttribute(fill, "role", "img");
  setAttribute(fill, "aria-label", `${name}: ${inWords}`);
  setAttribute(column, "title", inWords);
  column.classList.toggle("absent", absent);
  setText(column.querySelector(".name"), name);
  setText(column.querySelector(".hint"), hint);
  setText(
    column.querySelector(".tokens"),
    absent ? "none" : `${short(held * pageSize)} of ${short(total * pageSize)} tokens`,
  );
  setText(
    column.querySelector(".bytes"),
    absent ? "" : `${bytes(held * pageBytes)} of ${bytes(total * pageBytes)}`,
  );
  setText(column.querySelector(".note"), note);
}

function createFlow({ field, label, towards }) {
  const flow = element(
    "div",
    `flow ${towards}`,
    element("span", "label", label),
    element("span", "track", element("span", "pages")),
    element("span", "rate"),
  );
  flow.dataset.field = field;
  return flow;
}

function drawGap(gap, key, scheduler) {
  for (const flow of gap.children) {
    const { field } = flow.dataset;
    const stats = scheduler[field];
    const perSecond = rates.get(field).perSecond;
    setAttribute(flow, "data-speed", speedOf(perSecond, stats.in_flight_pages));
    setText(flow.querySelector(".rate"), rateInWords(perSecond, stats));
    setAttribute(
      flow,
      "title",
      `${several(stats.sound_pages, "page")} transferred, ${count(stats.unsound_pages)} failed or corrupt, ` +
        `${count(stats.in_flight_pages)} in flight`,
    );
  }
}

/** The speed in steps, because an animation jumps whenever its duration changes. */
function speedOf(pagesPerSecond, pagesInFlight) {
  if (pagesPerSecond > 200) return "fast";
  if (pagesPerSecond > 20) return "medium";
  return pagesPerSecond > 0 || pagesInFlight > 0 ? "slow" : "still";
}

function rateInWords(perSecond, stats) {
  if (perSecond > 0) return `${several(Math.max(1, Math.round(perSecond)), "page")}/s`;
  if (stats.in_flight_pages > 0) return `${several(stats.in_flight_pages, "page")} in flight`;
  return `${short(stats.sound_pages)} ${stats.sound_pages === 1 ? "page" : "pages"}`;
}
