// What the plots of a report show, as plotly's traces.
const PASS_AT_1 = /^pass@1$/;
const PHASES = ["rollout", "reward", "select", "prune", "exchange", "update", "sync"];
const NO_PHASES = ["time/step_s", "time/step_cpu_s", "time/pack_s", "time/logprobs_s"]; // the whole, or within a phase

/**
 * The traces that `build(run, style, label)` gives for each shown run; `style(index)` is a trace's line, `label(name)`
 * its name. Runs differ by colour and the traces of each by dash; those of a single run differ by colour.
 */
function ofShownRuns(build) {
  const shown = shownRuns();
  const single = shown.length === 1;
  return shown.flatMap(({ run, number }) => {
    const ofSingle = (index) => ({ color: colour(index), dash: "solid", width: 1.8 });
    const ofSeveral = (index) => ({ color: colour(number), dash: DASHES[index % 4], width: 1.8 });
    const label = (name) => (single ? name : `${run.name} · ${name}`);
    return build(run, single ? ofSingle : ofSeveral, label);
  });
}

/** Lines of metrics over steps. `metrics` has the name of each metric by its key. */
function lines(metrics) {
  const keys = Object.keys(metrics);
  const several = shownRuns().length > 1;
  const pairs = several && keys.length > 1;
  const traces = ofShownRuns((run, style, label) =>
    keys.flatMap((key, index) => {
      const name = several && !pairs ? run.name : label(metrics[key]);
      return metricTraces(run, key, { name, line: style(index), showlegend: !pairs });
    }),
  );
  return pairs && traces.length ? [...traces, ...pairsLegend(metrics)] : traces;
}

/** A metric of a run: its line, with a band of its standard error, or smoothed before the line as it was. */
function metricTraces(run, key, look) {
  const count = recorded(run, key).length;
  if (!count) return [];
  const x = axisValues(run);
  const values = run.columns[key];
  const mode = count < 2 ? "markers" : "lines";
  const trace = { ...look, x, y: smoothed(values), mode, connectgaps: true, hovertemplate: "%{y:.4g}" };
  const background = { x, mode: "lines", hoverinfo: "skip", showlegend: false };
  const thin = { color: look.line.color, width: 1 };
  if (state.smooth) return [{ ...background, y: values, line: thin, opacity: 0.22 }, trace];
  const errors = run.columns[`${key}_se`];
  if (!errors) return [trace];
  const places = placesOf(values).filter((place) => errors[place] !== null);
  const edge = (sign) => ({
    ...background,
    x: pick(x, places),
    y: places.map((place) => values[place] + sign * errors[place]),
    line: { width: 0, color: look.line.color },
  });
  return [edge(-1), { ...edge(1), fill: "tonexty", fillcolor: `${look.line.color}2b` }, trace];
}

/** Entries of a legend that names runs and metrics once each, and not every pair of them. */
function pairsLegend(metrics) {
  const empty = { x: [null], y: [null], mode: "lines", hoverinfo: "skip", showlegend: true };
  const entry = (name, color, dash) => ({ ...empty, name, line: { color, width: 1.8, dash } });
  const ofMetrics = Object.entries(metrics)
    .map(([key, name], index) => isRecorded(key) && entry(name, css("--dim"), DASHES[index % 4]))
    .filter(Boolean);
  return [...shownRuns().map(({ run, number }) => entry(run.name, colour(number), "solid")), ...ofMetrics];
}

/** For each evaluated set, the score that `pattern` matches and that has the most samples: [set, key] each. */
function evaluated(pattern, among = runs) {
  const best = new Map();
  const samples = (key) => Number(key.split("@").pop());
  for (const key of columnNames(among)) {
    const [, set, score] = /^eval\/(.+)\/(.+)$/.exec(key) || [];
    if (!set || !pattern.test(score)) continue;
    if (!best.has(set) || samples(best.get(set)) < samples(key)) best.set(set, key);
  }
  return [...best];
}

/** Evaluation scores with their standard errors. */
function scores(pattern) {
  return ofShownRuns((run, style, label) =>
    evaluated(pattern, [run]).map(([set, key], index) => {
      const values = run.columns[key];
      const errors = run.columns[`${key}_se`] || [];
      const places = placesOf(values);
      const line = style(index);
      const array = places.map((place) => 100 * (errors[place] || 0));
      return {
        x: pick(axisValues(run), places),
        y: places.map((place) => 100 * values[place]),
        name: label(pattern === PASS_AT_1 ? set : `${set} ${key.split("/").pop()}`),
        mode: "lines+markers",
        line,
        marker: { size: 6, color: line.color },
        error_y: { type: "data", array, thickness: 1, width: 3, color: line.color },
        hovertemplate: "%{y:.1f} %",
      };
    }),
  );
}

/** Seconds of each phase, stacked, of one run: areas over its steps, or the bars of a single step. */
function stackedPhases(run) {
  const phase = (key) => key.slice(5, -2);
  const rank = (key) => (PHASES.includes(phase(key)) ? PHASES.indexOf(phase(key)) : PHASES.length);
  const keys = Object.keys(run.columns)
    .filter((key) => /^time\/\w+_s$/.test(key) && !NO_PHASES.includes(key))
    .sort((one, other) => rank(one) - rank(other));
  const first = run.steps[0] === 0 ? 1 : 0; // before the first step there is only an evaluation
  const single = run.steps.length - first === 1;
  const trace = (values, name, lineColour, fillcolor) => ({
    ...(single ? { type: "bar", marker: { color: fillcolor } } : { stackgroup: "one", mode: "lines" }),
    x: axisValues(run).slice(first),
    y: smoothed(values)
      .slice(first)
      .map((value) => value || 0),
    name,
    line: { width: 0.6, color: lineColour },
    fillcolor,
    hovertemplate: "%{y:.3g} s",
  });
  const rest = run.steps.map((_, place) => {
    const known = sum(keys.map((key) => run.columns[key][place]));
    return Math.max(0, (run.columns["time/step_s"][place] || 0) - known);
  });
  const phases = keys.map((key, index) => trace(run.columns[key], phase(key), colour(index), `${colour(index)}b0`));
  return [...phases, trace(rest, "other", css("--dim"), css("--line"))];
}
