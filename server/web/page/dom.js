// Functions that change the document. Data of the server becomes text, never markup.

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new element with a class and children, which are elements or texts. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** A drawing, by the id of its symbol in the document. */
export function drawing(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", name);
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#${name}`);
  svg.append(use);
  return svg;
}

/** Changes a text if it differs. Views arrive four times a second and must not disturb screen readers and selections. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Changes an attribute if it differs. */
export function setAttribute(target, name, value) {
  if (target.getAttribute(name) !== String(value)) target.setAttribute(name, value);
}

/** Makes the children of `container` represent `items`, in their order. An item with a known key keeps its element. */
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
