// What the page holds, and small helpers. No framework: a report must still open in ten years.
const byId = (id) => document.getElementById(id);
const report = JSON.parse(byId("report-data").textContent);
const runs = report.runs;
const numberedRuns = runs.map((run, number) => ({ run, number }));
const PALETTE = {
  light: ["#1d5fd1", "#c2570c", "#0a7a4b", "#a21caf", "#b3261e", "#0e7490", "#5b7c0a", "#6d28d9"],
  dark: ["#7fb0ff", "#ffa45c", "#5fd39a", "#e58cf5", "#ff8f86", "#5fd0e6", "#b7d45a", "#b79cff"],
};
const state = {
  axis: "step",
  smooth: 0,
  hidden: new Set(),
  theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
};

const colour = (number) => PALETTE[state.theme][number % 8];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shownRuns = () => numberedRuns.filter(({ number }) => !state.hidden.has(number));

/** An element: make("a", {href: "#x"}, "text", [children]). Texts are never markup; null and false are left out. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  const isContent = (child) => child !== null && child !== undefined && child !== false;
  element.append(...children.flat(Infinity).filter(isContent));
  return element;
}

const div = (className, ...children) => make("div", { class: className }, ...children);
const span = (className, ...children) => make("span", { class: className }, ...children);
const paragraph = (className, ...children) => make("p", { class: className }, ...children);
const code = (text) => make("code", {}, text);
const chip = (text, kind = "") => span(`chip ${kind}`, text);
const button = (text, onclick, attributes = {}) => make("button", { type: "button", onclick, ...attributes }, text);
const option = (value, text = value, selected = false) => make("option", { value, selected }, text);
const select = (label, onchange, ...options) => make("select", { "aria-label": label, onchange }, options);
const runDot = (number) => make("span", { class: "dot", "data-colour": number });
const grid = (...cards) => div("grid", ...cards);

function section(id, title, lead, ...children) {
  const heading = make("h2", { id: `${id}-title` }, title);
  return make("section", { id, "aria-labelledby": heading.id }, heading, lead && paragraph("lead", lead), ...children);
}

/**
 * A table with a row for each item. A column has a `name`, the `content` of its cell for an item, and perhaps a `kind`:
 * the class of its cells, or a function from the item to that. With class "stacking" rows become lists on a narrow
 * screen (style.css), for which each cell carries its column's name.
 */
function table(columns, items, className) {
  const used = columns.filter(Boolean);
  const head = used.map(({ name, kind }) => make("th", { scope: "col", class: kind === "num" && kind }, name));
  const cell = ({ name, kind, content }, item) => {
    const attributes = { class: typeof kind === "function" ? kind(item) : kind, "data-name": name };
    return make("td", attributes, content(item));
  };
  const row = (item) => make("tr", {}, ...used.map((column) => cell(column, item)));
  const body = make("tbody", {}, ...items.map(row));
  return make("table", { class: className }, make("thead", {}, make("tr", {}, ...head)), body);
}

function format(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(digits - 1);
  if (size >= 1e15) return value.toExponential(digits - 1).replace("e+", "e");
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits });
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);

/** The recorded values of a metric: those that are not null. */
const recorded = (run, key) => (run.columns[key] || []).filter((value) => value !== null);
const isRecorded = (key) => runs.some((run) => recorded(run, key).length);
const placesOf = (values) => values.map((_, place) => place).filter((place) => values[place] !== null);
const pick = (values, places) => places.map((place) => values[place]);
const columnNames = (among) => [...new Set(among.flatMap((run) => Object.keys(run.columns)))];

/** Horizontal places of a run's steps on the chosen axis. */
function axisValues(run) {
  if (state.axis === "step") return run.steps;
  const values = run.columns[state.axis === "seconds" ? "time/step_s" : "tokens/generated"] || [];
  let total = 0;
  return run.steps.map((_, position) => (total += values[position] || 0));
}

/** Exponential moving average, corrected for its start; nulls stay. */
function smoothed(values) {
  if (!state.smooth) return values;
  let average = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    average = state.smooth * average + (1 - state.smooth) * value;
    weight = state.smooth * weight + (1 - state.smooth);
    return average / weight;
  });
}
