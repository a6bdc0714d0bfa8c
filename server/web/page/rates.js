// Speeds, derived from counters that only grow.

/** Time over which a speed is measured. Transfers take milliseconds, but must be shown long enough to be seen. */
const SPAN_US = 2_000_000;

/** The speed of one counter. */
export class Rate {
  #samples = [];

  /** Adds the value of the counter at a moment of the server's time. */
  add(nowUs, counter) {
    const latest = this.#samples.at(-1);
    // Time or counters that run backwards belong to another server.
    if (latest && (nowUs < latest.nowUs || counter < latest.counter)) this.#samples = [];
    this.#samples.push({ nowUs, counter });
    // The oldest sample that is kept is the last one before the span.
    while (this.#samples.length > 2 && this.#samples[1].nowUs <= nowUs - SPAN_US) this.#samples.shift();
  }

  /** Growth of the counter in the span. */
  get growth() {
    if (this.#samples.length < 2) return 0;
    return this.#samples.at(-1).counter - this.#samples[0].counter;
  }

  /** Growth per second. */
  get perSecond() {
    if (this.#samples.length < 2) return 0;
    const elapsedUs = this.#samples.at(-1).nowUs - this.#samples[0].nowUs;
    return elapsedUs > 0 ? (this.growth * 1e6) / elapsedUs : 0;
  }
}
