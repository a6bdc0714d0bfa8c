// What the built-in model can and cannot do. The figures are those of docs/answering-model.md: change both together.

/** The name under which the built-in model is served. */
export const BUILT_IN_MODEL = "terrace-built-in";

/** Abilities, measured accuracy and limit of the built-in model, for people. */
export const BUILT_IN_LIMITS =
  "The built-in model answers questions about a book's rows, sums below 100 and simple sequences; it cannot chat. " +
  "Right answers at its limit, 4,096 tokens: keepers 99.5\u00a0%, crops 99.9\u00a0%, rows 91\u00a0%.";

/** Why an answer of the built-in model can be wrong although its KV is right. */
export const WHY_WRONG = "The built-in model may misread unfamiliar names and words.";
