// The page: what is shown, and what the reader does.

const steps = new Map();
const state = { method: 0, from: 0, to: 1, stage: 0, span: null };
const isShown = (method) => Boolean(method && method.timeline);

function stepOf(index) {
  if (!steps.has(index)) steps.set(index, new Step(data.methods[index]));
  return steps.get(index);
}
const shown = () => data.methods[state.method];
const step = () => stepOf(state.method);
const longest = Math.max(1, ...data.methods.map((method) => method.iteration_ns || 0));

// --- head and methods

function megatronBest() {
  const own = data.methods.filter((method) => method.megatron && method.fits);
  return own.sort((a, b) => a.iteration_ns - b.iteration_ns)[0];
}

function meanTotals(index) {
  const stages = data.methods[index].stages;
  const sums = new Array(data.kinds.length).fill(0);
  stages.forEach((_, stage) => stepOf(index).totals(stage).forEach((time, kind) => (sums[kind] += time)));
  return sums.map((time) => time / stages.length);
}

function finding() {
  const method = shown();
  if (!isShown(method)) return method.reason || "This plan was not simulated: its costs are not known.";
  const totals = meanTotals(state.method);
  const hidden = totals[KIND["recompute-hidden"]] + totals[KIND["recompute-stall"]];
  const whole = hidden + totals[KIND["recompute-exposed"]];
  const best = megatronBest();
  const parts = [`A step takes ${timeText(method.iteration_ns)}, ${Math.round((method.tokens * 1e9) / method.iteration_ns).toLocaleString("en")} tokens/s`];
  if (best && best !== method) {
    const factor = best.iteration_ns / method.iteration_ns;
    parts.push(`: ${factor.toFixed(2)}\u00d7 the speed of Megatron\u2019s best that fits (${best.name}, ${timeText(best.iteration_ns)})`);
  } else if (!best) parts.push("; none of Megatron\u2019s own methods fits");
  parts.push(". ");
  if (whole) parts.push(`${percentText(hidden / whole)} of the recomputation is hidden in windows and stalls. `);
  else parts.push("Nothing is recomputed. ");
  const worst = method.stages.reduce((a, b) => (a.peak.size_bytes >= b.peak.size_bytes ? a : b));
  parts.push(`Stage ${worst.stage} holds most: ${bytesText(worst.peak.size_bytes)}${limited ? ` of ${budgetText}` : ""}, mostly ${OWNER_TEXT[worst.peak.owner] || worst.peak.owner}.`);
  const run = data.measured && state.method === 0 ? data.measured.stages[0].sums[0] : null;
  if (run) parts.push(` Measured: ${timeText(run.measured)} without the optimizer, for ${timeText(run.planned)} planned.`);
  return parts.join("");
}

function renderHead() {
  const { model, parallel, batch, cluster } = data.job;
  byId("title").textContent = `${model.name}: ${shown().name}`;
  const sizes = [`TP ${parallel.tp}`, `PP ${parallel.pp}`];
  if (parallel.vpp > 1) sizes.push(`VPP ${parallel.vpp}`);
  if (parallel.dp > 1) sizes.push(`DP ${parallel.dp}`);
  if (parallel.sequence_parallel) sizes.push("sequence parallel");
  byId("job").textContent = [
    cluster.name || "measured in place",
    `${model.num_layers} layers of ${model.hidden_size}, ${model.attention} attention`,
    sizes.join(", "),
    `sequence ${batch.seq_length}, ${batch.num_microbatches} microbatches of ${batch.micro_batch_size}`,
    limited ? `${budgetText} a device` : budgetText,
    `costs: ${cluster.costs}`,
  ].join(" \u00b7 ");
  byId("finding").textContent = finding();
}

const BAR = ["forward", "backward", "recompute-hidden", "recompute-stall", "recompute-exposed", "wait", "idle"];

function stackBar(parts, whole, extra = "") {
  const bar = make("span", { class: `stack ${extra}` });
  for (const [variable, time, text] of parts) {
    if (time <= 0) continue;
    const pattern = ["--recompute-exposed", "--wait"].includes(variable) ? "hatched" : null;
    const style = { "--color": `var(${variable})`, width: `${(time / whole) * 100}%` };
    bar.append(make("span", { class: pattern, style, title: `${text}: ${timeText(time)}` }));
  }
  return bar;
}

function methodRow(method, index) {
  const choose = make("button", { type: "button", "aria-pressed": String(index === state.method), disabled: !method.plan }, method.name);
  choose.addEventListener("click", () => {
    show(index); // which makes the table anew: the new button takes over the keyboard
    byId("methods").querySelector('[aria-pressed="true"]').focus({ preventScroll: true });
  });
  const name = make("th", { scope: "row" }, choose);
  const row = make("tr", { "data-method": method.name, "data-shown": index === state.method }, name);
  if (!isShown(method)) {
    row.append(make("td", { class: "reason", colspan: 6 }, method.reason || "not simulated"));
    return row;
  }
  const totals = meanTotals(index);
  const bar = BAR.map((kind) => [`--${kind}`, totals[KIND[kind]], KIND_TEXT[kind]]);
  bar.push(["--optimizer", method.optimizer_ns, "optimizer"]);
  const best = megatronBest();
  const peak = Math.max(...method.stages.map((stage) => stage.peak.size_bytes));
  row.append(
    make("td", { class: "wide" }, stackBar(bar, longest)),
    make("td", {}, timeText(method.iteration_ns)),
    make("td", {}, Math.round((method.tokens * 1e9) / method.iteration_ns).toLocaleString("en")),
    make("td", {}, best ? `${(best.iteration_ns / method.iteration_ns).toFixed(3)}\u00d7` : "\u2013"),
    make("td", {}, bytesText(peak)),
    make("td", {}, method.stages.map((stage) => stage.chunks.flat().length).join(" ")),
  );
  return row;
}

function renderMethods() {
  const heads = ["method", "", "step", "tokens/s", "over Megatron", "peak", "layers a stage"];
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = make("tbody", {}, ...data.methods.map(methodRow));
  byId("methods").replaceChildren(make("thead", {}, head), body);
}

// --- timeline and memory

function renderLegends() {
  const thin = new Set(["collective", "p2p"]);
  const item = (kind) => {
    const hatched = kind === "recompute-exposed" || kind === "wait" ? "hatched" : "";
    return legendItem(KIND_TEXT[kind], `--${kind}`, thin.has(kind) ? "thin" : hatched);
  };
  byId("legend").replaceChildren(...data.kinds.map(item));
  const used = data.owners.filter((owner) => data.methods.some((method) => (method.stages || []).some((stage) => stage.peak.owners[owner])));
  byId("owners").replaceChildren(
    ...["static", ...used].map((owner) => legendItem(owner, OWNER_COLOR[owner])),
    limited ? make("li", {}, make("span", { style: { width: "18px", "border-top": "1.5px dashed var(--ink)" } }), `budget ${budgetText}`) : "",
    make("li", {}, "\u25cb peak"),
  );
}

function buildRows() {
  const rows = (shown().stages || []).map((stage) => {
    const text = make("span", { class: "label" }, make("b", {}, `stage ${stage.stage}`), make("small", {}, `layers ${spansText(stage.chunks.flat())}`));
    return make("div", { class: "row timeline", "data-stage": stage.stage }, text, make("canvas"));
  });
  byId("rows").replaceChildren(...rows);
  const memory = (shown().stages || []).map((stage) => {
    const { peak } = stage;
    const action = stage.chunks.length > 1 ? peak.action : peak.action.replace(/\.0$/, "");
    const where = `${action} ${peak.where}`.trim();
    const title = Object.entries(peak.owners).map(([owner, bytes]) => `${owner}: ${bytesText(bytes)}`).join("\n");
    const text = make("span", { class: "label", title }, make("b", {}, `stage ${stage.stage}`),
      make("small", {}, `peak ${bytesText(peak.size_bytes)}`), make("small", {}, `mostly ${peak.owner}`), make("small", {}, where));
    const about = `Memory of stage ${stage.stage}: peak ${bytesText(peak.size_bytes)} of ${budgetText} in ${where}, mostly ${peak.owner}`;
    return make("div", { class: "row memory", "data-stage": stage.stage }, text, make("canvas", { role: "img", "aria-label": about }));
  });
  byId("memory").replaceChildren(...memory);
}

function drawAll() {
  if (!isShown(shown())) return;
  drawTimeline();
  drawAllMemory();
}

function drawTimeline() {
  const range = [state.from, state.to];
  byId("rows").querySelectorAll(".row").forEach((row, stage) => {
    row.toggleAttribute("data-active", stage === state.stage);
    const [context, width] = prepare(row.querySelector("canvas"), 46);
    drawLane(context, step(), stage, range, { x: 0, y: 1, width, height: LANE }, true);
    if (state.span && stage === state.stage) outline(context, width);
  });
  drawAxis(byId("axis"), range);
  const overview = byId("overview");
  const stages = shown().stages.length;
  const each = Math.max(6, Math.min(15, 120 / stages));
  const canvas = overview.querySelector("canvas");
  canvas.style.height = `${each * stages}px`;
  const [context, width] = prepare(canvas, each * stages);
  shown().stages.forEach((_, stage) => {
    drawLane(context, step(), stage, [0, step().end], { x: 0, y: stage * each, width, height: each - 1.5 }, false);
  });
  const brush = overview.querySelector(".brush").style;
  brush.left = `${(state.from / step().end) * 100}%`;
  brush.width = `${((state.to - state.from) / step().end) * 100}%`;
}

function outline(context, width) {
  const scale = width / (state.to - state.from);
  context.strokeStyle = color("--ink");
  context.lineWidth = 2;
  const { start, end } = state.span;
  context.strokeRect((start - state.from) * scale, 1, Math.max(2, (end - start) * scale), LANE);
}

function drawAllMemory() {
  const range = byId("follow").checked ? [state.from, state.to] : [0, step().end];
  const top = 1.04 * Math.max(limited ? data.budget_bytes : 0, ...shown().stages.map((stage) => stage.peak.size_bytes));
  byId("memory").querySelectorAll("canvas").forEach((canvas, stage) => drawMemory(canvas, step(), stage, range, top));
  drawAxis(byId("memory-axis"), range);
}

function setRange(from, to) {
  const end = step().end;
  const length = Math.min(end, Math.max(to - from, 2000));
  state.from = Math.min(Math.max(0, from), end - length);
  state.to = state.from + length;
  drawTimeline();
  if (byId("follow").checked) drawAllMemory();
}

function zoom(factor, center = (state.from + state.to) / 2) {
  setRange(center - (center - state.from) * factor, center + (state.to - center) * factor);
}

function show(index) {
  state.method = index;
  state.span = null;
  renderHead();
  renderMethods();
  buildRows();
  renderGrid();
  const known = isShown(shown());
  byId("timeline-section").hidden = byId("memory-section").hidden = !known;
  if (known) {
    [state.from, state.to] = step().steady();
    drawAll();
  }
}

// --- theme and start

const THEMES = ["auto", "light", "dark"];

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = `Theme: ${name}`;
  palette.clear();
  drawAll();
}

function start() {
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "auto";
    setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    palette.clear();
    drawAll();
  });
  byId("follow").addEventListener("change", drawAllMemory);
  listen();
  renderLegends();
  renderMeasured();
  show(data.shown);
  addEventListener("resize", drawAll);
  document.documentElement.dataset.ready = "yes";
}

globalThis.lynx = { data, state, step, KIND, setRange };
start();
