"""Settings of generation: sampling, which engine, how it is reached, and how it gets the actor's weights.

Divided into sections because most of it concerns servers: the embedded engine reads only `sampling` and one setting of
`limits`. `check_rollout` refuses settings that contradict each other.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from dppo_megatron.config.ranges import COUNT, FREE_AT_RESUME, SECONDS, ranged
from dppo_megatron.config.server_args import (
    DRAFT_OPTIONS,
    KEY_OPTIONS,
    OWN_OPTIONS,
    QUANTIZATION_OPTIONS,
    REPLICA_OPTIONS,
    STAGE_OPTIONS,
    check_engine_names,
    check_gpus,
    named_option,
    read_split,
)
from dppo_megatron.types import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_VARIABLE = r"(_*[A-Z]{1,20}[0-9]{0,2}(_|$))+[A-Z0-9_]{0,4}"
"""Names accepted for a variable that is not set; a key pasted in its place (base32 or hexadecimal) does not match."""


@dataclass
class SamplingConfig:
    max_completion_tokens: int = ranged(1024, "[1, 100000000]")
    """Most tokens of a completion. One that is truncated at this limit has finish reason `length`."""
    temperature: float = ranged(1.0, "(0, 100]")
    """Sampling temperature. The actor's log-probabilities are computed at the same temperature."""
    top_p: float = ranged(1.0, "(0, 1]")
    """Sample from the smallest set of tokens with at least this much probability. Below 1, the engine's
    log-probabilities are those of the truncated distribution and the actor's are not, which adds a mismatch."""
    top_k: int = ranged(0, "[0, 10000000]")
    """Sample from the k most likely tokens; 0: all."""
    stop_token_ids: list[int] = ranged([], "[0, 2147483647]")
    """More token ids that end a completion, besides the model's own (docs/data.md)."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0


@dataclass
class ServersConfig:
    free_at_resume = True
    endpoints: list[str] = field(default_factory=list)
    """Addresses of servers that are already running, or of routers in front of servers, as http://host:port. Hosts
    other than this machine's loopback need `allow_remote_endpoints`."""
    allow_remote_endpoints: bool = False
    """Allow plain HTTP to other hosts; prompts and completions can then be read on that network."""
    launch: Literal["none", "local"] = "none"
    """`local`: the trainer starts `count` servers on each of its machines and ends them with the run. On several
    machines the servers listen on the network between them, which needs `allow_remote_endpoints`."""
    count: int = ranged(1, "[1, 1024]")
    """Servers per machine: those of the trainer with launch=local, its own for `dppo-megatron serve`."""
    registry_dir: str = ""
    """Directory on a shared file system in which `dppo-megatron serve` registers servers on other machines. Servers may
    join and leave during the run; a new one is used from the next weight sync on."""
    min_servers: int = ranged(1, "[1, 1024]")
    """With `registry_dir`: number of servers that the first step waits for (`limits.start_timeout_s`)."""
    python: str = ""
    """Python interpreter of the engine's environment (.venv-vllm/bin/python); empty: the trainer's."""
    args: list[str] = field(default_factory=list)
    """More arguments for a launched server's command line, such as [--gpu-memory-utilization, "0.4"]."""
    gpus: list[str] = field(default_factory=list)
    """CUDA_VISIBLE_DEVICES of each launched server, such as ["0,1", "2,3"], with as many devices as the parallel sizes
    in `args` need. Numbers are positions in the trainer's own CUDA_VISIBLE_DEVICES if it has them (without `colocate`,
    after its ranks' GPUs), else CUDA's. Empty: all."""
    colocate: bool = False
    """Launched servers share the actor's GPUs, and sleep (free weights and KV cache) during the update."""
    api_key_env: str = "DPPO_ENGINE_API_KEY"
    """Environment variable that holds the servers' API key. If it is not set, no key is sent to `endpoints`, and
    launched servers get a random one. The key is never written or logged."""


@dataclass
class SpeculationConfig:
    free_at_resume = True
    method: Literal["none", "ngram", "suffix", "eagle3"] = "none"
    """How launched servers draft tokens, several of which the model verifies in one pass. `ngram`: what followed the
    same tokens earlier in the text. `suffix`: also in earlier completions. `eagle3`: the draft model at `draft_path`.
    The policy's distribution and log-probabilities stay the same."""
    draft_path: str = ""
    """Directory of an eagle3 draft model for this model. It is not trained, and guesses worse as the policy moves."""
    draft_tokens: int = ranged(4, "[1, 64]")
    """Tokens drafted at a time while few sequences are running."""
    max_drafted: int = ranged(128, "[0, 1e6]")
    """Most drafted tokens that a server verifies in one pass: with n running sequences each drafts `draft_tokens`, but
    at most max_drafted / n, so none above n = max_drafted, where drafts cost as much as they save. 0: no limit."""


@dataclass
class SyncConfig:
    channel: Literal["auto", "disk", "gloo", "nccl", "ipc"] = field(default="auto", metadata=FREE_AT_RESUME)
    """How weights reach a server. `disk`: safetensors files on a path that both can read. `gloo`, `nccl`: a broadcast
    group with the engine's workers. `ipc`: launched servers map memory of the trainer (CUDA IPC on GPUs). `auto`: ipc
    for servers that are colocated or launched on a CPU, else nccl on GPUs or gloo, else disk; the choice is logged."""
    dir: str = field(default="", metadata=FREE_AT_RESUME)
    """Directory for channel=disk, at the same path on the servers; each run adds its own. Empty: run_dir/sync."""
    bucket_mb: int = ranged(256, "[1, 1000000]", free_at_resume=True)
    """Weights are gathered and sent in buckets of about this many MiB, so that no rank holds the whole model."""
    verify_every: int = ranged(10, COUNT, free_at_resume=True)
    """After the first and then every this many syncs, compare the servers with the actor: checksums of tensors, if the
    engine exposes them, and the log-probabilities of a canary completion. 0: never."""
    max_canary_logprob_diff: float = ranged(0.05, "(0, 1e6]", free_at_resume=True)
    """Largest mean |log-probability difference| of the canary; above it the run stops."""
    in_flight: Literal["finish", "abort", "continue"] = "finish"
    """With async_steps, what a sync does with requests in flight. `finish`: wait for all of them, stragglers included
    (async_steps=1 at most). `abort`: abort them and generate them again. `continue`: go on with the new weights. The
    weights version of every token is recorded."""


@dataclass
class LimitsConfig:
    max_concurrent_sequences: int = ranged(512, "[1, 1000000]", free_at_resume=True)
    """Most sequences generated at a time: by one rank in one batch (hf), or by one replica of a server
    (--max-num-seqs). A server with N data-parallel replicas gets N times as many."""
    start_timeout_s: float = ranged(600.0, SECONDS, free_at_resume=True)
    """How long a launched server may take until it is ready."""
    sync_timeout_s: float = ranged(600.0, SECONDS, free_at_resume=True)
    """A server whose weight sync takes longer is marked out."""
    request_timeout_s: float = ranged(3600.0, SECONDS, free_at_resume=True)
    """A request older than this, counted from its first attempt, is ended, and its unfinished completions are missing
    from the step. In an evaluation it stops the run."""
    engine_wait_s: float = ranged(300.0, SECONDS, free_at_resume=True)
    """With every server out, a weight sync waits this long for one to come back; then the run stops."""
    probe_every_s: float = ranged(5.0, SECONDS, free_at_resume=True)
    """Interval between health probes of each server."""
    probe_timeout_s: float = ranged(20.0, SECONDS, free_at_resume=True)
    """A server whose health probe takes longer is marked out, and its requests are retried elsewhere."""
    logprob_diff_warning: float = ranged(0.5, "(0, 1e6]", free_at_resume=True)
    """Warn if a step's mean |log-probability difference| between engine and actor is above this."""


@dataclass
class RolloutConfig:
    page = "engines.md"
    engine: Literal["hf", "vllm", "sglang"] = "hf"
    """What generates completions: `hf` is embedded in every rank; `vllm` and `sglang` are servers."""
    prompts_per_step: int = ranged(64, "[1, 1000000]")
    """Nominal prompts of a step, before any pruning: the N of every denominator."""
    completions_per_prompt: int = ranged(8, "[2, 65536]", why="an advantage compares a group's completions")
    """Completions sampled for each selected prompt: the group size G."""
    async_steps: int = ranged(0, "[0, 8]")
    """Generate up to this many steps ahead: requests of later steps use the servers while stragglers of this step
    finish. Tokens are then at most this many steps old, which objective.correction makes up for. Colocated servers
    still pause for every update. 0: generate each step with the newest weights."""
    quantization: Literal["off", "fp8", "fp8_pow2"] = "off"
    """How servers hold the weights of linear layers. `off`: as the actor does. `fp8`: in FP8, rounded by the trainer,
    with a scale for each 128 x 128 block. `fp8_pow2`: the same with powers of two as scales, which Blackwell's kernels
    need. FP8 samples from a different policy than the one trained, so it needs objective.correction."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The distribution that completions are sampled from."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    """Where the servers are, or how they are started. Unused with engine=hf."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """Speculative decoding: drafted tokens are verified several at a time, which is faster while few sequences run."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """How weights reach the servers, and how their arrival is verified."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """Concurrency and time limits."""

    @property
    def overlaps_update(self) -> bool:
        """Whether servers generate while the actor trains."""
        return self.async_steps > 0 and not self.servers.colocate

    @property
    def pauses_requests(self) -> bool:
        """Whether requests are in flight when servers take new weights or sleep, and continue afterwards."""
        return self.async_steps > 0 and self.sync.in_flight == "continue"


def check_rollout(config: RolloutConfig) -> None:
    """Raise `UserError` for the first setting of `rollout` that contradicts another."""
    has_servers, servers = config.engine != "hf", config.servers
    sources = {"endpoints": servers.endpoints, "launch": servers.launch != "none", "registry_dir": servers.registry_dir}
    given = [key for key, value in sources.items() if value]
    if given and not has_servers:
        raise UserError(
            f"rollout.servers.{given[0]} is set, but rollout.engine = hf has no servers; use vllm or sglang"
        )
    if not has_servers and config.async_steps:
        raise UserError(
            f"rollout.async_steps = {config.async_steps} needs servers: the embedded hf engine runs on the actor's own"
            " devices"
        )
    if has_servers and len(given) != 1:
        raise UserError(
            f"rollout.engine = {config.engine} needs exactly one of the three sources of servers:"
            " rollout.servers.endpoints=[http://127.0.0.1:8000] if they run already, rollout.servers.launch=local if"
            " the trainer is to start them, rollout.servers.registry_dir=DIR for those of `dppo-megatron serve`"
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
            f"rollout.async_steps = {config.async_steps} keeps requests of several steps in flight, but with"
            " rollout.sync.in_flight = finish every weight sync waits for all of them; set"
            " rollout.sync.in_flight=continue"
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
            f"rollout.servers.args: pipeline parallel {stages}: SGLang (0.5.23) with several stages cannot pause"
            f" requests, which rollout.async_steps = {config.async_steps} with rollout.sync.in_flight = continue needs;"
            " use tensor parallelism"
        )


def _check_quantization(config: RolloutConfig) -> None:
    servers, is_on = config.servers, config.quantization != "off"
    if is_on and config.engine == "hf":
        raise UserError(f"rollout.quantization = {config.quantization} is for servers; rollout.engine = hf has none")
    if option := named_option(servers.args, QUANTIZATION_OPTIONS if is_on else QUANTIZATION_OPTIONS[:2]):
        raise UserError(
            f"rollout.servers.args has {option}, which rollout.quantization chooses: weight syncs must send the format"
            " that the server holds"
        )
    if is_on and config.engine == "sglang" and servers.colocate and named_option(servers.args, ("--kv-cache-dtype",)):
        raise UserError(
            "rollout.servers.args has --kv-cache-dtype: with rollout.quantization SGLang keeps scales for its KV cache,"
            " and loses them when it sleeps (rollout.servers.colocate); leave it out"
        )


def _check_speculation(config: RolloutConfig) -> None:
    """Refuse settings with which the engine cannot draft, or would sample or report differently than without drafts."""
    speculation, servers, sampling = config.speculation, config.servers, config.sampling
    method = speculation.method
    if bool(speculation.draft_path) != (method == "eagle3"):
        raise UserError(
            f"rollout.speculation.draft_path is {'set' if speculation.draft_path else 'empty'}, but"
            f" rollout.speculation.method = {method}; eagle3 needs a draft model, and no other method takes one"
        )
    if method == "none":
        return
    setting = f"rollout.speculation.method = {method}"
    if servers.launch == "none" and not servers.registry_dir:
        raise UserError(
            f"{setting} is for launched servers (rollout.servers.launch=local, or `dppo-megatron serve`); those of"
            " rollout.servers.endpoints draft as they were started, and the hf engine cannot draft"
        )
    if config.engine == "sglang" and method == "suffix":
        raise UserError(f"{setting} is vLLM's; SGLang has ngram and eagle3")
    if config.engine == "sglang" and sampling.truncates:
        raise UserError(
            f"{setting}: with drafts SGLang reports log-probabilities as they are without rollout.sampling.top_p and"
            " top_k; leave both at their defaults"
        )
    sglang_eagle, attention = config.engine == "sglang" and method == "eagle3", read_split(servers.args).attention
    if config.engine == "sglang" and method == "ngram" and attention > 1:
        raise UserError(
            f"{setting}: SGLang has no n-grams with attention data parallelism (--attn-dp-size {attention}); use eagle3"
        )
    if sglang_eagle and attention > 1 and len(draft_lengths(config)) > 1:
        raise UserError(
            f"{setting}: with attention data parallelism (--attn-dp-size {attention}) SGLang drafts the same number at"
            " any concurrency; set rollout.speculation.max_drafted=0"
        )
    if sglang_eagle and config.sync.channel == "disk":
        raise UserError(
            f"{setting} with rollout.sync.channel = disk: SGLang loads the policy's files into the draft model too;"
            " leave it at auto"
        )
    for options, why in (
        (DRAFT_OPTIONS, "which rollout.speculation chooses"),
        (STAGE_OPTIONS, "with which SGLang refuses drafts and vLLM's are untested; use tensor parallelism"),
        (
            REPLICA_OPTIONS if config.engine == "vllm" and speculation.max_drafted else (),
            "with which vLLM drafts the same number at any concurrency: use rollout.servers.count, or"
            " rollout.speculation.max_drafted=0",
        ),
        (
            REPLICA_OPTIONS if sglang_eagle and attention == 1 else (),
            "with which SGLang takes weights only from disk, into the draft model too: use rollout.servers.count",
        ),
    ):
        if option := named_option(servers.args, options):
            raise UserError(f"{setting}: rollout.servers.args has {option}, {why}")


def draft_lengths(config: RolloutConfig) -> list[tuple[int, int, int]]:
    """How many tokens a server drafts for each sequence, depending on how many sequences are running.

    Returns:
        (first, last, tokens): with first to last sequences running, each drafts `tokens`. The ranges cover 1 to
        `limits.max_concurrent_sequences`.

    Example: draft_tokens=2, max_drafted=8: [(1, 4, 2), (5, 8, 1), (9, 512, 0)]
    """
    most, budget = config.limits.max_concurrent_sequences, config.speculation.max_drafted
    if not budget:
        return [(1, most, config.speculation.draft_tokens)]
    lengths, first = [], 1
    for tokens in range(min(config.speculation.draft_tokens, budget), -1, -1):
        last = min(most, budget // tokens) if tokens else most
        if last >= first:
            lengths.append((first, last, tokens))
            first = last + 1
    return lengths


def _check_keys(config: RolloutConfig) -> None:
    """Refuse API keys in settings, because settings are written to files; messages do not repeat the value. Also refuse
    a model's own code, and arguments that the trainer sets itself."""
    name = config.servers.api_key_env
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not (name in os.environ or re.fullmatch(_VARIABLE, name)):
        raise UserError(
            "rollout.servers.api_key_env is not the name of an environment variable that is set; it must not be the key"
            " itself"
        )
    if named_option(config.servers.args, KEY_OPTIONS):
        raise UserError(
            "rollout.servers.args holds a key, which would be readable in config.yaml and in the list of processes; put"
            f" it into the environment variable {name} (rollout.servers.api_key_env)"
        )
    if option := named_option(config.servers.args, ("--trust-remote-code",)):
        raise UserError(f"rollout.servers.args has {option}, which runs a model's own Python files; leave it out")
    if option := named_option(config.servers.args, OWN_OPTIONS):
        raise UserError(
            f"rollout.servers.args has {option}, which is the trainer's to set: it needs the server's address, model,"
            " workers and endpoints; leave it out, or start the server yourself (rollout.servers.endpoints)"
        )


def check_endpoint(url: str, config: RolloutConfig) -> None:
    """Raise `UserError` if `url` is not the address of a server to which requests may be sent."""
    if "@" in url or "?" in url or "#" in url:  # the value is not shown: it may contain a key
        raise UserError(
            "rollout.servers.endpoints: put no key in an address; rollout.servers.api_key_env names the environment"
            " variable that holds it"
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
            f"rollout.servers.endpoints: '{url}' is another host, and others on the network can read plain HTTP;"
            " set rollout.servers.allow_remote_endpoints=true if that network is yours"
        )
