// Canvases: the stages' lanes, the axis, the memory curves.

const LANE = 28; // height of the compute lane, in pixels; two lines for the links follow
const LINK = 5;
const GAP = 3;
const STACK = ["backward", "forward", "recompute-hidden", "recompute-stall", "recompute-exposed", "wait"];

// A canvas ready for drawing in CSS pixels.
function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  context.font = `10.5px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return [context, width];
}

function hatch(context, x, y, width, height) {
  if (width < 3) return;
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = color("--paper");
  context.globalAlpha = 0.55;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 5) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

function block(context, kind, x, y, width, height) {
  context.fillStyle = color(`--${kind}`);
  context.fillRect(x, y, width, height);
  if (kind === "recompute-exposed" || kind === "wait") hatch(context, x, y, width, height);
}

// Lightness of a CSS colour "rgb(r, g, b)" decides the colour of text on it.
function textOn(kind) {
  const parts = color(`--${kind}`).match(/[\d.]+/g).map(Number);
  const scale = color(`--${kind}`).startsWith("color(") ? 255 : 1;
  const [r, g, b] = parts.map((part) => part * scale);
  return r * 0.299 + g * 0.587 + b * 0.114 > 150 ? "#16181c" : "#ffffff";
}

function label(context, text, x, y, width, kind) {
  if (width < 14 || context.measureText(text).width > width - 5) return;
  context.fillStyle = textOn(kind);
  context.textAlign = "center";
  context.fillText(text, x + width / 2, y);
}

// One stage in [from, to): blocks of whole passes, or their pieces where there is room for them.
function drawLane(context, step, stage, [from, to], box, detailed) {
  const scale = box.width / (to - from);
  const place = (time) => box.x + (time - from) * scale;
  context.save();
  context.beginPath();
  context.rect(box.x, box.y, box.width, box.height + 2 * (LINK + GAP));
  context.clip();
  context.fillStyle = color("--idle");
  context.fillRect(box.x, box.y, box.width, box.height);
  for (const run of step.visible(stage, from, to)) {
    if (detailed && step.pieceNs * scale > 1.6) drawPieces(context, step, run, place, box);
    else drawBlock(context, step, run, place, box, detailed);
  }
  context.restore();
}

function drawBlock(context, step, run, place, box, detailed) {
  const early = run.ready - run.start;
  if (early > 0) {
    const cut = Math.min(Math.max(run.arrival, run.start), run.ready);
    const middle = place(cut);
    block(context, "recompute-stall", place(run.start), box.y, middle - place(run.start), box.height);
    block(context, "recompute-exposed", middle, box.y, place(run.ready) - middle, box.height);
  }
  const x = place(run.begin);
  const room = place(run.end) - x;
  const seam = detailed && room > 5 ? 1 : room > 3 ? 0.3 : 0;
  const width = Math.max(1, room - seam); // narrower, and a bar would pale into nothing
  const whole = run.end - run.begin;
  let y = box.y + box.height;
  let base = y;
  for (const kind of STACK) {
    const height = (step.shares[run.pass][KIND[kind]] / whole) * box.height;
    if (!height) continue;
    y -= height;
    block(context, kind, x, y, width, height);
    if (kind === "forward" || kind === "backward") base = y + height / 2;
  }
  if (!detailed) return;
  label(context, runName(run, step.chunks), x, base, width, run.forward ? "forward" : "backward");
  drawLinks(context, step.spans(run), place, box);
}

function drawPieces(context, step, run, place, box) {
  const spans = step.spans(run);
  for (const span of spans) {
    if (span.stream !== STREAM.compute || span.kind === KIND.idle) continue;
    const kind = data.kinds[span.kind];
    const x = place(span.start);
    const width = place(span.end) - x;
    block(context, kind, x, box.y, Math.max(0.4, width - (width > 4 ? 0.7 : 0)), box.height);
    const text = span.layer < 0 ? span.name : kind.startsWith("recompute") ? span.name : `L${span.layer}`;
    label(context, text, x, box.y + box.height / 2, width, kind);
  }
  drawLinks(context, spans, place, box);
}

function drawLinks(context, spans, place, box) {
  for (const span of spans) {
    if (span.stream === STREAM.compute) continue;
    const line = span.stream === STREAM.tp ? 0 : 1;
    const y = box.y + box.height + GAP - 1 + line * (LINK + 2);
    context.fillStyle = color(line ? "--p2p" : "--collective");
    context.fillRect(place(span.start), y, Math.max(0.6, place(span.end) - place(span.start) - 0.5), LINK);
  }
}

// Ticks at round times.
function drawAxis(canvas, [from, to]) {
  const [context, width] = prepare(canvas, 20);
  const rough = (to - from) / Math.max(2, Math.floor(width / 110));
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((n) => n * power >= rough) * power;
  context.fillStyle = color("--soft");
  context.strokeStyle = color("--rule");
  for (let time = Math.ceil(from / unit) * unit; time <= to; time += unit) {
    const x = ((time - from) / (to - from)) * width;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, 5);
    context.stroke();
    context.textAlign = x < 20 ? "left" : x > width - 30 ? "right" : "center";
    const whole = to >= 1e9 ? 1e9 : to >= 1e6 ? 1e6 : to >= 1e3 ? 1e3 : 1;
    const text = { 1e9: "s", 1e6: "ms", 1e3: "\u00b5s", 1: "ns" }[whole];
    const digits = Math.max(0, Math.ceil(Math.log10(whole / unit) - 1e-9));
    context.fillText(`${(time / whole).toFixed(digits)} ${text}`, Math.min(Math.max(x, 0), width), 13);
  }
}

// What a stage holds over time: static memory below, the owners on it, the budget as a line. In each
// column of pixels the largest moment counts, so that no peak is lost.
function drawMemory(canvas, step, stage, [from, to], top) {
  const height = 78;
  const [context, width] = prepare(canvas, height);
  const curve = step.curve(stage);
  const fixed = step.method.stages[stage].static_bytes;
  const scale = (height - 6) / top;
  const bar = (variable, x, below, size) => {
    context.fillStyle = color(variable);
    context.fillRect(x, height - (below + size) * scale, 1, size * scale + 0.3);
  };
  let at = 0;
  for (let x = 0; x < width; x++) {
    const start = from + ((to - from) * x) / width;
    const end = from + ((to - from) * (x + 1)) / width;
    while (at + 1 < curve.times.length && curve.times[at + 1] <= start) at++;
    let best = at;
    for (let i = at + 1; i < curve.times.length && curve.times[i] < end; i++) {
      if (curve.sums[i] > curve.sums[best]) best = i;
    }
    bar("--static", x, 0, fixed);
    let below = fixed;
    data.owners.forEach((owner, i) => {
      const size = curve.owned[best * data.owners.length + i];
      if (size > 0) bar(OWNER_COLOR[owner], x, below, size);
      below += size;
    });
  }
  if (limited) drawBudget(context, width, height - data.budget_bytes * scale);
  drawPeak(context, step, stage, [from, to], width, (bytes) => height - bytes * scale);
}

function drawBudget(context, width, y) {
  context.strokeStyle = color("--ink");
  context.setLineDash([5, 4]);
  context.beginPath();
  context.moveTo(0, y);
  context.lineTo(width, y);
  context.stroke();
  context.setLineDash([]);
}

function drawPeak(context, step, stage, [from, to], width, level) {
  const peak = step.method.stages[stage].peak;
  const x = ((peak.at_ns - from) / (to - from)) * width;
  if (x < 0 || x > width) return;
  context.beginPath();
  context.arc(x, level(peak.size_bytes), 3.5, 0, 7);
  context.fillStyle = color("--paper");
  context.strokeStyle = color("--ink");
  context.lineWidth = 1.5;
  context.fill();
  context.stroke();
  context.lineWidth = 1;
}
