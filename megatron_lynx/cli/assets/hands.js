// What the reader does with the timeline: pointer, wheel, keys, the tooltip.

const tip = byId("tip");

function spanText(span) {
  const run = span.run;
  const pass = `${run.forward ? "forward" : "backward"} of microbatch ${run.microbatch}${step().chunks > 1 ? `, chunk ${run.chunk}` : ""}`;
  const where = [span.layer >= 0 ? `layer ${span.layer}` : "", span.name].filter(Boolean).join(" ");
  return [KIND_TEXT[data.kinds[span.kind]], `${where ? `${where}, ` : ""}${timeText(span.end - span.start)} from ${timeText(span.start)}`, `${runName(run, step().chunks)}: ${pass}`];
}

function showTip(lines, x, y) {
  tip.replaceChildren(make("b", {}, lines[0]), ...lines.slice(1).map((line) => make("small", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(x + 14, innerWidth - box.width - 8)}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18}px`;
}

const hideTip = () => (tip.hidden = true);

function shareLines(run, stage) {
  const shares = step().shares[run.pass];
  const times = STACK.filter((kind) => shares[KIND[kind]]).map((kind) => `${KIND_TEXT[kind]} ${timeText(shares[KIND[kind]])}`);
  return [`${runName(run, step().chunks)} on stage ${stage}, ${timeText(run.end - run.begin)}`, ...times, `from ${timeText(run.begin)}`];
}

// The lines for a point of a lane: one span where pieces are drawn, else the shares of the pass.
function linesAt(stage, time, y, width) {
  const run = step().visible(stage, time, time + 1)[0];
  if (!run) return null;
  if ((step().pieceNs * width) / (state.to - state.from) <= 1.6 && time >= run.begin) return shareLines(run, stage);
  const line = y < LANE + 2 ? STREAM.compute : y < LANE + LINK + 4 ? STREAM.tp : STREAM.p2p;
  const spans = step().spans(run).filter((span) => span.start <= time && time < span.end);
  const span = spans.find((one) => one.stream === line) || spans.find((one) => one.stream === STREAM.compute);
  return span ? spanText(span) : null;
}

function pointerTime(event, canvas) {
  const box = canvas.getBoundingClientRect();
  return [state.from + ((event.clientX - box.left) / box.width) * (state.to - state.from), event.clientY - box.top, box.width];
}

function listenPointer() {
  const rows = byId("rows");
  let drag = null;
  rows.addEventListener("pointerdown", (event) => {
    if (event.target.tagName !== "CANVAS" || event.button) return;
    drag = { x: event.clientX, from: state.from, to: state.to, width: event.target.clientWidth };
    rows.setPointerCapture(event.pointerId);
    rows.classList.add("dragging");
  });
  const release = () => {
    drag = null;
    rows.classList.remove("dragging");
  };
  rows.addEventListener("pointerup", release);
  rows.addEventListener("pointercancel", release);
  rows.addEventListener("pointerleave", hideTip);
  rows.addEventListener("pointermove", (event) => {
    if (drag) {
      const moved = ((drag.x - event.clientX) / drag.width) * (drag.to - drag.from);
      hideTip();
      setRange(drag.from + moved, drag.to + moved);
      return;
    }
    const row = event.target.closest(".row");
    if (event.target.tagName !== "CANVAS" || !row) return hideTip();
    const [time, y, width] = pointerTime(event, event.target);
    const lines = linesAt(Number(row.dataset.stage), time, y, width);
    if (lines) showTip(lines, event.clientX, event.clientY);
    else hideTip();
  });
  rows.addEventListener("wheel", (event) => {
    const canvas = event.target.tagName === "CANVAS" ? event.target : rows.querySelector("canvas");
    const length = state.to - state.from;
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.002), pointerTime(event, canvas)[0]);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) setRange(state.from + (event.deltaX / 800) * length, state.to + (event.deltaX / 800) * length);
    else return;
    event.preventDefault();
  }, { passive: false });
}

function listenOverview() {
  const overview = byId("overview");
  const timeAt = (event) => {
    const box = overview.getBoundingClientRect();
    return (Math.min(Math.max(0, event.clientX - box.left), box.width) / box.width) * step().end;
  };
  let anchor = null;
  overview.addEventListener("pointerdown", (event) => {
    anchor = timeAt(event);
    overview.setPointerCapture(event.pointerId);
  });
  overview.addEventListener("pointermove", (event) => {
    if (anchor === null) return;
    const time = timeAt(event);
    if (Math.abs(time - anchor) > step().end / 200) setRange(Math.min(anchor, time), Math.max(anchor, time));
  });
  overview.addEventListener("pointerup", (event) => {
    const time = timeAt(event);
    const half = (state.to - state.from) / 2;
    if (anchor !== null && Math.abs(time - anchor) <= step().end / 200) setRange(time - half, time + half);
    anchor = null;
  });
}

// Step to the next or previous span of the active stage's compute stream, and say what it is.
function walk(direction) {
  const runs = step().runs[state.stage];
  const middle = (state.from + state.to) / 2;
  const at = state.span ? (direction > 0 ? state.span.end : state.span.start - 1) : middle;
  const i = runs.findIndex((run) => run.end > at);
  if (i < 0) return;
  const near = [runs[i - 1], runs[i], runs[i + 1]].filter(Boolean).flatMap((run) => step().spans(run));
  const spans = near.filter((span) => span.stream === STREAM.compute);
  const next = direction > 0 ? spans.find((span) => span.start >= at) : spans.reverse().find((span) => span.start <= at);
  if (!next) return;
  state.span = next;
  const length = state.to - state.from;
  if (next.start < state.from || next.end > state.to) setRange(next.start - length / 2, next.start + length / 2);
  else drawTimeline();
  byId("spoken").textContent = `stage ${state.stage}: ${spanText(next).join("; ")}`;
}

function listenKeys() {
  const length = () => state.to - state.from;
  const moveStage = (by) => {
    state.stage = Math.min(Math.max(0, state.stage + by), shown().stages.length - 1);
    state.span = null;
    byId("spoken").textContent = `stage ${state.stage}`;
    drawTimeline();
  };
  const keys = {
    ArrowLeft: () => setRange(state.from - length() / 8, state.to - length() / 8),
    ArrowRight: () => setRange(state.from + length() / 8, state.to + length() / 8),
    ArrowUp: () => moveStage(-1),
    ArrowDown: () => moveStage(1),
    "+": () => zoom(0.6),
    "=": () => zoom(0.6),
    "-": () => zoom(1 / 0.6),
    0: () => setRange(0, step().end),
    n: () => walk(1),
    p: () => walk(-1),
  };
  byId("rows").addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    keys[event.key]();
    event.preventDefault();
  });
  const tools = { in: () => zoom(0.5), out: () => zoom(2), fit: () => setRange(0, step().end), steady: () => setRange(...step().steady()) };
  document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", tools[button.dataset.zoom]));
}

// What a stage holds at the pointer, by owner.
function listenMemory() {
  const panel = byId("memory");
  panel.addEventListener("pointerleave", hideTip);
  panel.addEventListener("pointermove", (event) => {
    const row = event.target.closest(".row");
    if (event.target.tagName !== "CANVAS" || !row) return hideTip();
    const stage = Number(row.dataset.stage);
    const [from, to] = byId("follow").checked ? [state.from, state.to] : [0, step().end];
    const time = from + (event.offsetX / event.target.clientWidth) * (to - from);
    const curve = step().curve(stage);
    const after = curve.times.findIndex((moment) => moment > time);
    const at = (after < 0 ? curve.times.length : after) - 1;
    const fixed = shown().stages[stage].static_bytes;
    const owned = data.owners.map((owner, i) => [owner, curve.owned[at * data.owners.length + i]]).filter(([, bytes]) => bytes);
    const lines = [["static", fixed], ...owned].map(([owner, bytes]) => `${owner} ${bytesText(bytes)}`);
    showTip([`${bytesText(fixed + curve.sums[at])} at ${timeText(time)}`, ...lines.reverse()], event.clientX, event.clientY);
  });
}

function listen() {
  listenMemory();
  listenPointer();
  listenOverview();
  listenKeys();
}
