// The time axis of the requests. Time in which there was no request is cut out, so that two requests can be compared
// however much later the second one came. Independent of the document.

/** Share of the axis that a cut takes. */
const CUT_SHARE = 0.03;
/** Share of the axis that all cuts take together at most. */
const CUTS_SHARE_MAX = 0.4;

/** An axis over the lives of some requests. */
export class TimeAxis {
  #spans;
  #scale;
  #cutShare;

  constructor(requests, nowUs) {
    this.#spans = mergeSpans(requests.map((request) => [request.timeline[0].at_us, endOf(request, nowUs)]));
    const cuts = Math.max(0, this.#spans.length - 1);
    this.#cutShare = Math.min(CUT_SHARE, CUTS_SHARE_MAX / Math.max(1, cuts));
    this.#scale = (1 - cuts * this.#cutShare) / (this.#busyUs || 1);
  }

  /** The position of a moment, from 0 to 1. */
  at(momentUs) {
    let place = 0;
    for (const [begin, end] of this.#spans) {
      if (momentUs <= end) return place + Math.max(0, momentUs - begin) * this.#scale;
      place += (end - begin) * this.#scale + this.#cutShare;
    }
    return 1;
  }

  /** About `wanted` ticks: each with its position and the time since the beginning of the axis, without cuts, in ms. */
  ticks(wanted) {
    const step = tickStep(this.#busyUs, wanted);
    const ticks = [];
    for (let elapsedUs = 0; step > 0 && elapsedUs <= this.#busyUs; elapsedUs += step) {
      ticks.push({ place: this.#placeAfter(elapsedUs), ms: elapsedUs / 1000 });
    }
    return ticks;
  }

  get #busyUs() {
    return this.#spans.reduce((sum, [begin, end]) => sum + end - begin, 0);
  }

  #placeAfter(elapsedUs) {
    let left = elapsedUs;
    for (const [begin, end] of this.#spans) {
      if (left <= end - begin) return this.at(begin + left);
      left -= end - begin;
    }
    return 1;
  }
}

/** The distance between ticks, 1, 2 or 5 times a power of ten, so that there are at most `wanted` distances. */
function tickStep(busyUs, wanted) {
  if (busyUs <= 0) return 0;
  const least = busyUs / wanted;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

/** The states of a request as segments from one moment to the next. */
export function segmentsOf(request, nowUs) {
  const { timeline } = request;
  const moments = isOver(request) ? timeline.slice(0, -1) : timeline;
  return moments.map(({ state, at_us: beginUs }, index) => ({
    state,
    beginUs,
    endUs: timeline[index + 1]?.at_us ?? nowUs,
  }));
}

/** Whether a request has ended. */
export function isOver({ state }) {
  return state === "Finished" || state === "Aborted" || state === "Failed";
}

/** When a request ended, or now. */
export function endOf(request, nowUs) {
  return isOver(request) ? request.timeline.at(-1).at_us : nowUs;
}

/** Joins spans that overlap. */
function mergeSpans(spans) {
  const merged = [];
  for (const [begin, end] of [...spans].sort(([one], [other]) => one - other)) {
    const latest = merged.at(-1);
    if (latest && begin <= latest[1]) latest[1] = Math.max(latest[1], end);
    else merged.push([begin, end]);
  }
  return merged;
}
