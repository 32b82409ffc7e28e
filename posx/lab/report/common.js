// The data, elements and charts of both pages. It stands before the script of a page.
// Texts reach the page by textContent alone, so that no name of a run is read as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  made.append(...children);
  return made;
}

function config() {
  const style = getComputedStyle(document.body);
  const [ink, line] = [style.color, style.getPropertyValue("--line").trim()];
  const axis = { labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line };
  return { background: null, font: "system-ui, sans-serif", axis, view: { stroke: null }, line: { strokeWidth: 2 } };
}

const embed = (box, spec, tooltip) => vegaEmbed(box, { ...spec, config: config() },
  { ast: true, renderer: "svg", actions: false, defaultStyle: false, tooltip, mode: "vega-lite" });

// ---- axes ----

const LADDERS = [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]; // of ticks in a decade
const ENOUGH = 5; // ticks of an axis

function evenTicks(low, high) { // from low or below it to high or above it
  const rough = (high - low) / (ENOUGH - 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((n) => n * power >= 0.999 * rough) * power;
  const first = Math.floor(low / step), last = Math.ceil(high / step);
  return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

function logTicks(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.floor(Math.log10(high)) + 1];
  const apart = Math.ceil((last - first) / 8), powers = [];
  for (let power = first; power < last + apart; power += apart) powers.push(power);
  for (const ladder of apart > 1 ? [[1]] : LADDERS) {
    const every = powers.flatMap((power) => ladder.map((step) => Number(`${step}e${power}`)));
    const ticks = every.slice(every.findLastIndex((tick) => tick <= low), every.findIndex((tick) => tick >= high) + 1);
    if (ticks.length >= ENOUGH || apart > 1) return ticks;
  }
  return evenTicks(low, high).filter((tick) => tick > 0);
}

// The scale and the axis of values that all lie inside the frame, with ticks over their whole range.
function scaleOf(kind, values, pad = 0.04) {
  if (!values.length) return {};
  let [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const log = kind === "log" && low > 0;
  const [to, from] = log ? [Math.log, Math.exp] : [(x) => x, (x) => x];
  if (low === high) [low, high] = log ? [low / 1.05, low * 1.05] : [low - 0.05 * Math.abs(low || 1), low + 0.05 * Math.abs(low || 1)];
  const ticks = (log ? logTicks : evenTicks)(low, high);
  [low, high] = [Math.min(low, ticks[0]), Math.max(high, ticks.at(-1))].map(to);
  const room = pad * (high - low);
  return { scale: { type: log ? "log" : "linear", nice: false, ...(!log && { zero: false }), domain: [from(low - room), from(high + room)] },
    axis: { values: ticks, format: ",.6~r" } };
}

// The scale and the axis of windows: ticks at their own lengths, the longest, the shortest and doublings of L first.
function windowsOf(kind, lengths, trainLength, width) {
  const every = [...new Set([...lengths, trainLength])].sort((a, b) => a - b), to = kind === "log" ? Math.log2 : (x) => x;
  const octaves = (x) => Math.abs(Math.log2(x / trainLength));
  const others = every.slice(1, -1).sort((a, b) => (octaves(a) % 1 !== 0) - (octaves(b) % 1 !== 0) || octaves(a) - octaves(b));
  const [low, high] = [to(every[0]), to(every.at(-1))], room = 0.04 * (high - low) || 0.5, kept = [];
  for (const length of [every.at(-1), every[0], ...others]) {
    const gap = 4 * (length.toLocaleString("en").length + 6) / width * (high - low);
    if (kept.every((other) => Math.abs(to(other) - to(length)) > gap)) kept.push(length);
  }
  const from = kind === "log" ? (x) => 2 ** x : (x) => x;
  return { scale: { type: kind, nice: false, ...(kind === "linear" && { zero: false }), domain: [from(low - room), from(high + room)] },
    axis: { values: kept.sort((a, b) => a - b), format: "," } };
}
