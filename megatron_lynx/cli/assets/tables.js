// The plan as a grid of layers and regions, and what was planned beside what was measured.

const CHOICES = [
  ["keep", "kept", ""],
  ["fwd", "rebuilt in a forward window", "F"],
  ["bwd", "rebuilt in a backward window", "B"],
  ["head", "rebuilt while the head waits", "H"],
  ["stall", "rebuilt in a stall", "S"],
  ["demand", "rebuilt on demand", "D"],
];
const LETTER = Object.fromEntries(CHOICES.map(([kind, , letter]) => [kind, letter]));

function gridCell(plan, entry, region, first) {
  const saves = !plan.saves || plan.saves.includes(region);
  const choice = entry.choices[region];
  const kind = choice ? choice.kind : saves ? "keep" : "nothing";
  const words = choice ? choice.words : saves ? "kept" : "nothing to keep";
  const how = choice && choice.words.match(/^(forward|backward) of/) ? "rebuilt in the " : choice ? "rebuilt " : "";
  const text = `layer ${entry.layer}, ${region}: ${how}${words}`;
  return make("td", { "data-choice": kind, class: first ? "first" : null, "aria-label": text, title: text, tabindex: -1 }, LETTER[kind] || "");
}

function renderGrid() {
  const plan = shown().plan;
  const table = byId("grid");
  if (!plan) return table.replaceChildren();
  const stages = plan.stages.filter((stage) => stage.layers.length);
  const count = stages.reduce((sum, stage) => sum + stage.layers.length, 0);
  const stageRow = make("tr", {}, make("td"));
  const layerRow = make("tr", {}, make("th", { scope: "col" }, "region \\ layer"));
  stages.forEach((stage) => {
    stageRow.append(make("th", { class: "stage first", colspan: stage.layers.length, scope: "colgroup" }, `stage ${stage.stage}`));
    stage.layers.forEach((entry, i) => layerRow.append(make("th", { class: `index ${i ? "" : "first"}`, scope: "col" }, String(entry.layer))));
  });
  const rows = data.regions.map((region) => {
    const row = make("tr", { "data-region": region }, make("th", { scope: "row" }, region));
    stages.forEach((stage) => stage.layers.forEach((entry, i) => row.append(gridCell(plan, entry, region, i === 0))));
    return row;
  });
  table.style.setProperty("--cell", `${Math.max(13, Math.min(40, Math.floor(1110 / count)))}px`);
  table.replaceChildren(make("thead", {}, stageRow, layerRow), make("tbody", {}, ...rows));
  table.querySelector("tbody td").tabIndex = 0;
  byId("cell-note").textContent = "";
  const used = new Set([...table.querySelectorAll("tbody td")].map((cell) => cell.dataset.choice));
  byId("choices").replaceChildren(...CHOICES.filter(([kind]) => used.has(kind)).map(choiceItem), make("li", {}, "\u00b7  nothing to keep"));
}

function choiceItem([kind, text, letter]) {
  const swatch = make("span", { class: "swatch", "data-choice": kind, style: kind === "keep" ? { background: "var(--keep)" } : {} });
  return make("li", {}, swatch, letter ? `${letter}  ${text}` : text);
}

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function listenGrid() {
  const table = byId("grid");
  table.addEventListener("keydown", (event) => {
    const move = ARROWS[event.key];
    const cell = event.target.closest("tbody td");
    if (!move || !cell) return;
    const rows = [...table.tBodies[0].rows];
    const row = rows[rows.indexOf(cell.parentElement) + move[0]];
    const next = row && row.cells[cell.cellIndex + move[1]];
    event.preventDefault();
    if (!next || next.tagName !== "TD") return;
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  table.addEventListener("focusin", (event) => {
    if (event.target.matches("tbody td")) byId("cell-note").textContent = event.target.getAttribute("aria-label");
  });
}

// --- planned and measured

function pairTable(title, head, rows) {
  const cells = head.map((text) => make("th", { scope: "col" }, text));
  const table = make("table", { class: "pair" }, make("thead", {}, make("tr", {}, ...cells)), ...rows);
  return make("div", {}, make("h3", {}, title), make("div", { class: "scroll" }, table));
}

// Two rows, the plan's above the run's.
function pair(name, parts, whole, texts) {
  const row = (which, extra) => {
    const first = which ? null : make("th", { scope: "rowgroup", rowspan: 2 }, name);
    const bar = parts[which] ? stackBar(parts[which], whole, extra) : "";
    const cells = texts[which].map((text) => make("td", {}, text));
    return make("tr", {}, first, make("td", {}, which ? "measured" : "planned"), make("td", { class: "wide" }, bar), ...cells);
  };
  return make("tbody", {}, row(0, "planned"), row(1, ""));
}

const optional = (value, text) => (value === null || value === undefined ? "\u2013" : text(value));

function stageWindows(stage) {
  const rows = stage.windows.filter((row) => row.measured.opened || row.planned.work_ns);
  const length = ({ work_ns, wait_ns }) => (work_ns || 0) + (wait_ns || 0);
  const whole = Math.max(1, ...rows.flatMap((row) => [length(row.planned), length(row.measured)]));
  const color = { fwd: "--in-forward", stall: "--recompute-stall" };
  const parts = (row, side) => [
    [color[row.kind] || "--in-backward", row[side].work_ns || 0, "rebuilding"],
    ["--wait", row[side].wait_ns || 0, "waiting after the work"],
  ];
  const texts = (side) => [optional(side.opened, (n) => `${rounded(n)}\u00d7`), optional(side.work_ns, timeText), optional(side.wait_ns, timeText), optional(side.bytes, bytesText)];
  const bodies = rows.map((row) => pair(row.name, [parts(row, "planned"), parts(row, "measured")], whole, [texts(row.planned), texts(row.measured)]));
  return pairTable(`Stage ${stage.stage}: windows, mean of one opening`, ["window", "", "", "a step", "work", "wait left", "bytes"], bodies);
}

function stageMeasures(stage) {
  const bodies = stage.sums.map((row) => {
    const text = row.unit === "ns" ? timeText : bytesText;
    const whole = Math.max(1, row.planned || 0, row.measured || 0);
    const bar = (value) => (value === null ? null : [[row.color, value, row.name, text]]);
    return pair(row.name, [bar(row.planned), bar(row.measured)], whole, [[optional(row.planned, text)], [optional(row.measured, text)]]);
  });
  return pairTable(`Stage ${stage.stage}: a step`, ["", "", "", ""], bodies);
}

function renderMeasured() {
  listenGrid();
  if (!data.measured) return;
  byId("measured-section").hidden = false;
  byId("measured-hint").textContent = data.measured.note;
  const stages = data.measured.stages.map((stage) => make("div", { class: "pairs", "data-measured": stage.stage }, stageMeasures(stage), stageWindows(stage)));
  byId("measured").replaceChildren(...stages);
}
