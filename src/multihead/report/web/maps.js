// The two maps of one head: weights and contributions, one cursor over both.

const LEVELS = 255; // as in payload.py: a byte b is (b / 255)^2 of the map's largest
const view = { panels: [], text: null, row: 0, key: 0, pinned: false, faint: false, words: data.by === "word" };

function unpack(packed, text, causal) {
  const [base64, largest] = packed;
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const keys = text.tokens.length;
  const values = new Float32Array(text.rows.length * keys).fill(NaN); // NaN: may not be read
  let from = 0;
  text.rows.forEach((row, i) => {
    const length = causal ? Math.min(row + 1, keys) : keys;
    for (let j = 0; j < length; j++) values[i * keys + j] = (bytes[from + j] / LEVELS) ** 2 * largest;
    from += length;
  });
  return { values, largest };
}

// A text between words: the pieces of a word that is read are summed, those of one that reads averaged.
function mergedText(text) {
  const place = new Map(text.rows.map((row, n) => [row, n]));
  const span = ([start, stop]) => Array.from({ length: stop - start }, (_, n) => start + n);
  const rows = text.row_words.map((word) => span(word).filter((row) => place.has(row)).map((row) => place.get(row)));
  const kept = [...rows.keys()].filter((n) => rows[n].length);
  return {
    tokens: text.words.map((word) => word[2]),
    rows: kept,
    row_tokens: kept.map((n) => text.row_words[n][2]),
    merged: true,
    pieces: { rows: kept.map((n) => rows[n]), keys: text.words.map((word) => span(word).filter((key) => key < text.tokens.length)) },
  };
}

function mergedMap({ values }, text, keys) {
  const { rows, keys: columns } = text.pieces;
  const merged = new Float32Array(rows.length * columns.length);
  rows.forEach((pieces, i) => columns.forEach((places, j) => {
    const cells = pieces.flatMap((row) => places.map((key) => values[row * keys + key])).filter((v) => !Number.isNaN(v));
    merged[i * columns.length + j] = cells.length ? cells.reduce((sum, v) => sum + v, 0) / pieces.length : NaN;
  }));
  return { values: merged, largest: merged.reduce((most, v) => Math.max(most, v || 0), 0) };
}

function showMaps(n) {
  const home = document.getElementById("maps");
  home.replaceChildren();
  view.panels = [];
  const entry = data.maps[n];
  const label = data.heads[n].head;
  if (!entry) {
    const why = data.dropped.includes(label)
      ? `The map of this head was left out to keep the page within ${home.dataset.budget}. `
      : "The map of this head is not on this page. ";
    const call = `multihead.read_maps(model, text, ${JSON.stringify(label)})`;
    home.append(el("p", { class: "nothing" }, why, "Get it with ", el("code", {}, call), "."));
    return;
  }
  const text = data.texts[entry.text];
  const canMerge = Boolean(text.words);
  view.text = canMerge && view.words ? mergedText(text) : text;
  view.pinned = false;
  const readout = el("p", { class: "readout", id: "readout", "aria-live": "polite" });
  const faint = el("input", { type: "checkbox", id: "faint" });
  faint.checked = view.faint;
  faint.addEventListener("change", () => { view.faint = faint.checked; drawMaps(); });
  const figures = el("div", { class: "maps" });
  const whole = el("input", { type: "checkbox", id: "by-word" });
  whole.checked = view.words;
  whole.addEventListener("change", () => {
    view.words = whole.checked;
    showMaps(n);
    document.getElementById("by-word").focus();
  });
  home.append(readout, figures,
    ...(canMerge ? [el("label", { class: "control" }, whole, "merge the pieces of a word (sum over keys, mean over queries)")] : []),
    el("label", { class: "control" }, faint, "bring out faint cells (square root of the scale)"),
    el("p", { class: "quiet" }, "Rows are queries, columns keys. Point or use the ",
      "arrow keys; a click pins the place, Escape releases it. Below each map, the attention of that query over the text."));
  const titles = { weights: "Weights: what it attends to", contributions: "Contributions: what that adds" };
  for (const [name, title] of Object.entries(titles)) {
    if (entry[name]) {
      const pieces = unpack(entry[name], text, entry.causal);
      const map = view.text.merged ? mergedMap(pieces, view.text, text.tokens.length) : pieces;
      view.panels.push(makePanel(name, title, map, figures, label));
    } else figures.append(el("figure", {}, el("figcaption", {}, el("b", {}, title)), el("p", { class: "nothing" },
      "Contributions can't be computed here: there is an operation between the heads and their output projection. ",
      data.reasons[`${data.heads[n].site} reach`] || data.reasons.reach || "")));
  }
  let best = 0;
  const { values } = view.panels.at(-1);
  values.forEach((v, i) => { if (v > values[best] || Number.isNaN(values[best])) best = i; });
  const keys = view.text.tokens.length;
  moveTo(Math.floor(best / keys), best % keys, true);
}

function makePanel(name, title, map, home, label) {
  const canvas = el("canvas", { class: "map", id: `map-${name}`, tabindex: "0", role: "img",
    "aria-label": `Map of ${name} of head ${label}; the arrow keys move over it`, "aria-describedby": "readout" });
  const ramp = el("canvas", { width: "90", height: "1", "aria-hidden": "true" });
  const strip = el("div", { class: "strip" });
  const panel = { name, canvas, ramp, strip, label, ...map };
  home.append(el("figure", {},
    el("figcaption", {}, el("b", {}, title), el("span", { class: "scale" }, "0", ramp, format(map.largest))),
    el("div", { class: "map-scroll" }, canvas), strip));
  canvas.addEventListener("pointermove", (event) => { if (!view.pinned) pointAt(panel, event); });
  canvas.addEventListener("click", (event) => { view.pinned = !view.pinned; pointAt(panel, event); });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Escape") view.pinned = false;
    if (!step) return;
    event.preventDefault();
    view.pinned = true;
    moveTo(view.row + step[0], view.key + step[1]);
  });
  return panel;
}

function pointAt(panel, event) {
  const { margin, cell } = panel.layout;
  const row = Math.floor((event.offsetY - margin) / cell);
  const key = Math.floor((event.offsetX - margin) / cell);
  if (row >= 0 && key >= 0 && row < view.text.rows.length && key < view.text.tokens.length) moveTo(row, key);
}

function moveTo(row, key, fresh = false) {
  const oldRow = view.row;
  view.row = Math.max(0, Math.min(view.text.rows.length - 1, row));
  view.key = Math.max(0, Math.min(view.text.tokens.length - 1, key));
  drawMaps(fresh);
  if (fresh || view.row !== oldRow) view.panels.forEach(drawStrip);
  describeCell();
}

function describeCell() {
  const { row, key, text } = view;
  const at = row * text.tokens.length + key;
  const unit = text.merged ? "word" : "token";
  const parts = [text.merged ? "Word " : "Token ", el("b", {}, String(text.rows[row])), " ", token(text.row_tokens[row]), ` attends to ${unit} `,
    el("b", {}, String(key)), " ", token(text.tokens[key])];
  if (Number.isNaN(view.panels[0].values[at])) parts.push(": not allowed, it comes later");
  else for (const panel of view.panels) {
    const share = panel.values[at] / rowOf(panel).reduce((sum, v) => sum + (v || 0), 0);
    parts.push(panel.name === "weights" ? ": weight " : " · contribution ", el("b", {}, format(panel.values[at])));
    if (panel.name !== "contributions" || !Number.isFinite(share)) continue;
    parts.push(` (${(100 * share).toFixed(0)} % of this query's)`);
  }
  if (view.pinned) parts.push(" · pinned");
  document.getElementById("readout").replaceChildren(...parts);
}

function rowOf(panel) {
  const keys = view.text.tokens.length;
  return panel.values.subarray(view.row * keys, (view.row + 1) * keys);
}

function drawStrip(panel) {
  const { text } = view;
  panel.strip.replaceChildren();
  if (text.tokens.length > 512) return;
  const row = rowOf(panel);
  const largest = row.reduce((most, v) => Math.max(most, v || 0), 0);
  const bare = !text.tokens.some((word) => /\s/.test(word)); // WordPiece: spaces are in no token
  text.tokens.forEach((word, j) => {
    const span = el("button", { type: "button", tabindex: "-1" }, printable(word));
    if (row[j] > 0) paint(span, rampColour(largest ? row[j] / largest : 0));
    const reader = text.rows.indexOf(j);
    if (data.heads[state.head].kind === "self" && reader >= 0) {
      if (reader === view.row) span.setAttribute("aria-current", "true");
      span.addEventListener("click", () => { view.pinned = true; moveTo(reader, view.key); });
    }
    span.title = `${j}: ${Number.isNaN(row[j]) ? "not allowed" : format(row[j])}`;
    panel.strip.append((text.merged || bare) && j && !word.startsWith("##") ? " " : "\u200b", span);
  });
  const current = panel.strip.querySelector("[aria-current]");
  if (current) panel.strip.scrollTop = current.offsetTop - panel.strip.clientHeight / 2;
}

function drawMaps(fresh = false) {
  for (const panel of view.panels) {
    if (fresh || panel.faint !== view.faint || !panel.image) panel.image = colourMap(panel);
    drawPanel(panel);
  }
}

function colourMap(panel) {
  const keys = view.text.tokens.length;
  const image = new ImageData(keys, view.text.rows.length);
  panel.faint = view.faint;
  panel.values.forEach((v, i) => {
    if (Number.isNaN(v)) return;
    const part = panel.largest ? v / panel.largest : 0;
    image.data.set([...rampColour(view.faint ? Math.sqrt(part) : part), 255], 4 * i);
  });
  const canvas = el("canvas", { width: String(keys), height: String(image.height) });
  canvas.getContext("2d").putImageData(image, 0, 0);
  drawRamp(panel.ramp, (t) => rampColour(view.faint ? Math.sqrt(t) : t));
  return canvas;
}

function drawPanel(panel) {
  const { canvas, image } = panel;
  const dots = window.devicePixelRatio || 1;
  const room = canvas.parentElement.clientWidth;
  const keys = image.width, rows = image.height;
  const margin = Math.round(Math.min(keys > 80 ? 64 : 84, room * 0.2));
  let cell = Math.max(1, Math.min(28, (room - margin - 1) / keys));
  cell = cell > 4 ? Math.floor(cell * dots) / dots : cell;
  panel.layout = { margin, cell };
  const width = Math.ceil(margin + keys * cell + 1), height = Math.ceil(margin + rows * cell + 1);
  canvas.width = width * dots;
  canvas.height = height * dots;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  pen.imageSmoothingEnabled = cell * dots < 1;
  pen.drawImage(image, margin, margin, keys * cell, rows * cell);
  pen.strokeStyle = css("--line");
  pen.strokeRect(margin - 0.5, margin - 0.5, keys * cell + 1, rows * cell + 1);
  drawLabels(pen, margin, cell, view.text.row_tokens, view.row, false);
  drawLabels(pen, margin, cell, view.text.tokens, view.key, true);
  pen.strokeStyle = css("--ink");
  pen.lineWidth = 1;
  pen.globalAlpha = 0.35;
  pen.strokeRect(margin - 0.5, margin + view.row * cell - 0.5, keys * cell + 1, cell + 1);
  pen.strokeRect(margin + view.key * cell - 0.5, margin - 0.5, cell + 1, rows * cell + 1);
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  pen.strokeRect(margin + view.key * cell - 1, margin + view.row * cell - 1, cell + 2, cell + 2);
}

function drawLabels(pen, margin, cell, words, chosen, upright) {
  const line = 11, step = Math.ceil(line / cell);
  pen.font = `10.5px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  pen.textAlign = upright ? "left" : "right";
  words.forEach((word, n) => {
    const near = Math.abs(n - chosen) * cell < line; // the chosen label needs its place
    if (n !== chosen && (n % step || near)) return;
    pen.fillStyle = css(n === chosen ? "--ink" : "--quiet");
    pen.save();
    if (upright) {
      pen.translate(margin + (n + 0.5) * cell, margin - 5);
      pen.rotate(-Math.PI / 2);
    } else pen.translate(margin - 5, margin + (n + 0.5) * cell);
    pen.fillText(fitted(pen, printable(word).trim() || "␣", margin - 8), 0, 0);
    pen.restore();
  });
}

function fitted(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let end = Math.min(text.length, 40);
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > room) end--;
  return `${text.slice(0, end)}…`;
}
