// The modules of the page that do not depend on the document.

import assert from "node:assert/strict";
import { join } from "node:path";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

const load = (name) => import(pathToFileURL(join(process.env.PAGE, name)).href);
const { EXAMPLE_QUESTION, MORE_QUESTIONS, exampleBook, promptOf, rightAnswer, verdictOn } = await load("book.js");
const { tokensAsText, bytes, percent, seconds, several } = await load("format.js");
const { GpuFigures } = await load("gpu.js");
const { chartsOf } = await load("history.js");
const { Rate } = await load("rates.js");
const { RunLog, sameness, timesAsFast } = await load("run_log.js");
const { bySource } = await load("sources.js");
const { guideOf } = await load("steps.js");
const { eventsOf } = await load("stream.js");
const { TimeAxis, segmentsOf } = await load("timeline.js");
const { layOut } = await load("tree_layout.js");

const PAGE_SIZE = 4;

/** A node of a view. */
function node(parent, startPage, pages, token, more = {}) {
  const tokens = pages > 0 ? Array(PAGE_SIZE).fill(token) : [];
  const held = { on_device: true, on_host: false, in_l3: false, moving: false, device_pins: 0, host_pins: 0 };
  return { parent, namespace: "00", start_page: startPage, pages, tokens, ...held, ...more };
}

/** A root, a run and branches behind it, some of them pinned. */
function fan(branches, pinned = []) {
  const tree = [node(null, 0, 0, 0), node(0, 0, 8, 1)];
  for (let branch = 0; branch < branches; branch += 1) {
    tree.push(node(1, 8, 1, 10 + branch, { device_pins: pinned.includes(branch) ? 1 : 0 }));
  }
  return tree;
}

function request(id, state, ...moments) {
  return { id, state, timeline: moments.map(([at_us, state]) => ({ at_us, state })) };
}

test("the right answer to the example is in its book", () => {
  const prompt = promptOf(exampleBook(), EXAMPLE_QUESTION);
  assert.ok(prompt.length > 3500 && prompt.length < 4000, "the model was trained on this length");
  const { text, at } = rightAnswer(prompt);
  assert.ok(prompt.includes(`Row 17: `) && prompt.slice(at).startsWith(`${text}.\n`));
  assert.match(prompt.slice(0, at), /\nRow 17: [a-z]+, kept by $/);
  assert.equal(verdictOn(prompt, `${text}\n`), "right");
  assert.equal(verdictOn(prompt, `${text}e`), "wrong");
  assert.equal(verdictOn(prompt, ""), "wrong");
  for (const question of MORE_QUESTIONS) assert.ok(rightAnswer(promptOf(exampleBook(), question)), question);
});

test("a copy of the example begins with another line and has the same answer", () => {
  const [one, other] = [1, 12345].map((copy) => exampleBook(copy));
  assert.ok(one.endsWith(exampleBook()) && other.endsWith(exampleBook()));
  assert.notEqual(one.slice(0, 12), other.slice(0, 12));
  assert.equal(rightAnswer(promptOf(other, EXAMPLE_QUESTION)).text, rightAnswer(promptOf(exampleBook(), EXAMPLE_QUESTION)).text);
});

test("the prompt is the book and, on a line below it, the question", () => {
  assert.equal(promptOf("a book\n", "Who?"), "a book\nWho?\n");
  assert.equal(promptOf("a book", " Who? "), "a book\nWho?\n");
  assert.equal(promptOf("", "Who?"), "Who?\n");
  assert.equal(promptOf("a book", " "), "a book");
});

test("other questions have other answers, or none in the book", () => {
  const book = "Row 7: figs, kept by Ada Finch.\nRow 17: flax, kept by Otto Reed.\n";
  const answers = {
    "What grows in row 7?": "figs",
    "Which row does Otto Reed keep?": "17",
    "Where does Ada Finch work?": "7",
    "By whom is row 17 kept?": "Otto Reed",
  };
  for (const [question, answer] of Object.entries(answers)) {
    assert.equal(rightAnswer(`${book}${question}\n`)?.text, answer, question);
  }
  assert.equal(verdictOn(`${book}Who keeps row 8?`, "Ada Finch"), "", "there is no such row");
  assert.equal(verdictOn(`${book}${book}Who keeps row 7?`, "Ada Finch"), "", "there are two such rows");
  assert.equal(verdictOn("Once upon a time", "there was"), "");
});

test("a run is as tall as its continuations and on their left", () => {
  const { boxes, rows } = layOut(fan(3), PAGE_SIZE, 10);
  const [run, ...branches] = boxes;
  assert.equal(rows, 3);
  assert.equal(run.rows, 3);
  assert.deepEqual(branches.map(({ row }) => row), [0, 1, 2]);
  assert.ok(branches.every(({ left }) => Math.abs(left - run.width) < 1e-9));
});

test("branches without space are folded and counted, pinned ones are drawn", () => {
  const { boxes, rows } = layOut(fan(40, [33, 39]), PAGE_SIZE, 6);
  const folded = boxes.filter((box) => box.folded);
  assert.equal(rows, 6);
  assert.equal(boxes.filter((box) => box.view?.device_pins > 0).length, 2);
  assert.deepEqual(folded.map((box) => box.folded), [{ nodes: 35, pages: 35, isOpen: false }]);
});

test("folded branches unfold level by level, and fold again", () => {
  const tree = fan(40);
  // Each branch has two continuations.
  for (let branch = 0; branch < 40; branch += 1) {
    tree.push(node(2 + branch, 9, 1, 100 + branch), node(2 + branch, 9, 1, 200 + branch));
  }
  const opened = new Set();
  for (;;) {
    const { boxes, rows, nodes } = layOut(tree, PAGE_SIZE, 6, opened);
    assert.equal(nodes, 121, "the number of nodes does not depend on what is drawn");
    const hidden = boxes.filter((box) => box.folded && !box.folded.isOpen);
    const drawn = boxes.filter((box) => box.view).length;
    assert.equal(drawn + hidden.reduce((sum, box) => sum + box.folded.nodes, 0), nodes);
    for (const [index, one] of boxes.entries()) {
      for (const other of boxes.slice(index + 1)) assert.ok(!overlap(one, other));
    }
    if (hidden.length === 0) {
      assert.ok(rows > 6, "unfolded branches take additional rows");
      break;
    }
    for (const box of hidden) opened.add(box.key);
  }
  assert.ok(opened.size > 1, "there were several levels");
  const [{ key }] = layOut(tree, PAGE_SIZE, 6).boxes.filter((box) => box.folded);
  assert.ok(opened.has(key), "the first box that was opened keeps its key, and folds all again");
});

test("a run of several nodes counts as one box", () => {
  const chain = [node(null, 0, 0, 0), node(0, 0, 1, 1), node(1, 1, 2, 2), node(2, 3, 4, 3)];
  const { boxes, nodes } = layOut(chain, PAGE_SIZE, 9);
  assert.deepEqual([boxes.length, nodes], [1, 1]);
});

test("a folded box behind a run keeps its key when the run is separated", () => {
  const run = (pins) => [node(null, 0, 0, 0), node(0, 0, 1, 1, { device_pins: pins }), node(1, 1, 2, 2)];
  const branches = Array.from({ length: 9 }, (_, branch) => node(2, 3, 1, 10 + branch));
  const foldOf = (tree) => layOut(tree, PAGE_SIZE, 3).boxes.find((box) => box.folded).key;
  assert.equal(foldOf([...run(0), ...branches]), foldOf([...run(1), ...branches]));
});

test("boxes never take more rows than there are and never overlap", () => {
  for (let seed = 1; seed < 200; seed += 1) {
    const { boxes, rows } = layOut(randomTree(seed), PAGE_SIZE, 1 + (seed % 12));
    assert.ok(rows <= 1 + (seed % 12), `seed ${seed}`);
    assert.equal(new Set(boxes.map(({ key }) => key)).size, boxes.length, `keys of seed ${seed}`);
    for (const [index, one] of boxes.entries()) {
      assert.ok(one.left + one.width <= 1 + 1e-9, `seed ${seed}`);
      for (const other of boxes.slice(index + 1)) assert.ok(!overlap(one, other), `seed ${seed}`);
    }
  }
});

test("a run of several nodes is one box, unless the nodes differ", () => {
  const chain = [node(null, 0, 0, 0), node(0, 0, 1, 1), node(1, 1, 2, 2), node(2, 3, 4, 3, { device_pins: 1 })];
  const { boxes } = layOut([...chain, node(3, 7, 1, 4), node(3, 7, 1, 5)], PAGE_SIZE, 9);
  assert.deepEqual(boxes.map(({ view }) => [view.pages, view.nodes ?? 1]), [[3, 2], [4, 1], [1, 1], [1, 1]]);
  assert.deepEqual(boxes[0].view.tokens, [1, 1, 1, 1, 2, 2, 2, 2]);
  const { boxes: folded } = layOut(chain, PAGE_SIZE, 1);
  assert.equal(folded.length, 2);
});

test("a node that is split keeps its key", () => {
  const whole = layOut([node(null, 0, 0, 0), node(0, 0, 8, 1)], PAGE_SIZE, 5);
  const split = layOut(fan(2), PAGE_SIZE, 5);
  assert.equal(split.boxes[0].key, whole.boxes[0].key);
});

test("time without requests takes little of the axis", () => {
  const early = request(1, "Finished", [0, "Submitted"], [100, "Finished"]);
  const late = request(2, "Finished", [1_000_000, "Submitted"], [1_000_100, "Finished"]);
  const axis = new TimeAxis([late, early], 9_000_000);
  assert.equal(axis.at(0), 0);
  assert.ok(Math.abs(axis.at(1_000_100) - 1) < 1e-9);
  assert.ok(axis.at(1_000_000) - axis.at(100) < 0.05);
  assert.ok(Math.abs(axis.at(100) - (1 - axis.at(1_000_000))) < 1e-9, "both took equally long");
});

test("the ticks of the axis are round times without the cuts", () => {
  const early = request(1, "Finished", [0, "Submitted"], [2_000_000, "Finished"]);
  const late = request(2, "Finished", [60_000_000, "Submitted"], [64_000_000, "Finished"]);
  const axis = new TimeAxis([early, late], 90_000_000);
  assert.deepEqual(axis.ticks(5).map(({ ms }) => ms), [0, 2000, 4000, 6000]);
  const places = axis.ticks(5).map(({ place }) => place);
  assert.equal(places[0], 0);
  assert.ok(Math.abs(places[2] - axis.at(62_000_000)) < 1e-9 && Math.abs(places[3] - 1) < 1e-9);
  assert.deepEqual(new TimeAxis([], 0).ticks(5), []);
  for (let busyUs = 1; busyUs < 1e12; busyUs *= 3) {
    const ticks = new TimeAxis([request(1, "Finished", [0, "Submitted"], [busyUs, "Finished"])], 0).ticks(5);
    assert.ok(ticks.length >= 2 && ticks.length <= 6, `${ticks.length} ticks in ${busyUs} us`);
  }
});

test("the state of a running request lasts until now", () => {
  const living = request(1, "Decoding", [0, "Submitted"], [10, "Decoding"]);
  assert.deepEqual(segmentsOf(living, 50), [
    { state: "Submitted", beginUs: 0, endUs: 10 },
    { state: "Decoding", beginUs: 10, endUs: 50 },
  ]);
});

test("a rate forgets old samples, and the counters of another server", () => {
  const rate = new Rate();
  for (let second = 0; second <= 10; second += 1) rate.add(second * 1e6, second < 5 ? second * 100 : 400);
  assert.equal(rate.perSecond, 0);
  rate.add(11e6, 600);
  assert.equal(rate.perSecond, 100);
  rate.add(1e6, 0);
  assert.equal(rate.perSecond, 0);
});

/** A run of 1,000 prompt tokens. */
function run(firstTokenMs, hits, more = {}) {
  const { device = 0, host = 0, l3 = 0 } = hits;
  const settings = { maxTokens: 24, temperature: 0 };
  const about = { prompt: "a prompt", model: "a model", settings, answer: "an answer", instance: "one" };
  return { ...about, firstTokenMs, tokens: bySource(1000, device, host, l3), ...more };
}

test("a run is compared with computing its prompt, not with the last hit", () => {
  const log = new RunLog();
  const add = (...about) => {
    log.add(run(...about));
    return timesAsFast(log.latest);
  };
  assert.equal(add(3000, {}), null, "computing is compared with nothing");
  assert.equal(add(30, { device: 990 }), 100);
  assert.equal(add(600, { l3: 990 }), 5);
  assert.equal(add(600, { l3: 990 }, { prompt: "another prompt" }), null);
  for (let again = 0; again < 9; again += 1) assert.equal(add(60, { host: 990 }), 50, "even if run 1 is not shown any more");
  assert.deepEqual(log.all.map(({ number }) => number), [13, 12, 11, 10, 9, 8]);
  assert.equal(add(1000, { device: 100 }), null, "it was computed again");
  assert.equal(add(100, { device: 500 }), 10, "the latest computing counts");
});

test("an answer is compared with the first one that was computed", () => {
  const log = new RunLog();
  const add = (...about) => {
    log.add(run(...about));
    return sameness(log.latest);
  };
  assert.equal(add(30, { device: 990 }), "", "it was never computed here");
  assert.equal(add(3000, {}, { answer: "Ada" }), "", "this is the one");
  assert.equal(add(30, { device: 990 }, { answer: "Ada" }), "same");
  assert.equal(add(30, { l3: 990 }, { answer: "Eve" }), "different");
  assert.equal(add(3000, {}, { answer: "Eve" }), "different", "computed again");
  assert.equal(add(30, { host: 990 }, { answer: "Ada" }), "same", "the first one counts");
  assert.equal(add(30, { device: 990 }, { answer: "A", settings: { maxTokens: 1, temperature: 0 } }), "", "a shorter answer");
  const sampled = { settings: { maxTokens: 24, temperature: 1 } };
  assert.equal(add(3000, {}, sampled), "");
  assert.equal(add(30, { device: 990 }, { ...sampled, answer: "Eve" }), "", "samples differ");
});

/** A server on which each step is possible. */
const SERVER = { isLocked: false, instance: "one", hasHost: true, hasL3: true, isOnDisk: true, isCopying: false };

test("the guide goes from step to step, over a reload", () => {
  let log = new RunLog();
  const guide = (server = SERVER) => guideOf(log, server, "a prompt");
  const states = () => guide().steps.map(({ state }) => state);
  const next = (server) => guide(server).next.name;
  assert.deepEqual([states(), next()], [["next", "later", "later", "later", "later"], "send"]);
  log.add(run(3000, {}));
  assert.deepEqual([states(), next()], [["done", "next", "later", "later", "later"], "send-again"]);
  log.add(run(3000, { device: 500 }));
  assert.deepEqual(states(), ["done", "next", "later", "later", "later"], "half of a prompt completes no step");
  log.add(run(30, { device: 990 }));
  assert.deepEqual([states(), next()], [["done", "done", "next", "later", "later"], "device"]);
  assert.match(guide({ ...SERVER, isCopying: true }).next.hint, /Wait/);
  log.forget("device");
  log = new RunLog(JSON.parse(JSON.stringify(log)));
  assert.equal(next(), "send-again");
  log.add(run(60, { host: 990 }));
  assert.deepEqual([states(), next()], [["done", "done", "done", "next", "later"], "device-and-host"]);
  log.forget("device");
  assert.equal(next(), "device-and-host", "the host still has it");
  log.forget("device-and-host");
  log.forget("device");
  assert.equal(next(), "send-again");
  log.add(run(600, { l3: 990 }));
  assert.deepEqual([states(), next()], [["done", "done", "done", "done", "next"], "restart"]);
  assert.equal(guide().next.isPossible, false);
  assert.equal(next({ ...SERVER, instance: "two" }), "send-again");
  log.add(run(600, { l3: 990 }, { instance: "two" }));
  assert.deepEqual([states(), next()], [["done", "done", "done", "done", "done"], "over"]);
  log.restartGuide();
  assert.deepEqual([states(), next()], [["next", "later", "later", "later", "later"], "new-example"], "the book is cached");
  assert.equal(guideOf(log, SERVER, "a copy").next.name, "send");
});

test("steps can be taken in another order", () => {
  const log = new RunLog();
  log.add(run(30, { device: 990 }));
  assert.equal(guideOf(log, SERVER, "a prompt").next.name, "new-example", "nothing had to be computed");
  log.add(run(3000, {}));
  log.forget("device-and-host");
  assert.match(guideOf(log, SERVER, "a prompt").next.hint, /L3/, "the host is empty, too");
  log.add(run(600, { l3: 990 }));
  const { steps, next } = guideOf(log, SERVER, "a prompt");
  assert.deepEqual([steps.map(({ state }) => state), next.name], [["done", "done", "next", "done", "later"], "device"]);
});

test("steps that a server cannot show are left out, and say why", () => {
  const log = new RunLog();
  log.add(run(3000, {}));
  log.add(run(30, { device: 990 }));
  const absent = (server) => guideOf(log, { ...SERVER, ...server }, "a prompt").steps.flatMap(({ obstacle }) => obstacle ?? []);
  assert.deepEqual(absent({}), []);
  assert.deepEqual(absent({ hasHost: false }), ["this server has no host tier"]);
  assert.deepEqual(absent({ isOnDisk: false }), ["this server has no L3 on disk"]);
  assert.deepEqual(absent({ hasL3: false, isOnDisk: false }), ["this server has no L3", "this server has no L3 on disk"]);
  assert.equal(guideOf(log, { ...SERVER, hasHost: false, hasL3: false }, "a prompt").next.name, "over");
  assert.deepEqual(absent({ isLocked: true }), ["needs the operator's key", "needs the operator's key"]);
  log.add(run(600, { l3: 990 }, { instance: null }));
  assert.ok("restart" in log.steps, "without the key only a restart empties device and host");
});

test("the history shows sources as shares and errors as numbers", () => {
  const none = [0, 0, 0, 0];
  const history = {
    bucket_s: 5,
    prompt_tokens: [0, 100, 200, 0],
    device: [0, 50, 0, 0],
    host: [0, 0, 100, 0],
    l3: [0, 0, 50, 0],
    busy: [0, 0, 3, 7],
    client_errors: [1, 0, 0, 0],
    server_errors: [0, 0, 0, 1],
  };
  const [hits, errors] = chartsOf(history);
  assert.deepEqual(hits.series.map(({ label, value }) => `${label} ${value}`), ["device 17 %", "host 33 %", "L3 17 %", "computed 33 %"]);
  assert.deepEqual(hits.bars.map(({ parts }) => parts.map(({ share }) => share)), [none, [0.5, 0, 0, 0.5], [0, 0.5, 0.25, 0.25], none]);
  assert.equal(hits.summary, "300 prompt tokens: device 17 %, host 33 %, L3 17 %, computed 33 %");
  assert.equal(errors.summary, "5xx: 1 request, other 4xx: 1 request, 429: 10 requests");
  assert.deepEqual([errors.top, errors.bars[3].parts.map(({ share }) => share)], ["8 requests", [0.125, 0, 0.875]]);
  const quiet = { ...history, prompt_tokens: none, device: none, host: none, l3: none, busy: none, server_errors: none };
  assert.deepEqual(chartsOf(quiet).map(({ top }) => top), ["100 %", "4 requests"]);
  assert.deepEqual(chartsOf(quiet)[0].series.map(({ value }) => value), ["–", "–", "–", "–"]);
});

/** A view of a server with a GPU, `second` seconds after its start. */
function gpuView(second, more = {}) {
  const link = { bytes: 0, busy_us: 0, by_kernel: 0, by_batch: 0, failed: 0, pages_compared: 0, pages_corrupt: 0 };
  const toDevice = { ...link, bytes: second * 3 * 2 ** 30, busy_us: second * 250_000, by_kernel: 8, by_batch: 1 };
  const gpu = { name: "A GPU", memory_bytes: 140 * 2 ** 30, memory_used_bytes: 100 * 2 ** 30 };
  return {
    now_us: second * 1e6,
    figures: { steps: { busy_us: second * 800_000, model_us: second * 780_000 } },
    gpu: { ...gpu, to_device: { ...toDevice, ...more }, to_host: link },
  };
}

test("the speeds of a GPU's link and its waits are those of the last seconds", () => {
  const figures = new GpuFigures();
  figures.after(gpuView(1));
  const said = figures.after(gpuView(2));
  assert.deepEqual(said.map(({ name, value }) => `${name}: ${value}`), [
    "GPU memory: 100 GiB of 140 GiB",
    "GPU waits: 2.5 %",
    "host to GPU: 3.0 GiB/s",
    "GPU to host: 0 B/s",
  ]);
  assert.match(said[2].hint, /busy 25 % of the time; 6.0 GiB so far, 8 parts by kernel and 1 by copy engines/);
});

test("a GPU has figures only where there is one, and its failures are shown", () => {
  const { gpu: _, ...withoutGpu } = gpuView(1);
  assert.deepEqual(new GpuFigures().after(withoutGpu), []);
  const trouble = (more) => new GpuFigures().after(gpuView(1, more)).slice(4).map(({ value, isTrouble }) => [value, isTrouble]);
  assert.deepEqual(trouble({ pages_compared: 9 }), [["9 pages, 0 corrupt", false]]);
  assert.deepEqual(trouble({ pages_compared: 9, pages_corrupt: 1, failed: 2 }), [["9 pages, 1 corrupt", true], ["2 copies", true]]);
});

test("events are read however their bytes are split", async () => {
  const text = 'data: {"é": 1}\n\n: nothing\n\ndata: a\ndata: b\r\n\r\ndata: [DONE]\n\n';
  for (const size of [1, 2, 3, 7, 100]) {
    const seen = [];
    for await (const data of eventsOf(new Response(inPieces(new TextEncoder().encode(text), size)))) seen.push(data);
    assert.deepEqual(seen, ['{"é": 1}', "a\nb", "[DONE]"], `pieces of ${size}`);
  }
});

test("numbers are short and have a unit", () => {
  assert.equal(bytes(1536), "1.5 KiB");
  assert.equal(bytes(256 << 20), "256 MiB");
  assert.equal(percent(0.0123), "1.2 %");
  assert.equal(percent(1), "100 %");
  assert.deepEqual([40, 1910, 12_500, 125_000].map(seconds), ["0.04 s", "1.91 s", "12.5 s", "125 s"]);
  assert.deepEqual([1, 2].map((number) => several(number, "copy", "copies")), ["1 copy", "2 copies"]);
});

// This test is last, because the module remembers a token that is no byte.
test("tokens are text as long as all of them are bytes", () => {
  assert.equal(tokensAsText([256, ...Buffer.from("a\né")]), "‹begin›a⏎é");
  assert.equal(tokensAsText([0xc3]), "·");
  assert.equal(tokensAsText([1000, 65]), "1000 65");
  assert.equal(tokensAsText([65]), "65");
});

function overlap(one, other) {
  const across = one.left < other.left + other.width - 1e-9 && other.left < one.left + one.width - 1e-9;
  return across && one.row < other.row + other.rows && other.row < one.row + one.rows;
}

function inPieces(whole, size) {
  return new ReadableStream({
    start(controller) {
      for (let begin = 0; begin < whole.length; begin += size) controller.enqueue(whole.slice(begin, begin + size));
      controller.close();
    },
  });
}

/** A random tree from a seed: breadth first, as in a view. */
function randomTree(seed) {
  let state = seed;
  const random = (below) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
  const tree = Array.from({ length: 1 + random(3) }, (_, root) => ({ ...node(null, 0, 0, 0), namespace: `${root}` }));
  for (let parent = 0; parent < tree.length && tree.length < 120; parent += 1) {
    for (let child = random(6); child > 0; child -= 1) {
      const pins = random(8) === 0 ? 1 : 0;
      tree.push(node(parent, 1, 1 + random(300), tree.length, { device_pins: pins }));
    }
  }
  return tree;
}
