// The page of a running server: its state, its history, and a form that sends prompts. Each panel is a module that
// draws one part of a view, the state that the server sends.

import { listenToForm } from "./page/ask.js";
import { drawFigures } from "./page/figures.js";
import { listenToForget } from "./page/forget.js";
import { drawGpu } from "./page/gpu.js";
import { drawGuide, listenToGuide } from "./page/guide.js";
import { drawHistory } from "./page/history.js";
import { watch } from "./page/live.js";
import { offerPlanting } from "./page/planting.js";
import { drawRequests } from "./page/requests.js";
import { drawTiers } from "./page/tiers.js";
import { drawTree } from "./page/tree.js";

function draw(view) {
  // A hidden page draws nothing: each view is complete, so the next one suffices.
  if (document.hidden) return;
  drawFigures(view);
  drawGpu(view);
  drawGuide(view);
  drawTiers(view);
  drawHistory(view);
  drawTree(view);
  drawRequests(view);
}

listenToForm();
listenToForget();
listenToGuide();
offerPlanting();
watch(draw);
