// The time axis of the requests. Time in which nobody was there is cut out, so that two requests can be
// compared however long one waits between them. Knows nothing of the page.

/** What a cut takes of the axis. */
const CUT_SHARE = 0.03;

/** An axis over the lives of some requests: says where on it, from 0 to 1, a moment is. */
export function axisOf(requests, nowUs) {
  const spans = mergeSpans(requests.map((request) => [request.timeline[0].at_us, endOf(request, nowUs)]));
  const busyUs = spans.reduce((sum, [begin, end]) => sum + end - begin, 0) || 1;
  const cuts = Math.max(0, spans.length - 1);
  const cutShare = Math.min(CUT_SHARE, 0.4 / Math.max(1, cuts));
  const scale = (1 - cuts * cutShare) / busyUs;
  return (atUs) => {
    let place = 0;
    for (const [begin, end] of spans) {
      if (atUs <= end) return place + Math.max(0, atUs - begin) * scale;
      place += (end - begin) * scale + cutShare;
    }
    return 1;
  };
}

/** The states of a request as segments, each from a moment to the next. */
export function segmentsOf(request, nowUs) {
  const { timeline } = request;
  const moments = isOver(request) ? timeline.slice(0, -1) : timeline;
  return moments.map(({ state, at_us: beginUs }, index) => ({
    state,
    beginUs,
    endUs: timeline[index + 1]?.at_us ?? nowUs,
  }));
}

/** Whether a request's life has ended. */
export function isOver({ state }) {
  return state === "Finished" || state === "Aborted" || state === "Failed";
}

/** When a request's life ended, or now. */
export function endOf(request, nowUs) {
  return isOver(request) ? request.timeline.at(-1).at_us : nowUs;
}

/** Spans that overlap become one. */
function mergeSpans(spans) {
  const merged = [];
  for (const [begin, end] of [...spans].sort(([one], [other]) => one - other)) {
    const latest = merged.at(-1);
    if (latest && begin <= latest[1]) latest[1] = Math.max(latest[1], end);
    else merged.push([begin, end]);
  }
  return merged;
}
