// The sections of the page, in order. A chart is left out if no run has data for it.
const numbers = (run, key) => (run.columns[key] || []).filter((value) => value !== null);
const has = (...keys) => runs.some((run) => keys.some((key) => numbers(run, key).length));
const share = { yaxis: { tickformat: ".2~%", rangemode: "tozero" } };
const zero = { yaxis: { rangemode: "tozero" } };
const log = { yaxis: { type: "log", exponentformat: "power" } };

function metric(title, note, keys, layout) {
  return keys.some(({ key, of }) => of || has(key)) ? chartCard({ title, note, traces: () => lines(keys), layout }) : null;
}

/** Keys of figures of the policy, and of those of the kept tokens, which a method without probabilities has instead. */
function ofPolicy(prefix, names) {
  return ["", "kept/"].flatMap((kept) => Object.entries(names).map(([key, name]) => ({ key: `${kept}${prefix}${key}`, name: kept ? `${name}, kept` : name })));
}

/** Mean rewards of the sets that have rewards of their own, and of the named rewards before their weights. */
function rewardParts() {
  const sets = runs.flatMap((run) => Object.keys(run.columns)).filter((key) => /^reward\/.+\/mean$/.test(key));
  const named = runs.flatMap((run) => Object.keys(run.settings)).map((key) => /^reward\.functions\.(.+)\.function$/.exec(key)).filter(Boolean);
  return [...[...new Set(sets)].map((key) => ({ key, name: key.slice(7, -5) })), ...[...new Set(named.map((found) => found[1]))].map((name) => ({ key: `reward/${name}`, name }))];
}

function overview() {
  const head = ["run", "state", "steps", "reward, last", "evaluation", "RL time", "generated", "trained", "s / step"];
  const rows = runs.map((run, place) => {
    const kind = { finished: "good", running: "", crashed: "bad", stopped: "warn" }[run.status];
    const of = Number(run.settings.steps || NaN), done = run.steps[run.steps.length - 1], seconds = total(run, "time/step_s");
    const each = seconds / numbers(run, "time/step_s").length; // not over done: a run may begin from another's checkpoint
    const left = run.status === "running" && of > done && each ? ` · ${duration((of - done) * each)} left` : "";
    const sets = Object.keys(run.columns).filter((key) => key.startsWith("eval/") && key.endsWith("/pass@1")).map((key) => {
      const values = run.columns[key].filter((value) => value !== null), errors = (run.columns[key + "_se"] || []).filter((value) => value !== null);
      return make("div", {}, `${key.slice(5, -7)} ${percent(values[0])} → ${percent(values[values.length - 1])}`, errors.length ? make("span", { class: "dim" }, ` ± ${(100 * errors[errors.length - 1]).toFixed(1)}`) : null);
    });
    const box = make("input", { type: "checkbox", checked: true, "aria-label": `Show ${run.name}`, onchange: (event) => { event.target.checked ? state.hidden.delete(place) : state.hidden.add(place); redraw(); } });
    return make("tr", {}, make("td", {}, make("label", {}, box, make("span", { class: "dot", "data-colour": place }), make("b", {}, run.name))), make("td", {}, make("span", { class: `chip ${kind}` }, run.status + left)),
      make("td", { class: "num" }, of ? `${done} of ${of}` : String(done)), make("td", { class: "num" }, number(last(run, "reward/mean"))), make("td", {}, ...sets), make("td", { class: "num" }, duration(seconds)),
      make("td", { class: "num" }, number(total(run, "tokens/generated"))), make("td", { class: "num" }, number(total(run, "tokens/trained"))), make("td", { class: "num" }, number(each)));
  });
  const numeric = new Set(["steps", "reward, last", "RL time", "generated", "trained", "s / step"]);
  return section("overview", runs.length > 1 ? `${runs.length} runs` : runs[0].name, null, make("div", { class: "card scroll" }, stacking(make("table", { class: "runs" },
    make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { class: numeric.has(text) ? "num" : null, scope: "col" }, text)))), make("tbody", {}, ...rows)))));
}

function learning() {
  return section("learning", "Learning", "Bands and bars are one standard error: over groups for rewards, over problems for evaluations. Drag over a plot to zoom in, double-click to zoom out.", grid(
    metric("Reward", "Mean of the generated groups, weighted by the prompts' inverse inclusion probabilities.", [{ key: "reward/mean", name: "mean", se: "reward/se" }, ...rewardParts()]),
    // avg@n is pass@1; of the others, each set's largest number of samples
    ...[["Evaluation: pass@1", "Chance that one answer is right, over the set's problems.", /^pass@1$/], ["Evaluation: best of n", "pass@n: chance that one of n answers is right.", /^pass@(?!1$)\d+$/], ["Evaluation: vote of n", "maj@n: chance that the most common of n answers is right.", /^maj@\d+$/]]
      .map(([title, note, name]) => evaluated(name).length ? chartCard({ title, note, traces: () => scores(name), layout: { yaxis: { ticksuffix: " %" } } }) : null),
    metric("Completion length", "Tokens: mean, and the 10th, 50th and 90th percentile of the step.", [{ key: "rollout/completion_tokens_mean", name: "mean" }, { key: "length/p10", name: "p10" }, { key: "length/p50", name: "median" }, { key: "length/p90", name: "p90" }], zero),
    metric("Truncated and failed", "Share of completions that hit the token limit; of gradings that failed.", [{ key: "rollout/truncated_share", name: "truncated" }, { key: "reward/failed_share", name: "failed" }], share),
    metric("Gradient norm", "Before clipping.", [{ key: "train/grad_norm", name: "gradient norm" }], zero),
    metric("Entropy", "Of the policy, in nats a token: minus the mean log-probability of what was sampled.", [{ key: "train/entropy", name: "entropy" }], zero),
    metric("Engine against actor", "|log-probability difference| of the same token under the same weights.", ofPolicy("mismatch/", { logprob_abs_diff_mean: "mean", logprob_abs_diff_p99: "p99" }), log),
    metric("Importance sampling ESS", "Effective share of the completions, were the engine's mismatch corrected by weights.", [...ofPolicy("mismatch/", { is_ess: "importance weights" }), { key: "kept/product_ess", name: "times the pruning weights" }], { yaxis: { tickformat: ".2%" } }),
    metric("Loss", "The weighted objective.", [{ key: "train/loss", name: "loss" }]),
    metric("Ratio and clipping", "Mean probability ratio; share of tokens that were clipped.", ofPolicy("train/", { ratio: "ratio", clip_fraction: "clipped" })),
    metric("Learning rate", "Of the step's last update.", [{ key: "train/learning_rate", name: "learning rate" }], { yaxis: { exponentformat: "e", rangemode: "tozero" } })));
}

function seconds() {
  return section("time", "Time and tokens", "Seconds of rank 0. With rollout.async_steps a phase overlaps the next step's generation.", grid(
    ...runs.map((run) => numbers(run, "time/step_s").length ? chartCard({ title: runs.length > 1 ? `Where the seconds go: ${run.name}` : "Where the seconds go", note: "Seconds of each step by phase, stacked.", traces: () => stacked(run), wide: runs.length === 1, height: runs.length === 1 ? 300 : 250, layout: { ...zero, hovermode: "x unified" } }) : null),
    metric("Seconds a step", "The whole step, evaluation and checkpoint not counted.", [{ key: "time/step_s", name: "step" }], zero),
    metric("Tokens of a step", "Completion tokens that were generated, and those that were trained on.", [{ key: "tokens/generated", name: "generated" }, { key: "tokens/trained", name: "trained" }], zero),
    metric("Tokens a second", "Generated over the rollout's seconds (where it overlaps the rest, the step's), trained over the update's.", [{ key: "tokens/generated_per_s", name: "generated" }, { key: "tokens/trained_per_s", name: "trained" }], zero),
    metric("Packing", "Share of the micro-batches' capacity that holds tokens; share of the run's tokens that is padding.", [{ key: "pack/fill", name: "fill" }, { key: "pack/padding", name: "padding" }], share),
    metric("Balance", "Slowest rank over the mean, largest micro-batch over the mean, by the cost model: 1 is even.", [{ key: "pack/imbalance", name: "ranks" }, { key: "pack/largest_over_mean", name: "micro-batches" }])));
}

const LABELS = { exact: "good", unbiased: "good", ratio: "warn", biased: "bad" };
function ledgerTable() {
  const rows = runs.flatMap((run, place) => run.ledger.map((row) => {
    const present = row.label.map((label, at) => at).filter((at) => row.label[at]);
    const labels = [...new Set(present.map((at) => row.label[at]))], mean = (part) => { const known = present.map((at) => part[at]).filter((value) => value !== null); return percent(known.length ? known.reduce((a, b) => a + b, 0) / known.length : null); };
    return make("tr", {}, runs.length > 1 ? make("td", {}, make("span", { class: "dot", "data-colour": place }), " ", run.name) : null, make("td", {}, make("code", {}, row.name)), make("td", {}, ...labels.flatMap((label) => [make("span", { class: `chip ${LABELS[label] || ""}` }, label), " "])),
      make("td", { class: "num" }, mean(row.kept)), make("td", { class: "num" }, mean(row.bias)), make("td", { class: "num" }, present.length ? `${run.steps[present[0]]}–${run.steps[present[present.length - 1]]}` : "–"), make("td", { class: "wrap dim" }, row.notes.join("; ")));
  }));
  if (!rows.length) return null;
  return make("div", { class: "card wide scroll" }, make("h3", {}, "Bias ledger"), make("p", { class: "note" }, "What each selection does to the expected gradient: exact (drops nothing that has a gradient), unbiased (weights undo it), ratio (up to O(1/n)), biased (changes it). Bias: how far off that is, as a share of the gradient, if the gradients of completions are orthogonal."),
    stacking(make("table", {}, make("thead", {}, make("tr", {}, ...(runs.length > 1 ? ["run"] : []).concat(["selection", "label", "kept, mean", "bias, mean", "steps", "notes"]).map((text) => make("th", { scope: "col", class: text.endsWith("mean") || text === "steps" ? "num" : null }, text)))), make("tbody", {}, ...rows))));
}

function pruning() {
  const keptLines = () => { const among = shown(), traces = []; among.forEach(({ run, number: place }) => run.ledger.forEach((row, index) => traces.push({ x: axisValues(run), y: row.kept, name: among.length > 1 ? `${run.name} · ${row.name}` : row.name, mode: "lines", connectgaps: false, line: { color: among.length > 1 ? colour(place) : colour(index), dash: among.length > 1 ? DASHES[index % 4] : "solid", width: 1.8, shape: "hv" }, customdata: row.label, hovertemplate: "%{y:.1%} %{customdata}" }))); return traces; };
  return section("pruning", "Pruning", "What was left out, and what that costs in variance. A design effect of 1.2 is as if the batch were 1.2 times smaller.", grid(
    metric("Rates", "Share of prompts that was skipped before generation, and of completions dropped before the update.", [{ key: "prune/prompt_rate_effective", name: "prompts" }, { key: "prune/completion_rate_effective", name: "completions" }], share),
    metric("Completions", "Generated, and trained on.", [{ key: "prune/completions_generated", name: "generated" }, { key: "prune/completions_trained", name: "trained" }], zero),
    metric("Design effect", "Of both selections: predicted before the draw, and realised by the outcomes of the same step, which scatters about it.", [{ key: "prune/design_effect", name: "predicted" }, { key: "prune/realised_design_effect", name: "realised" }]),
    metric("Skipping prompts", "Design effect over the last twenty steps, and that of skipping at random at the same cost.", [{ key: "prune/prompt_predicted_effect", name: "predicted" }, { key: "prune/prompt_realised_effect", name: "realised" }, { key: "prune/prompt_uniform_effect", name: "at random" }]),
    metric("Largest weight", "Of a trained completion.", [{ key: "prune/weight_max", name: "largest" }], zero),
    metric("At the floor, at one", "Share of completions with the smallest probability, and of those that are kept with certainty.", [{ key: "prune/completion_share_at_floor", name: "floor" }, { key: "prune/completion_share_at_one", name: "one" }, { key: "prune/completion_share_without_gradient", name: "no gradient" }], share),
    metric("Weight total", "Over its expectation: 1 in the mean, where nothing is biased.", [{ key: "prune/weight_total", name: "completions" }, { key: "prune/weight_total_tokens", name: "tokens" }]),
    metric("History", "Share of the prompts that has been visited; epochs since the last visit, in the mean.", [{ key: "prune/history_coverage", name: "coverage" }, { key: "prune/history_staleness_mean_epochs", name: "staleness, epochs" }], zero),
    runs.some((run) => run.ledger.length) ? chartCard({ title: "Ledger over time", note: "Share that each selection has kept.", traces: keptLines, layout: share, wide: true }) : null, ledgerTable()));
}

function explorer() {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.columns)))].sort();
  const choice = make("select", { "aria-label": "Metric" }, ...keys.map((key) => make("option", { value: key, selected: key === "train/grad_norm" }, key)));
  const card = chartCard({ title: "Any metric", note: "Every number of metrics.jsonl.", traces: () => lines([{ key: choice.value, name: choice.value }]), wide: true });
  choice.addEventListener("change", redraw);
  card.firstChild.append(choice);
  return card;
}

function warnings() {
  const rows = runs.flatMap((run, place) => run.findings.map((one) => make("tr", {}, make("td", {}, make("span", { class: `chip ${{ bad: "bad", warning: "warn", note: "" }[one.level]}` }, one.level)), runs.length > 1 ? make("td", {}, make("span", { class: "dot", "data-colour": place }), " ", run.name) : null, make("td", { class: "wrap" }, one.text), make("td", { class: "wrap" }, one.steps))));
  const head = ["level", ...(runs.length > 1 ? ["run"] : []), "what", "steps"];
  return section("warnings", "Warnings", null, make("div", { class: "card scroll" }, rows.length ? make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, ...rows)) : make("p", { class: "empty" }, "Nothing in the record deserves a warning.")), explorer());
}

function settings() {
  const keys = [...new Set([...Object.keys(report.defaults), ...runs.flatMap((run) => Object.keys(run.settings))])];
  const differs = (key) => new Set(runs.map((run) => run.settings[key])).size > 1;
  const changed = (key) => runs.some((run) => run.settings[key] !== undefined && run.settings[key] !== (report.defaults[key] ?? "null"));
  const body = make("tbody", {}), search = make("input", { type: "search", placeholder: "filter settings", class: "grow", "aria-label": "Filter settings" });
  const which = make("select", { "aria-label": "Which settings" }, ...[runs.length > 1 ? ["differs", "that differ between the runs"] : null, ["changed", "that differ from the defaults"], ["all", "all"]].filter(Boolean).map(([value, text]) => make("option", { value }, text)));
  const fill = () => {
    const test = { differs, changed, all: () => true }[which.value], wanted = search.value.toLowerCase();
    const found = keys.filter((key) => test(key) && (key + runs.map((run) => run.settings[key]).join(" ")).toLowerCase().includes(wanted));
    body.replaceChildren(...found.map((key) => make("tr", { class: changed(key) ? "changed" : null }, make("td", {}, make("code", {}, key)), ...runs.map((run) => make("td", { class: `wrap${differs(key) ? " differs" : ""}` }, make("code", {}, run.settings[key] ?? "–"))), make("td", { class: "wrap dim" }, make("code", {}, report.defaults[key] ?? "–")))));
    if (!found.length) body.append(make("tr", {}, make("td", { colspan: runs.length + 2, class: "empty" }, "No such setting.")));
  };
  search.addEventListener("input", fill); which.addEventListener("change", fill); fill();
  return section("settings", "Configuration", null, make("div", { class: "card scroll" }, make("div", { class: "row" }, "Settings ", which, search), make("table", {}, make("thead", {}, make("tr", {}, ...["setting", ...runs.map((run) => run.name), "default"].map((text) => make("th", { scope: "col" }, text)))), body)));
}
