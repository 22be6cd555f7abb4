// Plots, drawn when they come into view, and again when theme, axis, smoothing or the shown runs change.
const DASHES = ["solid", "dash", "dot", "dashdot"];
const charts = [];
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    entry.target.chart.visible = entry.isIntersecting;
    if (entry.isIntersecting) draw(entry.target.chart);
  }
}, { rootMargin: "300px" });

/** A card with a plot. `traces()` gives plotly's traces for the current state; `layout` overrides the default one. */
function chartCard({ title, note, traces, layout = {}, wide = false, height }) {
  const plot = make("div", { class: "plot", role: "img", "aria-label": `${title}. ${note || ""}` });
  if (height) plot.style.height = `${height}px`;
  const chart = { plot, traces, layout, stale: true, visible: false };
  plot.chart = chart;
  charts.push(chart);
  seen.observe(plot);
  return make("figure", { class: wide ? "card wide" : "card" }, make("figcaption", {}, make("h3", {}, title), note ? make("p", { class: "note" }, note) : null), plot);
}

function draw(chart, force = false) {
  if (!chart.stale && !force) return;
  chart.stale = false;
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true };
  const name = { step: "step", seconds: "seconds of RL", tokens: "tokens generated" }[state.axis];
  const own = typeof chart.layout === "function" ? chart.layout() : chart.layout;
  const traces = chart.traces();
  Plotly.react(chart.plot, traces, {
    margin: { l: 44, r: 10, t: 6, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified", uirevision: state.axis,
    font: { family: "system-ui, 'DejaVu Sans', sans-serif", size: 11.5, color: css("--dim") }, showlegend: traces.filter((one) => one.showlegend !== false && one.name).length > 1,
    legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } }, hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
    ...own, xaxis: { ...axis, title: { text: name, standoff: 4, font: { size: 11 } }, ...(own.xaxis || {}) }, yaxis: { ...axis, ...(own.yaxis || {}) },
  }, { displaylogo: false, responsive: true, displayModeBar: false });
}

function redraw() { for (const chart of charts) { chart.stale = true; if (chart.visible) draw(chart); } }
function drawAll() { for (const chart of charts) draw(chart); }

/** The page: its sections with their links, dark or light; printed, it is light and has all plots. */
function assemble(sections, themed = () => {}) {
  for (const [id, name, build] of sections) {
    document.getElementById("nav").append(make("a", { href: `#${id}` }, name));
    document.getElementById("main").append(build());
  }
  state.themed = themed;
  setTheme(state.theme);
  document.getElementById("theme").addEventListener("click", flip);
  let before;
  addEventListener("beforeprint", () => { before = state.theme; setTheme("light"); drawAll(); });
  addEventListener("afterprint", () => setTheme(before));
}
function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme;
  for (const dot of document.querySelectorAll("[data-colour]")) dot.style.background = colour(Number(dot.dataset.colour));
  redraw();
  state.themed();
}
const flip = () => setTheme(state.theme === "dark" ? "light" : "dark");

/** Lines of metrics over steps: runs differ by colour, metrics of one chart by dash (by colour where one run is shown). */
function lines(keys) {
  const among = shown(), alone = among.length === 1, traces = [];
  among.forEach(({ run, number: place }) => keys.forEach(({ key, name, se, of }, index) => {
    const values = of ? of(run) : run.columns[key];
    if (!values || values.every((value) => value === null)) return;
    const x = axisValues(run), y = smoothed(values), ink = alone ? colour(index) : colour(place);
    const label = [alone ? null : run.name, keys.length > 1 ? name : null].filter(Boolean).join(" · ") || name;
    const dash = alone ? "solid" : DASHES[index % 4];
    const errors = se && !state.smooth ? run.columns[se] : null;
    if (errors) traces.push(...band(x, values, errors, ink));
    if (state.smooth) traces.push({ x, y: values, mode: "lines", line: { color: ink, width: 1 }, opacity: .22, hoverinfo: "skip", showlegend: false });
    traces.push({ x, y, name: label, showlegend: alone || keys.length === 1, mode: values.filter((v) => v !== null).length < 2 ? "markers" : "lines", connectgaps: true, line: { color: ink, width: 1.8, dash }, hovertemplate: "%{y:.4g}" });
  }));
  return alone || keys.length === 1 || !traces.length ? traces : [...traces, ...key(among, keys.filter(({ key: name }) => has(name)))];
}

/** Entries of a legend that names runs and metrics once each, and not every pair of them. */
function key(among, metrics) {
  const entry = (name, color, dash) => ({ x: [null], y: [null], name, mode: "lines", line: { color, width: 1.8, dash }, hoverinfo: "skip", showlegend: true });
  return [...among.map(({ run, number: place }) => entry(run.name, colour(place), "solid")), ...metrics.map(({ name }, index) => entry(name, css("--dim"), DASHES[index % 4]))];
}

function band(x, values, errors, ink) {
  const places = values.map((value, place) => place).filter((place) => values[place] !== null && errors[place] !== null);
  const at = places.map((place) => x[place]);
  const edge = (sign) => places.map((place) => values[place] + sign * errors[place]);
  const common = { x: at, mode: "lines", line: { width: 0, color: ink }, hoverinfo: "skip", showlegend: false };
  return [{ ...common, y: edge(-1) }, { ...common, y: edge(1), fill: "tonexty", fillcolor: ink + "2b" }];
}

/** For each evaluated set, the score that `name` matches and that has the most samples. */
function evaluated(name, among = runs) {
  const best = new Map(), samples = (key) => Number(key.split("@").pop());
  for (const key of among.flatMap((run) => Object.keys(run.columns)).filter((key) => key.startsWith("eval/") && name.test(key.split("/").pop()))) {
    const set = key.slice(5, key.lastIndexOf("/"));
    if (!best.has(set) || samples(best.get(set)) < samples(key)) best.set(set, key);
  }
  return [...best];
}

/** Evaluation scores with their standard errors. */
function scores(name) {
  const among = shown(), traces = [], several = name.source !== "^pass@1$";
  among.forEach(({ run, number: place }) => {
    evaluated(name, [run]).forEach(([set, key], index) => {
      const places = run.columns[key].map((value, at) => at).filter((at) => run.columns[key][at] !== null);
      const x = axisValues(run), ink = among.length === 1 ? colour(index) : colour(place), errors = run.columns[key + "_se"] || [];
      const label = several ? `${set} ${key.split("/").pop()}` : set;
      traces.push({ x: places.map((at) => x[at]), y: places.map((at) => 100 * run.columns[key][at]), name: among.length === 1 ? label : `${run.name} · ${label}`, mode: "lines+markers",
        line: { color: ink, width: 1.8, dash: among.length === 1 ? "solid" : DASHES[index % 4] }, marker: { size: 6, color: ink },
        error_y: { type: "data", array: places.map((at) => 100 * (errors[at] || 0)), thickness: 1, width: 3, color: ink }, hovertemplate: "%{y:.1f} %" });
    });
  });
  return traces;
}

/** Seconds of each phase, stacked, of one run. */
function stacked(run) {
  const all = Object.keys(run.columns).filter((key) => /^time\/\w+_s$/.test(key) && !["time/step_s", "time/step_cpu_s", "time/pack_s", "time/logprobs_s"].includes(key));
  const order = ["rollout", "reward", "select", "prune", "exchange", "update", "sync"];
  const rank = (key) => { const at = order.indexOf(key.slice(5, -2)); return at < 0 ? 99 : at; };
  const keys = all.sort((a, b) => rank(a) - rank(b)), first = run.steps[0] === 0 ? 1 : 0, x = axisValues(run).slice(first);
  const rest = run.steps.map((_, place) => Math.max(0, (run.columns["time/step_s"][place] || 0) - keys.reduce((sum, key) => sum + (run.columns[key][place] || 0), 0)));
  const trace = (values, name, index) => ({ x, y: smoothed(values).slice(first).map((value) => value || 0), name, stackgroup: "one", mode: "lines", line: { width: .6, color: colour(index) }, fillcolor: colour(index) + "b0", hovertemplate: "%{y:.3g} s" });
  const traces = keys.map((key, index) => trace(run.columns[key], key.slice(5, -2), index));
  return [...traces, { ...trace(rest, "other", 0), line: { width: .6, color: css("--dim") }, fillcolor: css("--line") }];
}
