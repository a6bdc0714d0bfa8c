// What a plot says at the pointer, and the order of tables. Everything that is shown was written by the
// program into the page; the figures behind it are in #data, as JSON.
const tip = document.getElementById("tip");

function nearest(tips, x) {
  let best = tips[0];
  for (const candidate of tips) {
    if (Math.abs(candidate[0] - x) < Math.abs(best[0] - x)) best = candidate;
  }
  return best;
}

function show(plot, tips, event) {
  const box = plot.getBoundingClientRect();
  const scale = box.width / plot.viewBox.baseVal.width;
  const [x, text] = nearest(tips, (event.clientX - box.left) / scale);
  const cross = plot.querySelector(".cross");
  cross.setAttribute("x1", x);
  cross.setAttribute("x2", x);
  cross.removeAttribute("hidden");
  tip.textContent = text;
  tip.hidden = false;
  const left = box.left + x * scale;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  const beside = left + 12 > room ? left - tip.offsetWidth - 12 : left + 12;
  tip.style.left = `${Math.max(4, Math.min(room, beside))}px`;
  tip.style.top = `${Math.max(4, box.top + 14)}px`;
}

function hide(plot) {
  plot.querySelector(".cross").setAttribute("hidden", "");
  tip.hidden = true;
}

for (const plot of document.querySelectorAll("svg[data-tips]")) {
  const tips = JSON.parse(plot.dataset.tips);
  plot.addEventListener("pointermove", (event) => show(plot, tips, event));
  plot.addEventListener("pointerdown", (event) => show(plot, tips, event));
  plot.addEventListener("pointerleave", () => hide(plot));
}

function order(table, column, head) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows];
  const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  rows.sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    const numbers = [a, b].every((text) => text !== "" && Number.isFinite(Number(text)));
    const sign = numbers ? a - b : a.localeCompare(b);
    return down ? -sign : sign;
  });
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => order(table, column, head));
  });
}
