// The live connection: views of the server, a few times a second.

import { byId, setAttribute, setText } from "./dom.js";
import { askForKey, keyHeaders, wantsKey } from "./keys.js";
import { eventsOf } from "./stream.js";
import { troubleOf } from "./trouble.js";

/** A connection without any event for this long is lost, even if it is still open. */
const SILENCE_MS = 5_000;
const RETRY_MS_MIN = 500;
const RETRY_MS_MAX = 5_000;

/** Whether the panels show a view. */
let hasViews = false;

/** Why the panels are empty before the first view, by the state of the connection. */
const WHY_EMPTY = {
  connecting: "Waiting for the first update from the server.",
  locked:
    "This is shown only to the operator of the server, because it contains the prompts of all clients. " +
    "To see it, enter the operator's key under Ask.",
  lost: "The server does not respond. This panel is filled when it responds again.",
};

/** Calls `draw` with each view that the server sends. Shows when the connection is lost, and connects again. */
export async function watch(draw) {
  let retryMs = RETRY_MS_MIN;
  say("connecting");
  for (;;) {
    let seen = false;
    let why = "The connection to the server is lost.";
    try {
      const hasKey = await follow((view) => {
        seen = true;
        say("live");
        drawOrReport(draw, view);
      });
      if (hasKey) continue;
    } catch (error) {
      if (error instanceof Refused) why = `${error.message}.`;
      console.debug("the live connection ended:", error);
    }
    retryMs = seen ? RETRY_MS_MIN : Math.min(2 * retryMs, RETRY_MS_MAX);
    say("lost", `${why} Trying again. The page shows the latest state.`);
    await new Promise((resolve) => setTimeout(resolve, retryMs));
  }
}

/** Draws a view. An error of the page is reported as such: the connection is not to blame. */
function drawOrReport(draw, view) {
  try {
    draw(view);
  } catch (error) {
    reportError(error);
  }
}

/** Follows one connection to its end. Returns whether it ended for want of a key that has been entered since. */
async function follow(onView) {
  const silence = new Watchdog(SILENCE_MS);
  const response = await fetch("/ui/events", { headers: keyHeaders("watch"), signal: silence.signal });
  if (wantsKey(response)) {
    silence.end();
    say("locked");
    await askForKey("watch");
    say("connecting");
    return true;
  }
  try {
    if (!response.ok) throw new Refused(await troubleOf(response));
    for await (const data of eventsOf(response)) {
      silence.heard();
      onView(JSON.parse(data));
    }
  } finally {
    silence.end();
  }
  return false;
}

/** The server responds, but refuses to send views. */
class Refused extends Error {}

/** Aborts its signal when nothing is heard for a while. */
class Watchdog {
  #controller = new AbortController();
  #patienceMs;
  #timer;

  constructor(patienceMs) {
    this.#patienceMs = patienceMs;
    this.heard();
  }

  get signal() {
    return this.#controller.signal;
  }

  heard() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#controller.abort(), this.#patienceMs);
  }

  end() {
    clearTimeout(this.#timer);
  }
}

/**
 * Shows the state of the connection. It takes the same space in every state, and a notice lies above the page, so that
 * nothing moves when the connection is lost.
 */
function say(state, notice = "") {
  setAttribute(byId("connection"), "data-state", state);
  setText(byId("connection"), state);
  if (state !== "live" || !hasViews) byId("connection").dispatchEvent(new Event("change"));
  setText(byId("notice"), notice);
  // What was drawn stays visible, except to those who may not see it.
  hasViews = state === "live" || (hasViews && state !== "locked");
  document.body.classList.toggle("stale", hasViews && state !== "live");
  document.body.classList.toggle("blank", !hasViews);
  for (const note of document.querySelectorAll(".why")) setText(note, hasViews ? "" : WHY_EMPTY[state]);
}
