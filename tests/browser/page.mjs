// A newcomer's first minutes with the page, step by step as its guide says: a prompt is computed, found on the device, on
// the host, in L3, and in L3 after a restart of the server. Prints what it sees. A difference ends it with an error and a
// screenshot.

import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { Server, freePort } from "./server.mjs";

const { CHROMIUM, MODULES, SCREENSHOT, TERRACE } = process.env;
const { chromium } = createRequire(join(MODULES, "here.js"))("playwright-core");

/** The server may be slow on a busy machine; nothing here is about speed. */
const PATIENCE_MS = 180_000;
/** Typed before the example. If data became markup, this would be an element. */
const MARKUP = '<i id="markup">typed</i> ';

/** Completions that the server takes at a time. */
const REQUESTS_MAX = 8;
const SETTINGS = ["--requests-max", String(REQUESTS_MAX)];

const complaints = [];
let serverIsThere = true;
let isLocked = false;
let runs = 0;

function saw(what) {
  console.log(`saw: ${what}`);
}

/** A page that collects all complaints of the browser. */
async function openPage(browser, address, prepare = async () => {}) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 800 } });
  page.setDefaultTimeout(PATIENCE_MS);
  page.on("pageerror", (error) => complaints.push(`exception: ${error.message}`));
  page.on("console", (message) => {
    const unreachable = message.text().includes("net::ERR_") && !serverIsThere;
    const refused = /status of 40[13]/.test(message.text()) && isLocked;
    if (message.type() === "error" && !unreachable && !refused) complaints.push(`console: ${message.text()}`);
  });
  await page.addInitScript(() => {
    document.addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) =>
      console.error(`security policy: ${violatedDirective} forbids ${blockedURI}`),
    );
  });
  await prepare(page);
  const response = await page.goto(address);
  assert.equal(response.status(), 200);
  const policy = response.headers()["content-security-policy"] ?? "";
  assert.match(policy, /default-src/, "the page comes with a security policy");
  assert.doesNotMatch(policy, /unsafe-(inline|eval)/, "the security policy forbids inline scripts");
  return page;
}

async function typePrompt(page) {
  assert.equal(await page.inputValue("#question"), "Who keeps row 17?", "the question is filled in");
  assert.ok((await page.inputValue("#book")).length > 3000, "the book is filled in");
  await page.fill("#book", "");
  await page.click("#long-example");
  await page.locator("#book").press("Control+Home");
  await page.locator("#book").pressSequentially(MARKUP);
  await page.fill("#max-tokens", "24");
}

/** Sends the form, by default with its button; returns where the KV of the prompt came from. */
async function send(page, button = "#send") {
  runs += 1;
  await page.click(button);
  await page.waitForSelector(`#kv-source[data-run="${runs}"]`);
  await page.waitForSelector("#send:enabled");
  const source = page.locator("#kv-source");
  const answer = await page.locator("#answer").textContent();
  assert.notEqual(answer, "", "there is an answer");
  saw(`run ${runs}: ${await source.textContent()}`);
  assert.equal(await source.getAttribute("data-verdict"), "right", answer);
  const tokens = {};
  for (const name of ["device", "host", "l3", "computed", "first-token-ms"]) {
    tokens[name] = Number(await source.getAttribute(`data-${name}`));
  }
  return { ...tokens, answer, sameness: await source.getAttribute("data-sameness") };
}

async function tiersAndTreeAppear(page) {
  for (const tier of ["device", "host", "l3"]) {
    const text = await page.locator(`#tiers .tier.${tier} .tokens`).textContent();
    assert.match(text, /^[\d.]+K of [\d.]+[KM] tokens$/, `the ${tier} tier holds tokens`);
    saw(`${tier}: ${text}`);
  }
  const nodes = page.locator("#tree .node");
  const texts = await nodes.locator(".text").allTextContents();
  assert.ok(texts.some((text) => text.includes(MARKUP.trim())), `the prompt is in the tree: ${texts}`);
  assert.equal(await page.locator("#markup").count(), 0, "what was typed is text, not markup");
  const summary = await page.locator("#tree-summary").textContent();
  assert.equal(Number(summary.match(/^\d+/)[0]), await nodes.count(), `as many nodes as are drawn: ${summary}`);
  saw(`tree: ${summary}`);
  // The page draws the end of a request a moment after its answer.
  await page.locator("#requests tbody .status").first().filter({ hasText: "finished" }).waitFor();
  assert.ok((await page.locator("#requests .life .Decoding").count()) >= 2, "both lives are drawn");
}

/** Each number has a unit, and the requests have headers and a scale in seconds. */
async function numbersHaveUnits(page) {
  const figures = await page.locator("#figures > div:not(.wide)").evaluateAll((all) =>
    all.map((figure) => [figure.querySelector("dt").innerText, figure.querySelector("dd").innerText]),
  );
  assert.equal(figures.length, 5);
  for (const [name, value] of figures) {
    assert.match(value, /^[\d.,]+(, [\d.,]+ (tokens\/s|requests)| m?s [\d.,]+ m?s| % of step time)$/, `${name}: ${value}`);
  }
  assert.ok(figures.some(([name]) => name === "overhead: scheduler, engine"), "the overhead is explained");
  for (const rate of await page.locator(".flow .rate").allInnerTexts()) {
    assert.match(rate, /^([\d.,]+K? pages?|[\d.,]+ pages? in flight|[\d.,]+ pages?\/s)$/);
  }
  const headers = await page.locator("#requests th").evaluateAll((all) => all.map(({ firstChild }) => firstChild.textContent));
  assert.deepEqual(headers, ["request", "state", "prompt + new tokens", "KV from", "total time", "seconds, without idle time"]);
  const took = await page.locator("#requests tbody .took").allInnerTexts();
  assert.ok(took.length >= 2 && took.every((text) => /^\d+(\.\d+)? s$/.test(text)), `seconds: ${took}`);
  const ticks = await page.locator("#time-axis span").allInnerTexts();
  assert.ok(ticks.length >= 2 && ticks.every((text) => /^\d+(\.\d+)? s$/.test(text)), `the scale: ${ticks}`);
  assert.equal(ticks[0], "0.00 s");
  saw(`the scale of the requests: ${ticks.join(", ")}`);
}

/** The history shows prompts, a refused request and a wrong one; a failure is shown on a page with a view that has one. */
async function showsHistory(page) {
  const legend = (chart) => page.locator(`#history .${chart} .legend`).innerText();
  assert.match(await legend("hits"), /device: [\d.]+ %\s+host: 0 %\s+L3: 0 %\s+computed: [\d.]+ %/);
  assert.match(await legend("errors"), /5xx: 0 requests\s+other 4xx: 0 requests\s+429: 0 requests/);
  const headers = { "Content-Type": "application/json" };
  const statuses = [];
  for (const body of [{ prompt: "x", n: 1 + REQUESTS_MAX }, { prompt: 7.5 }]) {
    const response = await fetch(`${page.url()}v1/completions`, { method: "POST", headers, body: JSON.stringify(body) });
    statuses.push(response.status);
  }
  assert.deepEqual(statuses, [429, 400]);
  await page.locator("#history .errors .sample.busy").filter({ hasText: "429: 1 request" }).waitFor();
  await page.locator("#history .errors .sample.client_errors").filter({ hasText: "other 4xx: 1 request" }).waitFor();
  const height = (name) =>
    page.locator(`#history .errors .bar i.${name}`).evaluateAll((all) => Math.max(...all.map((bar) => bar.getBoundingClientRect().height)));
  assert.ok((await height("busy")) > 5 && (await height("client_errors")) > 5, "both are drawn");
  assert.equal(await height("server_errors"), 0);
  const label = await page.locator("#history .errors .bars").getAttribute("aria-label");
  assert.match(label, /from 5 min ago until now\..* 429: 1 request$/);

  const view = await viewOf(page.url());
  view.history.server_errors[59] = 2;
  const told = await openTold(page.context().browser(), page.url(), view);
  await told.locator("#history .errors .sample.server_errors").filter({ hasText: "5xx: 2 requests" }).waitFor();
  const bar = await told.locator("#history .errors .bar:last-child .server_errors").boundingBox();
  assert.ok(bar.height > 10, "the failures are drawn");
  await told.close();
  saw(`history: ${label}`);
}

/** An answer that is wrong by the user's own book, the same from each tier, is blamed on the model and not on the cache. */
async function judgesAnswers(browser, address) {
  const answers = [["Ada Finch", {}], ["Ada Finch", { device: 32 }], ["Eve Wren", { host: 32 }]];
  let place = 0;
  const told = await openPage(browser, address, (page) =>
    page.route("**/v1/completions", (route) => {
      const [text, cached_by_tier] = answers[place++];
      const usage = { prompt_tokens: 33, prompt_tokens_details: { cached_by_tier } };
      const chunks = [{ choices: [{ text }] }, { choices: [], usage }].map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`);
      return route.fulfill({ contentType: "text/event-stream", body: `${chunks.join("")}data: [DONE]\n\n` });
    }),
  );
  await told.waitForFunction(() => document.querySelector("#about-model").innerText.includes("%"));
  assert.match(await told.locator("#about-model").innerText(), /cannot chat.*4,096 tokens: keepers [\d.]+\s%/s);
  await told.fill("#book", "Row 17: sorghum, kept by Xzyq Vrrt.\n");
  const texts = [];
  for (const run of [1, 2, 3]) {
    await told.click("#send");
    await told.waitForSelector(`#kv-source[data-run="${run}"]`);
    texts.push(await told.locator("#kv-source").innerText());
  }
  assert.match(texts[0], /The answer is wrong\. .*may misread unfamiliar names.* Send it again: the same answer from every tier/);
  assert.match(texts[1], /may misread unfamiliar names.* The cache is right: it is the same answer as when computed \(run 1\)/);
  assert.match(texts[2], /It is not the answer that was computed \(run 1\): the KV may be wrong/);
  assert.deepEqual(await told.locator("#runs .sameness").allInnerTexts(), ["different", "same", ""]);
  await told.close();
  saw("a wrong answer is blamed on the model if it is the same as when computed, else on the KV");
}

/** Position and size of the parts of the page, for a wide and a narrow window. */
async function boxesOf(page) {
  const boxes = {};
  for (const width of [1280, 360]) {
    await page.setViewportSize({ width, height: 800 });
    // Each view may draw anew; two frames later everything is in its place.
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
    const parts = "header, header > *, #connection, #figures > *, #guide, #steps > *, #next, main > *, main > * > *, .tier, .chart";
    boxes[width] = await page.locator(parts).evaluateAll((all) =>
      all.map((part) => {
        const { x, y, width, height } = part.getBoundingClientRect();
        return `${part.id || part.className || part.tagName}: ${[x, y, width, height].map(Math.round).join(" ")}`;
      }),
    );
  }
  await page.setViewportSize({ width: 1280, height: 800 });
  return boxes;
}

/** In a wide but low window panels scroll; nothing overlaps what is next to it. */
async function fitsInLowWindows(page) {
  await page.setViewportSize({ width: 1280, height: 660 });
  const squeezed = await page.evaluate(() =>
    [...document.querySelectorAll("#ask > *")].filter((it) => it.scrollHeight > it.clientHeight + 1).map((it) => it.id),
  );
  assert.deepEqual(squeezed.filter((id) => id !== "answer"), [], "what does not fit is scrolled to");
  await page.setViewportSize({ width: 1280, height: 800 });
  saw("it fits in a low window");
}

/** No part is wider than the window. */
async function fitsInWidth(page, width) {
  await page.setViewportSize({ width, height: 900 });
  const tooWide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  assert.ok(tooWide <= 0, `at ${width} pixels the page is ${tooWide} pixels too wide`);
}

async function fitsOnPhones(page) {
  for (const width of [1600, 1260, 1000, 901, 760, 390, 360]) await fitsInWidth(page, width);
  assert.deepEqual(await arrowsOf(page), { load_backs: "up", write_backs: "down", prefetches: "up", backups: "down" });
  await page.setViewportSize({ width: 1280, height: 800 });
  saw("it fits from 360 to 1600 pixels");
}

/** Where the head of each flow's arrow is: the tiers stand beside each other, or on phones below each other. */
function arrowsOf(page) {
  return page.evaluate(() => {
    const colours = { up: "borderBottomColor", down: "borderTopColor", left: "borderRightColor", right: "borderLeftColor" };
    const flows = [...document.querySelectorAll(".flow")].map((flow) => {
      const head = getComputedStyle(flow.querySelector(".track"), "::after");
      const ways = Object.keys(colours).filter((way) => head[colours[way]] !== "rgba(0, 0, 0, 0)");
      return [flow.dataset.field, ways.join(" and ")];
    });
    return Object.fromEntries(flows);
  });
}

async function showsTimes(page) {
  for (const what of ["first-token", "inter-token"]) {
    const [half, most] = await Promise.all(["p50", "p99"].map((share) => page.locator(`#${what}-${share}`).innerText()));
    assert.match(half, /^[\d.,]+ m?s$/, `the ${what} of half of the answers: ${half}`);
    assert.match(most, /^[\d.,]+ m?s$/, `the ${what} of 99 of 100: ${most}`);
    saw(`${what}: p50 ${half}, p99 ${most}`);
  }
}

/** The number of steps that are done, the step that is next, and the label of the button that does it. */
async function guideOf(page) {
  const states = await page.locator("#steps li").evaluateAll((steps) => steps.map(({ className }) => className));
  const next = await page.locator('#steps li[aria-current="step"] .label').allInnerTexts();
  const done = states.filter((state) => state === "done").length;
  assert.equal(await page.locator("#guide-progress").innerText(), `${done} of 5 steps done`);
  return { done, next: next.join(), button: await page.locator("#next").innerText() };
}

/** Forgets with the button of the guide, which also marks the control for it. */
async function forgetByGuide(page, label) {
  assert.equal((await guideOf(page)).button, label);
  const control = await page.evaluate(() => [document.querySelector("#forget").className, document.querySelector("#forget-tiers").value]);
  assert.deepEqual(control, ["suggested", label === "Forget device" ? "device" : "device-and-host"], "the control is marked");
  await page.click("#next");
  await page.locator("#cache-result").filter({ hasText: "Dropped" }).waitFor();
  const result = await page.locator("#cache-result").innerText();
  assert.match(result, /Dropped [1-9]\d* pages on the device and \d+ pages? on the host/);
  await page.locator("#next").filter({ hasText: "Send again" }).waitFor();
  saw(result);
}

/** The form, the answer, the runs and the guide survive a reload. */
async function survivesReload(page) {
  const shown = () =>
    page.evaluate(() => ({
      book: document.querySelector("#book").value,
      question: document.querySelector("#question").value,
      maxTokens: document.querySelector("#max-tokens").value,
      answer: document.querySelector("#answer").textContent,
      source: document.querySelector("#kv-source").textContent,
      runs: document.querySelector("#runs").innerText,
      steps: document.querySelector("#steps").innerHTML,
    }));
  const before = await shown();
  assert.ok(before.book.startsWith(MARKUP) && before.source !== "" && before.answer !== "");
  await page.reload();
  await page.waitForSelector('#connection[data-state="live"]');
  assert.deepEqual(await shown(), before, "a reload loses nothing");
  saw("a reload keeps prompt, answer and runs");
}

/** Another page that gets one view again and again. */
async function openTold(browser, address, view) {
  return openPage(browser, address, (page) =>
    page.route("**/ui/events", (route) =>
      route.fulfill({ contentType: "text/event-stream", body: `data: ${JSON.stringify(view)}\n\n` }),
    ),
  );
}

/** A tree with more branches than there is space for: folded branches unfold, and fold again. */
async function opensFolded(browser, address) {
  const view = await viewOf(address);
  const [root] = view.tree;
  const branch = { ...view.tree[1], parent: 0, pages: 3, moving: false, device_pins: 0, host_pins: 0 };
  const branches = Array.from({ length: 90 }, (_, number) => ({ ...branch, tokens: Array(64).fill(33 + number) }));
  const told = await openTold(browser, address, { ...view, tree: [root, ...branches] });
  const fold = told.locator("#tree .folded button");
  await fold.waitFor();
  const drawn = () => told.locator("#tree .node").count();
  const summary = () => told.locator("#tree-summary").innerText();
  const before = await drawn();
  const folded = 90 - before;
  assert.ok(before > 0 && folded > 0, `${before} are drawn`);
  assert.equal(await summary(), `${before} of 90 nodes, 270 pages`);
  assert.match(await fold.innerText(), new RegExp(`^\\+ ${folded} nodes`));
  await fold.click();
  assert.deepEqual([await drawn(), await summary()], [90, "90 nodes, 270 pages"]);
  await told.locator("#tree .node").last().scrollIntoViewIfNeeded();
  assert.ok(await told.locator("#tree .node").last().isVisible(), "the last one can be scrolled to");
  await fold.click();
  assert.equal(await drawn(), before);
  await told.close();
  saw(`+ ${folded} nodes open and fold again`);
}

/** Without the operator's key the panels say why they are empty; with it they are filled. */
async function saysWhyLocked(browser, l3Folder) {
  isLocked = true;
  const port = await freePort();
  const server = await Server.start(TERRACE, port, l3Folder, "--operator-key", "the-operators-key");
  try {
    const page = await openPage(browser, `http://127.0.0.1:${port}/`);
    await page.waitForSelector('#connection[data-state="locked"]');
    const why = page.locator(".why");
    for (const text of await why.allInnerTexts()) assert.match(text, /only to the operator.*operator's key/s);
    assert.equal(await why.count(), 4, "each panel says it");
    assert.equal(await page.locator("#steps .absent").count(), 2, "two steps need the key");
    assert.ok(await page.locator("#figures").isHidden(), "unknown figures are not shown as zero");
    const give = async (key) => {
      await page.fill("#watch-key input", key);
      await page.click("#watch-key button");
    };
    await give("another key");
    await page.waitForSelector("#watch-key .refused:visible");
    await give("the-operators-key");
    await page.waitForSelector('#connection[data-state="live"]');
    await page.waitForSelector("#tiers .tier.device:visible");
    assert.deepEqual(await why.allInnerTexts(), ["", "", "", ""]);
    await page.waitForFunction(() => document.querySelectorAll("#steps .absent").length === 0);
    await page.close();
    await server.stop();
    saw("without the operator's key the panels say why they are empty");
  } finally {
    server.kill();
  }
}

/** The latest view of a server, as its page gets it. */
async function viewOf(address) {
  const stop = new AbortController();
  const response = await fetch(`${address}ui/events`, { signal: stop.signal });
  let text = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    text += piece;
    if (text.includes("\n\n")) break;
  }
  stop.abort();
  return JSON.parse(text.slice("data:".length, text.indexOf("\n\n")));
}

/** Another page gets a view with a GPU, which this machine need not have. */
async function showsGpu(browser, page, address) {
  assert.ok(await page.locator("#gpu").isHidden(), "without a GPU there are no figures of one");
  const link = { bytes: 0, busy_us: 0, by_kernel: 0, by_batch: 0, failed: 0, pages_compared: 9, pages_corrupt: 1 };
  const memory = { memory_bytes: 140 * 2 ** 30, memory_used_bytes: 100 * 2 ** 30 };
  const view = { ...(await viewOf(address)), gpu: { name: "A GPU", ...memory, to_device: link, to_host: link } };
  const told = await openTold(browser, address, view);
  await told.waitForSelector("#gpu:visible");
  const text = await told.locator("#gpu").innerText();
  assert.match(text, /100 GiB of 140 GiB/, text);
  assert.equal(await told.locator("#gpu .trouble").innerText(), "compared\n18 pages, 2 corrupt");
  assert.equal(await told.locator(".tier.device .hint").innerText(), "A GPU");
  await fitsOnPhones(told);
  await told.close();
  saw(`GPU: ${text.replaceAll(/\s+/g, " ")}`);
}

async function story(page, world) {
  await page.waitForSelector('#connection[data-state="live"]');
  assert.ok((await page.locator(".why").allInnerTexts()).every((text) => text === ""), "panels with data have no note");
  await typePrompt(page);

  assert.deepEqual(await guideOf(page), { done: 0, next: "Send the example", button: "Send" });
  const first = await send(page);
  assert.equal(first.device + first.host + first.l3, 0, "the first time everything is computed");
  assert.ok(first.computed > 3000, "the prompt is a long one");

  assert.deepEqual(await guideOf(page), { done: 1, next: "Send it again", button: "Send again" });
  const second = await send(page, "#next");
  assert.ok(second.device > 0.9 * first.computed, "the second time nearly all of it comes from the device");
  assert.deepEqual([second.answer, second.sameness], [first.answer, "same"]);
  assert.deepEqual(await guideOf(page), { done: 2, next: "Forget device, send", button: "Forget device" });

  // Pages reach host and L3 a moment after the answer.
  await page.waitForSelector("#tree .node.in-l3");
  await tiersAndTreeAppear(page);
  await numbersHaveUnits(page);
  await showsTimes(page);
  await showsHistory(page);
  await fitsInLowWindows(page);
  await fitsOnPhones(page);
  await survivesReload(page);
  await opensFolded(page.context().browser(), page.url());
  await showsGpu(page.context().browser(), page, page.url());
  await judgesAnswers(page.context().browser(), page.url());

  await forgetByGuide(page, "Forget device");
  const third = await send(page, "#next");
  assert.ok(third.host > 0.9 * first.computed, "without the device nearly all of it comes from the host");
  assert.deepEqual([third.answer, third.sameness], [first.answer, "same"]);
  assert.deepEqual((await guideOf(page)).done, 3);

  await forgetByGuide(page, "Forget device and host");
  const fourth = await send(page, "#next");
  assert.ok(fourth.l3 > 0.9 * first.computed, "without device and host nearly all of it comes from L3");
  assert.equal(fourth.sameness, "same");
  const waiting = { done: 4, next: "Restart, send", button: "Waiting for a restart" };
  assert.deepEqual(await guideOf(page), waiting);
  assert.ok(await page.locator("#next").isDisabled());

  await restarts(page, world);
  await page.locator("#next:enabled").filter({ hasText: "Send again" }).waitFor();
  const fifth = await send(page, "#next");
  assert.ok(fifth.l3 > 0.9 * first.computed, "after a restart nearly all of it comes from L3");
  assert.deepEqual([fifth.answer, fifth.sameness], [first.answer, "same"]);
  assert.match(await page.locator("#kv-source").innerText(), /in run 1, which computed the prompt/, "it is compared with computing");
  assert.deepEqual(await guideOf(page), { done: 5, next: "", button: "Start again" });

  // Again, with a copy of the book that is not in the cache.
  await page.click("#next");
  assert.match(await page.inputValue("#book"), /^Copy \d+ of this book\.\n/);
  assert.deepEqual(await guideOf(page), { done: 0, next: "Send the example", button: "Send" });
  assert.ok((await send(page, "#next")).computed > 3000, "the copy has to be computed");
  assert.equal((await guideOf(page)).done, 1);
  assert.deepEqual(complaints, [], "the browser has nothing to complain about");
}

/** The server is stopped and started again. The page says so, nothing on it moves, and it reconnects by itself. */
async function restarts(page, world) {
  // Rates are those of the last seconds: wait until they have gone back to zero.
  await page.waitForFunction(() => {
    const isZero = (id) => document.getElementById(id).innerText === "0";
    const flows = [...document.querySelectorAll(".flow")];
    return ["generated-rate", "prefilled-rate"].every(isZero) && flows.every(({ dataset }) => dataset.speed === "still");
  });
  const before = await boxesOf(page);
  serverIsThere = false;
  await world.server.stop();
  await page.waitForSelector('#connection[data-state="lost"]');
  const notice = page.locator("#notice");
  assert.match(await notice.innerText(), /connection to the server is lost\. Trying again/);
  assert.ok(await notice.isVisible());
  assert.deepEqual(await boxesOf(page), before, "nothing moves when the connection is lost");
  saw(`stopped: ${await notice.innerText()} ${before[1280].length} boxes have not moved`);
  world.server = await Server.start(TERRACE, world.port, world.l3Folder, ...SETTINGS);
  await page.waitForSelector('#connection[data-state="live"]');
  serverIsThere = true;
  assert.equal(await notice.innerText(), "");
  saw("started again: the page found it by itself");
}

async function main() {
  const world = { l3Folder: await mkdtemp(join(tmpdir(), "terrace-browser-")), port: await freePort() };
  // Containers run as root and have little shared memory.
  const browser = await chromium.launch({
    executablePath: CHROMIUM,
    args: ["--no-sandbox", "--disable-dev-shm-usage"],
  });
  let page;
  try {
    world.server = await Server.start(TERRACE, world.port, world.l3Folder, ...SETTINGS);
    page = await openPage(browser, `http://127.0.0.1:${world.port}/`);
    await story(page, world);
    await page.close();
    await world.server.stop();
    await saysWhyLocked(browser, world.l3Folder);
    assert.deepEqual(complaints, [], "the browser has no complaints");
    console.log("the page does what it should");
  } catch (error) {
    await page?.screenshot({ path: SCREENSHOT }).then(() => console.error(`picture: ${SCREENSHOT}`), () => {});
    console.error(`what the server said:\n${world.server?.output ?? ""}`);
    for (const complaint of complaints) console.error(`the browser said: ${complaint}`);
    throw error;
  } finally {
    world.server?.kill();
    await browser.close();
    await rm(world.l3Folder, { recursive: true, force: true });
  }
}

await main();
