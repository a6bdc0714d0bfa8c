// The figures at the top: hit rates, throughput, latency and overhead.

import { byId, setText } from "./dom.js";
import { count, duration, percent } from "./format.js";
import { Rate } from "./rates.js";
import { bySource, drawShares, drawSources } from "./sources.js";

const generated = new Rate();
const prefilled = new Rate();

/** Draws the figures of a view. */
export function drawFigures({ now_us: nowUs, figures: { scheduler, steps }, latency }) {
  generated.add(nowUs, scheduler.generated_tokens);
  prefilled.add(nowUs, scheduler.prefilled_tokens);
  setText(byId("generated-rate"), count(generated.perSecond));
  setText(byId("prefilled-rate"), count(prefilled.perSecond));
  setText(byId("running"), count(scheduler.running + scheduler.draining));
  setText(byId("waiting"), count(scheduler.waiting));
  setText(byId("overhead"), percent(overheadRatio(steps)));
  drawTimes("first-token", latency.first_token);
  drawTimes("inter-token", latency.inter_token);

  const tokens = bySource(
    scheduler.prompt_tokens,
    scheduler.device_hit_tokens,
    scheduler.host_hit_tokens,
    scheduler.l3_hit_tokens,
  );
  drawSources(byId("hit-rates"), tokens);
  drawShares(byId("hit-rate-names"), tokens);
}

/** Draws percentiles of the latest times, if there are any. */
function drawTimes(name, times) {
  setText(byId(`${name}-p50`), times ? duration(times.p50_ms) : "–");
  setText(byId(`${name}-p99`), times ? duration(times.p99_ms) : "");
}

/** Share of the time of steps that the scheduler and the engine took. */
function overheadRatio({ busy_us: busyUs, model_us: modelUs }) {
  return busyUs > 0 ? Math.max(0, busyUs - modelUs) / busyUs : 0;
}
