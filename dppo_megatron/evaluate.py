"""Greedy pass@1 on the evaluation sets, shared by all ranks of a job or alone."""

from __future__ import annotations

import math

import numpy as np

from dppo_megatron.distributed import collect, share
from dppo_megatron.job import Job
from dppo_megatron.rewards.grading import deciding_reward, task_of
from dppo_megatron.rollout.engine import Engine, Request, Sampling


def evaluate(engine: Engine, job: Job) -> dict[str, float]:
    """Share of the graded greedy answers of each set that are correct, as `eval/<set>/pass@1`. Collective."""
    greedy = Sampling(job.config.rollout.max_completion_tokens, temperature=0.0, seed=job.config.seed)
    scores = {}
    for name, prompts in job.eval_prompts.items():
        mine = share(prompts)
        completions = engine.generate([Request(prompt, completion_index=0, step=0) for prompt in mine], greedy)
        tasks = [
            task_of(prompt, completion.text, f"{name} problem {prompt.index}")
            for prompt, completion in zip(mine, completions, strict=True)
        ]
        rewards = np.array(collect([deciding_reward(grade) for grade in job.grade.grade(tasks)]))
        graded = rewards[~np.isnan(rewards)]
        correct = graded >= job.config.reward.correct_from
        scores[f"eval/{name}/pass@1"] = float(correct.mean()) if len(graded) else math.nan
    return scores
