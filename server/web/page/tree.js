// The radix tree: which runs of pages are cached, where, and who keeps them.

import { byId, drawing, drawList, element, setAttribute, setText } from "./dom.js";
import { several, tokensAsText } from "./format.js";
import { layOut } from "./tree_layout.js";

const ROW_PX_MIN = 26;
const ROW_PX_MAX = 54;
/** Boxes below this have one line. */
const LOW_PX = 38;
/** Between boxes. */
const SPACE_PX = 2;

/** Draws the tree of a view. */
export function drawTree({ tree: views, figures: { page_size: pageSize } }) {
  const container = byId("tree");
  const nodes = views.filter(({ pages }) => pages > 0);
  const summary = nodes.length > 0 ? `${several(nodes.length, "node")}, ${several(pagesOf(nodes), "page")}` : "";
  setText(byId("tree-summary"), summary);
  container.classList.toggle("empty", nodes.length === 0);

  const rowsMax = Math.floor(container.clientHeight / ROW_PX_MIN);
  const { boxes, rows } = layOut(nodes.length > 0 ? views : [], pageSize, rowsMax);
  const rowPx = Math.min(ROW_PX_MAX, container.clientHeight / Math.max(1, rows));
  drawList(container, boxes, ({ key }) => key, createBox, (box, item) => {
    placeBox(box, item, rowPx);
    if (item.folded) drawFolded(box, item.folded);
    else drawNode(box, item.view, pageSize);
    box.classList.toggle("low", item.rows * rowPx < LOW_PX);
  });
}

function pagesOf(nodes) {
  return nodes.reduce((pages, node) => pages + node.pages, 0);
}

function createBox({ folded }) {
  const box = element("div", "", element("span", "text"), element("span", "size"));
  box.setAttribute("role", "listitem");
  if (!folded) {
    const lanes = ["device", "host", "l3"].map((tier) => element("i", tier));
    box.append(element("span", "pins", drawing("pin"), element("b")), element("span", "lanes", ...lanes));
  }
  return box;
}

function placeBox(box, { row, rows, left, width }, rowPx) {
  box.style.top = `${row * rowPx}px`;
  box.style.height = `${rows * rowPx - SPACE_PX}px`;
  box.style.left = `${left * 100}%`;
  box.style.width = `calc(${width * 100}% - ${SPACE_PX}px)`;
}

function drawFolded(box, { nodes, pages }) {
  box.className = "folded";
  setText(box.querySelector(".text"), `+ ${several(nodes, "node")}`);
  setText(box.querySelector(".size"), several(pages, "page"));
  setAttribute(box, "title", `${several(nodes, "node")} with ${several(pages, "page")}, not shown for want of room`);
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

/** The root of a namespace has no pages: it only says that nothing is shared across it. */
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
