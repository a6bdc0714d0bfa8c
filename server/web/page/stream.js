// Server-sent events, read from a response. `EventSource` can neither send a key in a header nor tell why it was refused.

/** Limit of the length of an event, so that an endless one does not fill the memory. */
const EVENT_CHARS_MAX = 16 << 20;

/** The data of each event of a response, as it arrives. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value.replaceAll("\r", "");
      if (rest.length > EVENT_CHARS_MAX) throw new Error("the server sent an event that is too long");
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data !== "") yield data;
      }
    }
  } finally {
    // A reader that stops early ends the response.
    await reader.cancel().catch(() => {});
  }
}

function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
