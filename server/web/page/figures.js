// The figures at the top: how much was found in the cache, and how fast it goes.

import { byId, setText } from "./dom.js";
import { count, percent } from "./format.js";
import { Rate } from "./rates.js";
import { bySource, drawShares, drawSources } from "./sources.js";

const generated = new Rate();
const prefilled = new Rate();

/** Draws the figures of a view. */
export function drawFigures({ now_us: nowUs, figures: { scheduler, steps } }) {
  generated.add(nowUs, scheduler.generated_tokens);
  prefilled.add(nowUs, scheduler.prefilled_tokens);
  setText(byId("generated-rate"), count(generated.perSecond));
  setText(byId("prefilled-rate"), count(prefilled.perSecond));
  setText(byId("running"), count(scheduler.running + scheduler.draining));
  setText(byId("waiting"), count(scheduler.waiting));
  setText(byId("overhead"), percent(overheadRatio(steps)));

  const tokens = bySource(
    scheduler.prompt_tokens,
    scheduler.device_hit_tokens,
    scheduler.host_hit_tokens,
    scheduler.l3_hit_tokens,
  );
  drawSources(byId("hit-rates"), tokens);
  drawShares(byId("hit-rate-names"), tokens);
}

/** The share of busy time that was not spent in the model. */
function overheadRatio({ busy_us: busyUs, model_us: modelUs }) {
  return busyUs > 0 ? Math.max(0, busyUs - modelUs) / busyUs : 0;
}
