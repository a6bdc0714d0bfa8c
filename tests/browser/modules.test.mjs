// The modules of the page that know nothing of the page.

import assert from "node:assert/strict";
import { join } from "node:path";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

const load = (name) => import(pathToFileURL(join(process.env.PAGE, name)).href);
const { longExample, rightAnswer, verdictOn } = await load("book.js");
const { tokensAsText, bytes, percent } = await load("format.js");
const { GpuFigures } = await load("gpu.js");
const { Rate } = await load("rates.js");
const { RunLog, timesAsFast } = await load("run_log.js");
const { bySource } = await load("sources.js");
const { eventsOf } = await load("stream.js");
const { axisOf, segmentsOf } = await load("timeline.js");
const { layOut } = await load("tree_layout.js");

const PAGE_SIZE = 4;

/** A node as the server tells it. */
function node(parent, startPage, pages, token, more = {}) {
  const tokens = pages > 0 ? Array(PAGE_SIZE).fill(token) : [];
  const held = { on_device: true, on_host: false, in_l3: false, moving: false, device_pins: 0, host_pins: 0 };
  return { parent, namespace: "00", start_page: startPage, pages, tokens, ...held, ...more };
}

/** A root with a run and so many branches behind it, of which some are pinned. */
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

test("the book says what the right answer is", () => {
  const prompt = longExample();
  assert.ok(prompt.length > 3500 && prompt.length < 4000, "it fits into what the model was trained on");
  const { text, at } = rightAnswer(prompt);
  assert.ok(prompt.includes(`Row 17: `) && prompt.slice(at).startsWith(`${text}.\n`));
  assert.match(prompt.slice(0, at), /\nRow 17: [a-z]+, kept by $/);
  assert.equal(verdictOn(prompt, `${text}\n`), "right");
  assert.equal(verdictOn(prompt, `${text}e`), "wrong");
  assert.equal(verdictOn(prompt, ""), "wrong");
});

test("other questions have other answers, or none that the book knows", () => {
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

test("a run is as tall as what continues it and stands to its left", () => {
  const { boxes, rows } = layOut(fan(3), PAGE_SIZE, 10);
  const [run, ...branches] = boxes;
  assert.equal(rows, 3);
  assert.equal(run.rows, 3);
  assert.deepEqual(branches.map(({ row }) => row), [0, 1, 2]);
  assert.ok(branches.every(({ left }) => Math.abs(left - run.width) < 1e-9));
});

test("what finds no room is folded and counted, and who is pinned is shown", () => {
  const { boxes, rows } = layOut(fan(40, [33, 39]), PAGE_SIZE, 6);
  const folded = boxes.filter((box) => box.folded);
  assert.equal(rows, 6);
  assert.equal(boxes.filter((box) => box.view?.device_pins > 0).length, 2);
  assert.deepEqual(folded.map((box) => box.folded), [{ nodes: 35, pages: 35, isOpen: false }]);
});

test("what is folded can be opened, level by level, and folded again", () => {
  const tree = fan(40);
  // Each of the branches goes on in two ways.
  for (let branch = 0; branch < 40; branch += 1) {
    tree.push(node(2 + branch, 9, 1, 100 + branch), node(2 + branch, 9, 1, 200 + branch));
  }
  const opened = new Set();
  for (;;) {
    const { boxes, rows, nodes } = layOut(tree, PAGE_SIZE, 6, opened);
    assert.equal(nodes, 121, "however many are drawn, so many there are");
    const hidden = boxes.filter((box) => box.folded && !box.folded.isOpen);
    const drawn = boxes.filter((box) => box.view).length;
    assert.equal(drawn + hidden.reduce((sum, box) => sum + box.folded.nodes, 0), nodes);
    for (const [index, one] of boxes.entries()) {
      for (const other of boxes.slice(index + 1)) assert.ok(!overlap(one, other));
    }
    if (hidden.length === 0) {
      assert.ok(rows > 6, "what is opened takes rows of its own");
      break;
    }
    for (const box of hidden) opened.add(box.key);
  }
  assert.ok(opened.size > 1, "there were several levels");
  const [{ key }] = layOut(tree, PAGE_SIZE, 6).boxes.filter((box) => box.folded);
  assert.ok(opened.has(key), "the first box that was opened keeps its name, and folds it all again");
});

test("a run of several nodes counts as the one box that it is", () => {
  const chain = [node(null, 0, 0, 0), node(0, 0, 1, 1), node(1, 1, 2, 2), node(2, 3, 4, 3)];
  const { boxes, nodes } = layOut(chain, PAGE_SIZE, 9);
  assert.deepEqual([boxes.length, nodes], [1, 1]);
});

test("what is folded behind a run keeps its name when the run is told apart", () => {
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

test("a run in several nodes is one box, unless something tells them apart", () => {
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

test("time in which nobody was there takes little of the axis", () => {
  const early = request(1, "Finished", [0, "Submitted"], [100, "Finished"]);
  const late = request(2, "Finished", [1_000_000, "Submitted"], [1_000_100, "Finished"]);
  const axis = axisOf([late, early], 9_000_000);
  assert.equal(axis(0), 0);
  assert.ok(Math.abs(axis(1_000_100) - 1) < 1e-9);
  assert.ok(axis(1_000_000) - axis(100) < 0.05);
  assert.ok(Math.abs(axis(100) - (1 - axis(1_000_000))) < 1e-9, "both took equally long");
});

test("the state of a living request lasts until now", () => {
  const living = request(1, "Decoding", [0, "Submitted"], [10, "Decoding"]);
  assert.deepEqual(segmentsOf(living, 50), [
    { state: "Submitted", beginUs: 0, endUs: 10 },
    { state: "Decoding", beginUs: 10, endUs: 50 },
  ]);
});

test("a rate forgets what is long ago, and another server's counters", () => {
  const rate = new Rate();
  for (let second = 0; second <= 10; second += 1) rate.add(second * 1e6, second < 5 ? second * 100 : 400);
  assert.equal(rate.perSecond, 0);
  rate.add(11e6, 600);
  assert.equal(rate.perSecond, 100);
  rate.add(1e6, 0);
  assert.equal(rate.perSecond, 0);
});

/** A run of 1,000 prompt tokens. */
function run(firstTokenMs, hits, prompt = "a prompt") {
  const { device = 0, host = 0, l3 = 0 } = hits;
  return { prompt, model: "a model", firstTokenMs, tokens: bySource(1000, device, host, l3) };
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
  assert.equal(add(600, { l3: 990 }, "another prompt"), null);
  for (let again = 0; again < 9; again += 1) assert.equal(add(60, { host: 990 }), 50, "even if run 1 is not shown any more");
  assert.deepEqual(log.all.map(({ number }) => number), [13, 12, 11, 10]);
  assert.equal(add(1000, { device: 100 }), null, "it was computed again");
  assert.equal(add(100, { device: 500 }), 10, "the latest computing counts");
});

test("steps of the tour are ticked off by what happened, over a reload", () => {
  let log = new RunLog();
  assert.deepEqual([log.steps, log.isTourOver], [[false, false, false], false]);
  log.add(run(3000, {}));
  assert.deepEqual(log.steps, [true, false, false]);
  log.add(run(3000, { device: 500 }));
  assert.deepEqual(log.steps, [true, false, false], "half of a prompt is no step");
  log = new RunLog(JSON.parse(JSON.stringify(log)));
  log.add(run(600, { l3: 990 }));
  assert.deepEqual(log.steps, [true, false, true]);
  log.add(run(30, { device: 990 }));
  assert.deepEqual([log.steps, log.isTourOver], [[true, true, true], false], "the last tick is seen");
  log.add(run(30, { device: 990 }));
  assert.equal(log.isTourOver, true);
  assert.equal(timesAsFast(log.latest), 100);
});

/** A view of a server with a GPU, so many seconds after it started. */
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

test("nothing is said of a GPU that is not there, and trouble is", () => {
  const { gpu: _, ...withoutGpu } = gpuView(1);
  assert.deepEqual(new GpuFigures().after(withoutGpu), []);
  const trouble = (more) => new GpuFigures().after(gpuView(1, more)).slice(4).map(({ value, isTrouble }) => [value, isTrouble]);
  assert.deepEqual(trouble({ pages_compared: 9 }), [["9, 0 corrupt", false]]);
  assert.deepEqual(trouble({ pages_compared: 9, pages_corrupt: 1, failed: 2 }), [["9, 1 corrupt", true], ["2", true]]);
});

test("events are found however their bytes are cut", async () => {
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
});

// This one is last: a token that is no byte is remembered.
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

/** A tree drawn from a seed: breadth first, as the server tells it. */
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
