// The few ways in which this page writes to itself. Whatever the server says gets there as text, never
// as markup.

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new element with a class and, as children, elements or texts. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** A drawing from the top of the page, by the name of its symbol. */
export function drawing(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", name);
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#${name}`);
  svg.append(use);
  return svg;
}

/**
 * Changes a text only where it differs: screen readers and selections are not disturbed four times a
 * second.
 */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Changes an attribute only where it differs. */
export function setAttribute(target, name, value) {
  if (target.getAttribute(name) !== String(value)) target.setAttribute(name, value);
}

/**
 * Makes the children of `container` stand for `items`, in their order. What has the same key keeps its
 * element, so that it can move there instead of appearing anew.
 */
export function drawList(container, items, keyOf, create, update) {
  const existing = new Map([...container.children].map((child) => [child.dataset.key, child]));
  let place = container.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = existing.get(key);
    existing.delete(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) {
      place = place.nextElementSibling;
    } else {
      container.insertBefore(child, place);
    }
    update(child, item);
  }
  for (const gone of existing.values()) gone.remove();
}
