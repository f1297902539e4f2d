"use strict";
// What all parts of the page share: its data, elements, numbers and colours.
// Text of tokens only ever becomes a text node.

const data = JSON.parse(document.getElementById("multihead-data").textContent);
const state = { head: null, statistic: "role", sort: "", falling: true };
const LETTERS = { special: "*", mixed: "" };
const cells = []; // the button of each head

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function format(v) {
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  const size = Math.abs(v);
  if (size && size < 0.0005) return v.toExponential(1).replace("-", "−");
  return v.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3).replace("-", "−");
}

function printable(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\u0000-\u001f\u007f-\u009f]/g, "\ufffd") || "∅";
}

const token = (text) => el("span", { class: "token" }, printable(text));

// Colours: read from the style sheet, so that they follow the scheme.
let known = {};
const css = (name) => (known[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim());
const hex = (text) => [1, 3, 5].map((at) => parseInt(text.trim().slice(at, at + 2), 16));
const blend = (a, b, t) => a.map((v, i) => Math.round(v + (b[i] - v) * t));

function rampColour(t) {
  known.table ??= Array.from({ length: 256 }, (_, n) => {
    const stops = (known.stops ??= css("--ramp").split(",").map(hex));
    const at = (n / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    return blend(stops[low], stops[low + 1], at - low);
  });
  return known.table[Math.round(255 * Math.max(0, Math.min(1, t)))];
}

function paint(node, rgb) {
  const [r, g, b] = rgb.map((v) => (v / 255) ** 2.2);
  node.style.backgroundColor = `rgb(${rgb.join(",")})`;
  node.style.color = 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#16181c" : "#f6f7f8";
}

function drawRamp(canvas, colour) {
  const pen = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    pen.fillStyle = `rgb(${colour(x / (canvas.width - 1)).join(",")})`;
    pen.fillRect(x, 0, 1, canvas.height);
  }
}

// Numbers
const plain = (column) => column.replace(/^(contribution|even):/, "");
const statisticOf = (column) => data.statistics[plain(column)];
const roleOf = (n) => data.heads[n].roles[0] || "mixed";
const countOf = (column, n) => (Array.isArray(data.counts[column]) ? data.counts[column][n] : data.counts[column]);
const measuredRoles = () => Object.keys(data.roles).filter((r) => data.roles[r].scores.some((s) => s !== null));
const valuesOf = (key) => (key.startsWith("score:") ? data.roles[key.slice(6)].scores : data.values[key]);

function strongest(n) {
  const found = measuredRoles().filter((r) => data.roles[r].scores[n] !== null);
  return found.sort((a, b) => data.roles[b].scores[n] - data.roles[a].scores[n])[0];
}

function whyEmpty(n, column) {
    for (const name of [column, plain(column)])
    for (const key of [`${data.heads[n].site} ${name}`, name]) if (data.reasons[key]) return data.reasons[key];
  return "not measured in this reading";
}
