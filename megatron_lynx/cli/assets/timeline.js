// From the embedded templates to spans and curves. The rules are those of simulator/timeline.py and
// simulator/memory.py; a test compares the two.

const KIND = Object.fromEntries(data.kinds.map((name, i) => [name, i]));
const STREAM = Object.fromEntries(data.streams.map((name, i) => [name, i]));

// The runs of a rank from the rows that they share: each starts where the one before has ended.
function readRuns({ rows, passes, p2p_ns }, places) {
  const last = new Map();
  let end = 0;
  return places.map((place) => {
    const [forward, chunk, since, pass, wait, hidden, delay] = rows[place];
    const microbatch = (last.get(2 * chunk + forward) ?? -1) + since;
    last.set(2 * chunk + forward, microbatch);
    const start = end;
    const ready = start + passes[pass][0];
    const begin = ready + wait;
    end = begin + passes[pass][1];
    const delivered = end + delay;
    const sent = delay ? delivered - p2p_ns : end;
    return { forward, microbatch, chunk, pass, start, ready, arrival: start + hidden, begin, end, sent, delivered };
  });
}

function runName(run, chunks) {
  return `${run.forward ? "F" : "B"}${run.microbatch}${chunks > 1 ? `.${run.chunk}` : ""}`;
}

class Step {
  constructor(method) {
    const timeline = method.timeline;
    this.method = method;
    this.end = timeline.makespan_ns;
    this.names = timeline.names;
    this.passes = timeline.passes;
    this.runs = timeline.runs.map((places) => readRuns(timeline, places));
    this.chunks = method.stages[0].chunks.length;
    this.shares = timeline.passes.map(([, , , body]) => Step.shares(body));
    this.curves = new Map();
    // The early pieces' share of spans per nanosecond decides when to draw them one by one.
    const pieces = timeline.passes.reduce((sum, pass) => sum + pass[3].length, 0);
    const time = timeline.passes.reduce((sum, pass) => sum + pass[1], 0);
    this.pieceNs = time / Math.max(1, pieces);
  }

  static shares(body) {
    const times = new Array(data.kinds.length).fill(0);
    for (const [, kind, start, end] of body) times[kind] += end - start;
    return times;
  }

  // Runs of a stage that overlap [from, to).
  visible(stage, from, to) {
    const runs = this.runs[stage];
    let low = 0;
    let high = runs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (runs[middle].end <= from) low = middle + 1;
      else high = middle;
    }
    const found = [];
    for (let i = low; i < runs.length && runs[i].start < to; i++) found.push(runs[i]);
    return found;
  }

  // The spans of one run on all streams.
  spans(run) {
    const [, , early, body] = this.passes[run.pass];
    const found = [];
    const add = (stream, kind, start, end, layer, name) => {
      if (start < end) found.push({ stream, kind, start, end, layer, name, run });
    };
    for (const [stream, , from, to, layer, name] of early) {
      const start = run.start + from;
      const end = run.start + to;
      const cut = Math.min(Math.max(run.arrival, start), end);
      add(stream, KIND["recompute-stall"], start, cut, layer, this.names[name]);
      add(stream, KIND["recompute-exposed"], cut, end, layer, this.names[name]);
    }
    add(STREAM.compute, KIND.idle, run.ready, run.begin, -1, "");
    for (const [stream, kind, from, to, layer, name] of body) {
      add(stream, kind, run.begin + from, run.begin + to, layer, this.names[name]);
    }
    add(STREAM.p2p, KIND.p2p, run.sent, run.delivered, -1, "");
    return found;
  }

  // Time by kind of one stage; those of the compute stream add up to the step.
  totals(stage) {
    const totals = new Array(data.kinds.length).fill(0);
    const runs = this.runs[stage];
    for (const run of runs) {
      this.shares[run.pass].forEach((time, kind) => (totals[kind] += time));
      const early = run.ready - run.start;
      const hidden = Math.min(early, Math.max(0, run.arrival - run.start));
      totals[KIND["recompute-stall"]] += hidden;
      totals[KIND["recompute-exposed"]] += early - hidden;
      totals[KIND.idle] += run.begin - run.ready;
      totals[KIND.p2p] += run.delivered - run.sent;
    }
    if (runs.length) totals[KIND.idle] += this.end - runs[runs.length - 1].end;
    return totals;
  }

  // Moments at which a stage's memory changes: times, sums, and the owners' bytes side by side.
  // Within one moment the largest sum counts, and what is left after it.
  curve(stage) {
    if (!this.curves.has(stage)) this.curves.set(stage, this.makeCurve(stage));
    return this.curves.get(stage);
  }

  makeCurve(stage) {
    const held = new Array(data.owners.length).fill(0);
    const curve = { times: [], sums: [], owned: [] };
    let now = 0;
    let sum = 0;
    let most = { sum: 0, held: [...held] };
    const put = (total, owned) => {
      curve.times.push(now);
      curve.sums.push(total);
      curve.owned.push(...owned);
    };
    const close = () => {
      if (most.sum > sum) put(most.sum, most.held);
      put(sum, held);
    };
    const change = (time, [, bytes, owner]) => {
      if (time > now) {
        close();
        now = time;
        most = { sum: -1, held: [] };
      }
      held[owner] += bytes;
      sum += bytes;
      if (sum > most.sum) most = { sum, held: [...held] };
    };
    for (const run of this.runs[stage]) {
      const [, , , , early, body] = this.passes[run.pass];
      for (const delta of early) change(run.start + delta[0], delta);
      for (const delta of body) change(run.begin + delta[0], delta);
    }
    close();
    return curve;
  }

  peak(stage) {
    let best = 0;
    this.curve(stage).sums.forEach((sum, i, sums) => {
      if (sum > sums[best]) best = i;
    });
    return best;
  }

  // A range that shows the pipeline in full swing: from a forward of stage 0 to its next one.
  steady() {
    const forward = this.runs[0].filter((run) => run.forward);
    const after = forward[Math.min(forward.length - 1, (forward.length >> 1) + 1)];
    const first = forward[Math.max(0, forward.indexOf(after) - 1)];
    const period = after === first ? this.end : after.begin - first.begin;
    return [Math.max(0, first.begin - period * 0.02), Math.min(this.end, first.begin + period * 1.12)];
  }
}
