// The radix tree: the cached runs of pages, the tiers that hold them, and their pins.

import { byId, drawing, drawList, element, setAttribute, setText } from "./dom.js";
import { count, several, tokensAsText } from "./format.js";
import { layOut } from "./tree_layout.js";

const ROW_PX_MIN = 26;
const ROW_PX_MAX = 54;
/** Lower boxes have one line. */
const LOW_PX = 38;
/** Space between boxes. */
const SPACE_PX = 2;

/** Keys of the boxes that were opened. */
const opened = new Set();
/** The latest view, to draw it again when a box is opened. */
let latest = null;

/** Draws the tree of a view. */
export function drawTree(view) {
  latest = view;
  const { tree: views, tree_is_whole: isWhole, figures } = view;
  const pageSize = figures.page_size;
  const container = byId("tree");
  const isEmpty = views.every(({ pages }) => pages === 0);
  container.classList.toggle("empty", isEmpty);

  const rowsMax = Math.floor(container.clientHeight / ROW_PX_MIN);
  const { boxes, rows, nodes } = layOut(isEmpty ? [] : views, pageSize, rowsMax, opened);
  const drawn = boxes.filter(({ view }) => view?.pages > 0).length;
  setText(byId("tree-summary"), isEmpty ? "" : summary(drawn, nodes, isWhole, pagesOf(views)));
  const rowPx = Math.min(ROW_PX_MAX, Math.max(ROW_PX_MIN, container.clientHeight / Math.max(1, rows)));
  drawList(container, boxes, ({ key }) => key, createBox, (box, item) => {
    placeBox(box, item, rowPx);
    if (item.folded) drawFolded(box, item.folded);
    else drawNode(box, item.view, pageSize);
    box.classList.toggle("low", item.rows * rowPx < LOW_PX);
  });
}

/** "12 of 57 nodes, 656 pages": the number of boxes, of nodes, and of pages. */
function summary(drawn, nodes, isWhole, pages) {
  const shown = isWhole && drawn === nodes ? "" : `${count(drawn)} of `;
  const all = `${isWhole ? "" : "more than "}${several(nodes, "node")}`;
  return `${shown}${all}, ${isWhole ? "" : "more than "}${several(pages, "page")}`;
}

function pagesOf(nodes) {
  return nodes.reduce((pages, node) => pages + node.pages, 0);
}

function createBox({ folded, key }) {
  const label = [element("span", "text"), element("span", "size")];
  const box = element("div", "", ...(folded ? [foldButton(key, label)] : label));
  box.setAttribute("role", "listitem");
  if (!folded) {
    const lanes = ["device", "host", "l3"].map((tier) => element("i", tier));
    box.append(element("span", "pins", drawing("pin"), element("b")), element("span", "lanes", ...lanes));
  }
  return box;
}

/** A button that opens a folded box, or folds it again. */
function foldButton(key, label) {
  const button = element("button", "", ...label);
  button.type = "button";
  button.addEventListener("click", () => {
    if (!opened.delete(key)) opened.add(key);
    drawTree(latest);
  });
  return button;
}

function placeBox(box, { row, rows, left, width }, rowPx) {
  box.style.top = `${row * rowPx}px`;
  box.style.height = `${rows * rowPx - SPACE_PX}px`;
  box.style.left = `${left * 100}%`;
  box.style.width = `calc(${width * 100}% - ${SPACE_PX}px)`;
}

function drawFolded(box, { nodes, pages, isOpen }) {
  box.className = "folded";
  setText(box.querySelector(".text"), isOpen ? `− ${several(nodes, "node")}` : `+ ${several(nodes, "node")}`);
  setText(box.querySelector(".size"), several(pages, "page"));
  setAttribute(box.querySelector("button"), "aria-expanded", isOpen);
  const what = `${several(nodes, "node")} with ${several(pages, "page")}`;
  setAttribute(box, "title", isOpen ? `hide ${what} again` : `${what}, hidden because there is no space: click to show`);
}

function drawNode(box, view, pageSize) {
  if (view.pages === 0) {
    drawRoot(box, view);
    return;
  }
  const whole = view.tokens.length >= view.pages * pageSize;
  const text = `${tokensAsText(view.tokens)}${whole ? "" : "…"}`;
  const pins = view.device_pins + view.host_pins;
  box.className = classesOf(view).join(" ");
  setText(box.querySelector(".text"), text);
  setText(box.querySelector(".size"), several(view.pages, "page"));
  setText(box.querySelector(".pins b"), String(pins));
  setAttribute(box, "title", `${inWords(view)}\n${text}`);
  setAttribute(box, "aria-label", `${inWords(view)}: ${text}`);
}

/** The root of a namespace. It has no pages; it separates namespaces, which share none. */
function drawRoot(box, { namespace }) {
  box.className = "root";
  setText(box.querySelector(".text"), namespace.slice(0, 6));
  setAttribute(box, "title", `namespace ${namespace}: shares no page with any other`);
}

function classesOf(view) {
  const classes = ["node"];
  if (view.on_device) classes.push("on-device");
  if (view.on_host) classes.push("on-host");
  if (view.in_l3) classes.push("in-l3");
  if (view.moving) classes.push("moving");
  if (view.device_pins + view.host_pins > 0) classes.push("pinned");
  return classes;
}

function inWords(view) {
  const places = [view.on_device && "on device", view.on_host && "on host", view.in_l3 && "in L3"].filter(Boolean);
  const pins = [
    view.device_pins > 0 && `${several(view.device_pins, "pin")} on device`,
    view.host_pins > 0 && `${several(view.host_pins, "pin")} on host`,
  ].filter(Boolean);
  return [
    `${several(view.pages, "page")} from page ${view.start_page} on${view.nodes > 1 ? `, ${view.nodes} nodes` : ""}`,
    places.join(" and "),
    pins.join(", ") || "not pinned",
    ...(view.moving ? ["moving"] : []),
  ].join("; ");
}
