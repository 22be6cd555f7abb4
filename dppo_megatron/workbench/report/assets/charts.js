// Plots, drawn when they come into view, and again when theme, axis, smoothing or the shown runs change.
const DASHES = ["solid", "dash", "dot", "dashdot"];
const AXES = { step: "step", seconds: "seconds of RL", tokens: "tokens generated" };
const charts = [];

function drawVisible(entries) {
  for (const { target, isIntersecting } of entries) {
    target.chart.visible = isIntersecting;
    if (isIntersecting) draw(target.chart);
  }
}
const visibility = new IntersectionObserver(drawVisible, { rootMargin: "300px" });

/** A card with a plot. `traces()` gives plotly's traces for the current state; `layout` overrides the default one. */
function chartCard({ title, note, traces, layout = {}, wide = false, height }) {
  const plot = make("div", { class: "plot", role: "img", "aria-label": `${title}. ${note || ""}` });
  if (height) plot.style.height = `${height}px`;
  const chart = { plot, traces, layout, stale: true, visible: false };
  plot.chart = chart;
  charts.push(chart);
  visibility.observe(plot);
  const caption = make("figcaption", {}, make("h3", {}, title), note && paragraph("note", note));
  return make("figure", { class: wide ? "card wide" : "card" }, caption, plot);
}

/** The title of a horizontal axis. */
const axisTitle = (text) => ({ text, standoff: 4, font: { size: 11 } });

function plotLayout(own, traces) {
  const line = css("--line");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return {
    margin: { l: 44, r: 10, t: 6, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hovermode: "x unified",
    uirevision: state.axis,
    font: { family: "system-ui, 'DejaVu Sans', sans-serif", size: 11.5, color: css("--dim") },
    showlegend: traces.filter((trace) => trace.showlegend !== false && trace.name).length > 1,
    legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    hoverlabel: { bgcolor: css("--card"), bordercolor: line, font: { color: css("--ink") } },
    ...own,
    xaxis: { ...axis, title: axisTitle(AXES[state.axis]), ...own.xaxis },
    yaxis: { ...axis, ...own.yaxis },
  };
}

function draw(chart) {
  if (!chart.stale) return;
  chart.stale = false;
  const traces = chart.traces();
  const options = { displaylogo: false, responsive: true, displayModeBar: false };
  Plotly.react(chart.plot, traces, plotLayout(chart.layout, traces), options);
}

function redraw() {
  for (const chart of charts) {
    chart.stale = true;
    if (chart.visible) draw(chart);
  }
}

function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme;
  for (const dot of document.querySelectorAll("[data-colour]")) dot.style.background = colour(dot.dataset.colour);
  redraw();
}

/** The page: its sections with their links, dark or light. */
function assemble(sections) {
  for (const [id, name, build] of sections) {
    byId("nav").append(make("a", { href: `#${id}` }, name));
    byId("main").append(build());
  }
  setTheme(state.theme);
  byId("theme").addEventListener("click", () => setTheme(state.theme === "dark" ? "light" : "dark"));
}
