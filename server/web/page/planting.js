// The button that puts a wrong page into the cache, on servers that allow it: the next answer shows the effect.

import { rightAnswer } from "./book.js";
import { byId } from "./dom.js";
import { postAsOperator, sayCacheResult } from "./forget.js";
import { promptOfForm } from "./ask.js";
import { keyHeaders } from "./keys.js";

/** Shows the button if the server allows it. */
export async function offerPlanting() {
  byId("plant").addEventListener("click", plant);
  try {
    const response = await fetch("/plant_wrong_page", { headers: keyHeaders("watch") });
    byId("plant").hidden = !(response.ok && (await response.json()).plants_wrong_pages);
  } catch (error) {
    console.debug("cannot find out whether wrong pages can be planted:", error);
  }
}

async function plant() {
  const prompt = promptOfForm();
  const right = rightAnswer(prompt);
  if (!right) {
    sayCacheResult("Choose the example first: the page that contains the answer is replaced.");
    return;
  }
  // Each byte is a token, after one token that begins the text.
  const token = 1 + new TextEncoder().encode(prompt.slice(0, right.at)).length;
  if (await postAsOperator(`/plant_wrong_page?token=${token}`)) {
    sayCacheResult(
      `The next answer reads another page where “${right.text}” should be: send the prompt again. ` +
        "To mend it, forget device and host.",
    );
  }
}
