"use strict";
// Numbers for people, elements, colours. Times come in as nanoseconds, sizes as bytes.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function rounded(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}

function timeText(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  if (size < 1e6) return `${rounded(ns / 1e3)} \u00b5s`;
  if (size < 1e9) return `${rounded(ns / 1e6)} ms`;
  return `${(ns / 1e9).toFixed(size < 1e10 ? 3 : 2)} s`;
}

function bytesText(bytes) {
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024) return `${unit === "B" ? value : rounded(value)} ${unit}`;
    value /= 1024;
  }
  return `${rounded(value)} TiB`;
}

// A run without a budget plans for more than any device has.
const limited = data.budget_bytes < 2 ** 59;
const budgetText = limited ? bytesText(data.budget_bytes) : "no budget";

const percentText = (share) => `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;

// "0-3, 8-11" for layer numbers in order.
function spansText(numbers) {
  const spans = [];
  for (const number of numbers) {
    const last = spans[spans.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else spans.push([number, number]);
  }
  return spans.map(([a, b]) => (a === b ? `${a}` : `${a}\u2013${b}`)).join(", ") || "none";
}

// An element with attributes and children; texts are never read as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// The page's names of colours in CSS, by kind of span and by owner of memory.
const KIND_TEXT = {
  forward: "forward",
  backward: "backward",
  "recompute-hidden": "recompute in a window",
  "recompute-stall": "recompute in a stall",
  "recompute-exposed": "recompute on demand",
  wait: "waiting for a collective",
  idle: "idle for the pipeline",
  collective: "tensor-parallel collective",
  p2p: "pipeline transfer",
};
const OWNER_COLOR = {
  static: "--static",
  kept: "--kept",
  "rebuilt in forward windows": "--in-forward",
  "rebuilt in the stall": "--recompute-stall",
  "rebuilt in backward windows": "--in-backward",
  "rebuilt on demand": "--recompute-exposed",
  "backward workspace": "--workspace",
};

const OWNER_TEXT = {
  kept: "activations kept",
  "rebuilt in forward windows": "activations rebuilt in forward windows",
  "rebuilt in the stall": "activations rebuilt in the stall",
  "rebuilt in backward windows": "activations rebuilt in backward windows",
  "rebuilt on demand": "activations rebuilt on demand",
};

const probe = document.body.appendChild(make("span", { hidden: true }));
const palette = new Map();

// What a CSS variable looks like in the present theme; canvases cannot read variables.
function color(name) {
  if (!palette.has(name)) {
    probe.style.color = `var(${name})`;
    palette.set(name, getComputedStyle(probe).color);
  }
  return palette.get(name);
}

function legendItem(text, variable, extra = "") {
  return make("li", {}, make("span", { class: `swatch ${extra}`, style: { "--color": `var(${variable})` } }), text);
}
