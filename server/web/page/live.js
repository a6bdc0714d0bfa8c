// The live connection: what the server tells about itself, a few times a second.

import { byId, setAttribute, setText } from "./dom.js";
import { askForKey, keyHeaders, wantsKey } from "./keys.js";
import { eventsOf } from "./stream.js";
import { troubleOf } from "./trouble.js";

/** A server that says nothing for so long is gone, even if the connection does not say so. */
const SILENCE_MS = 5_000;
const RETRY_MS_MIN = 500;
const RETRY_MS_MAX = 5_000;

/** Whether there is something on the page that the server told. */
let hasViews = false;

/** Why the panels are empty before there is anything to draw, by the state of the connection. */
const WHY_EMPTY = {
  connecting: "Waiting for the first update from the server.",
  locked:
    "This is shown only to the operator of the server, because it contains the prompts of all clients. " +
    "To see it, enter the operator's key under Ask.",
  lost: "The server does not respond. This panel is filled when it responds again.",
};

/** Calls `draw` with every view that the server sends, for ever. A lost connection is said and made anew. */
export async function watch(draw) {
  let retryMs = RETRY_MS_MIN;
  say("connecting", "connecting");
  for (;;) {
    let seen = false;
    let why = "connection lost";
    try {
      const hasKey = await follow((view) => {
        seen = true;
        say("live", "live");
        drawOrReport(draw, view);
      });
      if (hasKey) continue;
    } catch (error) {
      if (error instanceof Refused) why = error.message;
      console.debug("the live connection ended:", error);
    }
    retryMs = seen ? RETRY_MS_MIN : Math.min(2 * retryMs, RETRY_MS_MAX);
    say("lost", `${why}, trying again`);
    await new Promise((resolve) => setTimeout(resolve, retryMs));
  }
}

/** A mistake of this page is not one of the connection: it goes where mistakes are looked for. */
function drawOrReport(draw, view) {
  try {
    draw(view);
  } catch (error) {
    reportError(error);
  }
}

/** Follows one connection to its end; says whether it ended for want of a key that has been given since. */
async function follow(onView) {
  const silence = new Watchdog(SILENCE_MS);
  const response = await fetch("/ui/events", { headers: keyHeaders("watch"), signal: silence.signal });
  if (wantsKey(response)) {
    silence.end();
    say("locked", "needs the operator's key");
    await askForKey("watch");
    say("connecting", "connecting");
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

/** The server is there, but does not want to tell. */
class Refused extends Error {}

/** Calls off what it is given the signal of when nothing is heard for a while. */
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

function say(state, text) {
  setAttribute(byId("connection"), "data-state", state);
  setText(byId("connection"), text);
  // What was drawn stays to be looked at, but for those who may not see it.
  hasViews = state === "live" || (hasViews && state !== "locked");
  document.body.classList.toggle("stale", hasViews && state !== "live");
  document.body.classList.toggle("blank", !hasViews);
  for (const note of document.querySelectorAll(".why")) setText(note, hasViews ? "" : WHY_EMPTY[state]);
}
