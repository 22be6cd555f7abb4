"""The pruning package alone, in another trainer: no Megatron, no engine, no torch, only arrays.

    pip install -e .
    python examples/pruning_library.py

A made-up problem set stands in for rollouts. Three calls a step: `select` before rollout, `observe` and `prune` after
the rewards. The trainer multiplies each kept completion's loss by its weight and divides by the planned batch's counts.
`help(dppo_megatron.pruning)` describes what else such a trainer has to know.
"""

import numpy as np

from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig
from dppo_megatron.pruning import CompletionBatch, make_completion_policy, make_prompt_policy
from dppo_megatron.pruning.scores import completion_score

NUM_PROMPTS, PROMPTS_PER_STEP, GROUP, STEPS = 256, 32, 8, 64
rng = np.random.default_rng(0)
pass_rate = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], NUM_PROMPTS)

prompts = make_prompt_policy(
    PromptPruningConfig(rate=0.3),
    num_prompts=NUM_PROMPTS,
    completions_per_prompt=GROUP,
    prompts_per_step=PROMPTS_PER_STEP,
    total_steps=STEPS,
    seed=0,
)
completions = make_completion_policy(CompletionPruningConfig(rate=0.7), seed=0, total_steps=STEPS)

for step in range(STEPS):
    nominal = rng.permutation(NUM_PROMPTS)[:PROMPTS_PER_STEP]
    chosen = prompts.select(nominal, step=step)
    index = nominal[chosen.kept]

    # your rollout and grader
    rewards = (rng.random((len(index), GROUP)) < pass_rate[index, None]).astype(float)
    lengths = rng.integers(50, 500, rewards.shape)
    logit_grad_norm = 0.3 * np.sqrt(lengths)  # sqrt(sum (1 - p_t)^2), from your engine's log-probabilities

    centred = rewards - rewards.mean(axis=1, keepdims=True)
    advantages = centred / (rewards.std(axis=1, keepdims=True) + 1e-6)
    nominal_count = PROMPTS_PER_STEP * GROUP  # not the survivors' count
    batch = CompletionBatch.of_groups(
        index,
        rewards=rewards,
        advantages=advantages,
        lengths=lengths,
        logit_grad_norm=logit_grad_norm,
        denominator=nominal_count * lengths,
        prompt_weight=chosen.weight[chosen.kept],
        num_nominal=nominal_count,
    )
    # the draw's probabilities let it check whether skipping by this score is better than at random
    score = completion_score(batch.advantages, batch.logit_grad_norm, batch.denominator, np.ones(1))
    prompts.observe(
        index,
        rewards,
        lengths,
        step=step,
        second_moment=np.square(score).reshape(rewards.shape).sum(axis=1),
        inclusion_prob=chosen.inclusion_prob[chosen.kept],
        planned_prob=chosen.planned[chosen.kept],
    )
    kept = completions.prune(batch, step=step)
    if not kept.kept.any():
        continue  # the gradient is 0: no update
    weight = batch.prompt_weight * kept.weight  # multiply each sequence's whole loss by this

    if step % 16 == 15:
        print(f"step {step}: {len(index)} prompts, {int(kept.kept.sum())} completions, max weight {weight.max():.1f}")
        print(
            "  "
            + ", ".join(f"{row.name}: {row.label} ({row.kept_fraction:.0%})" for row in chosen.ledger + kept.ledger)
        )
