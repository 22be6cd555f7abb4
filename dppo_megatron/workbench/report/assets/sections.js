// The sections of the page, in order, but for the samples.
const STATUS_CHIPS = { finished: "good", running: "", crashed: "bad", stopped: "warn" };
const LABEL_CHIPS = { exact: "good", unbiased: "good", ratio: "warn", biased: "bad" };
const LEVEL_CHIPS = { bad: "bad", warning: "warn", note: "" };
const LEDGER_NOTE =
  "What each selection does to the expected gradient: exact (drops nothing that has a gradient), unbiased " +
  "(weights undo it), ratio (up to O(1/n)), biased (changes it). Bias: how far off that is, as a share of the " +
  "gradient, if the gradients of completions are orthogonal.";

/** Of a table whose items have a `run` and its `number`; not needed for one run. */
const runColumn = runs.length > 1 && { name: "run", content: ({ run, number }) => [runDot(number), " ", run.name] };

/** The plots of a section (metrics.js), but for those that no run has data for. */
function plotCards(plots) {
  const hasData = ([, { pattern, metrics }]) =>
    pattern ? evaluated(pattern).length : Object.keys(metrics).some(isRecorded);
  const card = ([title, { note, pattern, metrics, layout = pattern && percents }]) =>
    chartCard({ title, note, layout, traces: () => (pattern ? scores(pattern) : lines(metrics)) });
  return Object.entries(plots).filter(hasData).map(card);
}

function overview() {
  const columns = [
    { name: "run", content: ({ run, number }) => runToggle(run, number) },
    { name: "state", content: ({ run }) => chip(run.status + timeLeft(run), STATUS_CHIPS[run.status]) },
    { name: "steps", kind: "num", content: ({ run }) => stepsDone(run) },
    { name: "reward, last", kind: "num", content: ({ run }) => format(recorded(run, "reward/mean").at(-1)) },
    { name: "evaluation", content: ({ run }) => evaluationChanges(run) },
    { name: "RL time", kind: "num", content: ({ run }) => duration(sum(recorded(run, "time/step_s"))) },
    { name: "generated", kind: "num", content: ({ run }) => format(sum(recorded(run, "tokens/generated"))) },
    { name: "trained", kind: "num", content: ({ run }) => format(sum(recorded(run, "tokens/trained"))) },
    { name: "s / step", kind: "num", content: ({ run }) => format(mean(recorded(run, "time/step_s"))) },
  ];
  const title = runs.length > 1 ? `${runs.length} runs` : runs[0].name;
  const rows = table(columns, numberedRuns, "runs stacking");
  return section("overview", title, null, div("card scroll", rows));
}

/** A run's name, with a box that shows it in the plots or hides it. */
function runToggle(run, number) {
  const toggle = (event) => {
    if (event.target.checked) state.hidden.delete(number);
    else state.hidden.add(number);
    redraw();
  };
  const attributes = { type: "checkbox", checked: true, "aria-label": `Show ${run.name}`, onchange: toggle };
  return make("label", {}, make("input", attributes), runDot(number), make("b", {}, run.name));
}

function stepsDone(run) {
  const done = run.steps.at(-1);
  return Number(run.settings.steps) ? `${done} of ${run.settings.steps}` : done;
}

/** From the mean over the steps of its own: a run may begin from another's checkpoint. */
function timeLeft(run) {
  const left = Number(run.settings.steps) - run.steps.at(-1);
  const secondsPerStep = mean(recorded(run, "time/step_s"));
  return run.status === "running" && left > 0 && secondsPerStep ? ` · ${duration(left * secondsPerStep)} left` : "";
}

/** Each set's pass@1 at the start and now. A set added at a resume starts there, with a score only in summary.json. */
function evaluationChanges(run) {
  const { eval_before: before = {}, eval_before_step: added = {} } = run.summary;
  return evaluated(PASS_AT_1, [run]).map(([set, key]) => {
    const values = recorded(run, key);
    const error = recorded(run, `${key}_se`).at(-1);
    const first = set in added ? `${percent(before[set])} (step ${added[set]})` : percent(values[0]);
    const start = set in added || values.length > 1 ? `${first} → ` : "";
    const change = `${set} ${start}${percent(values.at(-1))}`;
    return make("div", {}, change, error !== undefined && span("dim", ` ± ${(100 * error).toFixed(1)}`));
  });
}

function learning() {
  const lead =
    "Bands and bars are one standard error: over groups for rewards, over problems for evaluations. " +
    "Drag over a plot to zoom in, double-click to zoom out.";
  return section("learning", "Learning", lead, grid(plotCards(LEARNING)));
}

function time() {
  const single = runs.length === 1;
  const name = (run) => (single ? "Where the seconds go" : `Where the seconds go: ${run.name}`);
  const layout = { ...fromZero, barmode: "stack" };
  const look = { note: "Seconds of each step by phase, stacked.", wide: single, height: single ? 300 : 250 };
  const phases = runs
    .filter((run) => recorded(run, "time/step_s").length)
    .map((run) => chartCard({ title: name(run), traces: () => stackedPhases(run), layout, ...look }));
  const lead = "Seconds of rank 0. With rollout.async_steps a phase overlaps the next step's generation.";
  return section("time", "Time and tokens", lead, grid(phases, plotCards(TIME)));
}

function pruning() {
  const lead =
    "What was left out, and what that costs in variance. " +
    "A design effect of 1.2 is as if the batch were 1.2 times smaller.";
  const hasLedger = runs.some((run) => run.ledger.length);
  return section("pruning", "Pruning", lead, grid(plotCards(PRUNING), hasLedger && ledgerCard()));
}

/** The bias ledger: a row for each selection of each run, over the steps that have it. */
function ledgerCard() {
  const items = numberedRuns.flatMap(({ run, number }) =>
    run.ledger.map(({ name, label, kept, bias, notes }) => {
      const places = placesOf(label);
      const average = (values) => percent(mean(pick(values, places).filter((value) => value !== null)));
      const steps = places.length ? `${run.steps[places[0]]}–${run.steps[places.at(-1)]}` : "–";
      const labels = new Set(pick(label, places));
      return { run, number, name, labels: [...labels], kept: average(kept), bias: average(bias), steps, notes };
    }),
  );
  const columns = [
    runColumn,
    { name: "selection", content: ({ name }) => code(name) },
    { name: "label", content: ({ labels }) => labels.map((label) => [chip(label, LABEL_CHIPS[label]), " "]) },
    { name: "kept, mean", kind: "num", content: ({ kept }) => kept },
    { name: "bias, mean", kind: "num", content: ({ bias }) => bias },
    { name: "steps", kind: "num", content: ({ steps }) => steps },
    { name: "notes", kind: "wrap dim", content: ({ notes }) => notes.join("; ") },
  ];
  const rows = table(columns, items, "stacking");
  return div("card wide scroll", make("h3", {}, "Bias ledger"), paragraph("note", LEDGER_NOTE), rows);
}

function warnings() {
  const items = numberedRuns.flatMap((numbered) => numbered.run.findings.map((one) => ({ ...numbered, ...one })));
  const columns = [
    { name: "level", content: ({ level }) => chip(level, LEVEL_CHIPS[level]) },
    runColumn,
    { name: "what", kind: "wrap", content: ({ text }) => text },
    { name: "steps", kind: "wrap", content: ({ steps }) => steps },
  ];
  const none = paragraph("empty", "Nothing in the record deserves a warning.");
  const found = div("card scroll", items.length ? table(columns, items) : none);
  return section("warnings", "Warnings", null, found, metricExplorer());
}

function metricExplorer() {
  const keys = columnNames(runs).sort();
  const options = keys.map((key) => option(key, key, key === "train/grad_norm"));
  const choice = select("Metric", redraw, options);
  const traces = () => lines({ [choice.value]: choice.value });
  const card = chartCard({ title: "Any metric", note: "Every number of metrics.jsonl.", traces, wide: true });
  card.firstChild.append(choice);
  return card;
}

/** The settings that differ from their defaults; config.yaml of a run has all. */
function configuration() {
  const settings = runs.map((run) => run.settings);
  const keys = [...new Set([report.defaults, ...settings].flatMap(Object.keys))];
  const byDefault = (key) => report.defaults[key] ?? "null";
  const isChanged = (key) => settings.some((one) => one[key] !== undefined && one[key] !== byDefault(key));
  const differs = (key) => new Set(settings.map((one) => one[key])).size > 1;
  const ofRun = (run) => ({
    name: run.name,
    kind: (key) => (differs(key) ? "wrap differs" : "wrap"),
    content: (key) => code(run.settings[key] ?? "–"),
  });
  const columns = [
    { name: "setting", content: code },
    ...runs.map(ofRun),
    { name: "default", kind: "wrap dim", content: (key) => code(report.defaults[key] ?? "–") },
  ];
  const lead = runs.length > 1 ? "Where runs differ, values are marked." : null;
  return section("settings", "Configuration", lead, div("card scroll", table(columns, keys.filter(isChanged))));
}
