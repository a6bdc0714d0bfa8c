// A long prompt, always the same, so that sending it twice shows what a cache is good for.

const BEGINNING =
  "On the slope above the village the fields lie in terraces, one below the other. The highest is small " +
  "and gets the sun first: what is needed every hour grows there, close to the house. The one in the middle " +
  "is wider, and a short walk away. The lowest reaches down to the river; it takes a while to get there, " +
  "but it holds a hundred times as much, and nothing that was brought down is lost in winter. Whoever " +
  "works here carries baskets up before they are asked for, and down before the upper fields are full. " +
  "Nobody grows again what only has to be fetched.\n\nThe book of the fields says:\n";
const CROPS = ["barley", "lentils", "flax", "beans", "saffron", "millet", "cumin", "rye", "peas", "mint", "hops"];
const KEEPERS = ["Ada", "Blaise", "Carl", "Dorothy", "Edsger", "Frances", "Grace"];
const ENDING = "\nTell me which baskets have to be carried up tomorrow, and why:";
const CHARS = 4000;

/** About 4,000 characters of plain text. */
export function longExample() {
  let text = BEGINNING;
  for (let row = 1; text.length < CHARS - ENDING.length - 80; row += 1) {
    const crop = CROPS[(row * 7) % CROPS.length];
    const keeper = KEEPERS[(row * 3) % KEEPERS.length];
    text += `Row ${row}: ${crop}, kept by ${keeper}, ${(row * 37) % 90 + 10} baskets, last carried on day ${(row * 53) % 365 + 1}.\n`;
  }
  return text + ENDING;
}
