// The guided steps: which are done, and what to do next. Independent of the document.

/** The steps in their order. Each is completed by a run whose prompt came from one source. */
export const STEPS = [
  { id: "computed", title: "Send the example", outcome: "its KV is computed" },
  { id: "device", title: "Send it again", outcome: "its KV is found on the device" },
  { id: "host", title: "Forget device, send", outcome: "its KV is found on the host" },
  { id: "l3", title: "Forget both, send", outcome: "its KV is loaded from L3" },
  { id: "restart", title: "Restart, send", outcome: "its KV is still in L3, on disk" },
];

/** What to do next, by name: the label of the button, and what happens. */
const ACTIONS = {
  send: { label: "Send", hint: "Nothing is cached yet: the KV of all prompt tokens is computed." },
  "new-example": {
    label: "Use a new copy",
    hint: "This book was in the cache already. A new copy begins with another line, so it has to be computed.",
  },
  "send-again": { label: "Send again", hint: "" },
  device: { label: "Forget device", hint: "Drops the pages on the device. The host keeps its copies." },
  "device-and-host": { label: "Forget device and host", hint: "Drops the pages on device and host. L3 keeps its copies." },
  restart: {
    label: "Waiting for a restart",
    hint: "Stop the server (Ctrl+C) and start it with the same command. This page reconnects by itself.",
  },
  over: { label: "Start again", hint: "All steps are done. To repeat them, use a new copy of the book." },
};

/** What sending the prompt again shows, by the step that it completes. */
const SEND_AGAIN = {
  device: "The same prompt: its KV is found on the device.",
  host: "The device is empty: the KV is loaded back from the host.",
  l3: "Device and host are empty: the KV is prefetched from L3.",
  restart: "The server was restarted: only L3 still holds the KV.",
};

/** Why a step is impossible on a server, by step; empty for those that are possible. */
export function obstacles({ isLocked = false, hasHost = true, hasL3 = true, isOnDisk = true }) {
  const needsKey = isLocked ? "needs the operator's key" : "";
  return {
    host: needsKey || (hasHost ? "" : "this server has no host tier"),
    l3: needsKey || (hasL3 ? "" : "this server has no L3"),
    restart: hasL3 && isOnDisk ? "" : "this server has no L3 on disk",
  };
}

/**
 * The guide for a log of runs, a server and the prompt of the form: each step with its state, "done", "next", "later" or
 * "absent", and the next action with its label and hint.
 */
export function guideOf(log, server, prompt) {
  const missing = obstacles(server);
  const isOpen = ({ id }) => !(id in log.steps) && !missing[id];
  const next = STEPS.find(isOpen);
  const steps = STEPS.map((step) => ({ ...step, ...stateOf(step, log, next, missing[step.id] ?? "") }));
  const name = next ? actionFor(next.id, log, server, prompt) : "over";
  const hint = name === "send-again" ? sendAgainHint(next.id, log) : ACTIONS[name].hint;
  const isForgetting = name === "device" || name === "device-and-host";
  const wait = isForgetting && server.isCopying ? " Wait until the copies to host and L3 are done." : "";
  return { steps, next: { name, label: ACTIONS[name].label, hint: `${hint}${wait}`, isPossible: name !== "restart" } };
}

function stateOf(step, log, next, obstacle) {
  const done = log.steps[step.id];
  if (done) return { state: "done", done };
  if (obstacle) return { state: "absent", obstacle };
  return { state: step === next ? "next" : "later" };
}

/** The name of the action that leads to a step. */
function actionFor(step, log, server, prompt) {
  switch (step) {
    case "computed":
      return log.latest?.prompt === prompt ? "new-example" : "send";
    case "host":
      return log.forgotten ? "send-again" : "device";
    case "l3":
      return log.forgotten === "device-and-host" ? "send-again" : "device-and-host";
    case "restart":
      return server.isLocked || (server.instance && server.instance !== log.instance) ? "send-again" : "restart";
    default:
      return "send-again";
  }
}

function sendAgainHint(step, log) {
  const isHostEmpty = step === "host" && log.forgotten === "device-and-host";
  return SEND_AGAIN[isHostEmpty ? "l3" : step];
}
