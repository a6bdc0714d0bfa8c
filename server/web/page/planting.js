// A wrong page, planted on purpose where a server lets its operator do that: the next answer shows what it does.

import { rightAnswer } from "./book.js";
import { byId } from "./dom.js";
import { keyHeaders } from "./keys.js";
import { troubleOf } from "./trouble.js";

/** Shows the buttons where they would work. */
export async function offerPlanting() {
  byId("plant").addEventListener("click", plant);
  byId("forget").addEventListener("click", forget);
  try {
    const response = await fetch("/plant_wrong_page", { headers: keyHeaders("watch") });
    byId("planting").hidden = !(response.ok && (await response.json()).plants_wrong_pages);
  } catch (error) {
    console.debug("whether wrong pages can be planted is not known:", error);
  }
}

async function plant() {
  const prompt = byId("prompt").value;
  const right = rightAnswer(prompt);
  if (!right) return say("Choose the long example first: the page that contains its answer will be made wrong.");
  // Tokens are bytes, behind one that begins the text.
  const token = 1 + new TextEncoder().encode(prompt.slice(0, right.at)).length;
  await post(
    `/plant_wrong_page?token=${token}`,
    () => `The next answer reads another page where “${right.text}” should be. Send the prompt again.`,
  );
}

async function forget() {
  // Pages that a request or a backup still uses stay where they are.
  await post(
    "/reset_prefix_cache",
    (dropped) =>
      `Dropped ${dropped.device_pages} pages on the device and ${dropped.host_pages} on the host; pages in use stay. ` +
      "What comes from L3 is right: send the prompt again.",
  );
}

/** Sends a request, and says what `told` makes of the answer. */
async function post(path, told) {
  try {
    const response = await fetch(path, { method: "POST", headers: keyHeaders("watch") });
    say(response.ok ? told(await response.json()) : await troubleOf(response));
  } catch (error) {
    say(`The server cannot be reached: ${error.message}`);
  }
}

function say(text) {
  byId("planted").textContent = text;
}
