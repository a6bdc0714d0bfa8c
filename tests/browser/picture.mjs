// Takes the screenshot of the documentation: a server after four steps of the guide, further questions and a refused
// request. Run it with a release build on an idle machine, because the times are part of the picture.

import { mkdtemp, rm } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { Server, freePort } from "./server.mjs";

const { CHROMIUM, MODULES, PICTURE, TERRACE } = process.env;
const { chromium } = createRequire(join(MODULES, "here.js"))("playwright-core");

const REQUESTS_MAX = 8;
/** Time until rates are zero and copies to host and L3 are done. */
const SETTLE_MS = 4_000;
const QUESTIONS = ["What grows in row 17?", "Who keeps row 40?"];

async function play(page, address) {
  let runs = 0;
  const click = async (button) => {
    await page.click(`${button}:enabled`);
    await page.waitForTimeout(SETTLE_MS);
  };
  const send = async (button) => {
    runs += 1;
    await page.click(`${button}:enabled`);
    await page.waitForSelector(`#kv-source[data-run="${runs}"]`);
    await page.waitForTimeout(SETTLE_MS);
  };
  await page.waitForSelector('#connection[data-state="live"]');
  await send("#next");
  await send("#next");
  for (const _ of ["device", "device and host"]) {
    await click("#next");
    await send("#next");
  }
  for (const question of QUESTIONS) {
    await page.fill("#question", question);
    await send("#send");
  }
  const body = JSON.stringify({ prompt: "x", n: 1 + REQUESTS_MAX });
  await fetch(`${address}v1/completions`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
  await page.waitForTimeout(SETTLE_MS);
}

const l3Folder = await mkdtemp(join(tmpdir(), "terrace-picture-"));
const port = await freePort();
const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-dev-shm-usage"] });
const server = await Server.start(TERRACE, port, l3Folder, "--requests-max", String(REQUESTS_MAX));
try {
  const page = await browser.newPage({ viewport: { width: 1440, height: 1000 } });
  page.setDefaultTimeout(300_000);
  const address = `http://127.0.0.1:${port}/`;
  await page.goto(address);
  await play(page, address);
  await page.screenshot({ path: PICTURE });
  console.log(`wrote ${PICTURE}`);
} finally {
  server.kill();
  await browser.close();
  await rm(l3Folder, { recursive: true, force: true });
}
