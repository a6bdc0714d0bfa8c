// A long prompt, always the same, so that sending it twice shows what a cache is good for: a book of fields, and a
// question about one of its rows. Whether an answer is right can be told from the prompt alone.

const BEGINNING =
  "On the slope above the village the fields lie in terraces, one below the other. The highest is small and gets " +
  "the sun first. The one in the middle is wider, and a short walk away. The lowest reaches down to the river, and " +
  "nothing that was brought down is lost in winter. Nobody grows again what only has to be fetched. \n\n" +
  "The book of the fields says:\n";
const CROPS = ["barley", "lentils", "flax", "beans", "saffron", "millet", "cumin", "rye", "peas", "mint", "hops", "oats", "figs"];
const FIRST_NAMES = ["Ada", "Blaise", "Carl", "Dorothy", "Edsger", "Frances", "Grace", "Emmy", "Alan", "Tycho", "Lise"];
const LAST_NAMES = ["Finch", "Alder", "Brook", "Crane", "Dale", "Elm", "Frost", "Grove", "Heath", "Lark", "Moss", "Reed", "Wren"];
/** Rows are not in order, as in a book that is written as fields are dug. No divisor but 1 is shared with the step. */
const ROWS = 97;
const STEP = 37;
const ASKED = 17;

/** About 4,000 characters of plain text. */
export function longExample() {
  const rows = Array.from({ length: ROWS }, (_, index) => {
    const row = ((index * STEP) % ROWS) + 1;
    const keeper = `${FIRST_NAMES[(row * 3) % FIRST_NAMES.length]} ${LAST_NAMES[(row * 5) % LAST_NAMES.length]}`;
    return `Row ${row}: ${CROPS[(row * 7 + index) % CROPS.length]}, kept by ${keeper}.\n`;
  });
  return `${BEGINNING}${rows.join("")}Who keeps row ${ASKED}?\n`;
}

/** What the questions that the built-in model knows ask for, and about what. */
const QUESTIONS = [
  [/^(?:Who keeps row|By whom is row|Name the keeper of row) (\d+)/, "row", "keeper"],
  [/^(?:What grows in row|Which crop is in row|Name the crop of row) (\d+)/, "row", "crop"],
  [/^(?:Which row does|Where does|Name the row of) (.+?)(?: keep| work)?[?.]$/, "keeper", "row"],
];

/**
 * The right answer to the question at the end of a prompt, and where in the prompt it stands; null where the question
 * is another or the prompt does not say.
 */
export function rightAnswer(prompt) {
  const question = prompt.trimEnd().split("\n").at(-1);
  for (const [pattern, about, wanted] of QUESTIONS) {
    const asked = pattern.exec(question)?.[1];
    if (asked === undefined) continue;
    const found = [...prompt.matchAll(/^Row (?<row>\d+): (?<crop>.+), kept by (?<keeper>.+)\.$/dgm)];
    const told = found.filter(({ groups }) => groups[about] === asked);
    if (told.length !== 1) return null;
    return { text: told[0].groups[wanted], at: told[0].indices.groups[wanted][0] };
  }
  return null;
}

/** Whether an answer is "right" or "wrong"; "" where that cannot be told. */
export function verdictOn(prompt, answer) {
  const right = rightAnswer(prompt);
  if (!right) return "";
  return answer.trim() === right.text ? "right" : "wrong";
}
