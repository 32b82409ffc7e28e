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

