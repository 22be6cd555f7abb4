"""The training loop: one step as the data sees it.

    prompts -> select -> generate and grade -> prune -> pack -> update -> sync weights -> (next step)

One process:   dppo-megatron train CONFIG [key=value ...]
Many:          torchrun --nproc-per-node N -m dppo_megatron train CONFIG [key=value ...]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dppo_megatron.texts import log

if TYPE_CHECKING:  # importing Megatron takes seconds; reporting a mistake in the config should not
    from dppo_megatron.run import Run


def train(run: Run) -> None:
    """Warm start, evaluation, RL steps, final checkpoint and summary."""
    loop = run.loop
    if run.resumes:
        run.resume()
    else:
        run.sft()
    run.evaluate_if_due()
    for number in run.remaining_steps():
        with loop.step(number) as step:
            loop.begin_ahead(step, run.last_step)
            loop.rollout(step)
            loop.prune(step)
            loop.to_training(step)
            for update in step.updates:
                loop.update(step, update)
            loop.sync(step)
        log(*loop.finish(step))
        run.record(step)
        run.save_if_due(number)
        run.evaluate_if_due()
    run.finish()
