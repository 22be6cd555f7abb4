"""One trial of a night: a run that is struck again and again, damaged and moved, and in the end let finish.

What must hold after every blow: the run has ended as documented. And at the end: it is the run that was never
interrupted. Bit for bit in metrics, trace, samples and weights, unless it has changed its layout on the way; then to
rounding. Lines of the record that damage has taken may be missing, and samples after damage are not compared.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.damage import DAMAGES, FILES, RECORDS, harm, name_of, obstructed, unharmed_steps
from support.engines.fake_vllm import fake_python
from support.job import REPOSITORY, nearly, read_metrics, settings
from support.killing import PHASES, Kill, arm
from support.launch import RankError, run_ranks

from night.blows import Blow, clear_up, strike

RUN = {
    "sft__steps": 2,
    "checkpoint__every_steps": 1,
    "checkpoint__keep": 0,
    "steps": 4,
    "rollout__prompts_per_step": 8,
    "reward__function": "support.faulty:length_parity",
    "reward__min_self_consistency": 0,
    "guard__watchdog_s": 20,
}
SERVERS = {
    "rollout__engine": "vllm",
    "rollout__completions_per_prompt": 3,
    "rollout__servers__launch": "local",
    "rollout__servers__count": 2,
    "rollout__sync__verify_every": 0,
    "rollout__limits__probe_every_s": 0.3,
    "rollout__limits__probe_timeout_s": 2,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"actor__layout__tensor_parallel": 2}),
    "tp2pp2": (4, {"actor__layout__tensor_parallel": 2, "actor__layout__pipeline_parallel": 2}),
    "servers": (2, SERVERS),
}
_SHARES = {"tp1": 4, "dp2": 3, "tp2": 1, "tp2pp2": 1, "servers": 3}
_LIMIT_S = 600
"""After which a run that has not ended hangs."""
_SELDOM = ("no checkpoints", "link all", "lock")
"""Damages from which no run can be resumed by `_damage`'s measure, or for which a killed run leaves no place."""
_DUE = 10
"""What should have been tried so often and never was is not by chance: that has a probability of 5 in 100,000."""
STRUCK = "struck"
_MARK = "DPPO_NIGHT_TRIAL"
"""In the environment of all that a trial starts."""


@dataclass
class Ended:
    """How a run has ended: an exit code of each rank, or the launcher's account of the ranks that died."""

    codes: set[int]
    died: str
    log: str
    was_struck: bool

    @property
    def how(self) -> str:
        """done, killed, named (a watchdog has ended it and says whose fault it is), said (exit code 2 or 3 and one
        sentence), failed, or hangs."""
        if "did not finish within" in self.died:
            return "hangs"
        if self.codes == {0}:
            return "done"
        if "SIGKILL" in self.died:
            return "killed"
        if re.search(r"^watchdog: rank \d+|^rank \d+ \(host .* has died", self.log, re.MULTILINE):
            return "named"
        sentences = re.findall(r"^(?:error|stopped): .+$", self.log, re.MULTILINE)
        return "said" if sentences and self.codes and self.codes <= {2, 3} and "Traceback" not in self.log else "failed"


DOCUMENTED: dict[str, set[str]] = {
    "kill": {"killed"},
    "stop": {"done"},
    "hang": {"named"},
    "out of memory": {"killed"},
    "no memory": {"said", "failed", "killed", "named"},
    "clock": {"done"},
    "read-only": {"said"},
    "server killed": {"done"},
    "server stopped": {"done"},
}
"""How a run may end after each kind, besides "done": the moment may not have come, or what was left was enough."""


@dataclass
class Bench:
    """What all trials of a night share."""

    directory: Path
    files: Path
    kinds: list[str]
    wholes: dict[str, Path] = field(default_factory=dict)

    def whole(self, layout: str) -> Path:
        """The uninterrupted run of a layout, made when it is first asked for."""
        if layout not in self.wholes:
            run_dir = self.directory / f"whole_{layout}"
            ended = run(self, run_dir, layout, {})
            assert ended.how == "done", f"the uninterrupted run of {layout}: {ended.how}: {_last_words(ended)}"
            self.wholes[layout] = run_dir
        return self.wholes[layout]


def _rank(bench: Bench, run_dir: Path, values: list[str], blow: Blow | None, logs: Path) -> int:
    """The product's own command, with all that it prints in a file."""
    from dppo_megatron.run import Run
    from dppo_megatron.workbench.cli import main

    log = os.open(logs / f"rank_{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    enter = Run.__enter__

    def enter_armed(self: Run) -> Run:
        if blow is not None and blow.moment.rank == int(os.environ["RANK"]):
            arm(self, blow.moment, lambda: strike(blow, run_dir, bench.files, logs / STRUCK))
        return enter(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "__enter__", enter_armed)
        return main(["train", str(REPOSITORY / "configs" / "quickstart.yaml"), *values])


def run(bench: Bench, run_dir: Path, layout: str, extra: dict[str, Any], blow: Blow | None = None) -> Ended:
    """Start or resume a run; returns when nothing of it is left."""
    world_size, own = LAYOUTS[layout]
    values = settings(bench.files, run_dir, **RUN | own | extra)
    if own is SERVERS:
        values.append(f"rollout.servers.python={fake_python(bench.files)}")
    logs = run_dir.with_name("logs")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    survivors = (rank for rank in range(world_size) if blow is not None and rank != blow.moment.rank)
    dies = None if blow is None else next(survivors, None) if blow.kind == "hang" else blow.moment.rank
    os.environ[_MARK] = str(run_dir)
    codes, died = set[int](), ""
    try:
        codes = set(run_ranks(_rank, world_size, bench, run_dir, values, blow, logs, timeout_s=_LIMIT_S, dies=dies))
    except RankError as error:
        died = str(error)
    finally:
        clear_up(run_dir)
    said = "\n".join(path.read_text(errors="replace") for path in sorted(logs.iterdir()))
    (logs / "launcher.log").write_text(died)
    left = _left_over(str(run_dir))
    assert not left, f"{blow}: left behind: {left}"
    return Ended(codes, died, said, (logs / STRUCK).exists())


def _left_over(trial: str) -> list[str]:
    """Processes that the trial has started and that do not end by themselves."""
    deadline = time.monotonic() + 120
    while found := _processes_of(trial):
        if time.monotonic() > deadline:
            return found
        time.sleep(0.1)
    return []


def _processes_of(trial: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={trial}".encode() in path.read_bytes().split(b"\0"):
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
    return found


@dataclass
class Struck:
    """A run on its way through a trial."""

    layout: str
    is_exact: bool = True
    is_damaged: bool = False
    lost: set[int] = field(default_factory=set)
    """Steps whose lines damage may have taken."""
    story: list[str] = field(default_factory=list)


def trial(bench: Bench, seed: str, count: Counter[str]) -> list[str]:
    """What did not hold, with the whole story; what has struck is counted."""
    rng, run_dir = random.Random(seed), bench.directory / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    [layout] = rng.choices([*_SHARES], [*_SHARES.values()])
    bench.whole(layout)
    count[f"starts at {layout}"] += 1
    struck, faults = Struck(layout), list[str]()
    try:
        for _ in range(rng.randint(3, 8)):
            blow, asynchronous = _random_blow(rng, bench.kinds, struck.layout), rng.random() < 0.4
            ended = run(bench, run_dir, struck.layout, {"checkpoint__async_save": asynchronous}, blow)
            struck.story.append(f"{struck.layout} {'async ' * asynchronous}{blow}: {ended.how}")
            print(f"  {struck.story[-1]}", flush=True)
            if ended.how not in {"done"} | DOCUMENTED[blow.kind]:
                faults.append(f"{struck.story[-1]}: {_last_words(ended)}")
            count[blow.kind] += ended.was_struck and (ended.how != "done" or "done" in DOCUMENTED[blow.kind])
            if ended.how == "done":
                break
            _befall(bench, run_dir, rng, struck, count)
        else:
            ended = run(bench, run_dir, struck.layout, {})
            assert ended.how == "done", f"the last resume: {ended.how}: {_last_words(ended)}"
        _compare(run_dir, bench.whole(layout), struck)
    except AssertionError as error:
        faults.append(f"{'; '.join(struck.story)}: {str(error)[:2000]}")
    return faults


def expected(count: Counter[str], kinds: Sequence[str]) -> dict[str, float]:
    """How often, at least, each damage and each layout should have been tried in a night that counts so.

    Of all of them together by the blows that have struck, of each by how often one was chosen. A damage that changes
    nothing or leaves nothing to resume from does not count: of some kinds two of three, such as a swap of checkpoints
    where there is one; and those of `_SELDOM` need not be tried.
    """

    def chosen(what: str) -> int:
        return sum(times for name, times in count.items() if name.startswith(what))

    struck, started = sum(count[kind] for kind in kinds), chosen("starts at ")
    others = [name for name in LAYOUTS if name != "servers"]
    return {
        "damage": struck / 10,
        "another layout": struck / 10,
        "another layout after damage": struck / 50,
        **{f"starts at {name}": started * share / sum(_SHARES.values()) for name, share in _SHARES.items()},
        **{f"goes on at {name}": chosen("goes on at ") / (len(others) + 2) for name in others},
        **{
            f"damage: {name_of(one)}": chosen("damage: ") / (3 * len(DAMAGES))
            for one in DAMAGES
            if name_of(one) not in _SELDOM
        },
    }


def never_tried(count: Counter[str], kinds: Sequence[str]) -> list[str]:
    """The kinds of blows that have not struck, and the damages and layouts that the night was long enough to try."""
    due = [name for name, times in expected(count, kinds).items() if times >= _DUE]
    return [name for name in (*kinds, *due) if not count[name]]


def _last_words(ended: Ended) -> str:
    lines = [
        line for line in f"{ended.log}\n{ended.died}".splitlines() if re.match(r"(\w+\.)*\w*(Error|stop|error)", line)
    ]
    return " | ".join(lines[-3:])[:600] or f"codes {ended.codes}"


def _random_blow(rng: random.Random, kinds: list[str], layout: str) -> Blow:
    world_size, own = LAYOUTS[layout]
    phase = rng.choice(PHASES)
    gradings = 2 if own is SERVERS else 10  # clients grade for servers: rank 0 fetches what they have once a step
    most = {"finish": 1, "reward": gradings}.get(phase, 2)  # a resumed run has few steps left
    delay_s = rng.choice([0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 0.5)])
    moment = Kill(phase, rng.randint(1, most), rng.randrange(world_size), delay_s)
    here = [kind for kind in kinds if own is SERVERS or not kind.startswith("server")]
    kind = rng.choice(["kill"] * len(here) + [kind for kind in here if world_size > 1 or kind != "hang"])
    amount = {
        "stop": rng.uniform(0.5, 5),
        "server stopped": rng.uniform(2.5, 8),  # longer than a probe may take
        "out of memory": math.exp(rng.uniform(0, math.log(60))),
        "no memory": math.exp(rng.uniform(0, math.log(200))),
        "clock": rng.choice([-1, 1]) * math.exp(rng.uniform(0, math.log(10**8))),
    }.get(kind, 0.0)
    return Blow(kind, moment, amount)


def _befall(bench: Bench, run_dir: Path, rng: random.Random, struck: Struck, count: Counter[str]) -> None:
    """Between two starts: damage to the files, and another layout."""
    may_be = (
        rng.random() < 0.3 and run_dir.exists() and not struck.is_damaged
    )  # of whole files it is known what is whole
    if may_be and (told := _damage(run_dir, rng, struck, count)):
        struck.story.append(f"damage: {'; '.join(told)}".replace(str(run_dir), ""))
        count["damage"] += 1
    if rng.random() < 0.25 and struck.layout != "servers":
        struck.layout = rng.choice([name for name in LAYOUTS if name not in ("servers", struck.layout)])
        struck.is_exact = False
        struck.story.append(f"goes on at {struck.layout}")
        count["another layout" + " after damage" * struck.is_damaged] += 1
        count[f"goes on at {struck.layout}"] += 1


def _damage(run_dir: Path, rng: random.Random, struck: Struck, count: Counter[str]) -> list[str]:
    """Harm the run so that it can still be resumed; what was done, or nothing if it has nothing to be resumed from."""
    original, whole = run_dir.with_name("before_damage"), run_dir.with_name("whole")
    for link in [path for path in run_dir.rglob("*") if path.is_symlink()]:
        if (target := link.readlink()).is_relative_to(run_dir):  # of an earlier damage: a copy's leads to the copy
            link.unlink()
            link.symlink_to(os.path.relpath(target, link.parent))
    shutil.rmtree(original, ignore_errors=True)
    shutil.copytree(run_dir, original, symlinks=True, ignore=shutil.ignore_patterns("hf", "step_*.*"))
    lines = {name: _lines(original / name) for name in RECORDS}
    shutil.rmtree(whole, ignore_errors=True)
    run_dir.rename(whole)
    for _ in range(30):
        shutil.copytree(whole, run_dir, symlinks=True)
        tried = Counter[str]()
        told = harm(run_dir, rng, tried)  # in its own place: some of the links that it makes are absolute
        steps = unharmed_steps(run_dir, original)
        same = all(_bytes(run_dir / name) == _bytes(original / name) for name in ("run.json", "config.yaml"))
        linked = any((run_dir / name).is_symlink() for name in FILES)
        if steps and same and not linked and not obstructed(run_dir):
            for name in RECORDS:
                left = _bytes(run_dir / name)
                struck.lost |= {step for step, line in lines[name].items() if line not in left and step <= steps[-1]}
            struck.is_damaged = True
            count.update({f"damage: {name}": times for name, times in tried.items()})
            return told
        shutil.rmtree(run_dir)
    whole.rename(run_dir)
    return []


def _lines(path: Path) -> dict[int, bytes]:
    found = {}
    for line in _bytes(path).splitlines():
        with contextlib.suppress(ValueError):
            found[int(json.loads(line).get("step", -1))] = line
    return found


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _compare(mine: Path, theirs: Path, struck: Struck) -> None:
    """The run that was struck with the one that was not."""
    dropped = ("pack/", "prune/ledger", "eval/problems") if not struck.is_exact else ()
    if struck.layout == "servers":  # retries, servers that live, times: the completions are the same
        dropped += ("rollout/", "prune/ledger")
    rows = [{row["step"]: _without(row, dropped) for row in read_metrics(run)} for run in (mine, theirs)]
    _same_steps(rows, struck, "metrics.jsonl")
    trace = [{step: json.loads(line) for step, line in _lines(run / "trace.jsonl").items()} for run in (mine, theirs)]
    _same_steps(
        [{k: _without(v, ("seconds", "config", "ranks")) for k, v in one.items()} for one in trace],
        struck,
        "trace.jsonl",
    )
    weights = [load_file(run / "hf" / "model.safetensors") for run in (mine, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[1].items():
        if struck.is_exact:
            assert torch.equal(weights[0][name].view(torch.uint8), tensor.view(torch.uint8)), f"weights: {name}"
        else:
            torch.testing.assert_close(
                weights[0][name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
    if struck.is_exact and not struck.is_damaged:
        samples = [
            pd.read_parquet(run / "samples").sort_values(["step", "group", "completion"], ignore_index=True)
            for run in (mine, theirs)
        ]
        # engines count their weight syncs from the trainer's start; the actor's log-probabilities depend on the layout
        differ = ["weights_version_first", "weights_version_last", "actor_logprobs"]
        pd.testing.assert_frame_equal(*(one.drop(columns=differ) for one in samples))


def _without(row: dict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(prefixes)} if prefixes else row


def _same_steps(rows: list[dict[int, dict[str, Any]]], struck: Struck, name: str) -> None:
    mine, theirs = rows
    missing = theirs.keys() - mine.keys()
    assert mine.keys() <= theirs.keys() and missing <= struck.lost, f"{name}: steps {sorted(mine)}, {struck.lost} lost"
    for step, row in mine.items():
        for key in row.keys() | theirs[step].keys():
            left, right = row.get(key), theirs[step].get(key)
            near = left == right if struck.is_exact else left == _roughly(right)
            assert near, f"{name}: step {step}: {key}: {left} is not {right}"


def _roughly(value: Any) -> Any:
    """To rounding: of numbers, also in lists."""
    if isinstance(value, list):
        return [_roughly(one) for one in value]
    return nearly(value, rel=1e-3, abs=1e-4) if isinstance(value, float) else value
