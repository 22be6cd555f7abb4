"""Bias and variance of every selection's gradient, on what `record` has written.

    PYTHONPATH=benchmarks python -m referee.measure [--rows NAME ...] [--replays 300] [--json FILE]

Each row of `replay.ROWS` is replayed many times. Methods with a memory have seen the epochs before, replayed from what
was recorded then. E g of the full batch is known exactly: the mean over all possible groups.

    bias   |E g_method - E g| / |E g|, by a U-statistic over replays that has no bias of its own; its standard error by
           the jackknife; 0.000 where the estimate of the square is negative
    scale  projection of E g_method on E g: what another step size would undo
    cos    between the two: what no step size undoes
    VR     tr Cov(g_method) / tr Cov(g), both over prompts, rollouts and draws, at equal length (divided by scale^2)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dppo_megatron.types import FloatArray
from referee.record import MEASURED, PROMPTS, RECORDED, REPOSITORY
from referee.replay import GROUP, ROWS, Outcome, World, everything, weighted


def judge(replays: list[list[Outcome]], exact: FloatArray) -> dict[str, float]:
    """Figures of one method; each replay is a block that is independent of the others."""
    replays = [block for block in replays if block]
    shift = np.stack([np.mean([o.gradient - o.full for o in block], axis=0) for block in replays])
    squared = np.array([np.mean([o.gradient @ o.gradient for o in block]) for block in replays])
    # the full batch's own variance; a method without a full batch on the same rollouts takes it from elsewhere
    base = np.array([np.mean([(o.full - exact) @ (o.full - exact) for o in block]) for block in replays])
    whole = _figures(shift.sum(0), (shift * shift).sum(), squared.sum(), base.sum(), len(replays), exact)
    left = [
        _figures(
            shift.sum(0) - s, (shift * shift).sum() - s @ s, squared.sum() - q, base.sum() - b, len(replays) - 1, exact
        )
        for s, q, b in zip(shift, squared, base, strict=True)
    ]
    count = len(replays)
    figures = dict(zip(FIGURES, whole, strict=True))
    for place, name in enumerate(FIGURES):
        values = np.array([one[place] for one in left])
        figures[f"{name}_error"] = float(np.sqrt((count - 1) / count * np.sum((values - values.mean()) ** 2)))
    bias2, error2 = figures.pop("bias2"), figures.pop("bias2_error")
    figures["bias"] = float(np.sqrt(max(bias2, 0.0)))
    figures["bias_error"] = error2 / (2 * figures["bias"]) if bias2 > error2 else float(np.sqrt(error2))
    flat = [o for block in replays for o in block]
    figures["generated"] = float(np.mean([o.generated for o in flat]))
    figures["trained"] = float(np.mean([o.trained for o in flat]))
    return figures


FIGURES = ("bias2", "scale", "cos", "variance", "variance_full")


def _figures(
    total: FloatArray, squares: float, squared: float, base: float, count: int, exact: FloatArray
) -> tuple[float, ...]:
    """From sums over blocks: |E shift|^2 / |E g|^2, scale, cosine, tr Cov(g_method), tr Cov(g)."""
    norm2 = float(exact @ exact)
    bias2 = (float(total @ total) - squares) / (count * (count - 1))
    along = float(total @ exact) / count
    scale = 1.0 + along / norm2
    mean2 = norm2 + 2 * along + bias2
    cosine = scale * np.sqrt(norm2 / mean2) if mean2 > 0 else float("nan")
    return bias2 / norm2, scale, min(float(cosine), 1.0), squared / count - mean2, base / count


def token_rows(world: World, variance: float) -> dict[str, dict[str, float]]:
    """NAT: no bias, and its added variance exactly, from every token's gradient of some completions.

    The draws of different completions are independent, so a batch's design variance is the sum of theirs, each times
    its advantage squared; it is scaled up by the share of all squared gradients that those completions have.
    """
    power = world.mean_power(2)
    at = np.unravel_index(world.designs["design_index"].astype(np.int64), world.rewards.shape)
    d = {name.removeprefix("design_"): power[at] * values for name, values in world.designs.items()}
    moment = float((power * np.square(world.gradients["unit"], dtype=np.float64).sum(-1)).mean()) / (PROMPTS * GROUP)
    shares = {"tokens, nat uniform 50 %": ("uniform", 0.5)}
    shares["tokens, nat prefix"] = "prefix", float(world.designs["design_prefix_tokens"].mean())
    found = {}
    for name, (added, share) in shares.items():
        growth = float(d[added].sum() / d["squared"].sum())
        error = float(np.std(d[added] - growth * d["squared"]) / d["squared"].mean() / np.sqrt(len(at[0])))
        found[name] = dict.fromkeys(("bias", "bias_error"), 0.0) | dict.fromkeys(("scale", "cos", "generated"), 1.0)
        found[name] |= {"trained": share, "variance_ratio": 1 + growth * moment / variance}
        found[name] |= {"variance_ratio_error": error * moment / variance}
    return found


def read_worlds(directory: Path, after: int) -> tuple[World, list[World]]:
    """The policy after so many steps, and the policies of up to three earlier epochs."""
    earlier = [step for step in RECORDED if step < after][-3:]
    history = [World.read(directory / f"step_{step:03d}.npz", gradients=False) for step in earlier]
    return World.read(directory / f"step_{after:03d}.npz", gradients=True), history


def measure(directory: Path, rows: Iterable[str], replays: int, after: int) -> dict[str, dict[str, float]]:
    """Figures of `rows` on the policy after so many steps."""
    world, earlier = read_worlds(directory, after)
    exact = world.expected()
    grpo = judge([list(weighted(everything)(world, earlier, seed)) for seed in range(replays)], exact)
    variance = grpo["variance_full"]
    found: dict[str, dict[str, float]] = {}
    for name in rows:
        one = judge([list(ROWS[name](world, earlier, seed)) for seed in range(replays)], exact)
        # from the same replays if they have a full batch: the noise that both share cancels
        full = one["variance_full"] or variance
        one["variance_ratio"] = one["variance"] / full / one["scale"] ** 2
        one["variance_ratio_error"] = one["variance_error"] / full / one["scale"] ** 2
        found[name] = one
        print(_line(after, name, one), flush=True)
    extra = token_rows(world, variance) if world.designs else {}
    for name, one in extra.items():
        print(_line(after, name, one), flush=True)
    snr = {"signal_to_noise": float(exact @ exact) / variance, "mean_reward": float(world.rewards.mean())}
    return found | extra | {"grpo": grpo | snr}


def _line(after: int, name: str, one: dict[str, float]) -> str:
    return (
        f"| {after} | {name} | {one['bias']:.3f} ± {one['bias_error']:.3f} | {one['scale']:.2f} | {one['cos']:.4f}"
        f" | {one['variance_ratio']:.2f} ± {one['variance_ratio_error']:.2f} | {one['generated']:.0%}"
        f" | {one['trained']:.0%} |"
    )


def main() -> None:
    """Print a line for each row and step, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--world", type=Path, default=REPOSITORY / "runs" / "referee", help="what `record` wrote")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="default: all")
    parser.add_argument("--after", nargs="+", type=int, choices=MEASURED, default=list(MEASURED), help="steps")
    parser.add_argument("--replays", type=int, default=300, help="epochs played of each (default: 300)")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    arguments = parser.parse_args()
    print("| after | row | bias | scale | cos | VR | generated | trained |\n|---|---|---|---|---|---|---|---|")
    found = {after: measure(arguments.world, arguments.rows, arguments.replays, after) for after in arguments.after}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
