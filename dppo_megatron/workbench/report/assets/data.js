// What the page holds, and small helpers. No framework: a report must still open in ten years.
const report = JSON.parse(document.getElementById("report-data").textContent);
const runs = report.runs;
const PALETTE = { light: ["#1d5fd1", "#c2570c", "#0a7a4b", "#a21caf", "#b3261e", "#0e7490", "#5b7c0a", "#6d28d9"],
                  dark: ["#7fb0ff", "#ffa45c", "#5fd39a", "#e58cf5", "#ff8f86", "#5fd0e6", "#b7d45a", "#b79cff"] };
const state = { axis: "step", smooth: 0, hidden: new Set(), theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" };

const colour = (number) => PALETTE[state.theme][number % 8];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shown = () => runs.map((run, number) => ({ run, number })).filter((one) => !state.hidden.has(one.number));

/** An element: make("td", {class: "num"}, "3", child, ...). Texts are never markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function section(id, title, lead, ...children) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title`, tabindex: "-1" }, title), lead ? make("p", { class: "lead" }, lead) : null, ...children);
}
const grid = (...cards) => make("div", { class: "grid" }, ...cards.filter(Boolean));

/** A table whose rows become lists on a narrow screen (style.css): each cell carries its column's heading. */
function stacking(table) {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, at) => { cell.dataset.name = names[at]; });
  table.classList.add("stacking");
  return table;
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(Math.max(0, digits - 1));
  if (size >= 1e15) return value.toExponential(Math.max(0, digits - 1)).replace("e+", "e");
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits });
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}
const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  const h = Math.floor(seconds / 3600), m = Math.floor((seconds % 3600) / 60);
  return h ? `${h} h ${m} min` : m ? `${m} min ${Math.round(seconds % 60)} s` : `${seconds.toFixed(1)} s`;
}
function total(run, key) { return (run.columns[key] || []).reduce((sum, value) => sum + (value || 0), 0); }
function last(run, key) {
  const values = (run.columns[key] || []).filter((value) => value !== null);
  return values.length ? values[values.length - 1] : null;
}

/** Horizontal places of a run's steps on the chosen axis. */
function axisValues(run) {
  if (state.axis === "step") return run.steps;
  const values = run.columns[state.axis === "seconds" ? "time/step_s" : "tokens/generated"] || [];
  let sum = 0;
  return run.steps.map((_, place) => (sum += values[place] || 0));
}

/** Exponential moving average, corrected for its start; nulls stay. */
function smoothed(values) {
  if (!state.smooth) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = state.smooth * mean + (1 - state.smooth) * value;
    weight = state.smooth * weight + (1 - state.smooth);
    return mean / weight;
  });
}
