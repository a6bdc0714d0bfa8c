// A server for a test: started on a free port, stopped as an operator stops it.

import { spawn } from "node:child_process";
import { createServer } from "node:net";

const START_MS = 60_000;
const STOP_MS = 30_000;
const OUTPUT_CHARS_MAX = 20_000;

/** A port that is free at the moment. */
export function freePort() {
  return new Promise((resolve, reject) => {
    const probe = createServer().once("error", reject);
    probe.listen(0, "127.0.0.1", () => {
      const { port } = probe.address();
      probe.close(() => resolve(port));
    });
  });
}

/** A running server. */
export class Server {
  #child;
  #ended;
  #output = "";

  /** Starts the program, with further arguments if need be, and waits until it answers. */
  static async start(program, port, l3Folder, ...more) {
    const server = new Server(program, port, l3Folder, more);
    await server.#answers(`http://127.0.0.1:${port}/health`);
    return server;
  }

  constructor(program, port, l3Folder, more) {
    const settings = ["--listen", `127.0.0.1:${port}`, "--l3", `disk:${l3Folder}`, "--l3-capacity", "256MiB", "--l3-reserve", "0"];
    const memory = ["--device-memory", "96MiB", "--host-memory", "128MiB"];
    this.#child = spawn(program, ["serve", ...settings, ...memory, ...more], { stdio: ["ignore", "pipe", "pipe"] });
    for (const stream of [this.#child.stdout, this.#child.stderr]) {
      stream.on("data", (data) => {
        this.#output = (this.#output + data).slice(-OUTPUT_CHARS_MAX);
      });
    }
    this.#ended = new Promise((resolve) => {
      this.#child.once("exit", (code, signal) => resolve(signal ?? code));
      this.#child.once("error", (error) => resolve(error.message));
    });
  }

  /** The latest output of the server. */
  get output() {
    return this.#output;
  }

  /** Asks the server to stop and waits until it has. */
  async stop() {
    this.#child.kill("SIGTERM");
    const how = await Promise.race([this.#ended, afterMs(STOP_MS)]);
    if (how !== 0) {
      this.kill();
      throw new Error(`the server did not stop well: ${how ?? `still there after ${STOP_MS} ms`}`);
    }
  }

  /** Kills the server. */
  kill() {
    this.#child.kill("SIGKILL");
  }

  async #answers(address) {
    const deadline = Date.now() + START_MS;
    while (Date.now() < deadline) {
      const ended = await Promise.race([this.#ended, afterMs(100)]);
      if (ended !== undefined) throw new Error(`the server ended at once (${ended}):\n${this.#output}`);
      const response = await fetch(address).catch(() => null);
      if (response?.ok) return;
    }
    this.kill();
    throw new Error(`the server did not answer within ${START_MS} ms:\n${this.#output}`);
  }
}

/** A wait that does not keep this process alive. */
function afterMs(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms).unref());
}
