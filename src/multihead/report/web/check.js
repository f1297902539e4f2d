// The tables of a check: one cursor over the three of a head, by pointer and by arrow keys.

const placeOf = (cell) => [cell.parentElement.rowIndex - 1, cell.cellIndex - 1];

function cellAt(table, row, key) {
  return table.rows[row + 1]?.cells[key + 1];
}

function describe(head, row, key) {
  const numbers = data[head.id];
  const value = (name) => (numbers[name] ? numbers[name][row]?.[key] ?? NaN : undefined);
  const shown = (v) => (Number.isNaN(v) ? "NaN" : String(Number(v.toPrecision(5))).replace("-", "−"));
  const read = value("read"), expected = value("expected");
  const parts = ["Query ", el("b", {}, String(numbers.queries + row)), ", key ", el("b", {}, String(numbers.keys + key)), ": "];
  if (read !== undefined) parts.push(el("b", {}, shown(read)), " as read out");
  if (expected !== undefined) parts.push(read === undefined ? "" : ", ", el("b", {}, shown(expected)), " by the definition");
  if (read !== undefined && expected !== undefined) parts.push(", difference ", el("b", {}, shown(read - expected)));
  head.querySelector(".readout").replaceChildren(...parts);
}

function pointAt(head, row, key) {
  head.querySelectorAll(".here").forEach((cell) => cell.classList.remove("here"));
  for (const table of head.querySelectorAll(".matrix")) {
    for (const cell of [cellAt(table, row, key), cellAt(table, row, -1), cellAt(table, -1, key)]) cell?.classList.add("here");
    table.querySelectorAll('td[tabindex="0"]').forEach((cell) => cell.setAttribute("tabindex", "-1"));
    cellAt(table, row, key)?.setAttribute("tabindex", "0");
  }
  describe(head, row, key);
}

function walk(event) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step || event.target.tagName !== "TD") return;
  event.preventDefault();
  const [row, key] = placeOf(event.target);
  const next = cellAt(event.target.closest("table"), row + step[0], key + step[1]);
  if (next?.tagName !== "TD") return;
  next.setAttribute("tabindex", "0"); // only then it can have the focus
  next.focus();
}

function open(id) {
  for (let node = document.getElementById(id); node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
}

function start() {
  for (const node of document.querySelectorAll(".with-script")) node.hidden = false;
  for (const head of document.querySelectorAll(".head")) {
    if (!head.querySelector(".matrix")) {
      head.querySelector(".readout")?.remove();
      continue;
    }
    head.querySelectorAll(".matrix").forEach((table) => table.setAttribute("role", "grid"));
    const first = head.querySelector(".first") ?? head.querySelector(".matrix td");
    pointAt(head, ...placeOf(first));
    const point = (event) => { if (event.target.tagName === "TD") pointAt(head, ...placeOf(event.target)); };
    head.addEventListener("pointerover", point);
    head.addEventListener("focusin", point);
    head.addEventListener("keydown", walk);
  }
  const show = () => open(decodeURIComponent(location.hash.slice(1)));
  addEventListener("hashchange", show);
  show();
}

start();
