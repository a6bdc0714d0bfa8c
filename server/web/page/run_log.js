// What is known of the prompts that were sent: the latest runs, what each is compared with, and which steps
// of the tour they were. Knows nothing of the page.

/** Earlier runs are forgotten. */
const RUNS_MAX = 4;
/** A run was computed, or came from a tier, if so much of its prompt did. */
const MOST = 0.9;

/** The steps of the tour, by where most of a prompt comes from in each. */
const STEPS = ["computed", "device", "l3"];

/** The runs so far. What it is made of can be kept as JSON. */
export class RunLog {
  #runs;
  #steps;

  constructor({ runs = [], steps = {} } = {}) {
    this.#runs = runs;
    this.#steps = steps;
  }

  /**
   * Adds what came of a prompt: its text, the model, tokens by source, the time to the first token, and whether the
   * answer is right. A run knows the latest one of the same prompt that had to be computed, however long ago that was.
   */
  add({ prompt, model, tokens, firstTokenMs, verdict = "" }) {
    const number = (this.latest?.number ?? 0) + 1;
    const isSame = (run) => run.prompt === prompt && run.model === model;
    const computing = isMostly(tokens, "computed")
      ? { number, firstTokenMs }
      : (this.#runs.find(isSame)?.computing ?? null);
    this.#runs = [{ number, prompt, model, tokens, firstTokenMs, verdict, computing }, ...this.#runs].slice(0, RUNS_MAX);
    const step = STEPS.find((source) => isMostly(tokens, source));
    if (step) this.#steps = { [step]: number, ...this.#steps };
  }

  /** The runs, the latest first. */
  get all() {
    return this.#runs;
  }

  /** The latest run, if there is one. */
  get latest() {
    return this.#runs[0];
  }

  /** Which steps of the tour have been taken, in their order. */
  get steps() {
    return STEPS.map((step) => step in this.#steps);
  }

  /** Whether the tour was over before the latest run. */
  get isTourOver() {
    return STEPS.every((step) => this.#steps[step] < this.latest?.number);
  }

  toJSON() {
    return { runs: this.#runs, steps: this.#steps };
  }
}

/** How many times as fast the first token of a run came as when its prompt was computed, if that is known. */
export function timesAsFast({ number, firstTokenMs, computing }) {
  if (!computing?.firstTokenMs || !firstTokenMs || computing.number === number) return null;
  return computing.firstTokenMs / firstTokenMs;
}

function isMostly(tokens, source) {
  const total = Object.values(tokens).reduce((sum, tokens) => sum + tokens, 0);
  return total > 0 && tokens[source] >= MOST * total;
}
