// The layout of the tree: a run's continuations are on its right, branches are below each other, and a run is as tall as
// its continuations. Independent of the document.

/** Deeper nodes are folded into one box. */
const DEPTH_MAX = 12;
/** Number of tokens in a label at most. */
const TOKENS_MAX = 128;
/** Rank that is higher than any number of pages. */
const BUSY_RANK = 1e12;

/**
 * Boxes for `views` in at most `rowsMax` rows. Each has a key, a row, its left edge and width as shares of the whole, and
 * either a node or the number of nodes that are folded into it. Boxes whose keys are in `opened` are unfolded, in
 * additional rows. Also returns the number of rows, and the number of nodes as boxes if all were unfolded.
 */
export function layOut(views, pageSize, rowsMax, opened = new Set()) {
  const roots = growTree(views, pageSize);
  const boxes = [];
  // The root of the only namespace is not drawn.
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

/** The list, in which parents come before their children, as a tree. */
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
    // Nodes that are pinned or moving come first, then large ones.
    const { view } = node;
    const busy = view.moving || view.device_pins + view.host_pins > 0;
    const busyChildren = node.children.filter((child) => child.busy);
    node.busy = busy || busyChildren.length > 0;
    node.rank = node.pages + (node.busy ? BUSY_RANK : 0);
    // A row for each busy node, and one for all others together.
    const idleRows = busyChildren.length < node.children.length ? 1 : 0;
    node.leastRows = Math.max(1, sum(busyChildren, "leastRows") + idleRows);
  }
  return roots;
}

/** Joins a node with its only child if they look the same: branches matter, not the steps in which a run was computed. */
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
  // A folded box behind the run keeps its key when the run is separated again.
  node.endKey = child.endKey;
  node.children = child.children;
}

function alike(one, other) {
  const shown = ["on_device", "on_host", "in_l3", "moving", "device_pins", "host_pins"];
  return one.pages > 0 && shown.every((field) => one[field] === other[field]);
}

/** A key of a node that survives splits and merges: the hash of its parent's key and its first page. */
function keyOf(parentKey, tokens) {
  let hash = 0x811c9dc5;
  for (const unit of `${parentKey}/${tokens.join()}`) {
    hash = Math.imul(hash ^ unit.codePointAt(0), 0x01000193) >>> 0;
  }
  return hash.toString(36);
}

/** Places siblings below each other, in at most `rowsMax` rows unless they are unfolded. Returns the number of rows. */
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

/** Number of rows for each sibling. Siblings that are missing in the result are folded; one row is kept free for them. */
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
  // Remaining rows are shared out in turn, so that no branch takes all.
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

/** Places a node and its continuations. Returns the number of rows. */
function placeOne(node, row, rows, place, boxes) {
  const box = { key: node.key, view: node.view, row, rows: 1, left: place.left, width: widthOf(node.view) };
  boxes.push(box);
  const right = { ...place, depth: place.depth + 1, left: box.left + box.width, key: node.endKey };
  box.rows = Math.max(1, placeAll(node.children, row, rows, right, boxes));
  return box.rows;
}

/** A box that represents folded nodes, or that is below them while they are unfolded. */
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

/** The key of the folded box behind a node. */
function foldKey({ key }) {
  return `more-${key}`;
}

/** Width of a run, logarithmic in its pages: a question of one page behind a document of a thousand must be visible. */
function widthOf({ pages }) {
  return pages === 0 ? 2.5 : 3 + 1.6 * Math.log2(1 + pages);
}

function sum(nodes, field) {
  return nodes.reduce((total, node) => total + node[field], 0);
}
