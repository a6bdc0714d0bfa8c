// The page of a running server: what it holds, what it does, and a box to give it something to do.
// Every panel is a module that draws one part of what the server tells about itself.

import { drawFigures } from "./page/figures.js";
import { drawGpu } from "./page/gpu.js";
import { watch } from "./page/live.js";
import { listenToForm } from "./page/ask.js";
import { drawRequests } from "./page/requests.js";
import { drawTiers } from "./page/tiers.js";
import { drawTree } from "./page/tree.js";

function draw(view) {
  // Nobody looks; the next view says all that there is to say.
  if (document.hidden) return;
  drawFigures(view);
  drawGpu(view);
  drawTiers(view);
  drawTree(view);
  drawRequests(view);
}

listenToForm();
watch(draw);
