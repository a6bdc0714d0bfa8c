// Speeds, from counters that only grow.

/**
 * How far back a speed looks. Transfers are over in milliseconds; what is shown must stay long enough
 * to be seen.
 */
const SPAN_US = 2_000_000;

/** The speed of one counter. */
export class Rate {
  #samples = [];

  /** Takes down what the counter says at a moment of the server's time. */
  add(nowUs, counter) {
    const latest = this.#samples.at(-1);
    // Time or counters that run backwards mean another server.
    if (latest && (nowUs < latest.nowUs || counter < latest.counter)) this.#samples = [];
    this.#samples.push({ nowUs, counter });
    // The oldest sample that is kept is the last one from before the span.
    while (this.#samples.length > 2 && this.#samples[1].nowUs <= nowUs - SPAN_US) this.#samples.shift();
  }

  /** How much the counter grew in the span. */
  get growth() {
    if (this.#samples.length < 2) return 0;
    return this.#samples.at(-1).counter - this.#samples[0].counter;
  }

  /** How much it grows in a second. */
  get perSecond() {
    if (this.#samples.length < 2) return 0;
    const elapsedUs = this.#samples.at(-1).nowUs - this.#samples[0].nowUs;
    return elapsedUs > 0 ? (this.growth * 1e6) / elapsedUs : 0;
  }
}
