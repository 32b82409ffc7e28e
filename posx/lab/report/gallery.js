// The script of the gallery: sliders choose among curves in the page, and Vega-Lite draws them.

const DASHES = [[1, 0], [6, 3], [2, 2], [8, 2, 2, 2]];

async function draw(box, entry, curves) {
  const charts = curves.map((curve) => {
    const chart = element("div");
    chart.className = "small";
    return [chart, curve];
  });
  box.replaceChildren(...(charts.length ? charts.map(([chart]) => chart) : [element("p", entry.note)]));
  for (const [chart, curve] of charts) {
    const values = curve.lines.flatMap((line, head) => line.map((y, n) => ({ x: curve.x[n], y, head: `head ${head + 1}` })));
    const heads = curve.lines.map((_, head) => `head ${head + 1}`);
    const dash = { field: "head", type: "nominal", scale: { domain: heads, range: DASHES.slice(0, heads.length) },
      legend: heads.length > 1 ? { title: null, orient: "top", labelColor: getComputedStyle(document.body).color } : null };
    await embed(chart, {
      width: Math.max(Math.min(box.clientWidth - 80, 340), 180), height: 170, description: `${entry.name}: ${curve.title}`,
      layer: [
        { mark: { type: "rule", strokeDash: [4, 4], color: "#888", aria: false }, data: { values: [{ x: data.train_len }] },
          encoding: { x: { field: "x", type: "quantitative" } } },
        { mark: { type: "line", color: dark.matches ? "#9db7ff" : entry.color }, data: { values }, encoding: {
          x: { field: "x", type: "quantitative", title: curve.x_title },
          y: { field: "y", type: "quantitative", title: curve.title, scale: { zero: false } }, strokeDash: dash } }],
    }, false);
  }
}

function card(entry) {
  const box = element("div");
  box.className = "curves";
  const controls = entry.sliders.map((slider) => {
    const said = element("output", String(slider.places[slider.at].value));
    const range = Object.assign(element("input"), { type: "range", min: 0, max: slider.places.length - 1, value: slider.at });
    range.addEventListener("input", async () => {
      controls.filter((one) => one !== control).forEach((one) => one.reset());
      const place = slider.places[range.value];
      said.textContent = String(place.value);
      range.setAttribute("aria-valuetext", said.textContent);
      made.dataset.drawn = "";
      entry.now = place.curves;
      await draw(box, entry, entry.now);
      made.dataset.drawn = "yes";
    });
    const control = { label: element("label", `${slider.field} `, range, said),
      reset: () => { range.value = slider.at; said.textContent = String(slider.places[slider.at].value); } };
    return control;
  });
  const [first, ...rest] = entry.text.split("\n\n");
  const more = element("details", null, element("summary", "definition, reference, differences"), ...rest.map((one) => element("p", one)));
  const form = element("form", null, ...controls.map((control) => control.label));
  form.className = "switches";
  form.addEventListener("submit", (event) => event.preventDefault());
  const made = element("section", null, element("h2", entry.name), element("p", first), form, box,
    element("p", `Beyond L: ${entry.beyond}. ${entry.paper}`), more);
  made.lastChild.previousSibling.className = "facts";
  made.id = `e-${entry.name}`;
  return [made, box, entry];
}

async function drawAll() {
  document.body.dataset.drawn = "";
  for (const [, box, entry] of cards) await draw(box, entry, entry.now ?? entry.curves);
  document.body.dataset.drawn = "yes";
}

const cards = data.encodings.map(card);
document.getElementById("gallery").append(...cards.map(([made]) => made));
document.getElementById("summary").textContent = `${cards.length} encodings as initialised: ${data.sizes}. ` +
  "A slider changes one number; the others have their defaults. Dashed: the training length L.";
document.getElementById("switches").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("filter").addEventListener("input", (event) => {
  const word = event.target.value.toLowerCase();
  for (const [made, , entry] of cards) made.hidden = !(entry.name + entry.text).toLowerCase().includes(word);
});
dark.addEventListener("change", drawAll);
drawAll();
