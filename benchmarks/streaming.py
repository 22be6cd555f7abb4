"""Seconds of a step over the seconds that its tokens take at full load, by `rollout.async_steps`; in virtual time.

The trainer's own rollout thread (`servers/dispatch.py`) sends requests to simulated servers that follow the roofline of
one replica: an iteration takes a fixed time, plus reading weights and cached keys, plus FLOPs by its batch. Nothing
waits in real time, and no figure depends on this machine. Lengths are log-normal between prompts and within, capped:

    python benchmarks/streaming.py [--steps 12] [--update 0.2] [--replicas 4] [--prompt 150] [--together]

`--update` is a step's training time, as a share of the time of its tokens at full load. `--together` sends each group
to one replica, for comparison: the trainer spreads its completions (`Work.spread`), and each replica reads the prompt.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.randomness import generator
from dppo_megatron.rollout.servers.dialects import VLLMDialect
from dppo_megatron.rollout.servers.dispatch import Dispatch
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.wire import Completed, Event, Expected, GenerateRequest, Graded, Sampled, Submit

_BANDWIDTH, _WEIGHTS, _CACHED, _FIXED_S = 3.35e12 * 0.7 * 2, 16.4e9, 147456, 0.006
_TOKEN_S = 2 * 8.2e9 / (989e12 * 0.4 * 2)
_CACHE_TOKENS, _SEQUENCES, _RESERVED, _PIECE = 536402, 1024, 600, 16
"""Qwen3-8B on two H100. The figures are ratios, so they claim nothing about that machine."""


@dataclass
class Replica:
    """A simulated server: the part of `VLLMServer` that the fleet uses, and the sequences that run."""

    url: str
    prompt: int
    """Tokens of each prompt."""
    replicas: int = 1
    dialect: VLLMDialect = field(default_factory=VLLMDialect)
    now: float = 0.0
    made: int = 0
    """Tokens so far."""
    made_full: int = 0
    full_s: float = 0.0
    """Tokens, and the time, when completions last waited for room: until then the replica was full."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(ticket, tokens) of each completion, in the order of arrival."""
    ticket: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    left: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    context: Any = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def http(self) -> Any:
        return self

    def healthy(self, *, timeout_s: float) -> None: ...

    def close(self) -> None: ...

    def run_until(self, end_s: float) -> list[int]:
        """Generate until one or more completions have ended, or `end_s`; returns their tickets."""
        while True:
            self._admit()
            if not len(self.left):
                self.now = max(self.now, end_s) if end_s < math.inf else self.now
                return []
            if self.now >= end_s:
                return []
            count = min(_PIECE, int(self.left.min()))
            read_s = (_WEIGHTS + float(self.context.sum()) * _CACHED) / _BANDWIDTH
            self.now += count * (_FIXED_S + read_s + len(self.left) * _TOKEN_S)
            self.made += count * len(self.left)
            if self.waiting:
                self.made_full, self.full_s = self.made, self.now
            self.left, self.context = self.left - count, self.context + count
            if (ended := self.left <= 0).any():
                done: list[int] = self.ticket[ended].tolist()
                self.ticket, self.left, self.context = (a[~ended] for a in (self.ticket, self.left, self.context))
                return done

    def _admit(self) -> None:
        cached, first = int(self.context.sum()), 0
        running = len(self.left)
        while first < len(self.waiting) and running < _SEQUENCES:
            if cached + running * _RESERVED + self.prompt >= _CACHE_TOKENS:
                break
            cached, running, first = cached + self.prompt, running + 1, first + 1
        if first:
            tickets, tokens = zip(*self.waiting[:first], strict=True)
            del self.waiting[:first]
            self.ticket = np.concatenate([self.ticket, tickets])
            self.left = np.concatenate([self.left, tokens])
            self.context = np.concatenate([self.context, np.full(first, self.prompt)])


class Steps:
    """Steps of a job as the loop takes them, and the intake that answers for the servers.

    Args:
        lengths: [steps, prompts, G] tokens of each completion.
        ahead: `rollout.async_steps`. As large as the number of steps: all at once, for the rate at full load.
        update_s: seconds of training of a step.
        options: replicas, prompt and together, from the command line.
    """

    def __init__(self, lengths: Any, ahead: int, update_s: float, options: argparse.Namespace) -> None:
        self.lengths, self._ahead, self._update_s, self._options = lengths, ahead, update_s, options
        self.servers = [Replica(f"http://127.0.0.1:{8000 + i}", options.prompt) for i in range(options.replicas)]
        self._at = {server.url: server for server in self.servers}
        config = RolloutConfig(engine="vllm")
        config.limits.max_concurrent_sequences = _SEQUENCES
        config.limits.request_timeout_s = config.limits.probe_every_s = 1e9
        servers: Any = self.servers
        self.fleet = Fleet(servers, config, self, clock=lambda: self.now)
        self.fleet.expect("1")
        with self.fleet.lock:
            for member in self.fleet.members:
                member.synced("1")
        self.now, self._free_s = 0.0, 0.0
        self.works: list[Work] = []
        self.done_s: list[float] = []
        """When the answers of each step were complete."""
        self.trained = 0
        """Tokens of the steps that were trained."""
        self._open: dict[int, tuple[Submit, int]] = {}
        self._begin()

    def run(self) -> None:
        while len(self.done_s) < len(self.lengths):
            for _ in Dispatch(self.fleet, self.works).run():
                pass
            self._turn(ended=True)
        self.fleet.close()

    def _begin(self) -> None:
        """Begin the steps that may be open now."""
        while len(self.works) <= min(len(self.done_s) + self._ahead, len(self.lengths) - 1):
            step, (prompts, size) = len(self.works), self.lengths.shape[1:]
            read, most = (0,) * self._options.prompt, int(self.lengths.max())
            groups = [GenerateRequest(f"{step}-{index}-0", read, size, 0, most) for index in range(prompts)]
            self.works.append(Work(groups, Expected(19, 1, 9), order=step, number=step))
            if not self._options.together:
                self.works[-1].spread(len(self.servers), _SEQUENCES)

    def _turn(self, *, ended: bool = False) -> None:
        """The loop's turn: the next step trains once its answers are complete, and then a new one may begin."""
        while len(self.done_s) < len(self.works) and self.works[len(self.done_s)].is_complete:
            work = self.works[len(self.done_s)]
            self.done_s.append(max(self.now, self._free_s))
            self._free_s = self.done_s[-1] + self._update_s
            self.trained += sum(sum(one.lengths) for one in work.done.values())
        if ended and len(self.works) < len(self.lengths):
            self.now = max(self.now, self._free_s)  # there is nothing to generate until the training ends
        if self.now >= self._free_s:
            self._begin()

    # ---------------------------------------------------------------------------------------------- as an intake

    def gone(self, servers: Collection[str]) -> None: ...

    def client_of(self, server: str) -> int:
        return 0

    def room(self, server: str) -> int:
        return 1 << 20

    def ask(self, ask: Submit) -> None:
        step, prompt, first = map(int, ask.group.request_id.split("-"))
        server = self._at[ask.server]
        server.now = max(server.now, self.now) if not len(server.left) else server.now
        lengths = self.lengths[step, prompt, first : first + ask.group.count].tolist()
        server.now += self._options.prompt * _TOKEN_S
        server.waiting += [(ask.ticket, length) for length in lengths]
        self._open[ask.ticket] = ask, ask.group.count

    def keep(self, server: str, key: tuple[int, int, int], sampled: Sampled) -> None: ...

    def end(self, tickets: Sequence[int]) -> None: ...

    def cancel(self, tickets: Sequence[int]) -> None: ...

    def events(self, timeout_s: float) -> list[Event]:
        """The completions that end next on the server whose clock is furthest behind."""
        self._turn()
        busy = [server for server in self.servers if len(server.left) or server.waiting]
        if not busy:
            return []
        server = min(busy, key=lambda one: one.now)
        others = [one.now for one in busy if one is not server]
        limit = min([*others, self._free_s if self._free_s > self.now else math.inf]) + 1e-9
        events: list[Event] = []
        for ticket in server.run_until(max(limit, server.now + 1e-9)):
            ask, left = self._open[ticket]
            self._open[ticket] = ask, left - 1
            if left == 1:
                step, prompt, first = map(int, ask.group.request_id.split("-"))
                lengths = self.lengths[step, prompt, first : first + ask.group.count].tolist()
                events += [Completed(ticket, lengths, ["stop"] * len(lengths), []), Graded(ticket)]
        self.now = max(self.now, min(one.now for one in busy))
        return events


def drawn(steps: int, prompts: int, size: int, cap: int, mean: float, sigma: float) -> Any:
    """[steps, prompts, size] tokens: log-normal, 0.8 of sigma between prompts and 0.6 within, at most `cap`."""
    random = generator(0, "streaming", prompts, size, cap)
    base = random.normal(mean, 0.8 * sigma, (steps, prompts, 1))
    lengths = np.exp(base + random.normal(0.0, 0.6 * sigma, (steps, prompts, size)))
    return np.minimum(cap, lengths).astype(np.int64).clip(16)


def step_s(lengths: Any, ahead: int, update_s: float, options: argparse.Namespace) -> float:
    """Mean seconds from one step's answers to the next's, without the first quarter of the steps, and up to the last
    step after which as many were open as at the start."""
    steps = Steps(lengths, ahead, update_s, options)
    steps.run()
    assert steps.trained == lengths.sum(), "every completion is trained in its own step"
    first, last = len(lengths) // 4 - 1, len(lengths) - 1 - ahead
    return (steps.done_s[last] - steps.done_s[first]) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--update", type=float, default=0.2)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=150)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--ahead", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", type=int, help="the shape with so many prompts")
    given = parser.parse_args()
    cases = (("32 x 8 x 16k", 32, 8, 16384, 8.8, 0.7), ("128 x 16 x 8k", 128, 16, 8192, 8.0, 0.8))
    for name, prompts, size, cap, mean, sigma in (*cases, ("128 x 16 x 4k, heavy", 128, 16, 4096, 7.0, 1.0)):
        if given.only not in (None, prompts):
            continue
        lengths = drawn(given.steps, prompts, size, cap, mean, sigma)
        all_at_once = Steps(lengths, given.steps, 0.0, given)
        all_at_once.run()
        assert all(server.full_s for server in all_at_once.servers), "a replica was never full: give more --steps"
        rate = sum(server.made_full / server.full_s for server in all_at_once.servers)
        full_s = float(lengths[0].size * lengths.mean()) / rate
        found = [step_s(lengths, ahead, given.update * full_s, given) / full_s for ahead in given.ahead]
        shown = "  ".join(f"K={ahead} {value:.2f}" for ahead, value in zip(given.ahead, found, strict=True))
        print(f"{name:<22} mean {lengths.mean():6.0f} tokens, full load {full_s:6.1f} s a step;  {shown}", flush=True)


if __name__ == "__main__":
    main()
