// The chosen head: its roles and all its numbers.

function choose(n, look = false) {
  if (state.head !== null) cells[state.head].setAttribute("tabindex", "-1");
  state.head = n;
  cells.forEach((cell, i) => cell.setAttribute("aria-selected", String(i === n)));
  cells[n].setAttribute("tabindex", "0");
  const head = data.heads[n];
  document.getElementById("head-title").textContent = `Head ${head.head}`;
  document.getElementById("place").textContent =
    `${head.kind}-attention of ${head.site}, head ${head.index}, key/value head ${head.group}`;
  showRoles(n);
  showMaps(n);
  showNumbers(n);
  markRow();
  try { location.replace(`#${encodeURIComponent(head.head)}`); } catch { /* a frame without an address */ }
  if (look) document.getElementById("detail").scrollIntoView({ block: "start" });
}

function roleDot(role) {
  const dot = el("span", { class: "dot", "aria-hidden": "true" });
  dot.style.backgroundColor = css(`--${role}`);
  return dot;
}

function showRoles(n) {
  const list = document.getElementById("roles"), head = data.heads[n];
  const line = (role) => {
    const { mass, scores, meaning } = data.roles[role], of = (c) => format(data.values[c]?.[n]);
    const where = mass.startsWith("probe:") ? ", on the probe (random tokens that are repeated once)" : "";
    return `: ${meaning}${where}. Score ${format(scores[n])}: ${of(`contribution:${mass}`)} of its contribution is there` +
      (data.values[`even:${mass}`] ? `, minus the ${of(`even:${mass}`)} of uniform attention` : "") +
      `; ${of(mass)} of its weight; ${countOf(`contribution:${mass}`, n).toLocaleString("en")} queries`;
  };
  list.replaceChildren(...head.roles.map((r) => el("li", {}, roleDot(r), el("span", {}, el("b", {}, r), line(r)))));
  if (!head.roles.length) {
    const near = strongest(n);
    list.append(el("li", {}, roleDot("mixed"), el("span", {}, el("b", {}, "mixed"),
      `: no role reaches ${data.threshold.toFixed(2)}`, near ? `. Nearest: ${near}${line(near)}` : "")));
  }
  if (head.resting) list.append(el("li", {}, el("span", {}, el("b", {}, "resting"),
    ": most of its weight lies on the first or a special key, and it reads little there")));
}

function showNumbers(n) {
  const body = el("tbody"), number = (column) => {
    const value = data.values[column]?.[n] ?? null, error = data.errors[column]?.[n];
    const cell = el("td", {}, value === null ? "" : format(value));
    if (value !== null && error >= 0.0005) cell.append(el("span", { class: "error" }, ` ±${format(error)}`));
    if (value !== null && statisticOf(column).top === 1) bar(cell, value);
    return cell;
  };
  for (const statistic of Object.values(data.statistics)) {
    const key = statistic.name, more = el("tr", { class: "formula", hidden: "" }, el("td", { colspan: "5" },
      el("code", {}, statistic.formula), ` · ${statistic.meaning} · over ${statistic.rows}`,
      statistic.unit ? ` · in ${statistic.unit}` : "", statistic.source ? ` · ${statistic.source}` : ""));
    const button = el("button", { type: "button", "aria-expanded": "false", title: statistic.formula }, key);
    button.addEventListener("click", () => {
      more.hidden = !more.hidden;
      button.setAttribute("aria-expanded", String(!more.hidden));
    });
    const row = el("tr", {}, el("th", { scope: "row" }, button));
    const value = data.values[key]?.[n] ?? null, other = data.values[`contribution:${key}`]?.[n] ?? null;
    const pair = statistic.mass ? [number(`contribution:${key}`), number(`even:${key}`)] : [el("td"), el("td")];
    const rows = countOf(value === null ? `contribution:${key}` : key, n);
    if (value === null && other === null)
      row.append(el("td", { class: "why", colspan: "4" }, `empty: ${whyEmpty(n, key)}`));
    else row.append(number(key), ...pair, el("td", {}, rows.toLocaleString("en")));
    body.append(row, more);
  }
  const names = ["statistic", "value, by weight", "by contribution", "uniform", "queries"];
  document.getElementById("numbers").replaceChildren(
    el("thead", {}, el("tr", {}, ...names.map((text) => el("th", { scope: "col" }, text)))), body);
}

function bar(cell, value) {
  cell.classList.add("bar");
  cell.style.setProperty("--v", Math.max(0, Math.min(1, value)));
}
