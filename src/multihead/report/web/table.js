// The table of all heads.

function columnsShown() {
  const mass = (n) => data.roles[data.heads[n].roles[0]]?.mass, byRole = (prefix) => (n) =>
    (mass(n) ? data.values[prefix + mass(n)]?.[n] ?? null : null);
  const rests = (n) => data.heads[n].resting || null;
  const fixed = [
    { name: "head", value: (n) => n, text: (n) => data.heads[n].head },
    { name: "roles", value: (n) => data.heads[n].roles.join() || null, left: true },
    { name: "score", value: (n) => data.roles[data.heads[n].roles[0]]?.scores[n] ?? null, bar: true },
    { name: "weight", value: byRole(""), bar: true },
    { name: "contribution", value: byRole("contribution:"), bar: true },
    { name: "uniform", value: byRole("even:"), bar: true },
    { name: "queries", value: (n) => countOf(mass(n) ? `contribution:${mass(n)}` : "entropy", n) ?? null, whole: true },
    { name: "rests", value: rests, text: (n) => (rests(n) ? "resting" : "") },
  ];
  const chosen = document.getElementById("every").checked ? data.columns
    : ["norm", "share", "entropy_ratio", "distance"].filter((c) => data.columns.includes(c));
  return [...fixed, ...chosen.map((c) => ({ name: c, value: (n) => data.values[c][n],
    bar: statisticOf(c).top === 1 && c !== "share" }))];
}

function buildTable() {
  const filter = document.getElementById("filter");
  filter.append(...["all heads", ...measuredRoles(), "mixed", "resting"].map((r) => el("option", { value: r }, r)));
  filter.addEventListener("change", fillTable);
  document.getElementById("find").addEventListener("input", fillTable);
  document.getElementById("every").addEventListener("change", fillTable);
  document.getElementById("table").addEventListener("click", (event) => {
    const row = event.target.closest("tbody tr");
    if (row) choose(Number(row.dataset.head), true);
  });
  fillTable();
}

function fillTable() {
  const shown = columnsShown(), want = document.getElementById("filter").value;
  const text = document.getElementById("find").value.trim().toLowerCase();
  const rows = data.heads.map((_, n) => n).filter((n) => {
    const head = data.heads[n];
    const wanted = { "all heads": true, resting: head.resting, mixed: !head.roles.length };
    return (wanted[want] ?? head.roles.includes(want)) && head.head.toLowerCase().includes(text);
  });
  const column = shown.find((c) => c.name === state.sort);
  if (column) rows.sort((a, b) => {
    const x = column.value(a), y = column.value(b);
    if (x === null || y === null) return (x === null) - (y === null) || a - b; // the empty ones last, either way
    return (x < y ? -1 : x > y ? 1 : 0) * (state.falling ? -1 : 1) || a - b;
  });
  const names = shown.map((c) => {
    const button = el("button", { type: "button" }, c.name);
    button.addEventListener("click", () => {
      state.falling = state.sort === c.name ? !state.falling : c.name !== "head" && c.name !== "roles";
      state.sort = c.name;
      fillTable();
      [...document.querySelectorAll("#table thead button")].find((b) => b.textContent === c.name)?.focus();
    });
    const order = state.sort === c.name ? (state.falling ? "descending" : "ascending") : "none";
    return el("th", { scope: "col", "aria-sort": order, ...(c.left ? { class: "left" } : {}) }, button);
  });
  const body = el("tbody", {}, ...rows.map((n) => el("tr", { "data-head": n }, ...shown.map((c) => tableCell(c, n)))));
  document.getElementById("table").replaceChildren(el("thead", {}, el("tr", {}, ...names)), body);
  document.getElementById("shown").textContent = `${rows.length} of ${data.heads.length} heads`;
  markRow();
}

function tableCell(column, n) {
  if (column.name === "head") return el("th", { scope: "row" }, el("button", { type: "button" }, column.text(n)));
  const { roles } = data.heads[n], score = (r) => (data.roles[r] ? ` ${data.roles[r].scores[n].toFixed(2)}` : "");
  const chip = (r) => el("span", { class: "chip" }, roleDot(r), r, score(r));
  if (column.name === "roles") return el("td", { class: "left" }, ...(roles.length ? roles : ["mixed"]).map(chip));
  const value = column.value(n);
  const whole = column.whole && value !== null;
  const cell = el("td", {}, column.text ? column.text(n) : whole ? value.toLocaleString("en") : format(value));
  if (column.bar && value !== null) bar(cell, value);
  return cell;
}

function markRow() {
  for (const row of document.querySelectorAll("#table tbody tr"))
    row.setAttribute("aria-current", String(Number(row.dataset.head) === state.head));
}
