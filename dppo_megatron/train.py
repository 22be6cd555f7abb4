"""The training loop: one step as the data sees it.

    prompts -> select -> generate and grade -> prune -> pack -> update -> sync weights -> (next step)

One process:   dppo-megatron train CONFIG [key=value ...]
Many:          torchrun --nproc-per-node N -m dppo_megatron.train CONFIG [key=value ...]
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing Megatron takes seconds; a mistake in the config should not
    from dppo_megatron.run import Run


def train(run: Run) -> None:
    """Warm start, evaluation, RL steps, and what a run leaves behind."""
    loop = run.loop
    if run.resumes:
        run.resume()
    else:
        run.warm_start()
        run.record(0, {}, loop.evaluate())
    for step in run.remaining_steps():
        with run.step_timer():
            selected = loop.select(step)
            groups = loop.generate(selected, step)
            while more := loop.refill(groups, step):
                groups += loop.generate(more, step)
            minibatches = loop.prune(groups, step)
            loop.look_ahead(run.step_to_look_ahead_to(step))
            for samples in loop.recompute_logprobs(minibatches):
                plan = loop.pack(samples)
                loop.update(samples, plan)
            loop.sync()
        metrics = loop.take_metrics()
        run.say(loop.feedback(step, metrics))
        scores = loop.evaluate() if run.is_evaluation_step(step) else []
        run.record(step, metrics, scores)
        run.save_if_due(step)
    run.finish()


if __name__ == "__main__":
    from dppo_megatron.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
