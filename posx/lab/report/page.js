// The script of a report: it chooses among the numbers in the page, and draws them with Vega-Lite.

const MEASURES = { ppl: "perplexity per token", bpb: "bits per byte", R_k: "R_k = PPL(kL) / PPL(L)", right: "share of right answers" };
const quantity = () => data.panels[Number($("panel").value)]?.quantity ?? "perplexity";
const titleOf = (measure) => MEASURES[measure].replace("perplexity", quantity());
const MOST_CURVES = 30; // that are drawn at first
const MOST_ROWS = 500; // of the list of all rows
const $ = (id) => document.getElementById(id);
const shown = new Set();

function number(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1);
  const places = Math.max(digits - 1 - Math.floor(Math.log10(size)), 0);
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
}

function colorOf(n) {
  const { color } = data.curves[n];
  if (!dark.matches) return color;
  const parts = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return "#" + parts.map((part) => Math.round(part + 0.4 * (255 - part)).toString(16).padStart(2, "0")).join("");
}

// ---- charts ----

function scales(curves) {
  const labels = curves.map((n) => data.curves[n].label);
  const dashes = curves.map((n) => (data.curves[n].dash.length ? data.curves[n].dash : [1, 0]));
  return {
    color: { field: "label", type: "nominal", legend: null, scale: { domain: labels, range: curves.map(colorOf) } },
    strokeDash: { field: "label", type: "nominal", legend: null, scale: { domain: labels, range: dashes } },
    detail: { field: "run", type: "nominal" },
  };
}

function tooltip(handler, event, item, value) {
  const tip = $("tip");
  tip.hidden = !value || !value.text;
  if (tip.hidden) return;
  tip.textContent = value.text;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)}px`;
}

const widthOf = (id) => Math.max($(id).clientWidth - 70, 200);

async function draw(id, description, layer, values) {
  if (!values.length) {
    $(id).replaceChildren(element("p", "Nothing to draw here for the curves that are ticked."));
    return;
  }
  const width = widthOf(id);
  const spec = { width, height: Math.min(380, 0.8 * width + 80), autosize: { type: "pad" }, description, layer };
  await embed($(id), spec, tooltip);
}

function chosen() {
  const { points } = data.panels[$("panel").value];
  return points.filter((p) => p.measure === $("measure").value && shown.has(p.curve));
}

function drawLengths() {
  const [panel, measure, spread] = [data.panels[$("panel").value], $("measure").value, $("spread").value];
  const all = chosen().map((p) => ({ // a mean that is null breaks lines and bands
    ...p, label: data.curves[p.curve].label, run: "", thin: data.curves[p.curve].window_of !== "",
    min: p.mean && Math.min(...p.values), max: p.mean && Math.max(...p.values),
    tip: { text: `${data.curves[p.curve].label}\n${p.x.toLocaleString("en")} tokens: ${number(p.mean)}\n` +
      (p.low === null ? "no interval\n" : `95 %: ${number(p.low)} to ${number(p.high)}\n`) +
      `${p.values.length} seed${p.values.length > 1 ? "s" : ""}: ${p.values.map((v) => number(v)).join(", ")}` },
  }));
  const points = all.filter((p) => p.mean !== null), failed = all.filter((p) => p.failures.length);
  const used = [...shown].filter((n) => panel.curves.includes(n));
  const ends = { band: (p) => [p.min, p.max], seeds: (p) => p.values, interval: (p) => (p.low === null ? [] : [p.low, p.high]) };
  const values = points.flatMap((p) => [p.mean, ...(ends[spread]?.(p) ?? [])]);
  const windows = windowsOf($("xscale").value, all.map((p) => p.x), panel.train_len, widthOf("lengths"));
  const xy = {
    x: { field: "x", type: "quantitative", title: "tokens in the window", ...windows },
    y: { field: "mean", type: "quantitative", title: titleOf(measure), ...scaleOf(measure === "right" ? "linear" : $("yscale").value, values) },
    ...scales(used),
  };
  const { strokeDash, ...solid } = xy;
  const layer = [{ mark: { type: "rule", strokeDash: [4, 4], color: "#888", aria: false }, data: { values: [{ x: panel.train_len }] },
    encoding: { x: { field: "x", type: "quantitative" } } }];
  if (spread === "band")
    layer.push({ mark: { type: "area", opacity: 0.2, aria: false }, data: { values: all },
      encoding: { ...solid, y: { ...xy.y, field: "min" }, y2: { field: "max" } } });
  if (spread === "seeds")
    layer.push({ mark: { type: "point", size: 20, filled: true, opacity: 0.6, aria: false },
      data: { values: points.flatMap((p) => p.values.map((mean) => ({ ...p, mean }))) }, encoding: solid });
  if (spread === "interval")
    layer.push({ mark: { type: "rule", strokeWidth: 3, opacity: 0.6, aria: false },
      data: { values: points.filter((p) => p.low !== null) },
      encoding: { ...solid, y: { ...xy.y, field: "low" }, y2: { field: "high" } } });
  for (const [thin, strokeWidth, size] of [[true, 0.9, 12], [false, 2, 45]]) { // thin: windows of L
    const values = points.filter((p) => p.thin === thin);
    if (!values.length) continue;
    layer.push({ mark: { type: "line", strokeWidth, aria: false }, data: { values: all.filter((p) => p.thin === thin) }, encoding: xy });
    layer.push({ mark: { type: "point", filled: true, size, opacity: 1 }, data: { values },
      encoding: { ...solid, tooltip: { field: "tip" } } });
  }
  [...new Set(failed.map((p) => p.curve))].forEach((n, lane) => layer.push({ // over the frame, as in the figures
    mark: { type: "point", shape: "cross", angle: 45, filled: true, opacity: 1, size: 60, aria: false }, data: { values: failed.filter((p) => p.curve === n)
      .map((p) => ({ ...p, tip: { text: `${p.label}\n${p.x.toLocaleString("en")} tokens: ${p.failures.join(", ")}` } })) },
    encoding: { ...solid, y: { value: -8 - 9 * lane }, tooltip: { field: "tip" } } }));
  $("facts").textContent = panel.facts.join(" · ");
  $("notes").replaceChildren(...panel.notes.map((text) => element("p", text)));
  const left = panel.curves.length - used.length;
  $("lengths-text").textContent = `${used.length} of ${panel.curves.length} curves` +
    (left ? "; tick more in the list above" : "") +
    (points.some((p) => p.thin) ? ". Thin: the same weights, with attention to the last L tokens" : "") +
    (failed.length ? ". Crosses over the frame: a run has no value there" : "") + `. Dashed: the training length, ${panel.train_len} tokens.`;
  return draw("lengths", `${titleOf(measure)} against tokens in the window`, layer, points);
}

function lines(id, description, values, x, y, used, kind = "linear") {
  const known = values.filter((p) => p.y !== null); // the others break lines
  const encoding = {
    x: { field: "x", type: "quantitative", title: x, ...scaleOf(kind, known.map((p) => p.x), 0) },
    y: { field: "y", type: "quantitative", title: y, ...scaleOf("linear", known.map((p) => p.y)) }, ...scales(used) };
  return draw(id, description, [{ mark: { type: "line", strokeWidth: 1.5 }, data: { values }, encoding }], known);
}

function drawPositions() {
  const length = data.panels[$("panel").value]?.train_len;
  const panel = data.positions.find((p) => p.train_len === length) ?? data.positions[0];
  const values = panel.points.filter((p) => shown.has(p.curve))
    .map((p) => ({ x: p.x, y: p.mean, label: data.curves[p.curve].label, run: "" }));
  $("positions-facts").textContent = panel.facts.join(" · ");
  $("positions-notes").replaceChildren(...panel.notes.map((text) => element("p", text)));
  $("positions-text").textContent = "Means over bins of a sixth of an octave.";
  return lines("positions", "Loss by position", values, "position in the window, in tokens", "nats per token",
    panel.curves.filter((n) => shown.has(n)), $("xscale").value);
}

function showPictures() {
  $("s-pictures").hidden = !data.pictures.length && !data.no_pictures.length;
  $("pictures").replaceChildren(...data.pictures.map(([title, kind, src]) =>
    element("figure", null, Object.assign(element("img"), { src, alt: `The encoding ${title}, drawn` }),
      element("figcaption", `${title}. ${kind}`))));
  $("pictures").append(...data.no_pictures.map((text) => element("p", text)));
}

function drawTraining() {
  const column = Number($("against").value);
  const own = data.training.filter((run) => shown.has(run.curve));
  const values = own.flatMap((run) => run.steps.map((step) => ({
    x: step[column - 1], y: step[1], run: run.run, label: data.curves[run.curve].label })));
  const title = { 1: "steps", 3: "tokens", 4: "seconds of training on the run's own machine" }[column];
  $("training-text").textContent = `${own.length} run${own.length === 1 ? "" : "s"}; longer logs are averaged over equal spans.`;
  $("training-warning").textContent = (data.panels[$("panel").value] ?? data.positions[0]).training;
  return lines("training", "Training loss", values, title, "nats per token", [...new Set(own.map((run) => run.curve))]);
}

function drawCost() {
  const points = chosen().filter((p) => p.mean !== null);
  const longest = Math.max(...points.map((p) => p.x));
  const values = points.filter((p) => p.x === longest).flatMap((p) => {
    const times = data.training.filter((run) => run.curve === p.curve && run.steps.at(-1)[1] !== null).map((run) => run.seconds); // not of runs that ended with NaN
    const label = data.curves[p.curve].label;
    const x = times.reduce((a, b) => a + b, 0) / times.length;
    return times.length ? [{ x, y: p.mean, label, run: "", tip: { text: `${label}\n${number(x, 3)} s\n${number(p.mean)}` } }] : [];
  });
  const used = [...shown].filter((n) => data.panels[$("panel").value].curves.includes(n));
  const { strokeDash, ...solid } = scales(used);
  const encoding = {
    x: { field: "x", type: "quantitative", title: "seconds of training", ...scaleOf("linear", values.map((p) => p.x)) },
    y: { field: "y", type: "quantitative", title: titleOf($("measure").value),
         ...scaleOf($("measure").value === "right" ? "linear" : $("yscale").value, values.map((p) => p.y), 0.1) }, // room for a name over the highest mark
    tooltip: { field: "tip" }, ...solid };
  const name = { text: { field: "label" }, x: encoding.x, y: encoding.y, color: encoding.color };
  const middle = values.length ? (encoding.x.scale.domain[0] + encoding.x.scale.domain[1]) / 2 : 0;
  const names = [["left", (p) => p.x < middle], ["right", (p) => p.x >= middle]].map(([align, own]) => ({ // towards the middle
    mark: { type: "text", dy: -9, fontSize: 11, aria: false, align, limit: 0.45 * widthOf("cost") },
    data: { values: values.filter(own) }, encoding: name }));
  $("cost-text").textContent = !values.length ? "" : `Windows of ${longest.toLocaleString("en")} tokens. Runs on other machines do not compare.`;
  return draw("cost", "Seconds of training against quality", [
    { mark: { type: "point", filled: true, size: 70 }, data: { values }, encoding },
    ...names], values);
}

// ---- tables ----

function table(id, head, body) {
  let sorted = { column: -1, up: true };
  const rows = element("tbody");
  const fill = () => rows.replaceChildren(...body.map((line) => element("tr", null, ...line.map((cell, n) =>
    element(n ? "td" : "th", typeof cell === "number" ? number(cell) : (cell?.text ?? cell ?? "-"))))));
  const heads = head.map((text, column) => {
    const button = element("button", text), cell = element("th", null, button);
    button.type = "button";
    cell.scope = "col";
    button.addEventListener("click", () => {
      sorted = { column, up: sorted.column === column ? !sorted.up : true };
      const last = sorted.up ? Infinity : -Infinity;
      const value = (line) => (typeof line[column] === "object" ? line[column]?.value : line[column]) ?? last;
      body.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (sorted.up ? 1 : -1));
      heads.forEach((one, n) => one.setAttribute("aria-sort", n === column ? (sorted.up ? "ascending" : "descending") : "none"));
      fill();
    });
    return cell;
  });
  fill();
  $(id).replaceChildren(element("table", null, element("thead", null, element("tr", null, ...heads)), rows));
}

function fillTable() {
  const { head, curves, body } = data.panels[$("panel").value].table;
  table("table", head, body.map((cells, n) => [data.curves[curves[n]].label, ...cells]));
}

// Ratios with the decimals, 4 or more, at which no value that is not 1 is shown as 1: those of posx compare.
function ratioCells(values) {
  const gaps = values.filter((x) => x !== null && x !== 1).map((x) => Math.abs(x - 1));
  let places = 4;
  while (places < 9 && gaps.some((gap) => gap <= 0.5 * 10 ** -places)) places += 1;
  return values.map((x) => ({ value: x, text: x === null || x < 0.001 ? number(x) : x.toFixed(places) }));
}

// Differences of the shares of right answers.
const shareCells = (values) => values.map((x) => ({ value: x, text: x === null ? "-" : (x < 0 ? "" : "+") + x.toFixed(4) }));

function fillVerdicts() {
  const one = $("one").value === "" ? null : Number($("one").value);
  const words = { better: "worse", worse: "better" };
  const body = data.verdicts.filter((v) => one === null || v[0] === one || v[1] === one).map(([n, m, place, effect, ...rest]) => {
    const [protocol, stride, tokens, k, measure] = data.places[place], ofAnswers = measure === "right", turned = m === one;
    const turn = (x) => (x === null ? null : ofAnswers ? -x : 1 / x);
    const flip = ([low, high, p, word]) => [turn(high), turn(low), p, words[word] ?? word];
    const verdicts = rest.slice(0, 2).map((verdict) => (turned ? flip(verdict) : verdict));
    const ends = verdicts.flatMap((verdict) => verdict.slice(0, 2));
    const [value, ...texts] = (ofAnswers ? shareCells : ratioCells)([turned ? turn(effect) : effect, ...ends]);
    const rule = (stride ? `${protocol}, stride ${stride}` : protocol) + (k === null ? "" : `, R_${k}`);
    return [...(turned ? [m, n] : [n, m]).map((curve) => data.curves[curve].label), rule, tokens, value,
      ...verdicts.flatMap(([low, , p, word], i) => [{ value: low, text: low === null ? "-" : `${texts[2 * i].text}${ofAnswers ? " to " : "-"}${texts[2 * i + 1].text}` }, p, word]),
      rest[2]];
  });
  const few = body.slice(0, MOST_ROWS);
  const [ratio, text] = !data.places.some((place) => place[4] === "right") ? ["ratio", "text"]
    : data.places.every((place) => place[4] === "right") ? ["right", "items"] : ["ratio, or right answers", "text or items"];
  table("verdicts", ["curve", "against", "protocol", "tokens", ratio, `over ${text}`, "p (Holm)", "these checkpoints",
    `${text} and seeds`, "p (Holm)", "the method", "note"], few);
  if (!data.verdicts.length) $("verdicts").replaceChildren();
  $("verdicts").append(...data.no_verdicts.slice(0, 20).map((text) => element("p", `Not compared: ${text}.`)));
  if (data.families[0]) $("verdicts").append(element("p", `Verdicts follow from p after Holm's correction for all comparisons of the column: ${data.families[0]} of these checkpoints, ${data.families[1]} of the method.`));
  if (body.length > few.length) $("verdicts").append(element("p", `The first ${few.length} of ${body.length}: choose a curve.`));
}

function fillConvergence() {
  data.convergence.forEach(({ facts, head, body, notes }, n) => {
    const box = Object.assign(element("div"), { id: `convergence-${n}`, className: "scroll" });
    const words = notes.map((text) => Object.assign(element("p", text), { className: "facts" }));
    $("convergence").append(Object.assign(element("p", facts.join(" · ")), { className: "facts" }), box, ...words);
    table(box.id, head, body);
  });
}

function fillSettings() {
  const names = [...new Set(data.settings.flatMap(Object.keys))].sort();
  const body = data.curves.map((curve, n) => [curve.label, ...names.map((name) => data.settings[n][name] ?? "default")]);
  table("settings", ["curve", ...names], body);
}

// ---- numbers ----

async function copy(text, what, id) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  $(id).textContent = `${what} copied`;
}

const asJson = () => JSON.stringify(data.rows.map((row) => Object.fromEntries(row.map((cell, n) => [data.columns[n], cell]))));

function fillRows() {
  if ($("rows").childElementCount) return;
  const few = data.rows.slice(0, MOST_ROWS);
  table("rows", data.columns, few.map((row) => row.map((cell) => (Array.isArray(cell) ? cell.map((x) => number(x)).join(" to ")
    : cell === "inf" ? { value: Infinity, text: cell } : cell)))); // a text does not sort among numbers
  if (few.length < data.rows.length) $("rows").append(element("p", `The first ${few.length} of ${data.rows.length}; copy all with the button.`));
}

// ---- switches ----

function options(id, entries) {
  const before = $(id).value;
  $(id).replaceChildren(...entries.map(([value, text]) => Object.assign(element("option", text), { value })));
  if (entries.some(([value]) => String(value) === before)) $(id).value = before;
}

function swatch(n) {
  const [svg, line] = ["svg", "line"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  for (const [name, value] of Object.entries({ width: 28, height: 10, "aria-hidden": true })) svg.setAttribute(name, value);
  const of = { x1: 0, x2: 28, y1: 5, y2: 5, stroke: colorOf(n), "stroke-width": 3, "stroke-dasharray": data.curves[n].dash.join(" ") };
  for (const [name, value] of Object.entries(of)) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

function fillLegend() {
  const word = $("filter").value.toLowerCase();
  const own = data.panels[$("panel").value].curves.filter((n) => data.curves[n].label.toLowerCase().includes(word));
  $("legend").replaceChildren(...own.map((n) => {
    const box = Object.assign(element("input"), { type: "checkbox", checked: shown.has(n) });
    box.addEventListener("change", () => { shown[box.checked ? "add" : "delete"](n); drawAll(); });
    return element("label", null, box, swatch(n), data.curves[n].label);
  }));
  return own;
}

async function drawAll() {
  document.body.dataset.drawn = "";
  if (data.panels.length) await drawLengths();
  for (const [id, there, drawn] of [["s-positions", data.positions.length, drawPositions],
    ["s-training", data.training.length, drawTraining], ["s-cost", data.panels.length && data.training.length, drawCost]]) {
    $(id).hidden = !there;
    if (there) await drawn();
  }
  document.body.dataset.drawn = "yes";
}

function choosePanel() {
  const { points, table } = data.panels[$("panel").value];
  const there = new Set([points[0].measure, ...points.filter((p) => p.mean !== null).map((p) => p.measure)]); // one without any value
  options("measure", Object.entries(MEASURES).filter(([name]) => there.has(name)));
  shown.clear();
  table.curves.slice(0, MOST_CURVES).forEach((n) => shown.add(n));
  fillLegend();
  fillTable();
  return drawAll();
}

function showCurvesAlone() { // without rows by window
  for (const id of ["h-lengths", "h-table", "h-verdicts"]) $(id).closest("section").hidden = true;
  data.curves.forEach((_, n) => shown.add(n));
  return drawAll();
}

const runs = data.curves.reduce((sum, curve) => sum + curve.runs.length, 0);
$("summary").textContent = `${runs} runs, ${data.curves.length} curves, ${data.rows.length} measurements. ` +
  "All numbers are in this file; it loads nothing.";
$("warnings").replaceChildren(...data.warnings.map((text) => element("p", text)));
options("panel", data.panels.map((panel, n) => [n, panel.title]));
options("one", [["", "all pairs"], ...data.curves.map((curve, n) => [n, curve.label])]);
$("panel").addEventListener("change", choosePanel);
for (const id of ["measure", "spread", "xscale", "yscale", "against"]) $(id).addEventListener("change", drawAll);
$("switches").addEventListener("submit", (event) => event.preventDefault());
$("filter").addEventListener("input", fillLegend);
$("all").addEventListener("click", () => { fillLegend().forEach((n) => shown.add(n)); fillLegend(); drawAll(); });
$("none").addEventListener("click", () => { fillLegend().forEach((n) => shown.delete(n)); fillLegend(); drawAll(); });
$("one").addEventListener("change", fillVerdicts);
for (const [format, text] of Object.entries(data.copies))
  $(`copy-${format}`).addEventListener("click", () => copy(text, `table as ${format === "latex" ? "LaTeX" : format.toUpperCase()}`, "copied"));
$("copy-rows").addEventListener("click", () => copy(asJson(), `${data.rows.length} rows`, "copied-rows"));
document.querySelector("details").addEventListener("toggle", fillRows);
dark.addEventListener("change", () => { fillLegend(); drawAll(); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
fillVerdicts();
fillConvergence();
fillSettings();
showPictures();
if (data.panels.length) choosePanel();
else showCurvesAlone();
