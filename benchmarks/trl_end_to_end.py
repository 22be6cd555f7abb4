"""TRL's own GRPOTrainer on the job of a finished comparison: seconds to 90 and 95 % of its gain.

    dppo-megatron compare configs/quickstart.yaml --methods grpo,dppo --seeds 3 --out compare
    python benchmarks/against_trl.py --end-to-end compare [--trl-python PATH] [--json FILE] [--pruned-steps-factor 1.5]

The figures in docs/ are of `compare` with rollout.prompts_per_step=64 actor.optimizer.learning_rate=1e-3 steps=40.

For every seed, TRL gets the checkpoint, training problems, held-out problems, reward function and hyper-parameters of
the comparison's GRPO, which are read from its run. Everything else is TRL's: generation by transformers, buffering,
padding, loss, optimizer. The arm `trl_pruned` is the same with `dppo_megatron.adapters.trl`, with the comparison's own
pruning settings and, as there, perhaps more steps; `trl_compact` has only the adapter's generation, which shows that
part of the gain. TRL gets the fastest of several per-device batch sizes, tried for three steps each. Evaluation
samples as ours does, and its time is not counted. TRL's run is then the baseline, and the others are judged against it
by the rules of `compare` (`dppo_megatron/workbench/compare/verdict.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
TRIAL_STEPS = 3
SAME_ON_BOTH_SIDES = {
    "objective.loss": "clip",
    "objective.advantage": "group_std",
    "objective.normalization": "sequence_mean",
    "objective.kl.coef": 0.0,
    "objective.entropy_coef": 0.0,
    "objective.dual_clip": 0.0,
    "objective.updates_per_step": 1,
    "objective.overlong.filter": False,
    "objective.overlong.buffer_tokens": 0,
    "rollout.sampling.top_p": 1.0,
    "rollout.sampling.top_k": 0,
    "actor.optimizer.adam_eps": 1e-8,
    "reward.function": "final_answer",
    "data.prompt_template": "{problem}",
    "data.system_prompt": None,
    "model.dtype": "float32",
}
"""Settings that TRL's side always has, by its own defaults or by `_trl_settings`: the comparison must have them too."""


def run_worker(job_path: Path) -> None:
    """In TRL's process: train by the settings in `job_path`, and write the curve beside it."""
    import torch
    import transformers
    import trl  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]

    sys.path.insert(0, str(REPOSITORY))
    from dppo_megatron.rewards.functions import final_answer

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [final_answer(text, reference) for text, reference in zip(completions, answer, strict=True)]

    job = json.loads(job_path.read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"], padding_side="left", trust_remote_code=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, trust_remote_code=False
    )
    train, heldout = (_rows(job[name]) for name in ("train", "heldout"))
    watch = Watch(job, lambda: reward(_answers(model, tokenizer, heldout, job), [row["answer"] for row in heldout]))
    kind: Any = trl.GRPOTrainer
    own: dict[str, Any] = {}
    if job["is_compact"]:
        from dppo_megatron.adapters.trl import CompactGeneration

        kind = type("TRLCompact", (CompactGeneration, kind), {})
    if job["pruning"]:
        from dppo_megatron.adapters.settings import pruning_from
        from dppo_megatron.adapters.trl import PrunedGRPOTrainer

        kind, own = PrunedGRPOTrainer, {"pruning": pruning_from(job["pruning"], "pruning")}
    trainer = kind(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**_trl_settings(job, job_path.parent / "trl")),
        train_dataset=Dataset.from_list([{"prompt": row["problem"], "answer": row["answer"]} for row in train]),
        processing_class=tokenizer,
        callbacks=[_as_callback(watch)],
        **own,
    )
    trainer.train()
    results = {"points": watch.points, "solved": watch.solved, "step_cpu_s": watch.step_cpu_s}
    results["versions"] = {"trl": trl.__version__, "transformers": transformers.__version__}
    (job_path.parent / "found.json").write_text(json.dumps(results), encoding="utf-8")


class Watch:
    """Measures TRL's steps, and evaluates between them without counting that time.

    Args:
        evaluate: returns 1.0 or 0.0 for each held-out problem, with the current weights.
    """

    def __init__(self, job: dict[str, Any], evaluate: Callable[[], list[float]]) -> None:
        self._job, self._evaluate = job, evaluate
        self._spent = [0.0, 0.0]
        self.points: list[dict[str, Any]] = []
        self.solved: list[list[float]] = []
        self.step_cpu_s: list[float] = []

    def begin_step(self) -> None:
        """Start counting time."""
        self._clocks = time.perf_counter(), time.process_time()

    def end_step(self, step: int) -> None:
        """Stop counting time, and evaluate if it is due."""
        took = time.perf_counter() - self._clocks[0], time.process_time() - self._clocks[1]
        self._spent = [before + now for before, now in zip(self._spent, took, strict=True)]
        self.step_cpu_s.append(took[1])
        if step % self._job["every"] == 0 or step == self._job["steps"]:
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Add a point to the curve; not in a trial, which only measures seconds."""
        if self._job["trial"]:
            return
        self.solved.append(self._evaluate())
        accuracy = sum(self.solved[-1]) / len(self.solved[-1])
        seconds, cpu_s = self._spent
        self.points.append({"step": step, "accuracy": accuracy, "train_s": seconds, "train_cpu_s": cpu_s}
                           | {"tokens_generated": 0, "tokens_trained": 0})  # fmt: skip
        print(f"TRL step {step}: {100 * accuracy:.1f} %, {cpu_s:.1f} CPU s", file=sys.stderr, flush=True)


def _as_callback(watch: Watch) -> Any:
    """`watch` as a callback of transformers' Trainer."""
    import transformers

    class Calls(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.evaluate(0)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.begin_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.end_step(state.global_step)

    return Calls()


def _answers(model: Any, tokenizer: Any, heldout: list[dict[str, Any]], job: dict[str, Any]) -> list[str]:
    """Texts that the model samples for the held-out problems, in the way of this project's evaluation."""
    import torch

    torch.manual_seed(job["seed"])
    model.eval()
    prompts = tokenizer([row["problem"] for row in heldout], return_tensors="pt", padding=True)
    sampling: dict[str, Any] = {"do_sample": False}
    if job["eval_temperature"]:
        sampling = {"do_sample": True, "temperature": job["eval_temperature"], "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        tokens = model.generate(**prompts, max_new_tokens=job["max_completion_tokens"], **sampling)
    model.train()
    texts: list[str] = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def _trl_settings(job: dict[str, Any], output_dir: Path) -> dict[str, Any]:
    """The job's hyper-parameters under TRL's names."""
    names = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "temperature", "seed")
    return {name: job[name] for name in names} | {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": job["batch_size"],
        "gradient_accumulation_steps": job["prompts_per_step"] * job["completions_per_prompt"] // job["batch_size"],
        "num_generations": job["completions_per_prompt"],
        "max_completion_length": job["max_completion_tokens"],
        "loss_type": "grpo",
        "scale_rewards": "group",
        "epsilon": job["clip_low"],
        "epsilon_high": job["clip_high"],
        "beta": 0.0,
        **_schedule(job),
        "warmup_steps": job["lr_warmup_steps"],
        "max_steps": TRIAL_STEPS if job["trial"] else job["steps"],
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_strategy": "no",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def _schedule(job: dict[str, Any]) -> dict[str, Any]:
    """This project's constant and linear schedules under transformers' names, whose own "linear" ends at 0."""
    if job["lr_schedule"] == "constant":
        return {"lr_scheduler_type": "constant_with_warmup"}
    if job["lr_schedule"] == "linear":
        ends = {"lr_end": job["min_learning_rate"], "power": 1.0}
        return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": ends}
    raise SystemExit(f"actor.optimizer.lr_schedule={job['lr_schedule']}: only constant and linear are known here")


def end_to_end(args: argparse.Namespace) -> int:
    """Run TRL on every seed of the comparison, judge our runs against it, print the table."""
    from dppo_megatron.workbench.compare.arms import LAST, Arm, MethodRun, Point
    from dppo_megatron.workbench.compare.table import about, table
    from dppo_megatron.workbench.compare.verdict import judge

    out: Path = args.end_to_end
    known = json.loads((out / "results.json").read_text(encoding="utf-8"))
    runs = [MethodRun(**run | {"curve": [Point(**point) for point in run["curve"]]}) for run in known["runs"]]
    baseline = known["verdict"]["baseline"]
    batch_size, tried, versions = 0, {}, {}
    for seed in sorted({run.seed for run in runs}):
        job, pruning = _job(out / f"seed{seed}" / baseline, args.threads)
        if not batch_size:
            tried = {size: _trial(args, out, job, size) for size in args.trl_batch_sizes}
            batch_size = min(tried, key=lambda size: tried[size])
        for arm in ("trl", "trl_compact", "trl_pruned"):
            arm_job = job | {"batch_size": batch_size, "is_compact": arm == "trl_compact"}
            if arm == "trl_pruned":
                arm_job |= {"pruning": pruning, "steps": round(job["steps"] * args.pruned_steps_factor)}
            results = _work(args.trl_python, out / f"seed{seed}" / arm, arm_job)
            versions = results["versions"]
            last = [sum(shares) / LAST for shares in zip(*results["solved"][-LAST:], strict=True)]
            curve = [Point(**point) for point in results["points"]]
            runs.append(MethodRun(arm, seed, curve, {}, {"heldout": list(last)}, {"step": curve[-1].train_s}))
    names = list(dict.fromkeys(run.arm for run in runs if run.arm != "trl"))
    arms = [Arm(name, "ours", 0, ()) for name in names]  # no arm has the method grpo, so the first is the baseline
    verdict = judge(runs, [Arm("trl", "trl", 0, ()), *arms])
    print(table(verdict))
    print(f"TRL {versions['trl']}, per-device batch size {batch_size}: " + _seconds(tried))
    if args.json:
        values = about() | {"benchmark": "against_trl --end-to-end", "trl_versions": versions, "tried_cpu_s": tried}
        values |= {"verdict": asdict(verdict), "runs": [asdict(run) for run in runs]}
        args.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return 0


def _job(run_dir: Path, threads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What TRL needs from the run's settings, and the run's pruning settings with the method dppo."""
    from dppo_megatron.config import load_config

    config = load_config(str(run_dir / "config.yaml"), [], writes_run=False)
    for name, known in SAME_ON_BOTH_SIDES.items():
        if (value := attrgetter(name)(config)) != known:
            raise SystemExit(f"{run_dir}: {name}={value}, which TRL's side does not do here; it would be another job")
    optimizer, rollout = config.actor.optimizer, config.rollout
    rates = ("learning_rate", "min_learning_rate", "lr_schedule", "lr_warmup_steps")
    names = (*rates, "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm")
    job = {name: getattr(optimizer, name) for name in names} | {
        "model": config.model.hf_path,
        "train": config.data.train_path,
        "heldout": config.data.eval_paths["heldout"],
        "prompts_per_step": rollout.prompts_per_step,
        "completions_per_prompt": rollout.completions_per_prompt,
        "max_completion_tokens": rollout.sampling.max_completion_tokens,
        "temperature": rollout.sampling.temperature,
        "clip_low": config.objective.clip_low,
        "clip_high": config.objective.clip_high,
        "steps": config.steps,
        "every": config.eval.every_steps,
        "eval_temperature": config.eval.temperature,
        "seed": config.seed,
        "threads": config.threads_per_rank or threads,
        "trial": False,
        "pruning": None,
        "is_compact": False,
    }
    pruning = {level: asdict(getattr(config.pruning, level)) | {"method": "dppo"} for level in ("prompt", "completion")}
    return job, pruning


def _trial(args: argparse.Namespace, out: Path, job: dict[str, Any], size: int) -> float:
    """CPU seconds of the fastest step, without the first."""
    results = _work(args.trl_python, out / "trl_trial", job | {"batch_size": size, "trial": True})
    return float(min(results["step_cpu_s"][1:]))


def _work(python: str, directory: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run TRL's process, unless it has done this job already; returns its results."""
    directory.mkdir(parents=True, exist_ok=True)
    job_path, results_path = directory / "job.json", directory / "found.json"
    wanted = json.dumps(job)
    if not (results_path.exists() and job_path.exists() and job_path.read_text(encoding="utf-8") == wanted):
        results_path.unlink(missing_ok=True)
        job_path.write_text(wanted, encoding="utf-8")
        environment = os.environ | {"OMP_NUM_THREADS": str(job["threads"])}
        command = [python, str(Path(__file__).with_name("against_trl.py")), "--end-to-end-worker", str(job_path)]
        subprocess.run(command, check=True, env=environment)
    results: dict[str, Any] = json.loads(results_path.read_text(encoding="utf-8"))
    return results


def _rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _seconds(tried: dict[int, float]) -> str:
    return ", ".join(f"{size}: {seconds:.1f} CPU s a step" for size, seconds in tried.items())
