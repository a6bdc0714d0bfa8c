// The guide at the top: its steps, and the button that does what comes next.

import { isSending, promptOfForm, requestSend, showExample } from "./ask.js";
import { byId, drawList, element, setAttribute, setText } from "./dom.js";
import { forget } from "./forget.js";
import { duration } from "./format.js";
import { keep, kept } from "./kept.js";
import { log, noteInstance, restartGuide } from "./runs.js";
import { STEPS, guideOf } from "./steps.js";

const STATES = { done: "done", next: "next", later: "to do", absent: "not possible" };

/** Facts about the server, from its latest view. */
let server = {};
/** The step that was next when the guide was drawn last. */
let lastNext = null;

/** Makes the guide work. */
export function listenToGuide() {
  byId("guide").open = kept("guide-open") ?? true;
  byId("guide").addEventListener("toggle", () => keep("guide-open", byId("guide").open));
  byId("next").addEventListener("click", doNext);
  byId("connection").addEventListener("change", () => {
    if (byId("connection").dataset.state === "locked") server = { isLocked: true };
    drawAgain();
  });
  byId("runs").addEventListener("change", drawAgain);
  byId("ask-form").addEventListener("input", drawAgain);
  byId("ask-form").addEventListener("busychange", drawAgain);
  drawAgain();
}

/** Draws the guide for a view. */
export function drawGuide({ instance, figures: { scheduler, store } }) {
  noteInstance(instance);
  server = {
    isLocked: false,
    instance,
    hasHost: scheduler.cache.host.total_pages > 0,
    hasL3: Boolean(store?.disk ?? store?.memory),
    isOnDisk: Boolean(store?.disk),
    isCopying: scheduler.write_backs.in_flight_pages + scheduler.backups.in_flight_pages > 0,
  };
  drawAgain();
}

function currentGuide() {
  return guideOf(log, server, promptOfForm());
}

function drawAgain() {
  const { steps, next } = currentGuide();
  drawList(byId("steps"), steps, ({ id }) => id, createStep, drawStep);
  const done = steps.filter(({ state }) => state === "done").length;
  setText(byId("guide-progress"), `${done} of ${STEPS.length} steps done`);
  setText(byId("next"), isSending() ? "Sending" : next.label);
  byId("next").disabled = isSending() || !next.isPossible;
  setText(byId("next-hint"), next.hint);
  suggest(next.name);
}

/** Marks the control that does the next step, and chooses there what the step needs. */
function suggest(action) {
  const isForgetting = action === "device" || action === "device-and-host";
  byId("send").classList.toggle("suggested", action === "send" || action === "send-again");
  byId("forget").classList.toggle("suggested", isForgetting);
  if (isForgetting && action !== lastNext) byId("forget-tiers").value = action;
  lastNext = action;
}

async function doNext() {
  const { next } = currentGuide();
  switch (next.name) {
    case "new-example":
      showExample({ isNew: true });
      break;
    case "over":
      restartGuide();
      showExample({ isNew: true });
      break;
    case "send":
      if (promptOfForm() === "") showExample({ isNew: false });
      requestSend();
      break;
    case "send-again":
      requestSend();
      break;
    case "device":
    case "device-and-host":
      await forget(next.name);
      break;
    case "restart":
      break;
  }
  drawAgain();
}

function createStep({ title }) {
  const label = element("p", "label", element("span", "tick"), element("b", "", title));
  label.firstChild.setAttribute("role", "img");
  return element("li", "", label, element("p", "outcome quiet"));
}

function drawStep(item, { state, outcome, done, obstacle }) {
  item.className = state;
  if (state === "next") setAttribute(item, "aria-current", "step");
  else item.removeAttribute("aria-current");
  setAttribute(item.querySelector(".tick"), "aria-label", STATES[state]);
  const time = done?.firstTokenMs ? `, first token after ${duration(done.firstTokenMs).replace(" ", "\u00a0")}` : "";
  setText(item.querySelector(".outcome"), done ? `${outcome}${time}` : (obstacle ?? outcome));
}
