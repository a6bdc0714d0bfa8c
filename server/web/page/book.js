// The example, always the same so that it can be found in the cache: a book of fields and a question about one of its
// rows. The right answer follows from the prompt alone.

const BEGINNING =
  "On the slope above the village the fields lie in terraces, one below the other. The highest is small and gets " +
  "the sun first. The one in the middle is wider, and a short walk away. The lowest reaches down to the river, and " +
  "nothing that was brought down is lost in winter. Nobody grows again what only has to be fetched. \n\n" +
  "The book of the fields says:\n";
const CROPS = ["barley", "lentils", "flax", "beans", "saffron", "millet", "cumin", "rye", "peas", "mint", "hops", "oats", "figs"];
const FIRST_NAMES = ["Ada", "Blaise", "Carl", "Dorothy", "Edsger", "Frances", "Grace", "Emmy", "Alan", "Tycho", "Lise"];
const LAST_NAMES = ["Finch", "Alder", "Brook", "Crane", "Dale", "Elm", "Frost", "Grove", "Heath", "Lark", "Moss", "Reed", "Wren"];
/** Number of rows. */
const ROWS = 97;
/** Distance between the numbers of neighbouring rows. It shares no divisor but 1 with ROWS, so each row appears once. */
const STEP = 37;

/** The question of the example. */
export const EXAMPLE_QUESTION = "Who keeps row 17?";

/** Further questions about the example. */
export const MORE_QUESTIONS = ["What grows in row 17?", "Which row does Frances Dale keep?", "Who keeps row 40?"];

/**
 * The book of the example: about 3,800 characters of plain text. A copy with a number begins with another line, so that
 * it shares no page with other copies.
 */
export function exampleBook(copy = 0) {
  const rows = Array.from({ length: ROWS }, (_, index) => {
    const row = ((index * STEP) % ROWS) + 1;
    const keeper = `${FIRST_NAMES[(row * 3) % FIRST_NAMES.length]} ${LAST_NAMES[(row * 5) % LAST_NAMES.length]}`;
    return `Row ${row}: ${CROPS[(row * 7 + index) % CROPS.length]}, kept by ${keeper}.\n`;
  });
  return `${copy > 0 ? `Copy ${copy} of this book.\n\n` : ""}${BEGINNING}${rows.join("")}`;
}

/** The prompt: the book, the question on a line below it, and a line break. */
export function promptOf(book, question) {
  if (question.trim() === "") return book;
  const lineBreak = book === "" || book.endsWith("\n") ? "" : "\n";
  return `${book}${lineBreak}${question.trim()}\n`;
}

/** Questions that can be checked: a pattern, the field that the question names, and the field that it asks for. */
const QUESTIONS = [
  [/^(?:Who keeps row|By whom is row|Name the keeper of row) (\d+)/, "row", "keeper"],
  [/^(?:What grows in row|Which crop is in row|Name the crop of row) (\d+)/, "row", "crop"],
  [/^(?:Which row does|Where does|Name the row of) (.+?)(?: keep| work)?[?.]$/, "keeper", "row"],
];

/**
 * The right answer to the question at the end of a prompt, and its position in the prompt. Null if the question is of
 * another kind, or if the prompt does not contain exactly one answer.
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

/** Whether an answer is "right" or "wrong"; "" if that cannot be determined. */
export function verdictOn(prompt, answer) {
  const right = rightAnswer(prompt);
  if (!right) return "";
  return answer.trim() === right.text ? "right" : "wrong";
}
