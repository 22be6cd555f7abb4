"""Greedy pass@1 on the evaluation sets, shared by all ranks of a job or alone."""

from __future__ import annotations

import numpy as np

from dppo_megatron.distributed import collect, share
from dppo_megatron.job import Job
from dppo_megatron.rewards.grading import grade_group
from dppo_megatron.rollout.engine import Engine, Request, Sampling


def evaluate(engine: Engine, job: Job) -> dict[str, float]:
    """Share of problems of each set whose greedy answer has reward 1, as `eval/<set>/pass@1`. Collective."""
    greedy = Sampling(
        job.config.rollout.max_completion_tokens,
        temperature=0.0,
        seed=job.config.seed,
        stop_token_ids=job.stop_token_ids,
    )
    scores = {}
    for name, prompts in job.eval_prompts.items():
        mine = share(prompts)
        completions = engine.generate([Request(prompt, completion_index=0, step=0) for prompt in mine], greedy)
        rewards = [
            float(grade_group(job.grade, prompt, [completion])[0])
            for prompt, completion in zip(mine, completions, strict=True)
        ]
        scores[f"eval/{name}/pass@1"] = float(np.mean(np.array(collect(rewards)) == 1.0))
    return scores
