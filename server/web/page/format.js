// Numbers and tokens for people.

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** 12,345 */
export function count(number) {
  return COUNT.format(number);
}

/** 12.3K */
export function short(number) {
  return SHORT.format(number);
}

/** "1 page", "2 pages" */
export function several(number, noun, plural = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : plural}`;
}

/** 1.5 MiB */
export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let amount = number;
  while (amount >= 1024 && unit + 1 < units.length) {
    amount /= 1024;
    unit += 1;
  }
  return `${amount < 10 && unit > 0 ? amount.toFixed(1) : COUNT.format(amount)} ${units[unit]}`;
}

/** 12 % */
export function percent(share) {
  const hundredths = share * 100;
  return `${hundredths > 0 && hundredths < 9.95 ? hundredths.toFixed(1) : COUNT.format(hundredths)} %`;
}

/** 0.8 ms, 45 ms, 1.91 s */
export function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${COUNT.format(ms)} ms`;
  return `${(ms / 1000).toFixed(2)} s`;
}

/** 0.04 s, 1.91 s, 12.5 s, 125 s */
export function seconds(ms) {
  const digits = ms < 9_995 ? 2 : ms < 99_950 ? 1 : 0;
  return `${(ms / 1000).toFixed(digits)} s`;
}

/** The highest token of a tokenizer that has only bytes and a few marks. */
const BYTE_TOKEN_MAX = 261;
/** Names of the marks, from token 256 on. */
const MARKS = ["begin", "end", "system", "user", "assistant", "end of message"];
/** Whether all tokens so far were bytes or marks. Once one was not, no token is shown as a byte. */
let tokensAreBytes = true;

/** Tokens as text if they are bytes, else as numbers. */
export function tokensAsText(tokens) {
  tokensAreBytes &&= tokens.every((token) => token <= BYTE_TOKEN_MAX);
  return tokensAreBytes ? bytesAsText(tokens) : tokens.join(" ");
}

function bytesAsText(tokens) {
  let text = "";
  let pending = [];
  const flush = () => {
    text += new TextDecoder().decode(new Uint8Array(pending));
    pending = [];
  };
  for (const token of tokens) {
    if (token < 256) {
      pending.push(token);
    } else {
      flush();
      text += `‹${MARKS[token - 256]}›`;
    }
  }
  flush();
  // A node can begin or end within a character. A line break would end the label.
  return text.replace(/\uFFFD/g, "·").replace(/\n/g, "⏎").replace(/\p{Cc}/gu, "·");
}
