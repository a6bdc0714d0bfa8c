// Keys, for servers that require them. They are kept until the tab is closed, and sent in a header: addresses end up in
// logs.
//
// A server may have one key for clients and another for the operator, so there are two purposes, each with a form: `ask`
// and `watch`.

import { byId } from "./dom.js";

/** The headers that carry the key for a purpose, if there is one. */
export function keyHeaders(purpose) {
  const key = sessionStorage.getItem(storedAs(purpose));
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Whether a response says that a key is missing or wrong. */
export function wantsKey(response) {
  return response.status === 401 || response.status === 403;
}

/** Asks for the key for a purpose. Resolves when it was entered. */
export function askForKey(purpose) {
  const form = byId(`${purpose}-key`);
  const input = form.querySelector("input");
  input.value = "";
  form.hidden = false;
  // A key that was entered before was wrong.
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
