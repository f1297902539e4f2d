// The grid of layers x heads, coloured by a chosen statistic.

function fillStatistics() {
  const mass = (c) => statisticOf(c).mass, of = (word) => data.columns.filter((c) => c.startsWith(`${word}:`));
  const parts = [
    ["Roles", [["role", "strongest role"], ...measuredRoles().map((r) => [`score:${r}`, `score of ${r}`])]],
    ["Mass by contribution", of("contribution").map((c) => [c, `${plain(c)} (contribution)`])],
    ["Mass by weight", data.columns.filter((c) => mass(c) && c === plain(c)).map((c) => [c, `${c} (weight)`])],
    ["Of the whole head", data.columns.filter((c) => !mass(c)).map((c) => [c, c])],
    ["With uniform attention", of("even").map((c) => [c, `${plain(c)} (uniform)`])],
  ];
  const select = document.getElementById("statistic");
  for (const [label, options] of parts) if (options.length)
    select.append(el("optgroup", { label }, ...options.map(([value, text]) => el("option", { value }, text))));
  select.addEventListener("change", () => { state.statistic = select.value; colourGrid(); });
}

function buildGrids() {
  const home = document.getElementById("grids");
  for (const block of data.blocks) {
    const size = block.width > 48 ? 10 : block.width > 24 ? 14 : block.width > 16 ? 18 : 25;
    const starts = (c) => block.groups && c > 0 && block.groups[c] !== block.groups[c - 1];
    const tracks = Array.from({ length: block.width }, (_, c) => (starts(c) ? "5px " : "") + `${size}px`);
    const column = (c) => 2 + c + Array.from({ length: c + 1 }, (_, i) => i).filter(starts).length;
    const grid = el("div", { class: "grid", role: "grid", "aria-label": `Heads ${block.title}` });
    grid.style.gridTemplateColumns = `auto ${tracks.join(" ")}`;
    let line = 1;
    const place = (node, c, across = 1) => {
      node.style.gridArea = `${line} / ${c} / auto / span ${across}`;
      return node;
    };
    if (block.groups) {
      const title = "the key/value head that the heads below share";
      grid.append(place(el("span", { class: "row-label", title }, "key/value"), 1));
      for (let c = 0; c < block.width; ) {
        let end = c;
        while (end + 1 < block.width && block.groups[end + 1] === block.groups[c]) end++;
        grid.append(place(el("span", { class: "group" }, String(block.groups[c])), column(c), end - c + 1));
        c = end + 1;
      }
      line++;
    }
    const header = el("div", { role: "row", class: "contents" }, place(el("span", { class: "row-label" }, ""), 1));
    for (let c = 0; c < block.width; c++) {
      const shown = size >= 25 ? `H${c}` : size >= 18 || c % 4 === 0 ? String(c) : "";
      header.append(place(el("span", { role: "columnheader", "aria-label": `H${c}` }, shown), column(c)));
    }
    grid.append(header);
    for (const row of block.rows) {
      line++;
      const part = el("div", { role: "row", class: "contents" },
        place(el("span", { class: "row-label", role: "rowheader", title: row.site }, row.label), 1));
      row.cells.forEach((n, c) => {
        if (n === null) return;
        const marks = { class: "cell", role: "gridcell", type: "button", tabindex: "-1", "data-head": n };
        const cell = place(el("button", marks), column(c));
        cell.style.height = `${Math.max(14, size - (block.rows.length > 16 ? 7 : 2))}px`;
        if (size < 18) cell.dataset.small = "";
        cells[n] = cell;
        part.append(cell);
      });
      grid.append(part);
    }
    const kind = block.kind === "cross" && !/cross/.test(block.title) ? "cross-attention" : "";
    const title = [block.title, kind].filter(Boolean).join(", ");
    home.append(el("div", { class: "block" }, ...(title ? [el("h3", {}, title)] : []), grid));
  }
  const over = (event) => event.target.closest?.(".cell");
  home.addEventListener("click", (event) => { if (over(event)) choose(Number(over(event).dataset.head)); });
  for (const kind of ["pointerover", "focusin"]) home.addEventListener(kind, (event) => {
    if (over(event)) document.getElementById("pointed").textContent = over(event).getAttribute("aria-label");
  });
  home.addEventListener("keydown", walk);
}

function walk(event) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step || state.head === null) return;
  event.preventDefault();
  const rows = data.blocks.flatMap((block) => block.rows.map((row) => row.cells));
  let r = rows.findIndex((row) => row.includes(state.head));
  let c = rows[r].indexOf(state.head);
  do { r += step[0]; c += step[1]; } while (rows[r]?.[c] === null); // over the gaps of pruned heads
  const next = rows[r]?.[c];
  if (next === undefined) return;
  choose(next);
  cells[next].focus();
}

function colourGrid() {
  const key = state.statistic, legend = document.getElementById("legend");
  const values = key === "role" ? null : valuesOf(key);
  const there = (values || []).filter((v) => v !== null);
  const most = Math.max(...there), least = Math.min(...there), title = name(key);
  const signed = least < 0, limit = Math.max(most, -least);
  const side = (t) => blend(hex(css("--zero")), hex(css(t < 0 ? "--below" : "--above")), Math.min(1, Math.abs(t)));
  cells.forEach((cell, n) => {
    const role = roleOf(n), head = data.heads[n], value = values && values[n];
    cell.style.backgroundColor = cell.style.color = "";
    cell.classList.toggle("rests", key === "role" && head.resting);
    cell.classList.toggle("empty", Boolean(values) && value === null);
    cell.textContent = "";
    if (!values) {
      const fullness = 0.45 + 0.55 * Math.min(1, data.roles[role]?.scores[n]);
      paint(cell, role === "mixed" ? hex(css("--mixed")) : blend(hex(css("--page")), hex(css(`--${role}`)), fullness));
      cell.textContent = "small" in cell.dataset ? "" : letter(role);
    } else if (value !== null) paint(cell, signed ? side(value / limit) : rampColour(most ? value / most : 0));
    const held = head.roles.map((r) => `${r} ${format(data.roles[r].scores[n])}`).join(", ") || "mixed";
    const number = values ? `; ${title} ${value === null ? `empty: ${whyEmpty(n, key)}` : format(value)}` : "";
    cell.setAttribute("aria-label", `${head.head}: ${held}${head.resting ? ", resting" : ""}${number}`);
  });
  legend.replaceChildren();
  if (!values) {
    const items = [...measuredRoles(), "mixed"].map((role) => {
      const swatch = el("span", { class: "swatch", "aria-hidden": "true" }, letter(role));
      paint(swatch, hex(css(`--${role}`)));
      return el("li", { title: data.roles[role]?.meaning || "no role reaches the threshold" }, swatch, role);
    });
    const rests = el("span", { class: "swatch rests", "aria-hidden": "true" });
    paint(rests, hex(css("--quiet")));
    legend.append(el("ul", {}, ...items, el("li", {}, rests, "resting")),
      el("p", { class: "quiet" }, "The fuller the colour, the higher the role's score."));
    return;
  }
  const ramp = el("canvas", { width: "150", height: "1", "aria-hidden": "true" });
  drawRamp(ramp, (t) => (signed ? side(2 * t - 1) : rampColour(t)));
  const statistic = key.startsWith("score:") ? null : statisticOf(key);
  const at = (v) => data.heads[values.indexOf(v)].head;
  const ends = [signed ? -limit : 0, signed ? limit : most].map(format);
  const meaning = statistic ? `${statistic.meaning}: ${statistic.formula}`
    : `${data.roles[key.slice(6)].meaning}: contribution minus that of uniform attention`;
  legend.append(el("div", { class: "scale" }, ends[0], ramp, ends[1], statistic?.unit || ""),
    el("p", { class: "quiet" }, meaning, el("br"), `from ${format(least)} (${at(least)}) to ${format(most)} (${at(most)})`));
}

const letter = (role) => LETTERS[role] ?? role[0].toUpperCase();
const name = (key) => document.querySelector(`#statistic option[value="${CSS.escape(key)}"]`)?.textContent || key;
