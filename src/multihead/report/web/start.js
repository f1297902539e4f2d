// What is missing, and the start.

function showEmpty() {
  const lines = Object.entries(data.reasons).map(([key, why]) => el("li", {}, el("b", {}, key), `: ${why}`));
  const home = document.getElementById("empty");
  const summary = el("summary", {}, `What is empty, and why (${lines.length})`);
  if (lines.length) home.append(el("details", {}, summary, el("ul", {}, ...lines)));
  const lost = [];
  const some = [...data.dropped.slice(0, 6), ...(data.dropped.length > 6 ? ["…"] : [])].join(", ");
  if (data.dropped.length) lost.push(`the maps of the ${data.dropped.length} least informative heads (${some})`);
  if (data.left_out.includes("errors")) lost.push("standard errors");
  if (data.left_out.includes("even")) lost.push("the values of uniform attention");
  if (!lost.length) return;
  const notes = document.getElementById("notes"), budget = document.getElementById("maps").dataset.budget;
  notes.append(el("li", { id: "left-out" }, `left out to keep this page within ${budget}: ${lost.join("; ")}`));
  notes.hidden = false;
}

function start() {
  document.getElementById("main").hidden = false;
  fillStatistics();
  buildGrids();
  colourGrid();
  buildTable();
  showEmpty();
  const asked = decodeURIComponent(location.hash.slice(1));
  const first = data.heads.findIndex((head) => head.head === asked);
  const withMap = data.order.find((n) => data.maps[n]) ?? data.order[0];
  if (data.heads.length) choose(first >= 0 ? first : withMap);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    known = {};
    colourGrid();
    fillTable();
    if (state.head !== null) choose(state.head);
  });
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) > 1) requestAnimationFrame(() => drawMaps());
    width = entry.contentRect.width;
  }).observe(document.getElementById("maps"));
}

start();
