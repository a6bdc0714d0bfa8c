// Where the nodes of the tree go: what follows a run stands to its right, branches lie below each other,
// and a run is as tall as everything that continues it. Knows nothing of the page.

/** Deeper nodes are folded into one box. */
const DEPTH_MAX = 12;
/** A label has no room for more tokens. */
const TOKENS_MAX = 128;
/** Higher than any number of pages. */
const BUSY_RANK = 1e12;

/**
 * Boxes for `views` in so many rows: each with a key, a place in rows, a span from left to right in
 * shares of the width, and either a node or a number of nodes that found no place. Those whose box is
 * among the keys of `opened` are placed nevertheless, in more rows. Also how many rows they take, and how
 * many nodes there are, as many as there would be boxes for if all were opened.
 */
export function layOut(views, pageSize, rowsMax, opened = new Set()) {
  const roots = growTree(views, pageSize);
  const boxes = [];
  // The root of the only namespace says nothing.
  const tops = roots.length === 1 ? roots[0].children : roots;
  const place = { depth: 0, left: 0, key: "top", opened };
  const rows = placeAll(tops, 0, Math.max(1, rowsMax), place, boxes);
  const width = Math.max(1, ...boxes.map(({ left, width }) => left + width));
  for (const box of boxes) {
    box.left /= width;
    box.width /= width;
  }
  return { boxes, rows, nodes: sum(roots, "size") };
}

/** The list as a tree. Parents come before their children in it. */
function growTree(views, pageSize) {
  // Roots of namespaces have no pages, and are not counted.
  const nodes = views.map((view) => ({ view, children: [], size: view.pages > 0 ? 1 : 0, pages: view.pages }));
  const roots = [];
  for (const node of nodes) {
    const parent = node.view.parent === null ? null : nodes[node.view.parent];
    node.key = keyOf(parent?.key ?? node.view.namespace, node.view.tokens.slice(0, pageSize));
    node.endKey = node.key;
    (parent?.children ?? roots).push(node);
  }
  for (const node of [...nodes].reverse()) {
    joinOnlyChild(node, pageSize);
    node.leaves = Math.max(1, sum(node.children, "leaves"));
    node.size += sum(node.children, "size");
    node.pages += sum(node.children, "pages");
    // Who is pinned or moving is what one wants to see; then, what is large.
    const { view } = node;
    const busy = view.moving || view.device_pins + view.host_pins > 0;
    const busyChildren = node.children.filter((child) => child.busy);
    node.busy = busy || busyChildren.length > 0;
    node.rank = node.pages + (node.busy ? BUSY_RANK : 0);
    // Enough to show everybody who is busy, and in one more row all others together.
    const idleRows = busyChildren.length < node.children.length ? 1 : 0;
    node.leastRows = Math.max(1, sum(busyChildren, "leastRows") + idleRows);
  }
  return roots;
}

/**
 * Makes a node and its only child one, if nothing that is shown tells them apart: where sequences branch is
 * what matters, not in how many steps a run was computed.
 */
function joinOnlyChild(node, pageSize) {
  const [child, ...others] = node.children;
  if (!child || others.length > 0 || !alike(node.view, child.view)) return;
  const { view } = node;
  const tokensAreWhole = view.tokens.length === view.pages * pageSize;
  node.view = {
    ...view,
    pages: view.pages + child.view.pages,
    tokens: tokensAreWhole ? [...view.tokens, ...child.view.tokens].slice(0, TOKENS_MAX) : view.tokens,
    nodes: 1 + (child.view.nodes ?? 1),
  };
  node.pages += child.pages - sum(child.children, "pages");
  // What is folded behind a run keeps its name when the run is told apart again.
  node.endKey = child.endKey;
  node.children = child.children;
}

function alike(one, other) {
  const shown = ["on_device", "on_host", "in_l3", "moving", "device_pins", "host_pins"];
  return one.pages > 0 && shown.every((field) => one[field] === other[field]);
}

/**
 * A name for a node that stays when nodes are split or merged: the hash of its parent's and of its first
 * page.
 */
function keyOf(parentKey, tokens) {
  let hash = 0x811c9dc5;
  for (const unit of `${parentKey}/${tokens.join()}`) {
    hash = Math.imul(hash ^ unit.codePointAt(0), 0x01000193) >>> 0;
  }
  return hash.toString(36);
}

/** Places siblings below each other in at most so many rows, unless they are opened; says how many they took. */
function placeAll(siblings, row, rowsMax, place, boxes) {
  const rowsOf = place.depth < DEPTH_MAX ? shareRows(siblings, rowsMax) : new Map();
  const folded = siblings.filter((node) => !rowsOf.has(node));
  const isOpen = place.opened.has(foldKey(place));
  let next = row;
  for (const node of siblings) {
    if (rowsOf.has(node) || isOpen) next += placeOne(node, next, rowsOf.get(node) ?? 1, place, boxes);
  }
  if (folded.length > 0) {
    boxes.push(foldBox(folded, isOpen, next, place));
    next += 1;
  }
  return next - row;
}

/**
 * How many rows each of some siblings gets. Those that are not in the answer get none; for them together
 * one row is kept free.
 */
function shareRows(siblings, rowsMax) {
  const rowsOf = new Map();
  let rowsLeft = rowsMax;
  const byRank = [...siblings].sort((one, other) => other.rank - one.rank);
  for (const node of byRank) {
    const others = siblings.length - rowsOf.size - 1;
    const rows = Math.min(node.leastRows, rowsLeft - (others > 0 ? 1 : 0));
    if (rows < 1) break;
    rowsOf.set(node, rows);
    rowsLeft -= rows;
  }
  if (rowsOf.size < siblings.length) return rowsOf;
  // What is left goes round, so that no branch takes it all.
  let wanting = byRank;
  while (rowsLeft > 0 && wanting.length > 0) {
    wanting = wanting.filter((node) => rowsOf.get(node) < node.leaves);
    for (const node of wanting.slice(0, rowsLeft)) {
      rowsOf.set(node, rowsOf.get(node) + 1);
      rowsLeft -= 1;
    }
  }
  return rowsOf;
}

/** Places a node and what follows it; says how many rows that took. */
function placeOne(node, row, rows, place, boxes) {
  const box = { key: node.key, view: node.view, row, rows: 1, left: place.left, width: widthOf(node.view) };
  boxes.push(box);
  const right = { ...place, depth: place.depth + 1, left: box.left + box.width, key: node.endKey };
  box.rows = Math.max(1, placeAll(node.children, row, rows, right, boxes));
  return box.rows;
}

/** A box that stands for nodes without a place of their own, or stands below them while they are opened. */
function foldBox(nodes, isOpen, row, place) {
  return {
    key: foldKey(place),
    folded: { nodes: sum(nodes, "size"), pages: sum(nodes, "pages"), isOpen },
    row,
    rows: 1,
    left: place.left,
    width: 5,
  };
}

/** A name for what is folded behind a node. */
function foldKey({ key }) {
  return `more-${key}`;
}

/**
 * Longer runs are wider, but by their order of magnitude: a question of one page behind a document of a
 * thousand must be seen, too.
 */
function widthOf({ pages }) {
  return pages === 0 ? 2.5 : 3 + 1.6 * Math.log2(1 + pages);
}

function sum(nodes, field) {
  return nodes.reduce((total, node) => total + node[field], 0);
}
