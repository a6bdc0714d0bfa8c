// The button that drops cached pages on the device, or on device and host.

import { byId, setText } from "./dom.js";
import { several } from "./format.js";
import { keyHeaders } from "./keys.js";
import { noteForgotten } from "./runs.js";
import { troubleOf } from "./trouble.js";

/** The request that forgets, by the tiers that are chosen. */
const PATHS = {
  device: "/reset_prefix_cache?host=false",
  "device-and-host": "/reset_prefix_cache",
};

/** Makes the form work. */
export function listenToForget() {
  byId("forget-form").addEventListener("submit", (event) => {
    event.preventDefault();
    forget(byId("forget-tiers").value);
  });
}

/** Drops the cached pages of `tiers`, "device" or "device-and-host". Pages that a request or a copy uses stay. */
export async function forget(tiers) {
  byId("forget-tiers").value = tiers;
  const dropped = await postAsOperator(PATHS[tiers]);
  if (!dropped) return;
  noteForgotten(tiers);
  const { device_pages: devicePages, host_pages: hostPages } = dropped;
  const next = tiers === "device" ? "The host keeps its copies" : "L3 keeps its copies";
  sayCacheResult(
    `Dropped ${several(devicePages, "page")} on the device and ${several(hostPages, "page")} on the host. ` +
      `Pages in use stay. ${next}: send the prompt again.`,
  );
}

/** Sends a request of the operator. Returns the JSON of the response, or null after showing why there is none. */
export async function postAsOperator(path) {
  try {
    const response = await fetch(path, { method: "POST", headers: keyHeaders("watch") });
    if (response.ok) return await response.json();
    sayCacheResult(await troubleOf(response));
  } catch (error) {
    sayCacheResult(`The server cannot be reached: ${error.message}`);
  }
  return null;
}

/** Shows the result of the last action on the cache. */
export function sayCacheResult(text) {
  setText(byId("cache-result"), text);
}
