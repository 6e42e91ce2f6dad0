// SPDX-License-Identifier: Apache-2.0
// Keeps a page of the server up to date. It draws the charts of the last 15 minutes from /history.json, and fetches the page
// again to renew the parts that have changed. No text of the server becomes markup here: texts are set as text, and a fetched
// page is parsed into a document of its own, in which no script runs.
"use strict";

const PERIOD_MS = 2000;
const LONGEST_PERIOD_MS = 60000; // while the head of the page is missing
const WINDOW_SECONDS = 900; // of history, which are kept
const LEAST_SECONDS = 120; // that a chart shows at least, when the server has just started
const MOST_LINES = 8; // in one chart, because there are 8 colours
const HEAD = document.body.dataset.head;

// ---- Numbers as people read them ----

function digits(value, suffix) {
  const size = Math.abs(value);
  return (size >= 100 || Number.isInteger(value) ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toPrecision(2)) + suffix;
}
function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base && unit + 1 < units.length) {
    value /= base;
    ++unit;
  }
  return digits(value, units[unit]);
}
const FORMATS = {
  count: (value) => scaled(value, 1000, ["", " k", " M", " G"]),
  bytes: (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
  seconds: (value) => value === 0 ? "0" : value < 1e-3 ? digits(value * 1e6, " us") : value < 1 ? digits(value * 1e3, " ms") : digits(value, " s"),
  share: (value) => `${(100 * value).toFixed(0)} %`,
  number: (value) => value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) ? value.toExponential(1) : String(Number(value.toPrecision(4))),
};

// ---- Charts and their lines. A line is [name, series]. With `steps`, a line leads from step to step, skips samples without
// a step, and ends at the last step. ----

function server(...lines) {
  return (samples) => lines.map(([name, series]) => [name, samples.server[series] || []]);
}
function has(values) {
  return values.some((value) => value !== null);
}
// The heads in the order of their lines: first the MOST_LINES heads with most rows in the window, by name; then all others.
function byRows(heads) {
  const rows = ([, of]) => (of.rows_per_second || []).reduce((sum, value) => sum + (value || 0), 0);
  const busiest = Object.entries(heads).sort((a, b) => rows(b) - rows(a));
  return busiest.splice(0, MOST_LINES).sort(([a], [b]) => (a < b ? -1 : 1)).concat(busiest);
}
function everyHead(series) {
  return (samples) => byRows(samples.heads).map(([name, of]) => [name, of[series]]).filter(([, values]) => has(values));
}
function thisHead(series) {
  return (samples) => HEAD in samples.heads ? [["", samples.heads[HEAD][series]]] : [];
}
const CHARTS = {
  rows: { lines: (samples) => [["all heads", samples.server.rows_per_second || []]], format: "count", zero: true },
  loss: { lines: everyHead("loss"), format: "number", fence: true, steps: true },
  latency: { lines: server(["median", "microbatch_seconds_p50"], ["95 %", "microbatch_seconds_p95"], ["99 %", "microbatch_seconds_p99"]), format: "seconds", zero: true },
  phases: { lines: server(["receive", "receive_seconds_p50"], ["queue", "queue_seconds_p50"], ["compute", "compute_seconds_p50"], ["send", "send_seconds_p50"]), format: "seconds", zero: true },
  busy: { lines: server(["device", "device_busy_ratio"]), format: "share", range: [0, 1] },
  bytes: { lines: server(["received", "bytes_in_per_second"], ["sent", "bytes_out_per_second"]), format: "bytes", zero: true, whole: true },
  norm: { lines: everyHead("gradient_norm"), format: "number", zero: true, fence: true, steps: true },
  memory: { lines: server(["planned", "planned_bytes"], ["staging used", "staging_used_bytes"], ["process", "resident_bytes"]), format: "bytes", zero: true },
  queue: { lines: server(["queued slices", "queued_slices"], ["open streams", "open_streams"]), format: "count", zero: true, whole: true },
  "head-rows": { lines: thisHead("rows_per_second"), format: "count", zero: true },
  "head-loss": { lines: thisHead("loss"), format: "number", fence: true, steps: true },
  "head-norm": { lines: thisHead("gradient_norm"), format: "number", zero: true, fence: true, steps: true },
  "head-rate": { lines: thisHead("learning_rate"), format: "number", zero: true, steps: true },
};

// ---- Samples: the answers of /history.json, joined ----

const samples = { incarnation: "", last: 0, times: [], server: {}, heads: {} };

function extend(into, known, more, added, keep) {
  for (const name of Object.keys(more)) {
    const values = into[name] || new Array(known).fill(null);
    into[name] = values.concat(more[name]).slice(-keep);
  }
  for (const name of Object.keys(into)) {
    if (!(name in more)) into[name] = into[name].concat(new Array(added).fill(null)).slice(-keep);
  }
}

// Adds an answer to the samples. False if it is from another server process than earlier answers: it then lacks the samples
// up to `after`.
function join(answer, after) {
  if (answer.incarnation !== samples.incarnation) {
    Object.assign(samples, { incarnation: answer.incarnation, last: 0, times: [], server: {}, heads: {} });
    if (after > 0) return false;
  }
  const known = samples.times.length;
  const added = answer.times.length;
  const keep = WINDOW_SECONDS / answer.interval_seconds;
  samples.times = samples.times.concat(answer.times).slice(-keep);
  extend(samples.server, known, answer.server, added, keep);
  for (const head of Object.keys(samples.heads)) {
    if (!(head in answer.heads)) delete samples.heads[head];
  }
  for (const head of Object.keys(answer.heads)) {
    samples.heads[head] = samples.heads[head] || {};
    extend(samples.heads[head], known, answer.heads[head], added, keep);
  }
  samples.last = answer.last;
  return true;
}

// ---- Drawing ----

function element(name, attributes, text) {
  const created = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, value);
  if (text !== undefined) created.textContent = text;
  return created;
}

// Some round numbers from low to high: powers of two for bytes (`binary`), and only whole numbers if `whole`.
function ticks(low, high, binary, whole) {
  const raw = Math.max((high - low) / 6, whole ? 1 : 0);
  const power = binary ? 2 ** Math.floor(Math.log2(raw)) : 10 ** Math.floor(Math.log10(raw));
  const step = (binary ? [1, 2] : [1, 2, 5, 10]).map((factor) => factor * power).find((candidate) => candidate >= raw);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) found.push(tick);
  return found;
}

// The limit above which values are outliers: a head that diverges must not flatten the lines of all others. Outliers leave the
// chart at its top, and the legend names the largest. Infinity if there are no outliers.
function fenceOf(values) {
  const sorted = values.slice().sort((a, b) => a - b);
  const fence = 20 * Math.abs(sorted[Math.floor(0.75 * (sorted.length - 1))]);
  return fence > 0 && sorted[sorted.length - 1] > fence ? fence : Infinity;
}

function valuesOf(lines) {
  return lines.flatMap(([, values]) => values).filter((value) => value !== null);
}

function rangeOf(all, zero, fence) {
  const values = all.filter((value) => value <= fence);
  if (values.length === 0) return null;
  let low = values.reduce((a, b) => Math.min(a, b));
  let high = values.reduce((a, b) => Math.max(a, b));
  if (zero) low = Math.min(low, 0);
  if (high === low) high = low + (Math.abs(low) || 1);
  const room = (high - low) * 0.06;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

function pathOf(values, x, y, steps) {
  let path = "";
  let pen = "M";
  values.forEach((value, i) => {
    if (value === null) {
      if (!steps) pen = "M";
      return;
    }
    // A point without neighbours is a dot: a line of no length with round ends.
    const alone = pen === "M" && (steps ? !has(values.slice(i + 1)) : (values[i + 1] ?? null) === null);
    path += `${pen}${x(i).toFixed(1)} ${y(value).toFixed(1)}${alone ? "h.01" : ""}`;
    pen = "L";
  });
  return path;
}

// The last value, or the value of the sample under the pointer. With `steps`, the value of the last step up to there.
function valueAt(values, at, steps) {
  let i = at === null ? values.length - 1 : at;
  while (steps && i > 0 && values[i] === null) --i;
  return values[i];
}

// The beginning and the end of a name, because names in a series differ at the end.
function shortened(name) {
  return name.length <= 28 ? name : `${name.slice(0, 14)}\u2026${name.slice(-13)}`;
}

function drawLegend(figure, lines, chart, at, hidden, beyond) {
  const format = FORMATS[chart.format];
  const legend = document.createElement("div");
  legend.className = "legend";
  lines.forEach(([name, values], i) => {
    const entry = document.createElement("span");
    const mark = document.createElement("i");
    mark.className = `c${i}`;
    const value = valueAt(values, at, chart.steps);
    const shown = document.createElement("b");
    shown.textContent = value === null || value === undefined ? "" : format(value);
    entry.title = name;
    entry.append(mark, shortened(name), name === "" ? "" : " ", shown);
    legend.append(entry);
  });
  const note = (text) => legend.append(Object.assign(document.createElement("span"), { textContent: text }));
  if (beyond !== null) note(`above the chart: up to ${format(beyond)}`);
  if (at !== null) note(new Date(samples.times[at] * 1000).toLocaleTimeString());
  if (hidden > 0) note(`and ${hidden} more`);
  figure.append(legend);
}

function draw(figure) {
  const chart = CHARTS[figure.dataset.chart];
  if (chart === undefined) return;
  const format = FORMATS[chart.format];
  const all = chart.lines(samples);
  const lines = all.slice(0, MOST_LINES);
  const width = Math.max(figure.clientWidth - 24, 120);
  const height = 168;
  const [left, right, top, bottom] = [52, width - 6, 8, height - 20];
  figure.querySelectorAll("svg, .legend").forEach((old) => old.remove());
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": figure.querySelector("figcaption").textContent });
  figure.append(svg);
  const values = valuesOf(lines);
  const fence = chart.fence ? fenceOf(values) : Infinity;
  const found = rangeOf(values, chart.zero, fence);
  const range = found && (chart.range || found);
  const now = samples.times[samples.times.length - 1];
  const span = samples.times.length === 0 ? 0 : now - samples.times[0];
  if (range === null) {
    svg.append(element("text", { x: width / 2, y: height / 2, class: "empty" }, span < WINDOW_SECONDS - 60 ? "nothing yet" : "nothing in the last 15 minutes"));
    drawLegend(figure, [], chart, null, 0, null);
    return;
  }
  const [low, high] = range;
  const shown = Math.min(WINDOW_SECONDS, Math.max(LEAST_SECONDS, span));
  const xAt = (ago) => right - (right - left) * ago / shown;
  const x = (i) => xAt(now - samples.times[i]);
  const y = (value) => Math.max(bottom - (bottom - top) * (value - low) / (high - low), -height);  // above it: not seen
  for (const tick of ticks(low, high, chart.format === "bytes", chart.whole)) {
    svg.append(element("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
    svg.append(element("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
  }
  for (let minutes = 0; minutes * 60 <= shown * 1.001; minutes += shown > 600 ? 5 : shown > 330 ? 2 : 1) {
    const at = xAt(minutes * 60);
    const anchor = minutes === 0 ? "end" : at < left + 25 ? "start" : "middle";
    svg.append(element("text", { x: at, y: height - 4, "text-anchor": anchor }, minutes === 0 ? "now" : `-${minutes} min`));
  }
  lines.forEach(([name, values], i) => {
    const path = element("path", { class: `c${i}`, d: pathOf(values, x, y, chart.steps) });
    path.append(element("title", {}, name));
    svg.append(path);
  });
  const at = pointers.has(figure) ? sampleAt(pointers.get(figure) * width, x) : null;
  if (at !== null) svg.append(element("line", { class: "cursor", x1: x(at), x2: x(at), y1: top, y2: bottom }));
  const beyond = fence === Infinity ? null : values.reduce((a, b) => Math.max(a, b));
  drawLegend(figure, lines, chart, at, all.length - lines.length, beyond);
}

// The position of the pointer in each chart, as a share of the width.
const pointers = new Map();

function sampleAt(position, x) {
  let best = null;
  samples.times.forEach((_, i) => {
    if (best === null || Math.abs(x(i) - position) < Math.abs(x(best) - position)) best = i;
  });
  return best;
}

function watchPointer(figure) {
  figure.addEventListener("pointermove", (event) => {
    const svg = figure.querySelector("svg");
    if (svg === null) return;
    const box = svg.getBoundingClientRect();
    pointers.set(figure, (event.clientX - box.left) / box.width);
    draw(figure);
  });
  figure.addEventListener("pointerleave", () => {
    pointers.delete(figure);
    draw(figure);
  });
}

function drawAll() {
  document.querySelectorAll(".chart").forEach(draw);
}

// ---- Renewal ----

async function fetchText(path) {
  const limit = new AbortController();
  const timer = setTimeout(() => limit.abort(), 5 * PERIOD_MS);
  try {
    return await (await fetch(path, { signal: limit.signal, cache: "no-store" })).text();
  } finally {
    clearTimeout(timer);
  }
}

async function renewSamples() {
  const of = HEAD === "" ? "" : `&head=${encodeURIComponent(HEAD)}`;
  const ask = async (after) => join(JSON.parse(await fetchText(`/history.json?after=${after}${of}`)), after);
  if (!await ask(samples.last)) await ask(0);
}

// Replaces the parts of the page that have changed, except the charts, which this script draws.
async function renewPage() {
  const renewed = new DOMParser().parseFromString(await fetchText(location.pathname), "text/html");
  const main = renewed.querySelector("main");
  if (main === null) throw new Error("the answer is no page");
  const charts = document.getElementById("charts");
  if (charts === null && main.querySelector("#charts") !== null) return location.reload(); // the head is there now
  if (charts !== null) charts.hidden = main.querySelector("#charts") === null; // the head is gone
  const parts = (of) => Array.from(of.children).filter((part) => part.id !== "" && part.id !== "charts");
  const here = document.querySelector("main");
  const kept = new Set(parts(main).map((part) => part.id));
  for (const part of parts(here)) {
    if (!kept.has(part.id)) part.remove();
  }
  for (const part of parts(main)) {
    const shown = document.getElementById(part.id);
    if (shown === null) here.append(document.adoptNode(part));
    else if (!shown.isEqualNode(part)) replace(shown, part);
  }
  document.title = renewed.title;
}

// Replaces a part, and keeps the sideways scroll positions of its tables.
function replace(shown, part) {
  const scrolled = Array.from(shown.querySelectorAll(".wide"), (box) => box.scrollLeft);
  const adopted = document.adoptNode(part);
  shown.replaceWith(adopted);
  adopted.querySelectorAll(".wide").forEach((box, i) => { box.scrollLeft = scrolled[i] || 0; });
}

// Whether the head of the page does not exist. Its page has no charts.
function isMissing() {
  const charts = document.getElementById("charts");
  return charts === null || charts.hidden;
}

let answered = Date.now();
let period = PERIOD_MS;

async function renew() {
  const trouble = document.getElementById("trouble");
  try {
    if (!isMissing()) await renewSamples();
    await renewPage();
    answered = Date.now();
    period = isMissing() ? Math.min(2 * period, LONGEST_PERIOD_MS) : PERIOD_MS;
    trouble.hidden = true;
    drawAll();
  } catch (error) {
    trouble.textContent = `No answer from the server for ${Math.round((Date.now() - answered) / 1000)} s.`;
    trouble.hidden = false;
    period = PERIOD_MS;
  }
}

async function live() {
  if (document.visibilityState === "visible") await renew();
  setTimeout(live, period);
}

document.querySelectorAll(".chart").forEach(watchPointer);
document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") renew(); });
window.addEventListener("resize", drawAll);
live();
