// The latest runs: where the KV of each came from, how its time and its answer compare with those of computing the
// prompt, and which steps of the guide they completed. Independent of the document.

/** Number of runs that are kept. */
const RUNS_MAX = 6;
/** Share of the prompt that must come from one source to count as coming from there. */
const MAIN_SOURCE_SHARE = 0.9;

/** The runs so far. Its state can be stored as JSON. */
export class RunLog {
  #runs;
  #steps;
  #forgotten;
  #instance;

  constructor({ runs = [], steps = {}, forgotten = null, instance = null } = {}) {
    this.#runs = runs;
    this.#steps = steps;
    this.#forgotten = forgotten;
    this.#instance = instance;
  }

  /**
   * Adds a run: prompt, model and settings, tokens by source, time to first token, answer, verdict, and the instance of
   * the server that answered (null if unknown). The time is compared with that of the latest run that computed the same
   * prompt, the answer with that of the first.
   */
  add({ prompt, model, settings, tokens, firstTokenMs, answer, verdict = "", instance = null }) {
    const number = (this.latest?.number ?? 0) + 1;
    const isComputed = mainSource(tokens) === "computed";
    const isSame = (run) => run.prompt === prompt && run.model === model;
    const isSameRequest = (run) => isSame(run) && JSON.stringify(run.settings) === JSON.stringify(settings);
    const computing = isComputed ? { number, firstTokenMs } : (this.#runs.find(isSame)?.computing ?? null);
    const known = this.#runs.find((run) => isSameRequest(run) && run.reference)?.reference;
    const reference = known ?? (isComputed ? { number, answer } : null);
    const run = { number, prompt, model, settings, tokens, firstTokenMs, answer, verdict, computing, reference };
    this.#completeStep(run, instance);
    this.#runs = [run, ...this.#runs].slice(0, RUNS_MAX);
    this.#forgotten = null;
    this.#instance = instance;
  }

  /** Takes down that pages were forgotten, "device" or "device-and-host", since the latest run. */
  forget(tiers) {
    if (this.#forgotten !== "device-and-host") this.#forgotten = tiers;
  }

  /** Begins the guide anew. The runs stay. */
  restartGuide() {
    this.#steps = {};
    this.#forgotten = null;
  }

  /** The runs, the latest first. */
  get all() {
    return this.#runs;
  }

  /** The latest run, if there is one. */
  get latest() {
    return this.#runs[0];
  }

  /** The completed steps of the guide: for each its run's number and time to first token. */
  get steps() {
    return this.#steps;
  }

  /** The tiers that were forgotten since the latest run, or null. */
  get forgotten() {
    return this.#forgotten;
  }

  /** The instance of the server that answered the latest run, or null. */
  get instance() {
    return this.#instance;
  }

  toJSON() {
    return { runs: this.#runs, steps: this.#steps, forgotten: this.#forgotten, instance: this.#instance };
  }

  #completeStep({ number, tokens, firstTokenMs }, instance) {
    const source = mainSource(tokens);
    if (source === null) return;
    // Without the operator's key the instance is unknown, and only a restart brings a prompt from L3.
    const isRestarted = instance === null || (this.#instance !== null && this.#instance !== instance);
    const step = source === "l3" && isRestarted ? "restart" : source;
    this.#steps = { [step]: { number, firstTokenMs }, ...this.#steps };
  }
}

/** The time to first token of computing the prompt, divided by that of the run; null if unknown. */
export function timesAsFast({ number, firstTokenMs, computing }) {
  if (!computing?.firstTokenMs || !firstTokenMs || computing.number === number) return null;
  return computing.firstTokenMs / firstTokenMs;
}

/**
 * Whether the answer of a run is "same" as, or "different" from, that of the first run that computed the prompt; "" if
 * there is nothing to compare, or if the answers are sampled.
 */
export function sameness({ number, answer, settings, reference }) {
  if (!reference || reference.number === number || settings.temperature > 0) return "";
  return answer === reference.answer ? "same" : "different";
}

/** The source of nearly all prompt tokens, or null. */
function mainSource(tokens) {
  const total = Object.values(tokens).reduce((sum, tokens) => sum + tokens, 0);
  const isMain = (source) => total > 0 && tokens[source] >= MAIN_SOURCE_SHARE * total;
  return Object.keys(tokens).find(isMain) ?? null;
}
