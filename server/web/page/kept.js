// Values that survive a reload. They are kept only until the tab is closed, because prompts may be private.

/** The value of a name, or null. */
export function kept(name) {
  try {
    return JSON.parse(sessionStorage.getItem(storedAs(name)));
  } catch (error) {
    console.debug(`the stored value of ${name} cannot be read:`, error);
    return null;
  }
}

/** Stores the value of a name, if there is space for it. */
export function keep(name, value) {
  try {
    sessionStorage.setItem(storedAs(name), JSON.stringify(value));
  } catch (error) {
    // An older value would not be that of the page.
    sessionStorage.removeItem(storedAs(name));
    console.debug(`${name} is not kept:`, error);
  }
}

function storedAs(name) {
  return `terrace-${name}`;
}
