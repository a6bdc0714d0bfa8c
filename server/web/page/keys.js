// Keys, for servers that ask for them. They are kept as long as the tab is open, and sent in a header
// only: an address ends up in logs.
//
// A server may have one key for those who ask and another for those who watch, so there is a question,
// and a form, for each: `ask` and `watch`.

import { byId } from "./dom.js";

/** The headers that carry the key for a purpose, if there is one. */
export function keyHeaders(purpose) {
  const key = sessionStorage.getItem(storedAs(purpose));
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Whether an answer says that a key is missing or is not the right one. */
export function wantsKey(response) {
  return response.status === 401 || response.status === 403;
}

/** Asks for the key for a purpose and waits until it has been given. */
export function askForKey(purpose) {
  const form = byId(`${purpose}-key`);
  const input = form.querySelector("input");
  input.value = "";
  form.hidden = false;
  // Whoever gave a key already is told that it was not the right one.
  const refused = form.querySelector(".refused");
  if (refused) refused.hidden = sessionStorage.getItem(storedAs(purpose)) === null;
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      form.hidden = true;
      sessionStorage.setItem(storedAs(purpose), input.value.trim());
      resolve();
    };
  });
}

function storedAs(purpose) {
  return `terrace-key-${purpose}`;
}
