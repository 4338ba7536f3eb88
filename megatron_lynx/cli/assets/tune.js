"use strict";
// The page of a search: points in a canvas, filters, a table; everything works from the keyboard.

const SIDES = { lynx: "with lynx", megatron: "Megatron\u2019s own options" };
const FIELDS = {
  side: "side", budget_bytes: "budget", tp: "TP", pp: "PP", vpp: "VPP", dp: "DP", micro_batch_size: "batch",
  sequence_parallel: "SP", distributed_optimizer: "DO",
};
const FIRST = 50;
const PAD = { left: 70, right: 16, top: 12, bottom: 34 };

const points = [...data.points].sort((a, b) => a.step_ns - b.step_ns);
const chosen = Object.fromEntries(Object.keys(FIELDS).map((name) => [name, ""]));
let shown = points;
let current = null;
let places = [];

function valueText(name, value) {
  if (name === "side") return SIDES[value];
  if (name === "budget_bytes") return bytesText(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return `${value}`;
}

function pointText(point) {
  const exact = point.exact ? ", planned exactly" : "";
  return `${point.name}, ${SIDES[point.side]}: ${timeText(point.step_ns)} a step, peak ${bytesText(point.peak_bytes)} on ` +
    `stage ${point.stage}, ${point.method}${exact}, ${Math.round(point.tokens)} tokens/s a device, ` +
    `MFU ${(point.mfu * 100).toFixed(1)} %; recomputed: ${point.recomputed}`;
}

// Filters

function buildFilters() {
  for (const [name, label] of Object.entries(FIELDS)) {
    const values = [...new Set(points.map((point) => point[name]))].sort((a, b) => (a > b ? 1 : -1));
    if (values.length < 2) continue;
    const select = make("select", { id: `filter-${name}`, "aria-label": label });
    select.append(make("option", { value: "" }, `${label}: all`));
    values.forEach((value, place) => select.append(make("option", { value: place }, `${label}: ${valueText(name, value)}`)));
    select.addEventListener("change", () => {
      chosen[name] = select.value === "" ? "" : values[Number(select.value)];
      update();
    });
    byId("filters").append(select);
  }
}

function passes(point) {
  return Object.entries(chosen).every(([name, value]) => value === "" || point[name] === value);
}

// Plot

function bounds() {
  const steps = shown.map((point) => point.step_ns);
  const peaks = shown.map((point) => point.peak_bytes);
  const least = steps.length ? steps[0] : 0;
  const most = steps.length ? steps[steps.length - 1] : 1;
  return { least, most: most > least ? most : least + 1, top: 1.05 * peaks.reduce((a, b) => Math.max(a, b), 1) };
}

function draw() {
  const canvas = byId("plot").querySelector("canvas");
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = byId("plot");
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const style = getComputedStyle(document.body);
  const ink = style.color;
  const area = bounds();
  const x = (ns) => PAD.left + ((ns - area.least) / (area.most - area.least)) * (width - PAD.left - PAD.right);
  const y = (bytes) => height - PAD.bottom - (bytes / area.top) * (height - PAD.top - PAD.bottom);
  axes(pen, area, x, y, width, height, ink);
  const colors = {};
  for (const item of byId("legend").querySelectorAll(".swatch")) {
    colors[item.dataset.side] = getComputedStyle(item).backgroundColor;
  }
  places = shown.map((point) => ({ point, x: x(point.step_ns), y: y(point.peak_bytes) }));
  for (const place of [...places].reverse()) mark(pen, place, colors[place.point.side]);
  const here = places.find((place) => place.point === current);
  if (here) {
    pen.strokeStyle = ink;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(here.x, here.y, 8, 0, 7);
    pen.stroke();
  }
}

function axes(pen, area, x, y, width, height, ink) {
  pen.strokeStyle = pen.fillStyle = ink;
  pen.globalAlpha = 0.7;
  pen.font = "11px system-ui, sans-serif";
  pen.strokeRect(PAD.left, PAD.top, width - PAD.left - PAD.right, height - PAD.top - PAD.bottom);
  for (let part = 0; part <= 4; part += 1) {
    const ns = area.least + (part / 4) * (area.most - area.least);
    const bytes = (part / 4) * area.top;
    pen.textAlign = part === 4 ? "right" : part ? "center" : "left";
    pen.fillText(timeText(ns), x(ns), height - 14);
    pen.textAlign = "right";
    pen.fillText(bytesText(bytes), PAD.left - 6, y(bytes) + 4);
  }
  pen.globalAlpha = 1;
}

function mark(pen, place, color) {
  pen.fillStyle = pen.strokeStyle = color;
  pen.lineWidth = 1.5;
  pen.beginPath();
  if (place.point.side === "lynx") pen.arc(place.x, place.y, 4, 0, 7);
  else pen.rect(place.x - 3.5, place.y - 3.5, 7, 7);
  if (place.point.exact) pen.fill();
  else pen.stroke();
}

function nearest(event) {
  const box = byId("plot").getBoundingClientRect();
  let best = null;
  let least = 15 ** 2;
  for (const place of places) {
    const far = (place.x - event.clientX + box.left) ** 2 + (place.y - event.clientY + box.top) ** 2;
    if (far < least) [best, least] = [place.point, far];
  }
  return best;
}

function show(point) {
  current = point;
  byId("spoken").textContent = point ? pointText(point) : "";
  for (const row of byId("fastest").querySelectorAll("tr[data-place]")) {
    row.toggleAttribute("data-shown", shown[Number(row.dataset.place)] === point);
  }
  draw();
}

function buildHands() {
  const plot = byId("plot");
  plot.addEventListener("pointermove", (event) => {
    const point = nearest(event);
    const tip = byId("tip");
    tip.hidden = !point;
    if (!point) return;
    tip.textContent = pointText(point);
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 350)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  plot.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
  plot.addEventListener("click", (event) => show(nearest(event) || current));
  plot.addEventListener("keydown", (event) => {
    const at = shown.indexOf(current);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: shown.length - 1 }[event.key];
    if (to === undefined || !shown.length) return;
    event.preventDefault();
    show(shown[Math.min(Math.max(to, 0), shown.length - 1)]);
  });
}

// Texts

function buildTexts() {
  byId("title").textContent = data.title;
  byId("job").textContent = data.job;
  const gains = data.gains.filter((gain) => gain !== null).map((gain) => `${gain}\u00d7`);
  const best = points.length ? `Fastest: ${pointText(points[0])}. ` : "Nothing fits. ";
  const over = gains.length ? `Best with lynx over best without, both tuned: ${gains.join(", ")}. ` : "";
  byId("finding").textContent = `${best}${over}All figures are simulated.`;
  for (const [side, label] of Object.entries(SIDES)) {
    const kind = side === "lynx" ? "with" : "without";
    byId("legend").append(make("li", {}, make("span", { class: `swatch ${kind}`, "data-side": side }), label));
  }
  for (const tally of data.tallies) {
    for (const [side, text] of Object.entries(tally)) byId("tallies").append(make("li", {}, `${SIDES[side]}: ${text}`));
  }
}

function buildTable() {
  const heads = ["configuration", "side", "step", "tokens/s/device", "MFU", "peak", "method", "recomputed"];
  const body = make("tbody");
  shown.slice(0, FIRST).forEach((point, place) => {
    const button = make("button", { type: "button" }, point.name);
    button.addEventListener("click", () => show(point));
    const cells = [
      SIDES[point.side], timeText(point.step_ns), `${Math.round(point.tokens)}`, `${(point.mfu * 100).toFixed(1)} %`,
      bytesText(point.peak_bytes), point.method, point.recomputed,
    ];
    body.append(make("tr", { "data-place": place }, make("td", {}, button), ...cells.map((text) => make("td", {}, text))));
  });
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
  byId("fastest").replaceChildren(head, body);
  byId("count").textContent = `${shown.length} of ${points.length} shown; the table has the first ${Math.min(FIRST, shown.length)}`;
}

function update() {
  shown = points.filter(passes);
  buildTable();
  show(shown.includes(current) ? current : shown[0] || null);
}

function buildTheme() {
  const names = ["auto", "light", "dark"];
  byId("theme").addEventListener("click", () => {
    const next = names[(names.indexOf(document.documentElement.dataset.theme || "auto") + 1) % 3];
    document.documentElement.dataset.theme = next;
    byId("theme").textContent = `Theme: ${next}`;
    draw();
  });
}

buildTexts();
buildFilters();
buildHands();
buildTheme();
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
update();
document.documentElement.dataset.ready = "yes";
