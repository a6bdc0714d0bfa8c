// A newcomer's two minutes with the page: a prompt is computed, then found on the device, then, after the
// server was restarted, found in L3. Says what it sees; whatever is otherwise ends it with an error and a
// picture.

import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { Server, freePort } from "./server.mjs";

const { CHROMIUM, MODULES, SCREENSHOT, TERRACE } = process.env;
const { chromium } = createRequire(join(MODULES, "here.js"))("playwright-core");

/** The server may be slow on a busy machine; nothing here is about speed. */
const PATIENCE_MS = 60_000;
/** Typed before the example. If data ever became markup, this would be found as an element. */
const MARKUP = '<i id="markup">typed</i> ';

const complaints = [];
let serverIsThere = true;
let isLocked = false;
let runs = 0;

function saw(what) {
  console.log(`saw: ${what}`);
}

/** A page that takes down whatever the browser complains about. */
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
  await page.click("#long-example");
  await page.locator("#prompt").press("Control+Home");
  await page.locator("#prompt").pressSequentially(MARKUP);
  await page.fill("#max-tokens", "24");
}

/** Sends what is in the box; says where the KV of the prompt came from. */
async function send(page) {
  runs += 1;
  await page.click("#send");
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
  return { ...tokens, answer };
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
  await page.locator("#requests li .state").first().filter({ hasText: "finished" }).waitFor();
  assert.ok((await page.locator("#requests .life .Decoding").count()) >= 2, "both lives are drawn");
}

/** Where a wide window is low, panels scroll; nothing in them is squeezed into what is next to it. */
async function fitsInLowWindows(page) {
  await page.setViewportSize({ width: 1280, height: 660 });
  const squeezed = await page.evaluate(() =>
    [...document.querySelectorAll("#ask > *")].filter((it) => it.scrollHeight > it.clientHeight + 1).map((it) => it.id),
  );
  assert.deepEqual(squeezed.filter((id) => id !== "answer"), [], "what does not fit is scrolled to");
  await page.setViewportSize({ width: 1280, height: 800 });
  saw("it fits in a low window");
}

async function fitsOnPhones(page) {
  await page.setViewportSize({ width: 390, height: 844 });
  const tooWide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  assert.ok(tooWide <= 0, `on a phone the page is ${tooWide} pixels too wide`);
  assert.deepEqual(await arrowsOf(page), { load_backs: "up", write_backs: "down", prefetches: "up", backups: "down" });
  await page.setViewportSize({ width: 1280, height: 800 });
  saw("it fits on a phone");
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

async function takenSteps(page) {
  return page.locator("#tour li").evaluateAll((steps) => steps.map((step) => step.classList.contains("taken")));
}

/** What was typed, and what came of it, is there again when the page is loaded anew. */
async function survivesReload(page) {
  const shown = () =>
    page.evaluate(() => ({
      prompt: document.querySelector("#prompt").value,
      maxTokens: document.querySelector("#max-tokens").value,
      answer: document.querySelector("#answer").textContent,
      source: document.querySelector("#kv-source").textContent,
      runs: document.querySelector("#runs").innerText,
      tour: document.querySelector("#tour").innerHTML,
    }));
  const before = await shown();
  assert.ok(before.prompt.startsWith(MARKUP) && before.source !== "" && before.answer !== "");
  await page.reload();
  await page.waitForSelector('#connection[data-state="live"]');
  assert.deepEqual(await shown(), before, "a reload loses nothing");
  saw("a reload keeps prompt, answer and runs");
}

/** A page of its own that is told one view, over and over. */
async function openTold(browser, address, view) {
  return openPage(browser, address, (page) =>
    page.route("**/ui/events", (route) =>
      route.fulfill({ contentType: "text/event-stream", body: `data: ${JSON.stringify(view)}\n\n` }),
    ),
  );
}

/** A tree with more branches than there is room for: what is folded opens, and folds again. */
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
    assert.equal(await why.count(), 3, "each panel says it");
    assert.ok(await page.locator("#figures").isHidden(), "nothing is said to be nought that is not known");
    const give = async (key) => {
      await page.fill("#watch-key input", key);
      await page.click("#watch-key button");
    };
    await give("another key");
    await page.waitForSelector("#watch-key .refused:visible");
    await give("the-operators-key");
    await page.waitForSelector('#connection[data-state="live"]');
    await page.waitForSelector("#tiers .tier.device:visible");
    assert.deepEqual(await why.allInnerTexts(), ["", "", ""]);
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

/** This machine need not have a GPU: a page of its own is told of one. */
async function showsGpu(browser, page, address) {
  assert.ok(await page.locator("#gpu").isHidden(), "nothing is said of a GPU that is not there");
  const link = { bytes: 0, busy_us: 0, by_kernel: 0, by_batch: 0, failed: 0, pages_compared: 9, pages_corrupt: 1 };
  const memory = { memory_bytes: 140 * 2 ** 30, memory_used_bytes: 100 * 2 ** 30 };
  const view = { ...(await viewOf(address)), gpu: { name: "A GPU", ...memory, to_device: link, to_host: link } };
  const told = await openTold(browser, address, view);
  await told.waitForSelector("#gpu:visible");
  const text = await told.locator("#gpu").innerText();
  assert.match(text, /100 GiB of 140 GiB/, text);
  assert.equal(await told.locator("#gpu .trouble").innerText(), "pages compared\n18, 2 corrupt");
  assert.equal(await told.locator(".tier.device .hint").innerText(), "A GPU");
  await fitsOnPhones(told);
  await told.close();
  saw(`GPU: ${text.replaceAll(/\s+/g, " ")}`);
}

async function story(page, world) {
  await page.waitForSelector('#connection[data-state="live"]');
  assert.ok((await page.locator(".why").allInnerTexts()).every((text) => text === ""), "panels that are filled say nothing");
  await typePrompt(page);

  assert.deepEqual(await takenSteps(page), [false, false, false]);
  const first = await send(page);
  assert.equal(first.device + first.host + first.l3, 0, "the first time everything is computed");
  assert.ok(first.computed > 3000, "the prompt is a long one");
  assert.deepEqual(await takenSteps(page), [true, false, false]);

  const second = await send(page);
  assert.ok(second.device > 0.9 * first.computed, "the second time nearly all of it comes from the device");
  assert.equal(second.answer, first.answer, "the answer is the same");
  assert.deepEqual(await takenSteps(page), [true, true, false]);

  // What was written reaches L3 a moment later.
  await page.waitForSelector('#tree .node.in-l3');
  await tiersAndTreeAppear(page);
  await showsTimes(page);
  await fitsInLowWindows(page);
  await fitsOnPhones(page);
  await survivesReload(page);
  await opensFolded(page.context().browser(), page.url());
  await showsGpu(page.context().browser(), page, page.url());

  serverIsThere = false;
  await world.server.stop();
  await page.waitForSelector('#connection[data-state="lost"]');
  saw(`stopped: ${await page.locator("#connection").textContent()}`);
  world.server = await Server.start(TERRACE, world.port, world.l3Folder);
  await page.waitForSelector('#connection[data-state="live"]');
  serverIsThere = true;
  saw("started again: the page found it by itself");

  const third = await send(page);
  assert.ok(third.l3 > 0.9 * first.computed, "after a restart nearly all of it comes from L3");
  assert.equal(third.answer, first.answer, "the answer is still the same");
  assert.match(await page.locator("#kv-source").innerText(), /in run 1, which computed the prompt/, "it is compared with computing");
  assert.deepEqual(await takenSteps(page), [true, true, true]);
  assert.ok(await page.locator("#tour").isVisible(), "the last tick is seen");
  assert.deepEqual(complaints, [], "the browser has nothing to complain about");
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
    world.server = await Server.start(TERRACE, world.port, world.l3Folder);
    page = await openPage(browser, `http://127.0.0.1:${world.port}/`);
    await story(page, world);
    await page.close();
    await world.server.stop();
    await saysWhyLocked(browser, world.l3Folder);
    assert.deepEqual(complaints, [], "the browser still has nothing to complain about");
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
