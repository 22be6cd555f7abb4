// The sections of a comparison. data.js and charts.js of the report come before this file.
const { verdict, text, notes, about, title } = report;
const arms = verdict.arms, arm_runs = (name) => runs.filter((run) => run.arm === name);
const rgba = (number, alpha) => colour(number) + Math.round(alpha * 255).toString(16).padStart(2, "0");
const plain = (label, extra = {}) => ({ xaxis: { title: { text: label, standoff: 4, font: { size: 11 } }, ...extra } });

function overview() {
  return section("overview", title, notes.join(" "), make("div", { class: "card scroll" }, make("pre", {}, text)));
}

/** Speed-up over the baseline: median, interval, and a dot for each seed. */
function factors(clock, level) {
  const known = arms.map((one, place) => ({ one, place, at: one.factors[clock][level] })).filter(({ at }) => at);
  const bars = { type: "bar", x: known.map(({ one }) => one.arm), y: known.map(({ at }) => at.median), marker: { color: known.map(({ place }) => rgba(place, .55)) }, showlegend: false, hovertemplate: "%{y:.2f}x",
    error_y: { type: "data", symmetric: false, array: known.map(({ at }) => at.high - at.median), arrayminus: known.map(({ at }) => at.median - at.low), color: css("--ink"), thickness: 1.2, width: 4 } };
  const dots = known.flatMap(({ one }) => one.by_seed[clock][level].map((value) => ({ x: one.arm, y: value })));
  return [bars, { x: dots.map((dot) => dot.x), y: dots.map((dot) => dot.y), mode: "markers", marker: { size: 5, color: css("--ink") }, showlegend: false, hovertemplate: "%{y:.2f}x" }];
}

function speedUps() {
  const cards = [["train_cpu_s", "CPU seconds"], ["train_s", "seconds by the clock"]].flatMap(([clock, label]) => Object.keys(arms[0].factors[clock]).map((level) =>
    chartCard({ title: `To ${Math.round(100 * level)} % of the gain, ${label}`, note: `${verdict.baseline}'s cost over the method's. Bars: 95 % interval over seeds and the noise of their curves; where it contains 1x, the factor is noise. Dots: seeds; 0: not reached.`, traces: () => factors(clock, level),
      layout: { ...plain(""), yaxis: { rangemode: "tozero", ticksuffix: "x" }, hovermode: "closest" } })));
  return section("speed-up", "Speed-up", `To the same accuracy, on smoothed curves. 1x is ${verdict.baseline}.`, grid(...cards));
}

function ends() {
  const traces = () => {
    const known = arms.map((one, place) => ({ place, name: one.arm, at: one.end_difference })).filter(({ at }) => at && at.low !== null);
    return [{ x: known.map(({ name }) => name), y: known.map(({ at }) => 100 * at.difference), mode: "markers", marker: { size: 9, color: known.map(({ place }) => colour(place)) }, showlegend: false, hovertemplate: "%{y:+.1f} points",
      error_y: { type: "data", symmetric: false, array: known.map(({ at }) => 100 * (at.high - at.difference)), arrayminus: known.map(({ at }) => 100 * (at.difference - at.low)), thickness: 1.4, width: 5 } }];
  };
  return section("ends", "Final accuracy", "pass@1 over the last two evaluations.", grid(chartCard({ title: `Final accuracy minus ${verdict.baseline}'s`, note: "Points, over the same problems, with the 95 % interval of a paired bootstrap over seeds and problems. A difference whose interval contains 0 is within noise.", traces, layout: { ...plain(""), yaxis: { zeroline: true }, hovermode: "closest" } })));
}

/** Centred mean over three evaluations, at the ends over two, as in verdict.py, which reads the times off it. */
const movingMean = (values) => values.map((_, i) => { const near = values.slice(Math.max(0, i - 1), i + 2); return near.reduce((sum, value) => sum + value, 0) / near.length; });

/** For each method, the mean over seeds of the smoothed curves with its standard error, and, faint, each seed as it was evaluated. */
function curves(cost) {
  return arms.flatMap((one, place) => {
    const of = arm_runs(one.arm), length = Math.min(...of.map((run) => run.curve.length)), at = [...Array(length).keys()];
    const column = (pick) => at.map((i) => of.map((run) => pick(run.curve[i])));
    const smooth = of.map((run) => movingMean(run.curve.map((point) => 100 * point.accuracy)));
    const accuracies = at.map((i) => smooth.map((values) => values[i]));
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const error = (values) => values.length < 2 ? 0 : Math.sqrt(values.reduce((sum, value) => sum + (value - mean(values)) ** 2, 0) / (values.length - 1) / values.length);
    const seeds = of.map((run) => ({ x: run.curve.map((point) => point[cost]), y: run.curve.map((point) => 100 * point.accuracy), mode: "lines", line: { width: 1, color: rgba(place, .25) }, hoverinfo: "skip", showlegend: false }));
    return [...seeds, { x: column((point) => point[cost]).map(mean), y: accuracies.map(mean), name: one.arm, mode: "lines+markers", line: { width: 2, color: colour(place) }, marker: { size: 4 },
      error_y: { type: "data", array: accuracies.map(error), thickness: 1, width: 2 }, hovertemplate: "%{y:.1f} %" }];
  });
}

function learning() {
  const axes = [["step", "step"], ["train_cpu_s", "CPU seconds of RL"], ["train_s", "seconds of RL"], ["tokens_generated", "tokens generated"], ["tokens_trained", "tokens trained"]];
  return section("curves", "Curves", "Thick: smoothed over three evaluations, as the times are read off, mean over seeds with its standard error; thin: each seed as it was evaluated. Evaluations are not counted in any cost.", grid(...axes.map(([cost, label]) =>
    chartCard({ title: `Accuracy against ${label}`, traces: () => curves(cost), layout: { ...plain(label, { rangemode: "tozero" }), yaxis: { ticksuffix: " %" }, hovermode: "closest" }, height: 300 }))));
}

function split() {
  const phases = [...new Set(arms.flatMap((one) => Object.keys(one.phase_s)))].filter((name) => !["step", "pack", "logprobs"].includes(name));
  const traces = () => phases.map((phase, place) => ({ type: "bar", name: phase, x: arms.map((one) => one.arm), y: arms.map((one) => one.phase_s[phase] || 0), marker: { color: colour(place) }, hovertemplate: "%{y:.1f} s" }));
  return section("time", "Where the seconds go", "Of the whole run by the clock, medians over seeds.", grid(chartCard({ title: "Seconds by phase", traces, layout: { ...plain(""), barmode: "stack" }, height: 300 })));
}

function conditions() {
  const rows = [["date", about.date], ["machine", `${about.machine.cpu}, ${about.machine.cores} cores`], ...Object.entries(about.versions)];
  return section("about", "Conditions", "", make("div", { class: "card scroll" }, make("table", {}, make("tbody", {}, ...rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, String(value))))))));
}

assemble([["overview", "Overview", overview], ["speed-up", "Speed-up", speedUps], ["ends", "Final accuracy", ends], ["curves", "Curves", learning], ["time", "Time", split], ["about", "Conditions", conditions]]);
