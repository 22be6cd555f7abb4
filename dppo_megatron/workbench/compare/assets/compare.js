// The sections of a comparison. data.js and charts.js of the report come before this file.
const { verdict, text, notes, about, title } = report;
const { arms, baseline } = verdict;
const CLOCKS = { train_cpu_s: "CPU seconds", train_s: "seconds by the clock" };
const COSTS = {
  step: "step",
  train_cpu_s: "CPU seconds of RL",
  train_s: "seconds of RL",
  tokens_generated: "tokens generated",
  tokens_trained: "tokens trained",
};
const PARTS_OF_PHASES = ["step", "pack", "logprobs"];
const SPEED_UP_NOTE =
  `${baseline}'s cost over the method's. Bars: 95 % interval over seeds and the noise of their curves; where it ` +
  "contains 1x, the factor is noise. Dots: seeds; 0: not reached.";
const ENDS_NOTE =
  "Points, over the same problems, with the 95 % interval of a paired bootstrap over seeds and problems. " +
  "A difference whose interval contains 0 is within noise.";
const CURVES_LEAD =
  "Thick: smoothed over three evaluations, as the times are read off, mean over seeds with its standard error; " +
  "thin: each seed as it was evaluated. Evaluations are not counted in any cost.";

const closest = (label, yaxis) => ({ xaxis: { title: axisTitle(label) }, yaxis, hovermode: "closest" });

/** A trace over the methods: the `middle` of each, with error bars from `low` to `high`, times a scale. */
function intervals(known, middle, scale, bars) {
  return {
    x: known.map(({ arm }) => arm),
    y: known.map((one) => scale * one[middle]),
    showlegend: false,
    error_y: {
      type: "data",
      symmetric: false,
      array: known.map((one) => scale * (one.high - one[middle])),
      arrayminus: known.map((one) => scale * (one[middle] - one.low)),
      ...bars,
    },
  };
}

function overview() {
  return section("overview", title, notes.join(" "), div("card scroll", make("pre", {}, text)));
}

/** Speed-up over the baseline: median, interval, and a dot for each seed. */
function factors(clock, level) {
  const known = arms
    .map(({ arm, factors, by_seed }, number) => ({ arm, number, by_seed, ...factors[clock][level] }))
    .filter(({ median }) => median !== undefined);
  const dots = known.flatMap(({ arm, by_seed }) => by_seed[clock][level].map((factor) => ({ arm, factor })));
  const hovertemplate = "%{y:.2f}x";
  const bars = {
    ...intervals(known, "median", 1, { color: css("--ink"), thickness: 1.2, width: 4 }),
    type: "bar",
    marker: { color: known.map(({ number }) => `${colour(number)}8c`) },
    hovertemplate,
  };
  const seeds = {
    x: dots.map(({ arm }) => arm),
    y: dots.map(({ factor }) => factor),
    mode: "markers",
    marker: { size: 5, color: css("--ink") },
    showlegend: false,
    hovertemplate,
  };
  return [bars, seeds];
}

function speedUps() {
  const layout = closest("", { rangemode: "tozero", ticksuffix: "x" });
  const card = (clock, level) => {
    const name = `To ${Math.round(100 * level)} % of the gain, ${CLOCKS[clock]}`;
    return chartCard({ title: name, note: SPEED_UP_NOTE, traces: () => factors(clock, level), layout });
  };
  const levels = (clock) => Object.keys(arms[0].factors[clock]);
  const cards = Object.keys(CLOCKS).map((clock) => levels(clock).map((level) => card(clock, level)));
  return section("speed-up", "Speed-up", `To the same accuracy, on smoothed curves. 1x is ${baseline}.`, grid(cards));
}

/** Differences from the baseline's final accuracy, in points. */
function differences() {
  const known = arms
    .map(({ arm, end_difference }, number) => ({ arm, number, low: null, ...end_difference }))
    .filter(({ low }) => low !== null);
  const trace = {
    ...intervals(known, "difference", 100, { thickness: 1.4, width: 5 }),
    mode: "markers",
    marker: { size: 9, color: known.map(({ number }) => colour(number)) },
    hovertemplate: "%{y:+.1f} points",
  };
  return [trace];
}

function ends() {
  const layout = closest("", { zeroline: true });
  const name = `Final accuracy minus ${baseline}'s`;
  const card = chartCard({ title: name, note: ENDS_NOTE, traces: differences, layout });
  return section("ends", "Final accuracy", "pass@1 over the last two evaluations.", grid(card));
}

/** Centred mean over three evaluations, at the ends over two, as in verdict.py, which reads the times off it. */
const movingMean = (values) =>
  values.length < 3 ? values : values.map((_, place) => mean(values.slice(Math.max(0, place - 1), place + 2)));

function standardError(values) {
  if (values.length < 2) return 0;
  const centre = mean(values);
  const squares = sum(values.map((value) => (value - centre) ** 2));
  return Math.sqrt(squares / (values.length - 1) / values.length);
}

/** For each method, the mean over seeds of the smoothed curves with its error, and, faint, each seed as evaluated. */
function curves(cost) {
  return arms.flatMap(({ arm }, number) => {
    const seeds = runs
      .filter((run) => run.arm === arm)
      .map(({ curve }) => ({ x: curve.map((point) => point[cost]), y: curve.map((point) => 100 * point.accuracy) }));
    const length = Math.min(...seeds.map(({ y }) => y.length));
    const overSeeds = (curves) => [...Array(length).keys()].map((place) => curves.map((values) => values[place]));
    const accuracies = overSeeds(seeds.map(({ y }) => movingMean(y)));
    const line = { width: 1, color: `${colour(number)}40` };
    const faint = seeds.map((seed) => ({ ...seed, mode: "lines", line, hoverinfo: "skip", showlegend: false }));
    const thick = {
      x: overSeeds(seeds.map(({ x }) => x)).map(mean),
      y: accuracies.map(mean),
      name: arm,
      mode: "lines+markers",
      line: { width: 2, color: colour(number) },
      marker: { size: 4 },
      error_y: { type: "data", array: accuracies.map(standardError), thickness: 1, width: 2 },
      hovertemplate: "%{y:.1f} %",
    };
    return [...faint, thick];
  });
}

function learning() {
  const cards = Object.entries(COSTS).map(([cost, label]) => {
    const layout = closest(label, { ticksuffix: " %" });
    layout.xaxis.rangemode = "tozero";
    return chartCard({ title: `Accuracy against ${label}`, traces: () => curves(cost), layout, height: 300 });
  });
  return section("curves", "Curves", CURVES_LEAD, grid(cards));
}

function phases() {
  const names = [...new Set(arms.flatMap((one) => Object.keys(one.phase_s)))];
  const trace = (name, number) => ({
    type: "bar",
    name,
    x: arms.map(({ arm }) => arm),
    y: arms.map(({ phase_s }) => phase_s[name] || 0),
    marker: { color: colour(number) },
    hovertemplate: "%{y:.1f} s",
  });
  const traces = () => names.filter((name) => !PARTS_OF_PHASES.includes(name)).map(trace);
  const layout = { xaxis: { title: axisTitle("") }, barmode: "stack" };
  const card = chartCard({ title: "Seconds by phase", traces, layout, height: 300 });
  return section("time", "Where the seconds go", "Of the whole run by the clock, medians over seeds.", grid(card));
}

function conditions() {
  const { cpu, cores } = about.machine;
  const facts = { date: about.date, machine: `${cpu}, ${cores} cores`, ...about.versions };
  const row = ([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value));
  const body = make("tbody", {}, Object.entries(facts).map(row));
  return section("about", "Conditions", null, div("card scroll", make("table", {}, body)));
}

assemble([
  ["overview", "Overview", overview],
  ["speed-up", "Speed-up", speedUps],
  ["ends", "Final accuracy", ends],
  ["curves", "Curves", learning],
  ["time", "Time", phases],
  ["about", "Conditions", conditions],
]);
