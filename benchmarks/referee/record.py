"""One GRPO run of the quickstart, and at some of its steps everything that could have been sampled.

    PYTHONPATH=benchmarks python -m referee.record --out runs/referee

The real trainer trains. At each recorded step, all training prompts are rolled out by its engine with its current
weights, twice a group's completions; at some of them each completion's gradient is taken too. A group of a step is then
any G of a prompt's completions, so a method can be replayed on thousands of batches of one policy, and the mean over
all possible batches is known exactly. The price is a finite world: 512 prompts, 16 completions each.

Gradients are of sum_t log pi(o_t) / len, which the advantage multiplies: at the first update of a step the ratio is 1
and nothing is clipped. They are a plain torch model's, compared with the Megatron actor's before anything is recorded,
and kept as sketches (random signs and sums: unbiased for inner products, within 3 % at 1,024 numbers).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, jacrev, vmap
from transformers import Qwen3ForCausalLM

from dppo_megatron.actor.layout import start_process_group, stop_process_group
from dppo_megatron.config import load_config
from dppo_megatron.job import prepare_job
from dppo_megatron.pruning import logit_grad_norm
from dppo_megatron.randomness import generator
from dppo_megatron.steps.loop import Loop
from dppo_megatron.steps.step import Step
from dppo_megatron.types import Completion, RolloutPrompt, TrainSample
from dppo_megatron.workbench.quickstart.make import Recipe, write_task
from dppo_megatron.workbench.quickstart.tiny_model import ANSWER_MARK, VOCABULARY, write_tiny_qwen3

REPOSITORY = Path(__file__).parents[2]
PROMPTS = 64
"""Prompts of a step."""
SKETCH = 1024
KINDS = ("unit", "first_half", "entropy")
"""Gradients of all tokens, of the first half, and of the fifth with the largest entropy; all over the full length."""
RECORDED, MEASURED = (0, 8, 16, 24, 32, 40), (8, 24, 40)
"""Steps after which outcomes are recorded, an epoch apart; those after which methods are judged by gradients."""
DESIGNS = 384
"""Number of completions for which each token's gradient is taken."""
PREFIX = 0.25
"""NAT's shortest prefix, as a share of the completion."""


class Gradients:
    """Per-completion gradients of the actor's current weights."""

    def __init__(self, model_dir: Path) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(
            model_dir, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False
        )
        size = sum(p.numel() for p in self.model.parameters())
        self._sign = torch.from_numpy(generator(0, "sketch").integers(0, 2, size) * 2 - 1).float()
        self._pad = -size % SKETCH

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.model.load_state_dict({name: tensor.detach().clone() for name, tensor in weights})

    def sketch(self, rows: Tensor) -> Tensor:
        """[n, parameters] -> [n, SKETCH]: random signs, then sums of every SKETCH-th."""
        return F.pad(rows * self._sign, (0, self._pad)).view(len(rows), -1, SKETCH).sum(1)

    def rows(self, pairs: Sequence[tuple[Sequence[int], Completion]], masks: Tensor) -> Tensor:
        """Gradients [n, m, parameters] of sum_t mask log pi / len, for masks [n, m, tokens] of completion tokens."""
        tokens, place = _padded(pairs)
        names = [name for name, _ in self.model.named_parameters()]

        def values(parameters: dict[str, Tensor], ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
            logits = functional_call(self.model, parameters, (ids[None],), {"use_cache": False}).logits[0]
            chosen = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            value: Tensor = (mask * chosen[at]).sum(-1)
            return value

        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        by_name = vmap(jacrev(values), (None, 0, 0, 0))(parameters, tokens, place, masks)
        return torch.cat([by_name[name].flatten(2) for name in names], -1)

    @torch.no_grad()
    def entropies(self, pairs: Sequence[tuple[Sequence[int], Completion]]) -> Tensor:
        """[n, tokens] entropy of the distribution that each completion token was drawn from."""
        tokens, place = _padded(pairs)
        logp = self.model(tokens, use_cache=False).logits.log_softmax(-1)
        per_token: Tensor = -(logp.exp() * logp).sum(-1)
        return per_token.gather(1, place)


def _padded(pairs: Sequence[tuple[Sequence[int], Completion]]) -> tuple[Tensor, Tensor]:
    """Token ids [n, L] padded on the right, and the position [n, tokens] of the logits of each completion token."""
    longest = max(len(prompt) + len(c.token_ids) for prompt, c in pairs)
    most = max(len(c.token_ids) for _, c in pairs)
    tokens, place = torch.zeros(len(pairs), longest, dtype=torch.long), torch.zeros(len(pairs), most, dtype=torch.long)
    for row, (prompt, completion) in enumerate(pairs):
        whole = [*prompt, *completion.token_ids.tolist()]
        tokens[row, : len(whole)] = torch.tensor(whole)
        place[row] = (torch.arange(most) + len(prompt) - 1).clamp(max=longest - 2)
    return tokens, place


def sequence_masks(lengths: Sequence[int], entropies: Tensor) -> Tensor:
    """[n, len(KINDS), tokens], already divided by the full length."""
    masks = torch.zeros(len(lengths), len(KINDS), entropies.shape[1])
    for row, length in enumerate(lengths):
        masks[row, 0, :length] = 1.0 / length
        masks[row, 1, : -(-length // 2)] = 1.0 / length
        most = entropies[row, :length].topk(max(round(0.2 * length), 1)).indices
        masks[row, 2, most] = 1.0 / length
    return masks


def token_designs(gradients: Gradients, pairs: Sequence[tuple[Sequence[int], Completion]]) -> dict[str, np.ndarray]:
    """What cutting tokens adds to each completion's squared gradient |a|^2, exactly: a_t are its tokens' gradients.

    NAT's uniform sampling at p = 1/2 adds (1/p - 1) sum_t |a_t|^2. Its random prefix adds the variance of
    sum_{t <= L} a_t / P(L >= t) over all cuts L.
    """
    from referee.methods import nat_prefix

    found: dict[str, list[float]] = {"squared": [], "uniform": [], "prefix": [], "prefix_tokens": []}
    for pair in pairs:
        length = len(pair[1].token_ids)
        each = gradients.rows([pair], torch.eye(length)[None] / length)[0]
        whole = each.sum(0)
        cut_prob, inclusion = nat_prefix(length, max(int(PREFIX * length), 1))
        partial = torch.cumsum(each / torch.from_numpy(inclusion).float()[:, None], 0)
        second = torch.from_numpy(cut_prob).float() @ partial.square().sum(1)
        found["squared"].append(float(whole.square().sum()))
        found["uniform"].append(float(each.square().sum()))
        found["prefix"].append(float(second - whole.square().sum()))
        found["prefix_tokens"].append(float(inclusion.mean()))
    return {f"design_{name}": np.array(values) for name, values in found.items()}


def make_loop(work: Path, sft_steps: int, overrides: Sequence[str], seed: int = 0) -> Loop:
    """The quickstart's job without pruning, on the task of this seed, after SFT."""
    write_task(work, Recipe(seed))
    write_tiny_qwen3(work / "model", seed=seed)
    settings = {
        "run_dir": work / "run",
        "model.hf_path": work / "model",
        "data.train_path": work / "train.jsonl",
        "data.eval_paths.heldout": work / "heldout.jsonl",
        "sft.examples_path": work / "sft.jsonl",
        "sft.steps": sft_steps,
        "actor.optimizer.distributed": "false",
        "steps": 40,
        "rollout.prompts_per_step": PROMPTS,
        "rollout.completions_per_prompt": 8,
        "actor.optimizer.learning_rate": 1e-3,
    }
    given = [*(f"{k}={v}" for k, v in settings.items()), *overrides]
    loop = Loop(prepare_job(load_config(str(REPOSITORY / "configs/quickstart_grpo.yaml"), given), 1))
    loop.sft()
    loop.start_rl()
    loop.load_engine()
    return loop


def train_step(loop: Loop, number: int) -> float:
    """One step of the trainer; returns the mean reward."""
    with loop.step(number) as step:
        loop.rollout(step)
        loop.prune(step)
        loop.to_training(step)
        for update in step.updates:
            loop.update(step, update)
        loop.sync(step)
    loop.finish(step)
    return float(step.record.metrics["reward/mean"])


def sample(loop: Loop, after: int, rounds: int) -> tuple[list[list[Completion]], np.ndarray]:
    """Completions [prompts][rounds x G] and rewards of every training prompt under the current weights."""
    prompts = loop.job.train_prompts
    completions: list[list[Completion]] = [[] for _ in prompts]
    rewards: list[list[float]] = [[] for _ in prompts]
    per_step = loop.job.config.rollout.prompts_per_step
    for turn in range(rounds):
        for start in range(0, len(prompts), per_step):
            chosen = [RolloutPrompt(one, 1.0, 1.0) for one in prompts[start : start + per_step]]
            # a step number of its own for each: the random numbers of the completions depend on it
            step = Step(100_000 + 1_000 * after + 100 * turn + start // per_step, chosen, reached="selected")
            loop.generate(step, chosen, 0)
            for place, group in step.groups.items():
                completions[start + place] += group.completions
                rewards[start + place] += group.rewards.tolist()
    return completions, np.array(rewards)


def outcomes(completions: list[list[Completion]], rewards: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays that a method may remember of a visit, [prompts, completions] each."""
    mark = VOCABULARY.index(ANSWER_MARK)

    def of(figure: Callable[[Completion], float]) -> np.ndarray:
        return np.array([[figure(one) for one in row] for row in completions])

    def marked(one: Completion) -> float:
        found = np.flatnonzero(np.asarray(one.token_ids) == mark)
        return float(found[0]) if len(found) else -1.0

    return {
        "rewards": rewards,
        "lengths": of(lambda one: len(one.token_ids)).astype(np.int64),
        "logit_grad_norm": of(lambda one: logit_grad_norm(one.logprobs)),
        "logprob": of(lambda one: float(np.sum(one.logprobs))),
        "marker": of(marked).astype(np.int64),
    }


def all_gradients(
    loop: Loop, gradients: Gradients, completions: list[list[Completion]], rewards: np.ndarray, chunk: int = 32
) -> dict[str, np.ndarray]:
    """Sketches [prompts, completions, SKETCH] of every kind, and the exact designs of some completions."""
    prompts, per_prompt = loop.job.train_prompts, len(completions[0])
    flat = [(prompts[q].token_ids, one) for q, row in enumerate(completions) for one in row]
    # a prompt whose completions all have the same reward never has an advantage
    mixed = np.flatnonzero((rewards.min(1) < rewards.max(1)).repeat(per_prompt)).tolist()
    order = sorted(mixed, key=lambda i: len(flat[i][0]) + len(flat[i][1].token_ids))
    out = {kind: np.zeros((len(flat), SKETCH), dtype=np.float32) for kind in KINDS}
    for start in range(0, len(order), chunk):
        rows = order[start : start + chunk]
        pairs = [flat[i] for i in rows]
        masks = sequence_masks([len(c.token_ids) for _, c in pairs], gradients.entropies(pairs))
        sketched = gradients.sketch(gradients.rows(pairs, masks).flatten(0, 1)).view(len(rows), len(KINDS), SKETCH)
        for index, kind in enumerate(KINDS):
            out[kind][rows] = sketched[:, index].numpy()
    some = generator(0, "designs").choice(mixed, min(DESIGNS, len(mixed)), replace=False)
    found = token_designs(gradients, [flat[i] for i in some]) | {"design_index": some}
    return {kind: rows.reshape(len(prompts), per_prompt, SKETCH) for kind, rows in out.items()} | found


def check_against_actor(loop: Loop, gradients: Gradients, completions: list[list[Completion]]) -> float:
    """Largest |plain - actor's gradient| over the actor's norm, over one completion of each of the first prompts."""
    worst = 0.0
    names = [name for name, _ in gradients.model.named_parameters()]
    for prompt, row in list(zip(loop.job.train_prompts, completions, strict=True))[:8]:
        one = row[0]
        ids = np.concatenate([np.array(prompt.token_ids, np.int64), one.token_ids])
        sample = TrainSample(
            id="check",
            token_ids=ids,
            num_prompt_tokens=len(prompt.token_ids),
            behaviour_logprobs=one.logprobs,
            advantage=1.0,
            weight=1.0,
            denominator=float(len(one.token_ids)),
        )
        loop.actor.accumulate([sample], loop.pack([sample]), loop.objective)
        by_name = {name: gradient.flatten().clone() for name, gradient in loop.actor.gradients()}
        actor = -torch.cat([by_name[name] for name in names])
        mask = torch.full((1, 1, len(one.token_ids)), 1.0 / len(one.token_ids))
        plain = gradients.rows([(prompt.token_ids, one)], mask)[0, 0]
        worst = max(worst, float((plain - actor).norm() / actor.norm()))
    return worst


def record(out: Path, *, sft_steps: int, steps: Sequence[int], overrides: Sequence[str], rounds: int = 2) -> None:
    """Train, and write `step_<n>.npz` of each recorded step that is still missing; every call repeats the same run."""
    out.mkdir(parents=True, exist_ok=True)
    loop = make_loop(out / "job", sft_steps, overrides)
    gradients = Gradients(out / "job" / "model")
    for number in range(max(steps) + 1):
        if number:
            print(f"step {number}: mean reward {train_step(loop, number):.3f}", flush=True)
        if number in steps and not (out / f"step_{number:03d}.npz").exists():
            completions, rewards = sample(loop, number, rounds)
            found: dict[str, Any] = outcomes(completions, rewards)
            gradients.load(loop.actor.weights())
            difference = check_against_actor(loop, gradients, completions)
            assert difference < 1e-3, f"the plain gradients differ from the actor's by {difference:.2g}"
            if number in MEASURED:
                found |= all_gradients(loop, gradients, completions, rewards)
            np.savez(out / f"step_{number:03d}.npz", **found)
            print(f"recorded step {number}: gradients within {difference:.1e} of the actor's", flush=True)
    loop.close()


def main() -> None:
    """Record into --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "referee")
    parser.add_argument("overrides", nargs="*", help="settings of the job, key=value")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start_process_group()
    record(arguments.out, sft_steps=700, steps=RECORDED, overrides=arguments.overrides)
    stop_process_group()


if __name__ == "__main__":
    main()
