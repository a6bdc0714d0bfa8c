// The GPU, if there is one: its memory, the transfers over its link, and its idle time.

import { byId, drawList, element, setAttribute, setText } from "./dom.js";
import { bytes, count, percent, several } from "./format.js";
import { Rate } from "./rates.js";

/** The two directions of the link. */
const LINKS = [
  { field: "to_device", name: "host to GPU" },
  { field: "to_host", name: "GPU to host" },
];

/** Derives the figures of the GPU from successive views: most of them are speeds. */
export class GpuFigures {
  #work = new Rate();
  #waited = new Rate();
  #links = LINKS.map((link) => ({ ...link, bytes: new Rate(), busy: new Rate() }));

  /** The figures after one more view; none without a GPU. */
  after({ now_us: nowUs, gpu, figures: { steps } }) {
    if (!gpu) return [];
    this.#work.add(nowUs, steps.busy_us);
    this.#waited.add(nowUs, Math.max(0, steps.busy_us - steps.model_us));
    return [memory(gpu), this.#waiting(), ...this.#links.map((link) => speed(link, nowUs, gpu)), ...checks(gpu)];
  }

  #waiting() {
    const share = this.#work.growth > 0 ? this.#waited.growth / this.#work.growth : 0;
    const hint = "Share of the latest busy time in which the GPU was idle although a step could have run";
    return { name: "GPU waits", value: percent(share), hint };
  }
}

function memory({ name, memory_bytes: total, memory_used_bytes: used }) {
  const value = total > 0 ? `${bytes(used)} of ${bytes(total)}` : "lost";
  return { name: "GPU memory", value, hint: name, isTrouble: total === 0 };
}

function speed(link, nowUs, gpu) {
  const stats = gpu[link.field];
  link.bytes.add(nowUs, stats.bytes);
  link.busy.add(nowUs, stats.busy_us);
  const busy = percent(Math.min(1, link.busy.perSecond / 1e6));
  const hint =
    `The link is busy ${busy} of the time; ${bytes(stats.bytes)} so far, ` +
    `${several(stats.by_kernel, "part")} by kernel and ${count(stats.by_batch)} by copy engines`;
  return { name: link.name, value: `${bytes(link.bytes.perSecond)}/s`, hint };
}

/** Results of the checks of copies, if there are any. */
function checks({ to_device: toDevice, to_host: toHost }) {
  const compared = toDevice.pages_compared + toHost.pages_compared;
  const corrupt = toDevice.pages_corrupt + toHost.pages_corrupt;
  const failed = toDevice.failed + toHost.failed;
  const found = [];
  if (compared > 0) {
    const hint = "Copied pages whose bytes were compared on both sides";
    const value = `${several(compared, "page")}, ${count(corrupt)} corrupt`;
    found.push({ name: "compared", value, hint, isTrouble: corrupt > 0 });
  }
  if (failed > 0) {
    const hint = "Failed copies between GPU and host; their pages were not used";
    found.push({ name: "failed", value: several(failed, "copy", "copies"), hint, isTrouble: true });
  }
  return found;
}

const figures = new GpuFigures();

/** Draws the GPU of a view. */
export function drawGpu(view) {
  const shown = figures.after(view);
  byId("gpu").hidden = shown.length === 0;
  drawList(byId("gpu"), shown, ({ name }) => name, createFigure, (figure, { name, value, hint, isTrouble }) => {
    setText(figure.querySelector("dt"), name);
    setText(figure.querySelector("b"), value);
    setAttribute(figure, "title", hint);
    figure.classList.toggle("trouble", Boolean(isTrouble));
  });
}

function createFigure() {
  return element("div", "", element("dt"), element("dd", "", element("b")));
}
