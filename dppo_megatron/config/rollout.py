"""Settings of generation: sampling, which engine, how it is reached, and how its weights follow the actor's.

In sections because most of it concerns servers: an embedded engine reads `sampling` and one line of `limits`.
`check_rollout` finds settings that contradict one another.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from dppo_megatron.config.ranges import COUNT, FREE_AT_RESUME, SECONDS, ranged
from dppo_megatron.config.server_args import (
    CODE_OPTIONS,
    DRAFT_OPTIONS,
    KEY_OPTIONS,
    OWN_OPTIONS,
    QUANTIZATION_OPTIONS,
    REPLICA_OPTIONS,
    STAGE_OPTIONS,
    check_engine_names,
    check_gpus,
    importing_option,
    named_option,
    read_split,
)
from dppo_megatron.types import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_WORDS = r"(_*[A-Z]{1,20}[0-9]{0,2}(_|$))+[A-Z0-9_]{0,4}"
"""What a variable that is not set may be called: a key in base32 or hexadecimal digits has none of these forms."""


@dataclass
class SamplingConfig:
    max_completion_tokens: int = ranged(1024, "[1, 100000000]")
    """Generation stops here; such a completion has finish reason `length`."""
    temperature: float = ranged(1.0, "(0, 100]")
    """Sampling temperature. The actor's log-probabilities are taken at the same temperature."""
    top_p: float = ranged(1.0, "(0, 1]")
    """Sample from the smallest set of tokens with this much probability. Below 1 the behaviour log-probabilities are
    those of the truncated distribution and the actor's are not: a mismatch by choice."""
    top_k: int = ranged(0, "[0, 10000000]")
    """Sample from the k most likely tokens; 0: all."""
    stop_token_ids: list[int] = ranged([], "[0, 2147483647]")
    """Tokens that end a completion, beside the tokenizer's end of sequence."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0


@dataclass
class ServersConfig:
    free_at_resume = True
    endpoints: list[str] = field(default_factory=list)
    """Servers that are already running, or routers in front of some, as http://host:port. Hosts other than this
    machine's loopback need `allow_remote_endpoints`."""
    allow_remote_endpoints: bool = False
    """Plain HTTP to other hosts: prompts and completions are then readable on that network."""
    launch: Literal["none", "local"] = "none"
    """`local`: the trainer starts `count` servers on each of its machines and ends them with the run. On several
    machines they listen on that network, so it needs `allow_remote_endpoints`."""
    count: int = ranged(1, "[1, 1024]")
    """Servers that launch=local starts on each of the trainer's machines, or `dppo-megatron serve` on its own."""
    registry_dir: str = ""
    """Directory on a shared file system where `dppo-megatron serve` writes the addresses of servers on other machines.
    Servers may come and go while the run goes on: a new one is used from the next weight sync on."""
    min_servers: int = ranged(1, "[1, 1024]")
    """With `registry_dir`, the first step waits until so many servers have come (`limits.start_timeout_s`)."""
    python: str = ""
    """Python interpreter of the environment that holds the engine (.venv-vllm/bin/python); empty: the trainer's."""
    args: list[str] = field(default_factory=list)
    """More arguments for a launched server's command line, e.g. [--gpu-memory-utilization, "0.4"]."""
    gpus: list[str] = field(default_factory=list)
    """CUDA_VISIBLE_DEVICES of each launched server, as many as the parallel sizes in `args` take, e.g. ["0,1", "2,3"];
    numbers are places in the trainer's own where that has them (without `colocate`, after its ranks'). Empty: all."""
    colocate: bool = False
    """Launched servers share the actor's GPUs: they sleep (free weights and key-value cache) during the update."""
    api_key_env: str = "DPPO_ENGINE_API_KEY"
    """Environment variable that holds the servers' API key. Unset: no key is sent to `endpoints`, and launched vLLM
    servers get a random one. The key is never written or logged."""


@dataclass
class SpeculationConfig:
    free_at_resume = True
    method: Literal["none", "ngram", "suffix", "eagle3"] = "none"
    """How launched servers draft several tokens, which the model checks in one pass: `ngram`, what followed the same
    tokens before; `suffix`, also in earlier completions; `eagle3`, the model at `draft_path`. The distribution that is
    sampled from, and its log-probabilities, stay the policy's."""
    draft_path: str = ""
    """Directory of a drafter made for this model (eagle3). It is not trained: as the policy moves, it guesses worse."""
    draft_tokens: int = ranged(4, "[1, 64]")
    """Tokens drafted at a time while few sequences run."""
    max_drafted: int = ranged(128, "[0, 1e6]")
    """Drafted tokens that a server checks in one pass: with n sequences running each gets `draft_tokens`, but at most
    this / n, and none above it, where drafts cost the time of tokens. 0: `draft_tokens` at any n."""


@dataclass
class SyncConfig:
    channel: Literal["auto", "disk", "gloo", "nccl", "ipc"] = field(default="auto", metadata=FREE_AT_RESUME)
    """How weights reach a server: `disk` is safetensors on a path that both can read, gloo and nccl a broadcast group
    with the engine's workers, ipc memory of the trainer that servers it has launched map (CUDA IPC on GPUs). `auto`
    takes ipc where servers are colocated or launched on a CPU, then nccl on GPUs or gloo, else disk; it is printed."""
    dir: str = field(default="", metadata=FREE_AT_RESUME)
    """Directory for channel=disk, in which each run has one of its own; it must be the same path for the servers.
    Empty: run_dir/sync."""
    bucket_mb: int = ranged(256, "[1, 1000000]", free_at_resume=True)
    """Weights are gathered and sent in pieces of about this size, in MiB; no rank holds the whole model for it."""
    verify_every: int = ranged(10, COUNT, free_at_resume=True)
    """After the first and every so many syncs, tensors' checksums (where the engine shows its tensors) and a canary
    completion's log-probabilities are compared with the actor's; 0: never."""
    max_canary_logprob_diff: float = ranged(0.05, "(0, 1e6]", free_at_resume=True)
    """Largest mean |log-probability difference| of the canary; above it the run stops."""
    in_flight: Literal["finish", "abort", "continue"] = "finish"
    """Requests in flight at a sync (with async_steps): wait for them, and so for every straggler (async_steps=1 at
    most); abort and generate them again; or let them continue with the new weights. Every token's weights version is
    recorded."""


@dataclass
class LimitsConfig:
    max_concurrent_sequences: int = ranged(512, "[1, 1000000]", free_at_resume=True)
    """Sequences generated at a time: in one batch on one rank (hf), or by one engine of a server (--max-num-seqs). A
    server of N data-parallel replicas has N times as many outstanding."""
    start_timeout_s: float = ranged(600.0, SECONDS, free_at_resume=True)
    """A launched server must be ready after this long."""
    sync_timeout_s: float = ranged(600.0, SECONDS, free_at_resume=True)
    """A weight sync of one server must be done after this long; else the server is marked out."""
    request_timeout_s: float = ranged(3600.0, SECONDS, free_at_resume=True)
    """A request older than this, counted from its first try, is ended: completions of it that are not done are missing
    from the step. One of an evaluation stops the run."""
    engine_wait_s: float = ranged(300.0, SECONDS, free_at_resume=True)
    """With every server gone the run waits this long for one to come back, then stops."""
    probe_every_s: float = ranged(5.0, SECONDS, free_at_resume=True)
    """Interval between health probes of each server."""
    probe_timeout_s: float = ranged(20.0, SECONDS, free_at_resume=True)
    """A server that does not answer a health probe in this time is marked out and its requests go elsewhere."""
    logprob_diff_warning: float = ranged(0.5, "(0, 1e6]", free_at_resume=True)
    """A warning is printed when a step's mean |log-probability difference| between engine and actor is above this."""


@dataclass
class RolloutConfig:
    page = "engines.md"
    engine: Literal["hf", "vllm", "sglang"] = "hf"
    """What generates: `hf` is embedded in every rank; `vllm` and `sglang` are servers."""
    prompts_per_step: int = ranged(64, "[1, 1000000]")
    """Nominal prompts of a step, before any pruning: N of every denominator."""
    completions_per_prompt: int = ranged(8, "[2, 65536]", why="an advantage compares a group's completions")
    """Completions sampled for each selected prompt: the group size G."""
    async_steps: int = ranged(0, "[0, 8]")
    """K: the next K steps' prompts wait behind this step's and fill what its last answers leave free, so that no
    straggler holds the servers; tokens are at most K steps old, which `objective.correction` makes up for. Colocated
    servers pause for every update. 0: never stale."""
    quantization: Literal["off", "fp8", "fp8_pow2"] = "off"
    """How servers hold the linear layers' weights: as the actor, or in FP8 with a scale for each 128 x 128, rounded by
    the trainer. `fp8_pow2`: scales are powers of two, which Blackwell's kernels need. The policy that is sampled from
    is another one then, so it needs `objective.correction`."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The distribution that completions are sampled from."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    """Where the servers are, or how they are started; engine=hf has none."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """Tokens drafted and checked instead of sampled one by one: faster while few sequences run."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """How weights reach the servers, and how their arrival is verified."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """Concurrency and time limits."""

    @property
    def overlaps_update(self) -> bool:
        """Whether it generates while the actor trains."""
        return self.async_steps > 0 and not self.servers.colocate

    @property
    def pauses_requests(self) -> bool:
        """Whether servers take weights, or sleep, with requests under way."""
        return self.async_steps > 0 and self.sync.in_flight == "continue"


def check_rollout(config: RolloutConfig) -> None:
    """Raise `UserError` for the first setting of `rollout` that contradicts another."""
    serves, servers = config.engine != "hf", config.servers
    sources = {"endpoints": servers.endpoints, "launch": servers.launch != "none", "registry_dir": servers.registry_dir}
    given = [key for key, value in sources.items() if value]
    if given and not serves:
        raise UserError(
            f"rollout.servers.{given[0]} is set, but rollout.engine = hf has no servers; use vllm or sglang"
        )
    if not serves and config.async_steps:
        raise UserError(
            f"rollout.async_steps = {config.async_steps} needs servers: the embedded hf engine shares the actor's"
            " processors"
        )
    if serves and len(given) != 1:
        raise UserError(
            f"rollout.engine = {config.engine}: give the servers' addresses as"
            " rollout.servers.endpoints=[http://127.0.0.1:8000], let the trainer start them with"
            " rollout.servers.launch=local, or find those of `dppo-megatron serve` with"
            " rollout.servers.registry_dir=DIR, one of the three"
        )
    if servers.colocate and servers.launch != "local":
        raise UserError(
            "rollout.servers.colocate needs rollout.servers.launch = local: only this machine's servers can share its"
            " GPUs"
        )
    if servers.colocate and config.async_steps and config.sync.in_flight != "continue":
        raise UserError(
            f"rollout.async_steps = {config.async_steps} with rollout.servers.colocate: servers sleep during the update"
            f" with requests under way, which rollout.sync.in_flight = {config.sync.in_flight} would end; set"
            " rollout.sync.in_flight=continue"
        )
    if config.async_steps > 1 and config.sync.in_flight == "finish":
        raise UserError(
            f"rollout.async_steps = {config.async_steps} streams over steps, but with rollout.sync.in_flight = finish"
            " every weight sync waits for all of them and their stragglers; set rollout.sync.in_flight=continue"
        )
    if servers.colocate and config.sync.channel == "nccl":
        raise UserError(
            "rollout.sync.channel = nccl cannot reach a colocated server: NCCL has no groups with two members on one"
            " GPU; use ipc or disk"
        )
    if config.sync.channel == "ipc" and servers.launch != "local":
        raise UserError(
            "rollout.sync.channel = ipc needs rollout.servers.launch = local: servers must share this machine's memory"
        )
    if servers.gpus and len(servers.gpus) != servers.count:
        raise UserError(
            f"rollout.servers.gpus has {len(servers.gpus)} entries for rollout.servers.count = {servers.count}"
        )
    if config.engine != "hf":
        check_gpus(servers.gpus, servers.args)
        check_engine_names(config.engine, servers.args)
        _check_stages(config)
    _check_keys(config)
    _check_quantization(config)
    _check_speculation(config)
    for url in servers.endpoints:
        check_endpoint(url, config)
    if len(set(servers.endpoints)) < len(servers.endpoints):
        raise UserError("rollout.servers.endpoints names a server twice")


def _check_stages(config: RolloutConfig) -> None:
    stages = read_split(config.servers.args).stages
    if config.engine == "sglang" and stages > 1 and config.pauses_requests:
        raise UserError(
            f"rollout.servers.args: pipeline parallel {stages}: an SGLang of several stages does not pause (0.5.23), as"
            f" rollout.async_steps = {config.async_steps} with rollout.sync.in_flight = continue needs; split it by"
            " tensors"
        )


def _check_quantization(config: RolloutConfig) -> None:
    servers, is_on = config.servers, config.quantization != "off"
    if is_on and config.engine == "hf":
        raise UserError(f"rollout.quantization = {config.quantization} is for servers; rollout.engine = hf has none")
    if option := named_option(servers.args, QUANTIZATION_OPTIONS if is_on else QUANTIZATION_OPTIONS[:2]):
        raise UserError(
            f"rollout.servers.args has {option}, which rollout.quantization chooses: weight syncs must bring what the"
            " server holds"
        )
    if is_on and config.engine == "sglang" and servers.colocate and named_option(servers.args, ("--kv-cache-dtype",)):
        raise UserError(
            "rollout.servers.args has --kv-cache-dtype: with rollout.quantization SGLang has scales of its cache, and"
            " loses them when it sleeps (rollout.servers.colocate); leave it out"
        )


def _check_speculation(config: RolloutConfig) -> None:
    """Refuse what the engine cannot draft, or would sample or report otherwise than without drafts."""
    speculation, servers, sampling = config.speculation, config.servers, config.sampling
    method = speculation.method
    if bool(speculation.draft_path) != (method == "eagle3"):
        raise UserError(
            f"rollout.speculation.draft_path is {'set' if speculation.draft_path else 'empty'}, but"
            f" rollout.speculation.method = {method}; only eagle3 has a drafter, and needs one"
        )
    if method == "none":
        return
    setting = f"rollout.speculation.method = {method}"
    if servers.launch == "none" and not servers.registry_dir:
        raise UserError(
            f"{setting} is for launched servers (rollout.servers.launch=local, or `dppo-megatron serve`); those of"
            " rollout.servers.endpoints draft as they were started, and the hf engine not at all"
        )
    if config.engine == "sglang" and method == "suffix":
        raise UserError(f"{setting} is vLLM's; SGLang has ngram and eagle3")
    if config.engine == "sglang" and sampling.truncates:
        raise UserError(
            f"{setting}: with drafts SGLang's log-probabilities are those before rollout.sampling.top_p and top_k cut;"
            " leave both at their defaults"
        )
    reads_all, attention = config.engine == "sglang" and method == "eagle3", read_split(servers.args).attention
    if reads_all and attention > 1 and len(draft_lengths(config)) > 1:
        raise UserError(
            f"{setting}: with attention data parallelism (--attn-dp-size {attention}) SGLang drafts the same number at"
            " any concurrency; set rollout.speculation.max_drafted=0"
        )
    if reads_all and config.sync.channel == "disk":
        raise UserError(
            f"{setting} with rollout.sync.channel = disk: SGLang reads the policy's files into the drafter too; leave"
            " it at auto"
        )
    for options, why in (
        (DRAFT_OPTIONS, "which rollout.speculation chooses"),
        (STAGE_OPTIONS, "with which SGLang refuses drafts, and nobody has run vLLM's; split it by tensors"),
        (
            REPLICA_OPTIONS if config.engine == "vllm" and speculation.max_drafted else (),
            "with which vLLM drafts the same number at any concurrency: use rollout.servers.count, or"
            " rollout.speculation.max_drafted=0",
        ),
        (
            REPLICA_OPTIONS if reads_all and attention == 1 else (),
            "with which SGLang takes weights from disk alone, and into the drafter too: use rollout.servers.count",
        ),
    ):
        if option := named_option(servers.args, options):
            raise UserError(f"{setting}: rollout.servers.args has {option}, {why}")


def draft_lengths(config: RolloutConfig) -> list[tuple[int, int, int]]:
    """How many tokens a server drafts for each of its running sequences.

    Returns:
        First and last number of sequences, and tokens of each; from 1 to `limits.max_concurrent_sequences`.

    Example: draft_tokens=2, max_drafted=8: [(1, 4, 2), (5, 8, 1), (9, 512, 0)]
    """
    most, budget = config.limits.max_concurrent_sequences, config.speculation.max_drafted
    if not budget:
        return [(1, most, config.speculation.draft_tokens)]
    found, first = [], 1
    for tokens in range(min(config.speculation.draft_tokens, budget), -1, -1):
        last = min(most, budget // tokens) if tokens else most
        if last >= first:
            found.append((first, last, tokens))
            first = last + 1
    return found


def _check_keys(config: RolloutConfig) -> None:
    """Refuse API keys in settings, which are written to files. The message does not repeat the value."""
    name = config.servers.api_key_env
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not (name in os.environ or re.fullmatch(_WORDS, name)):
        raise UserError(
            "rollout.servers.api_key_env is not the name of an environment variable that is set; it must not be the key"
            " itself"
        )
    if named_option(config.servers.args, KEY_OPTIONS):
        raise UserError(
            "rollout.servers.args holds a key, which would stand in config.yaml and in the list of processes;"
            f" put it into the environment variable {name} (rollout.servers.api_key_env)"
        )
    if option := named_option(config.servers.args, CODE_OPTIONS) or importing_option(config.servers.args):
        raise UserError(
            f"rollout.servers.args has {option}, which runs code that this trainer does not know in the server; it"
            " never runs the Python files of a model either: leave it out"
        )
    if option := named_option(config.servers.args, OWN_OPTIONS):
        raise UserError(
            f"rollout.servers.args has {option}, which the trainer chooses itself: the server's address and model, and"
            " what it checks there; leave it out, or start the server yourself and name it in rollout.servers.endpoints"
        )


def check_endpoint(url: str, config: RolloutConfig) -> None:
    """Raise `UserError` if `url` is no address that may be asked."""
    if "@" in url or "?" in url or "#" in url:  # the value is not shown: it may contain a key
        raise UserError(
            "rollout.servers.endpoints: put no key in an address; rollout.servers.api_key_env names"
            " where it is read from"
        )
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(f"rollout.servers.endpoints: {url[:200]!r} is no address; expected http://host:port")
    if parts.hostname not in LOOPBACK and parts.scheme == "http" and not config.servers.allow_remote_endpoints:
        raise UserError(
            f"rollout.servers.endpoints: '{url}' is another host, and plain HTTP can be read on the way;"
            " set rollout.servers.allow_remote_endpoints=true if that network is yours"
        )
