// What this page keeps when it is loaded again: as long as the tab is open, and no longer, since prompts may
// be nobody else's business.

/** What was kept under a name, or nothing. */
export function kept(name) {
  try {
    return JSON.parse(sessionStorage.getItem(storedAs(name)));
  } catch (error) {
    console.debug(`what was kept as ${name} cannot be read:`, error);
    return null;
  }
}

/** Keeps something under a name, if there is room for it. */
export function keep(name, value) {
  try {
    sessionStorage.setItem(storedAs(name), JSON.stringify(value));
  } catch (error) {
    // Something older under this name would be something else than what is shown.
    sessionStorage.removeItem(storedAs(name));
    console.debug(`${name} is not kept:`, error);
  }
}

function storedAs(name) {
  return `terrace-${name}`;
}
