// The plots of metrics, by section and title: the metrics by key with their names, or the pattern of evaluation scores.
const shares = { yaxis: { tickformat: ".2~%", rangemode: "tozero" } };
const fromZero = { yaxis: { rangemode: "tozero" } };
const percents = { yaxis: { ticksuffix: " %" } };
const logarithmic = { yaxis: { type: "log", exponentformat: "power" } };

/** Metrics of the policy, with those of the kept tokens, which a method without probabilities has instead. */
function ofPolicy(metrics) {
  const kept = Object.entries(metrics).map(([key, name]) => [`kept/${key}`, `${name}, kept`]);
  return { ...metrics, ...Object.fromEntries(kept) };
}

/** Mean rewards of the sets that have rewards of their own, and of the named rewards before their weights. */
function rewardParts() {
  const sets = columnNames(runs).filter((key) => /^reward\/.+\/mean$/.test(key));
  const functions = runs
    .flatMap((run) => Object.keys(run.settings))
    .map((key) => /^reward\.functions\.(.+)\.function$/.exec(key)?.[1])
    .filter(Boolean);
  const ofSets = sets.map((key) => [key, key.slice("reward/".length, -"/mean".length)]);
  return Object.fromEntries([...ofSets, ...functions.map((name) => [`reward/${name}`, name])]);
}

const LEARNING = {
  Reward: {
    note: "Mean of the generated groups, weighted by the prompts' inverse inclusion probabilities.",
    metrics: { "reward/mean": "mean", ...rewardParts() },
  },
  // avg@n is pass@1; of the others, each set's largest number of samples
  "Evaluation: pass@1": { note: "Chance that one answer is right, over the set's problems.", pattern: PASS_AT_1 },
  "Evaluation: best of n": { note: "pass@n: chance that one of n answers is right.", pattern: /^pass@(?!1$)\d+$/ },
  "Evaluation: vote of n": { note: "maj@n: chance that the most common of n answers is right.", pattern: /^maj@\d+$/ },
  "Completion length": {
    note: "Mean tokens.",
    metrics: { "rollout/completion_tokens_mean": "mean" },
    layout: fromZero,
  },
  "Truncated and failed": {
    note: "Share of completions that hit the token limit; of gradings that failed.",
    metrics: { "rollout/truncated_share": "truncated", "reward/failed_share": "failed" },
    layout: shares,
  },
  "Gradient norm": { note: "Before clipping.", metrics: { "train/grad_norm": "gradient norm" }, layout: fromZero },
  Entropy: {
    note: "Of the policy, in nats a token: minus the mean log-probability of what was sampled.",
    metrics: { "train/entropy": "entropy" },
    layout: fromZero,
  },
  "Engine against actor": {
    note: "|log-probability difference| of the same token under the same weights.",
    metrics: ofPolicy({ "mismatch/logprob_abs_diff_mean": "mean", "mismatch/logprob_abs_diff_p99": "p99" }),
    layout: logarithmic,
  },
  "Importance sampling ESS": {
    note: "Effective share of the completions, were the engine's mismatch corrected by weights.",
    metrics: {
      ...ofPolicy({ "mismatch/is_ess": "importance weights" }),
      "kept/product_ess": "times the pruning weights",
    },
    layout: { yaxis: { tickformat: ".2%" } },
  },
  Loss: { note: "The weighted objective.", metrics: { "train/loss": "loss" } },
  "Ratio and clipping": {
    note: "Mean probability ratio; share of tokens that were clipped.",
    metrics: ofPolicy({ "train/ratio": "ratio", "train/clip_fraction": "clipped", "train/dual_clip_fraction": "dual" }),
  },
};

const TIME = {
  "Seconds a step": {
    note: "The whole step, evaluation and checkpoint not counted.",
    metrics: { "time/step_s": "step" },
    layout: fromZero,
  },
  "Tokens of a step": {
    note: "Completion tokens that were generated, and those that were trained on.",
    metrics: { "tokens/generated": "generated", "tokens/trained": "trained" },
    layout: fromZero,
  },
  "Tokens a second": {
    note: "Generated over the rollout's seconds (where it overlaps the rest, the step's), trained over the update's.",
    metrics: { "tokens/generated_per_s": "generated", "tokens/trained_per_s": "trained" },
    layout: fromZero,
  },
  Packing: {
    note: "Share of the micro-batches' capacity that holds tokens; share of the run's tokens that is padding.",
    metrics: { "pack/fill": "fill", "pack/padding": "padding" },
    layout: shares,
  },
};

const PRUNING = {
  Rates: {
    note: "Share of prompts that was skipped before generation, and of completions dropped before the update.",
    metrics: { "prune/prompt_rate_effective": "prompts", "prune/completion_rate_effective": "completions" },
    layout: shares,
  },
  "Design effect": {
    note:
      "Of both selections: predicted before the draw, and realised by the outcomes of the same step, " +
      "which scatters about it.",
    metrics: { "prune/design_effect": "predicted", "prune/realised_design_effect": "realised" },
  },
  "Skipping prompts": {
    note: "Design effect over the last twenty steps, and that of skipping at random at the same cost.",
    metrics: {
      "prune/prompt_predicted_effect": "predicted",
      "prune/prompt_realised_effect": "realised",
      "prune/prompt_uniform_effect": "at random",
    },
  },
  "Largest weight": { note: "Of a trained completion.", metrics: { "prune/weight_max": "largest" }, layout: fromZero },
  "Weight total": {
    note: "Over its expectation: 1 in the mean, where nothing is biased.",
    metrics: { "prune/weight_total": "completions", "prune/weight_total_tokens": "tokens" },
  },
};
