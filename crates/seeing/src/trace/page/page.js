"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const root = document.documentElement;
const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
const stages = data.stage_names;
const us = (v) => v >= 1e6 ? (v / 1e6).toFixed(2) + " s" : v >= 1e4 ? (v / 1e3).toFixed(1) + " ms"
  : v >= 1e3 ? (v / 1e3).toFixed(2) + " ms" : v >= 100 ? v.toFixed(0) + " us" : v.toFixed(2) + " us";
const ns = (v) => us(v / 1e3);
const whole = (v) => Math.round(v).toLocaleString("en");

function element(name, text, className) {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  if (className) e.className = className;
  return e;
}

function table(id, head, rows, left) {
  const line = (cells, cell) => {
    const tr = element("tr");
    cells.forEach((text, i) => tr.append(element(cell, text, i < left ? "left" : "")));
    return tr;
  };
  byId(id).append(line(head, "th"), ...rows.map((row) => line(row, "td")));
}

// The words above, and tables.
byId("title").textContent = data.disk;
byId("about").textContent = data.image + " · " + new Date(data.began_unix_ms).toISOString() + " · "
  + whole(data.requests) + " requests in " + data.seconds.toFixed(3) + " s";
if (data.lost_requests > 0 || data.lost_spans > 0) {
  byId("warning").hidden = false;
  byId("warning").textContent = whole(data.lost_requests) + " requests and " + whole(data.lost_spans)
    + " spans were overwritten before they were read: they are not in these pictures.";
}
const times = (l) => [whole(l.n), us(l.mean_us), us(l.p50_us), us(l.p99_us), us(l.p999_us), us(l.max_us)];
const heads = ["requests", "mean", "p50", "p99", "p99.9", "longest"];
table("operations", ["operation", ...heads, "data"],
  data.operations.map((l) => [l.operation, ...times(l), (l.bytes / 1e6).toFixed(1) + " MB"]), 1);
table("stages", ["operation", "stage", ...heads],
  data.stages.map((l) => [l.operation, l.stage, ...times(l)]), 2);
const within = (v, ci, digits) => v === null ? "-" : v.toFixed(digits) + " ± " + ci.toFixed(digits);
table("fits", ["operation", "stage", "requests", "mean", "X (us)", "Y (us a KiB)", "r²"],
  data.fits.map((f) => [f.operation, f.stage, whole(f.n), us(f.mean_us), within(f.x_us, f.x_ci95_us, 2),
    within(f.y_us_per_kib, f.y_ci95_us_per_kib, 4), f.r2 === null ? "-" : f.r2.toFixed(3)]), 2);
const share = (n) => whole(n) + (data.requests ? " (" + (100 * n / data.requests).toFixed(1) + " %)" : "");
const facts = [
  ["noticed", data.noticed.map(([name, n]) => name + " " + share(n)).join(", ")],
  ["metadata", data.hits + data.misses ? "in memory " + share(data.hits) + ", waited for " + share(data.misses)
    : "none is needed"],
  ["merged", share(data.sharing.reduce((n, [pieces, count]) => n + (pieces > 1 ? count : 0), 0))],
  ["guest notified", share(data.notified)],
  ["errors", share(data.errors)],
  ["answer seen consumed after", data.unnoticed ? "p50 " + us(data.unnoticed.p50_us) + ", p99 "
    + us(data.unnoticed.p99_us) + ", longest " + us(data.unnoticed.max_us) : "-"],
];
for (const [name, text] of facts) byId("facts").append(element("dt", name), element("dd", text));

// Mean latency as bars of stages.
const longest = Math.max(1e-9, ...data.operations.map((l) => l.mean_us));
for (const l of data.operations) {
  const bar = element("div", undefined, "bar");
  bar.append(element("b", l.operation));
  for (const s of data.stages.filter((s) => s.operation === l.operation)) {
    const part = element("span");
    part.style.width = 70 * s.mean_us * s.n / l.n / longest + "%";
    part.style.background = "var(--s" + stages.indexOf(s.stage) + ")";
    part.title = s.stage + ": " + us(s.mean_us * s.n / l.n);
    bar.append(part);
  }
  bar.append(element("em", us(l.mean_us)));
  byId("bars").append(bar);
}

// The time line.
const requests = data.shown.map((r) => {
  const [queue, operation, taken, took, bytes, sector, segments, status, noticed, metadata, transfer,
    sharing, notified, seen] = r;
  const answered = taken + took.reduce((sum, t) => sum + (t || 0), 0);
  return { queue, operation, taken, took, bytes, sector, segments, status, noticed, metadata, transfer,
    sharing, notified, seen, answered, lane: 0, on: true };
});
const LANES = 32, LANE = 9, WORKER = 14, GUEST = 14, TITLE = 18, AXIS = 22, LEFT = 8;
const first = requests.length ? Math.min(...requests.map((r) => r.taken)) : 0;
const last = Math.max(first + 1000, ...requests.map((r) => r.answered));
// At first as many as one can tell apart, from the middle.
const middle = requests.length >> 1, some = requests.slice(Math.max(0, middle - 100), middle + 100);
let view = some.length ? [some[0].taken, Math.max(some[0].taken + 1000, ...some.map((r) => r.answered))] : [first, last];
const rows = data.lines.map(([queue, name]) => {
  const here = requests.filter((r) => r.queue === queue);
  const ends = [];
  for (const r of here) {
    let lane = ends.findIndex((end) => end <= r.taken);
    if (lane < 0) lane = Math.min(ends.length, LANES - 1);
    ends[lane] = r.answered;
    r.lane = lane;
    r.line = name;
  }
  const spans = data.spans.filter((s) => s[0] === queue && s[3] >= first && s[2] <= last)
    .sort((a, b) => a[2] - b[2]);
  return { name, here, spans, lanes: Math.max(1, ends.length), top: 0 };
});
let height = AXIS;
for (const row of rows) {
  row.top = height;
  height += TITLE + row.lanes * LANE + WORKER + GUEST + 8;
}
const canvas = byId("timeline");
const x = (t) => LEFT + (t - view[0]) / (view[1] - view[0]) * (canvas.clientWidth - 2 * LEFT);
const at = (px) => view[0] + (px - LEFT) / (canvas.clientWidth - 2 * LEFT) * (view[1] - view[0]);

function begin(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
  canvas.height = Math.round(height * scale);
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  g.font = "11px system-ui, sans-serif";
  return g;
}

function drawLine() {
  const g = begin(canvas, height), width = canvas.clientWidth;
  const c = Object.fromEntries(["text", "soft", "line", "ran", "polled", "vain", "slept", "event", "wait", "seen",
    "s0", "s1", "s2", "s3", "s4"].map((name) => [name, color(name)]));
  const rect = (from, to, y, h, fill) => {
    const a = Math.max(x(from), 0), b = Math.min(x(to), width);
    if (b < 0 || a > width) return;
    g.fillStyle = fill;
    g.fillRect(a, y, Math.max(b - a, 0.7), h);
  };
  // The axis, in steps of 1, 2 or 5.
  const raw = (view[1] - view[0]) / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= raw);
  g.textAlign = "center";
  for (let t = Math.ceil(view[0] / step) * step; t <= view[1]; t += step) {
    g.fillStyle = c.line;
    g.fillRect(x(t), AXIS - 6, 1, height);
    g.fillStyle = c.soft;
    g.fillText(step >= 1e6 ? (t / 1e6).toFixed(step < 1e7 ? 1 : 0) + " ms" : (t / 1e3).toFixed(step < 1e3 ? 1 : 0) + " us",
      x(t), 12);
  }
  g.textAlign = "left";
  for (const row of rows) {
    g.fillStyle = c.text;
    g.fillText(row.name, LEFT, row.top + 12);
    const lanes = row.top + TITLE, worker = lanes + row.lanes * LANE + 3, guest = worker + WORKER;
    for (const r of row.here) {
      if (!r.on || r.answered < view[0] || r.taken > view[1]) continue;
      let t = r.taken;
      r.took.forEach((took, i) => {
        if (took === null) return;
        rect(t, t + took, lanes + r.lane * LANE, LANE - 2, c["s" + i]);
        t += took;
      });
      if (r.metadata === "miss") rect(r.taken, r.answered, lanes + r.lane * LANE + LANE - 2, 1, "#d00");
      if (r.seen) {
        rect(r.answered, r.seen[0], guest, GUEST - 4, c.wait);
        rect(r.seen[0], r.seen[1], guest, GUEST - 4, c.seen);
      }
      if (r.notified) rect(r.answered, r.answered, guest - 1, GUEST - 2, c.text);
    }
    // Where it neither polled nor slept, it ran.
    if (row.spans.length) rect(row.spans[0][2], row.spans[row.spans.length - 1][3], worker, WORKER - 4, c.ran);
    for (const [, kind, from, to] of row.spans) {
      rect(from, to, worker, WORKER - 4, [c.vain, c.polled, c.slept, c.event][kind]);
    }
  }
}

const legend = [...stages.map((name, i) => ["s" + i, name]), ["ran", "worker: ran"], ["polled", "polled, found something"],
  ["vain", "polled in vain"], ["slept", "slept"], ["event", "slept until an event"],
  ["wait", "guest: has not consumed the answer"], ["seen", "consumed it in this time, or before"]];
for (const [name, text] of legend) {
  const item = element("span"), mark = element("i");
  mark.style.background = "var(--" + name + ")";
  item.append(mark, text);
  byId("legend").append(item);
}
byId("legend").append(element("span", "red: metadata miss · mark: guest was notified"));

// Filters.
const form = byId("filter"), field = (name) => form.elements[name];
for (const name of ["operation", "line", "noticed", "metadata"]) {
  for (const value of new Set(requests.map((r) => String(r[name])))) field(name).append(element("option", value));
}
function filter() {
  const is = (r, name) => field(name).value === "" || String(r[name]) === field(name).value;
  const least = Number(field("least").value) * 1e3 || 0;
  let n = 0;
  for (const r of requests) {
    r.on = ["operation", "line", "noticed", "metadata"].every((name) => is(r, name))
      && r.answered - r.taken >= least && (!field("shared").checked || r.sharing > 1);
    n += r.on;
  }
  byId("matches").textContent = n + " of the first " + requests.length + " requests";
  drawLine();
}
form.addEventListener("input", filter);
form.addEventListener("submit", (e) => e.preventDefault());

// To move and to zoom.
function look(from, to) {
  const all = last - first, span = Math.min(Math.max(to - from, 100), all * 1.1);
  const start = Math.min(Math.max(from, first - all * 0.05), last + all * 0.05 - span);
  view = [start, start + span];
  root.dataset.view = view.map(Math.round).join(" ");
  drawLine();
}
function zoom(factor, center) {
  look(center - (center - view[0]) * factor, center + (view[1] - center) * factor);
}
canvas.addEventListener("wheel", (e) => {
  if (e.ctrlKey) return;
  e.preventDefault();
  zoom(Math.exp(Math.sign(e.deltaY) * 0.25), at(e.offsetX));
}, { passive: false });
let drag = null;
canvas.addEventListener("pointerdown", (e) => { drag = [e.clientX, view]; canvas.setPointerCapture(e.pointerId); });
canvas.addEventListener("pointerup", () => { drag = null; });
canvas.addEventListener("dblclick", () => look(first, last));
byId("all").addEventListener("click", () => look(first, last));
canvas.addEventListener("keydown", (e) => {
  const span = view[1] - view[0], middle = (view[0] + view[1]) / 2;
  const does = { "+": () => zoom(0.7, middle), "-": () => zoom(1.4, middle), "0": () => look(first, last),
    ArrowLeft: () => look(view[0] - span / 5, view[1] - span / 5),
    ArrowRight: () => look(view[0] + span / 5, view[1] + span / 5) }[e.key];
  if (does) { e.preventDefault(); does(); }
});

// A text for the place under the pointer.
function told(px, py) {
  const t = at(px), near = (view[1] - view[0]) / canvas.clientWidth * 2;
  const row = rows.findLast((row) => row.top <= py);
  if (!row) return null;
  const lanes = row.top + TITLE, worker = lanes + row.lanes * LANE + 3, guest = worker + WORKER;
  if (py >= lanes && py < worker - 3) {
    const lane = Math.floor((py - lanes) / LANE);
    const r = row.here.find((r) => r.on && r.lane === lane && r.taken - near <= t && t <= r.answered + near);
    if (!r) return null;
    const parts = r.took.map((took, i) => took === null ? null : stages[i].padEnd(9) + ns(took)).filter(Boolean);
    return [r.operation + " " + r.bytes / 1024 + " KiB at sector " + r.sector, "total    " + ns(r.answered - r.taken),
      ...parts, "noticed: " + r.noticed + ", metadata: " + r.metadata,
      r.transfer ? "operation " + r.transfer + ", shared by " + r.sharing : "no operation of its own",
      r.segments + " segments, status " + r.status + (r.notified ? ", guest notified" : ""),
      r.seen ? "answer consumed after " + ns(r.seen[0] - r.answered) + " to " + ns(r.seen[1] - r.answered)
        : "when the answer was consumed is not known"].join("\n");
  }
  if (py >= worker && py < guest) {
    const s = row.spans.find((s) => s[2] <= t && t <= s[3]);
    return "worker " + (s ? ["polled in vain", "polled, found something", "slept", "slept until an event"][s[1]]
      + " for " + ns(s[3] - s[2]) : "ran");
  }
  return null;
}
canvas.addEventListener("pointermove", (e) => {
  if (drag) {
    const [from, old] = drag, moved = (e.clientX - from) / (canvas.clientWidth - 2 * LEFT) * (old[1] - old[0]);
    look(old[0] - moved, old[1] - moved);
    return;
  }
  const text = told(e.offsetX, e.offsetY), tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
});
canvas.addEventListener("pointerleave", () => { byId("tip").hidden = true; });

// Over time, and in bars.
const over = data.over_time;
const columns = over.per_s.length, seconds = over.per_s.map((_, i) => (i + 0.5) * over.column_s);
function drawHeat() {
  const heat = byId("heat");
  let low = over.rows_us.length, high = 0, most = 1;
  over.heat.forEach((counts) => counts.forEach((n, row) => {
    if (n > 0) { low = Math.min(low, row); high = Math.max(high, row); most = Math.max(most, n); }
  }));
  if (low > high) [low, high] = [0, 1];
  const cell = 10, left = 70, g = begin(heat, (high - low + 1) * cell + 20);
  const width = (heat.clientWidth - left - 8) / columns, rgb = color("heat");
  over.heat.forEach((counts, column) => {
    for (let row = low; row <= high; row++) {
      if (counts[row] === 0) continue;
      g.fillStyle = "rgba(" + rgb + "," + (0.08 + 0.92 * Math.log1p(counts[row]) / Math.log1p(most)) + ")";
      g.fillRect(left + column * width, (high - row) * cell, Math.ceil(width), cell);
    }
  });
  g.fillStyle = color("soft");
  g.textAlign = "right";
  for (let row = low; row <= high; row++) {
    if ((row - low) % 2 === 0) g.fillText(us(over.rows_us[row]), left - 6, (high - row + 1) * cell);
  }
  g.textAlign = "center";
  for (let i = 0; i <= 6; i++) {
    g.fillText((i * columns * over.column_s / 6).toFixed(2) + " s", left + i * columns * width / 6 * 0.97 + 8,
      (high - low + 1) * cell + 14);
  }
}

let plots = [];
function drawPlots() {
  plots.forEach((plot) => plot.destroy());
  const axis = { stroke: color("soft"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") } };
  const sync = { key: "time" };
  const plot = (id, title, series, axes, values, more) => {
    const options = { title, width: Math.max(300, byId(id).clientWidth), height: 240, series, axes, ...more };
    plots.push(new uPlot(options, values, byId(id)));
  };
  const time = { scales: { x: { time: false } }, cursor: { sync } };
  const line = (label, name, scale) => ({ label, stroke: color(name), width: 1.5, scale, spanGaps: true });
  plot("rate", "Requests and data, by second", [{ label: "s" }, line("requests/s", "s2", "y"),
    line("MB/s", "s1", "mb")], [axis, { ...axis, size: 70 }, { ...axis, scale: "mb", side: 1, grid: { show: false } }],
  [seconds, over.per_s, over.mb_per_s], time);
  plot("latency", "Latency (us)", [{ label: "s" }, line("p50", "s2", "y"), line("p99", "s4", "y")],
    [axis, { ...axis, size: 70 }], [seconds, over.p50_us, over.p99_us],
    { ...time, scales: { x: { time: false }, y: { distr: 3 } } });
  const bars = (values, offset) => ({ paths: uPlot.paths.bars({ size: [0.4, 40], align: offset }), points: { show: false } });
  // Of many names as many as there is room for, the last among them.
  const named = (names) => ({ ...axis, splits: () => names.map((_, i) => i), values: (_, splits) =>
    splits.map((i) => (names.length - 1 - i) % Math.ceil(names.length / 12) ? "" : names[i]), grid: { show: false } });
  const range = (names) => ({ scales: { x: { time: false, range: [-0.6, Math.max(0.6, names.length - 0.4)] },
    y: { range: (_, low, high) => [0, high * 1.05 || 1] } } });
  const kib = data.sizes.map(([kib]) => String(kib));
  plot("sizes", "Requests by size (KiB)", [{ label: "KiB", value: (_, i) => i === null ? "-" : kib[i] },
    { label: "reads", fill: color("s2"), ...bars(0, -1) }, { label: "writes", fill: color("s1"), ...bars(0, 1) }],
  [named(kib), { ...axis, size: 70 }], [kib.map((_, i) => i), data.sizes.map((s) => s[1]), data.sizes.map((s) => s[2])],
  range(kib));
  const pieces = data.sharing.map(([pieces]) => String(pieces));
  plot("sharing", "Requests by pieces of their operation of storage", [{ label: "pieces",
    value: (_, i) => i === null ? "-" : pieces[i] }, { label: "requests", fill: color("s3"), ...bars(0, 0) }],
  [named(pieces), { ...axis, size: 70 }], [pieces.map((_, i) => i), data.sharing.map((s) => s[1])], range(pieces));
}

function draw() {
  drawLine();
  drawHeat();
  drawPlots();
}
addEventListener("error", (e) => { root.dataset.error = e.message; });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
matchMedia("print").addEventListener("change", draw);
let later;
addEventListener("resize", () => { clearTimeout(later); later = setTimeout(draw, 100); });
filter();
draw();
root.dataset.requests = requests.length;
root.dataset.plots = plots.length;
root.dataset.state = "ready";
})();
