"""Experts that were chosen elsewhere are forced on the actor's routers: the same log-probabilities and gradients as
transformers with the same experts, at every layout."""

from __future__ import annotations

import base64
import importlib
import json
import socket
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.actor.layout import ContextShare
from dppo_megatron.actor.replay import Routers, _Replay
from dppo_megatron.algorithms.correction import Mismatch
from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.config.schema import ActorConfig, Config
from dppo_megatron.job import check_settings
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.rollout.client.buffer import BufferedGroup, hand_over
from dppo_megatron.rollout.client.messages import take_over
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import HFEngine
from dppo_megatron.rollout.servers.dialects import SGLangDialect, VLLMDialect
from dppo_megatron.rollout.servers.http import BadAnswer
from dppo_megatron.rollout.servers.in_engine import dppo_arrays
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest, Sampled, checked
from dppo_megatron.types import Completion, ExpertChoices, PackPlan, Prompt, TrainSample, UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.workbench.quickstart.tiny_model import make_tokenizer

SIZES: dict[str, Any] = {"family": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 4}
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
LAYOUTS = [
    Parallel(**DOUBLE),
    Parallel(tp=2, pp=2, ep=2, etp=1, **DOUBLE),
    Parallel(pp=2, vpp=2, recompute=True, **DOUBLE),
    Parallel(cp=2, ep=2, **DOUBLE),
    Parallel(dp=2, ep=2, recompute=True, **DOUBLE),
    Parallel(tp=2, etp=2, cp=2, **DOUBLE),
]


def _samples(path: Path) -> list[TrainSample]:
    """With random experts, mostly not the ones that the model would choose."""
    choices = read_architecture(path).expert_choices
    assert choices is not None
    layers, per_token, count = choices.layers, choices.per_token, choices.count
    rng, found = np.random.default_rng(5), []
    for sample in random_samples(9, 37):
        order = rng.random((sample.num_tokens, layers, count)).argsort(-1)[..., :per_token]
        found.append(replace(sample, experts=order.astype(np.uint8)))
    return found


def _measure(path: Path, parallel: Parallel, **settings: Any) -> tuple[Any, dict[str, torch.Tensor], bool, bool]:
    actor = build_actor(path, parallel, routing_replay="engine", **_ROUTER, **settings)
    samples = _samples(path)
    plan = plan_for(samples, parallel)
    logprobs = actor.logprobs(samples, plan)
    actor.accumulate(samples, plan, supervised())
    gradients = {name: gradient.clone() for name, gradient in actor.gradients()}
    routes = actor.own_logprobs(samples, plan, records=True).routes
    bare = [replace(sample, experts=None) for sample in samples]
    actor.accumulate(bare, plan, supervised(), routes=routes)
    again = all(torch.equal(gradient, gradients[name]) for name, gradient in actor.gradients())
    actor.accumulate(bare, plan, supervised())
    own = all(torch.equal(gradient, gradients[name]) for name, gradient in actor.gradients())
    return logprobs, gradients, again, own


_ROUTER = {"megatron": {"moe_router_dtype": "fp64"}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe"), **SIZES)


def _kept_for_the_backward_pass(path: Path, *modules: str) -> tuple[Any, dict[str, torch.Tensor], bool, bool, set[int]]:
    """As `_measure`, with `modules` recomputed, and how many micro-batches routers have held choices of at once."""
    held: set[int] = set()
    begin = _Replay.begin

    def noting(router: _Replay, forced: torch.Tensor | None) -> None:
        begin(router, forced)
        held.add(len(router._recomputed))

    _Replay.begin = noting  # type: ignore[method-assign]
    how = {"recompute": "selective", "recompute_modules": list(modules)} if modules else {}
    return *_measure(path, Parallel(**DOUBLE), **how), held


def _force(model: torch.nn.Module, experts: np.ndarray) -> None:
    """Have the model's routers choose `experts` [tokens, layers, k]; the rest of their arithmetic is transformers'."""
    for layer, block in enumerate(model.model.layers):
        gate = getattr(block.mlp, "gate", None)
        if gate is None:
            continue
        own = torch.from_numpy(experts[:, layer].astype(np.int64))

        def forward(hidden: torch.Tensor, gate: Any = gate, own: torch.Tensor = own) -> tuple[torch.Tensor, ...]:
            logits = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            is_sigmoid = hasattr(gate, "e_score_correction_bias")
            shares = logits.float().sigmoid() if is_sigmoid else F.softmax(logits, dtype=torch.float, dim=-1)
            shares = shares.gather(1, own)
            if getattr(gate, "norm_topk_prob", True):
                shares = shares / shares.sum(-1, keepdim=True)
            scale = gate.routed_scaling_factor if is_sigmoid else 1.0
            return logits, (scale * shares).to(logits.dtype), own

        gate.forward = forward


@pytest.fixture(scope="module")
def expected(path: Path) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    return _expected(path)


def _expected(path: Path) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """transformers' log-probabilities and gradient of the weighted loss, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()
    found = []
    for sample in _samples(path):
        assert sample.experts is not None
        _force(model, sample.experts)
        ids = torch.from_numpy(sample.token_ids)
        logits = model(ids[None, :-1]).logits[0, sample.num_prompt_tokens - 1 :]
        picked = logits.log_softmax(-1).gather(1, ids[sample.num_prompt_tokens :, None])[:, 0]
        (-picked.sum() * sample.weight / sample.denominator).backward()
        found.append(picked.detach().numpy())
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        base, _, kind = name.partition(".experts.")
        for expert, one in enumerate(parameter.grad if kind else []):
            parts = (
                {"gate_proj": one.chunk(2)[0], "up_proj": one.chunk(2)[1]} if kind == "gate_up_proj" else {kind: one}
            )
            gradients |= {f"{base}.experts.{expert}.{part}.weight": value for part, value in parts.items()}
        if not kind:
            gradients[name] = parameter.grad
    return found, gradients


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_equals_transformers_with_the_same_experts(path: Path, expected: Any, parallel: Parallel) -> None:
    """Log-probabilities within 1e-5, the gradient of each parameter within 1e-6 of the largest norm: float64, but for
    the shares of the experts, which both compute in float32. What a pass recorded gives the same when replayed;
    without either the routers choose."""
    logprobs, gradients, again, own = run_ranks(_measure, parallel.world_size, path, parallel)[0]
    assert again and not own
    _check_equal(expected, logprobs, gradients)


def _check_equal(expected: Any, logprobs: Any, gradients: dict[str, torch.Tensor]) -> None:
    for mine, theirs in zip(logprobs, expected[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    theirs_by_name = expected[1]
    assert gradients.keys() == theirs_by_name.keys()
    for name, gradient in gradients.items():
        assert (gradient - theirs_by_name[name]).norm() <= 1e-6 * theirs_by_name[name].norm(), name


def _of_padding(path: Path) -> list[list[int]]:
    """Of each layer, how often the padding of a pack has chosen each expert."""
    samples = random_samples(3, 37)
    pack = PackingLayout().place((0, 1, 2), [sample.num_tokens for sample in samples], pad_to=200)
    actor, plan = build_actor(path, Parallel(), routing_replay="actor"), PackPlan(((pack,),), 200, 1, {})
    routes = actor.own_logprobs(samples, plan, records=True).routes
    assert routes is not None
    padding = routes[0][0][pack.cu_seqlens_padded[-2] :]
    return [torch.bincount(layer.flatten()).tolist() for layer in padding.long().unbind(1)]


def test_padding_visits_many_experts(path: Path) -> None:
    """Where routers choose: equal tokens would choose alike in every layer, and burden the ranks of those experts."""
    layers = run_ranks(_of_padding, 1, path)[0]
    assert len(layers) == SIZES["num_hidden_layers"]
    for counts in layers:
        assert max(counts) < sum(counts) / SIZES["num_experts_per_tok"], "every token has chosen this expert"


RENAMED = {"mixtral": ((".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))}
"""What transformers renames as it loads the checkpoint, and its checkpoint's name."""


# no size is a power of two
ODD = {"hidden_size": 42, "num_attention_heads": 6, "intermediate_size": 66}
OTHERS: dict[str, dict[str, Any]] = {
    **{family: {"family": family, "head_dim": 12} for family in ("qwen2_moe", "mixtral", "glm4_moe")},
    "deepseek_v3": {"family": "deepseek_v3", "num_key_value_heads": 6},
    "moonlight": {"family": "deepseek_v3", "num_key_value_heads": 6, "q_lora_rank": None}
    | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
}


@pytest.mark.parametrize("parallel", [LAYOUTS[1], LAYOUTS[3]], ids=str)
@pytest.mark.parametrize("case", OTHERS)
def test_other_mixtures_equal_transformers_with_the_same_experts(tmp_path: Path, case: str, parallel: Parallel) -> None:
    """Of which it says all but the choice: norms, attention, experts, their shares and every name."""
    path, family = write_model(tmp_path, **ODD | OTHERS[case]), OTHERS[case]["family"]
    logprobs, gradients, again, own = run_ranks(_measure, parallel.world_size, path, parallel)[0]
    assert again and not own
    theirs, by_name = _expected(path)
    for name, stored in RENAMED.get(family, ()):
        by_name = {one.replace(name, stored): gradient for one, gradient in by_name.items()}
    _check_equal((theirs, by_name), logprobs, gradients)


@pytest.mark.parametrize(("modules", "most"), [((), 0), (("core_attn",), 0), (("core_attn", "moe"), 1)])
def test_only_what_is_recomputed_is_kept(path: Path, expected: Any, modules: tuple[str, ...], most: int) -> None:
    """Nothing where no backward pass runs a router again, or an update would hold the choices of all its tokens; else
    those of the micro-batches that are under way."""
    logprobs, gradients, again, own, held = run_ranks(_kept_for_the_backward_pass, 1, path, *modules)[0]
    assert again and not own and max(held) == most
    _check_equal(expected, logprobs, gradients)


def test_a_rank_prepares_its_own_tokens_alone(path: Path) -> None:
    """Of four context-parallel ranks each has what one alone has at its positions, padding too, and takes less than
    half of that one's memory."""
    rng, slots = np.random.default_rng(0), (0, 2008, 3512, 3520)
    experts = [rng.integers(0, 6, (tokens, 4, 3)).astype(np.uint8) for tokens in (2001, 1500)]
    samples: Any = [SimpleNamespace(experts=one) for one in experts]
    pack: Any = SimpleNamespace(samples=(0, 1), packed=SimpleNamespace(slots=slots))

    def carried(context: ContextShare) -> tuple[torch.Tensor, int]:
        """The experts of a stage of two layers, and bytes at the peak."""
        how = {"sequence_parallel": False, "tensor_parallel": 1, "device": torch.device("cpu")}
        layout: Any = SimpleNamespace(context=context, **how)
        routers = Routers([], read_architecture(path), layout, replays=True)
        routers._of_chunk = [{layer: _Replay(False) for layer in (1, 2)}]
        routers._from_samples(samples, pack, 0)
        tracemalloc.start()
        found = routers._from_samples(samples, pack, 0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found is not None
        return found, peak

    whole, alone = carried(ContextShare())
    for start, one in zip(slots, experts, strict=False):
        assert np.array_equal(whole[start : start + len(one)], one[:, 1:3])
    for context in (ContextShare(rank, 4) for rank in range(4)):
        part, peak = carried(context)
        assert torch.equal(part, whole[context.indices(slots)]) and 2 * peak < alone


PROMPTS = [Prompt(index, "", ids, "", "") for index, ids in enumerate([(5, 6, 7, 8), (9, 4), (3, 5, 9, 11, 6, 7)])]


def _generated(path: Path, *, router_noise: float) -> list[tuple[Prompt, Completion]]:
    """Completions of the embedded engine, whose routers differ from the checkpoint's by relative noise."""
    engine = HFEngine(
        read_architecture(path),
        make_tokenizer(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_concurrent_sequences=64,
        records_experts=True,
    )
    torch.manual_seed(3)
    weights = {
        name: tensor * (1 + router_noise * torch.randn_like(tensor)) if "mlp.gate." in name else tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    engine.load_weights(lambda: weights.items())
    requests = [Request(prompt, index, 1) for prompt in PROMPTS for index in range(8)]
    found = engine.generate(requests, Sampling(24, 1.0, 0))
    return [(request.prompt, completion) for request, completion in zip(requests, found, strict=True)]


def _sample_of(prompt: Prompt, completion: Completion) -> TrainSample:
    ids = np.concatenate([np.array(prompt.token_ids, np.int64), completion.token_ids])
    return TrainSample("", ids, len(prompt.token_ids), completion.logprobs, 1.0, 1.0, 1.0, experts=completion.experts)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3"])
def test_the_embedded_engine_gives_the_experts_that_transformers_chooses(tmp_path: Path, family: str) -> None:
    """Of each token of prompt and completion but the last, in prompts of different lengths and completions that end
    early; float32, so a choice between nearly equal experts may differ: at most one in 500. Layers without experts
    have 0."""
    path = write_model(tmp_path, **SIZES if family == "qwen3_moe" else {"family": family})
    choices = read_architecture(path).expert_choices
    assert choices is not None
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    chosen: list[torch.Tensor] = []
    for block in model.model.layers[choices.dense_layers :]:
        block.mlp.gate.register_forward_hook(lambda _, __, found: chosen.append(found[2]))
    same = total = 0
    generated = _generated(path, router_noise=0.0)
    assert len({len(completion.token_ids) for _, completion in generated}) > 2
    for prompt, completion in generated:
        sample = _sample_of(prompt, completion)
        chosen.clear()
        with torch.no_grad():
            model(torch.from_numpy(sample.token_ids[None, :-1]))
        theirs = torch.stack(chosen, 1).sort(-1).values.numpy()
        assert completion.experts is not None and completion.experts.dtype == np.uint8
        assert completion.experts.shape == (sample.num_tokens, 4, choices.per_token)
        dense, mine = np.split(completion.experts, [choices.dense_layers], 1)
        same += int((np.sort(mine, -1) == theirs).all(-1).sum())
        assert not dense.any()
        total += theirs[..., 0].size
    assert total > 500 and total - same <= total / 500


def _mismatch(path: Path, samples: list[TrainSample]) -> tuple[float, float]:
    """KL between engine and actor with the engine's experts, and with the actor's own."""
    actor, found = build_actor(path, Parallel(), routing_replay="engine"), []
    for given in (samples, [replace(sample, experts=None) for sample in samples]):
        seen = Mismatch()
        for sample, values in zip(given, actor.logprobs(given, plan_for(given)) or [], strict=True):
            seen.add(values, sample.behaviour_logprobs, 1.0, 1.0)
        found.append(seen.metrics()["mismatch/kl"])
    return found[0], found[1]


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_replay_lowers_the_mismatch(path: Path, noise: float) -> None:
    """Routers whose weights differ by 1 or 3 % decide otherwise for some tokens; with the same decisions the KL is at
    least five times lower, in float32."""
    samples = [_sample_of(*one) for one in _generated(path, router_noise=noise)]
    replayed, own = run_ranks(_mismatch, 1, path, samples)[0]
    assert 0 <= 5 * replayed <= own, (replayed, own)


GROUP = GenerateRequest("r", (5, 6, 7), 2, 0, 4, stop_token_ids=(1,), experts=ExpertChoices(4, 3, 6))
TOKENS = [[9, 4, 1], [8, 1]]


def _experts() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = [(3 + len(tokens) - 1, 4, 6) for tokens in TOKENS]
    return [rng.random(shape).argsort(-1)[..., :3].astype(np.uint8) for shape in shapes]


def _packed(
    experts: Sequence[np.ndarray | None], reasons: Sequence[str] = ("stop", "stop"), version: str = "1", short: int = 0
) -> bytes:
    """The answer of our path in vLLM to GROUP."""
    spans = [[{"version": version, "start": 0, "end": len(tokens) - short}] for tokens in TOKENS]
    heads = [{"id": f"r/{i}", "finish_reason": reasons[i], "weight_versions": spans[i]} for i in range(len(TOKENS))]
    rows = [(head, tokens, [-1.0] * len(tokens)) for head, tokens in zip(heads, TOKENS, strict=True)]
    return dppo_arrays.packed(rows, experts)


def _read(content: bytes, group: GenerateRequest = GROUP) -> list[Sampled]:
    return checked(VLLMDialect(arrays=True).read([content], group), group, Expected(19, 1, 1))


def _answered(engine: str, experts: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What our path in an engine answers to GROUP: SGLang's own experts are int32 in base64."""
    if engine == "vllm":
        return _packed(experts)
    monkeypatch.syspath_prepend(str(Path(dppo_arrays.__file__).parent))
    answer = [
        {
            "output_ids": tokens,
            "meta_info": {
                "id": f"r/{index}",
                "finish_reason": {"type": "stop"},
                "weight_versions": [{"version": "1", "start": 0, "end": len(tokens)}],
                "output_token_logprobs": [[-1.0, token, None] for token in tokens],
                "routed_experts": base64.b64encode(experts[index].astype("<i4").tobytes()).decode(),
            },
        }
        for index, tokens in enumerate(TOKENS)
    ]
    content: bytes = importlib.import_module("dppo_sglang_server").packed_answers(answer, (4, 3, "uint8"))
    return content


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_experts_come_over_the_wire(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were sent, in a byte each, and to the rank that holds the completion."""
    experts = _experts()
    found = _read(_answered(engine, experts, monkeypatch))
    for one, sent in zip(found, experts, strict=True):
        assert one.experts is not None and one.experts.dtype == np.uint8
        assert np.array_equal(one.experts, sent)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        hand_over(ours, [BufferedGroup(0, found, ["a", "b"])])
        arrived = [one.completion.experts for one in take_over(theirs)]
    assert all(np.array_equal(one, sent) for one, sent in zip(arrived, experts, strict=True))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda one: one[:-1], "shape"),
        (lambda one: one[:, :3], "shape|cannot reshape"),
        (lambda one: np.where(one == 5, 6, one).astype(np.uint8), "expert 6"),
        (lambda one: one * 0, "one expert twice"),
        (lambda one: one.astype(np.int32) - 256 * (one == 5), "from -251|cannot be read"),
    ],
    ids=["a token too few", "a layer too few", "an expert that there is not", "not recorded", "5 in its last byte"],
)
def test_wrong_experts_are_refused(engine: str, spoil: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At our path or by the trainer; never something to train on."""
    with pytest.raises((BadAnswer, ValueError), match=message):
        _read(_answered(engine, [spoil(one) for one in _experts()], monkeypatch))


def test_experts_of_other_weights_are_refused() -> None:
    """They come with the weights version of every token that was sampled as they were, one row a token."""
    for version, short, message in (("0", 0, "not this rollout's"), ("1", 1, "weights versions for 2 of 3 tokens")):
        with pytest.raises(BadAnswer, match=message):
            _read(_packed(_experts(), version=version, short=short))


def test_an_aborted_completion_needs_no_experts() -> None:
    """It is asked for again or lost, never trained on; one that was aborted behind its last token has ended."""
    aborted = msgspec.structs.replace(GROUP, stop_token_ids=(2,), max_tokens=9)
    content = _packed([None, None], ("abort", "abort"))
    assert [one.finish_reason for one in _read(content, aborted)] == ["abort", "abort"]
    with pytest.raises(BadAnswer, match="no routed experts"):
        _read(content)


def test_an_answer_without_experts_is_refused_where_they_are_wanted() -> None:
    """And asked for only there: an evaluation takes none."""
    bare = msgspec.structs.replace(GROUP, experts=None)
    with pytest.raises(BadAnswer, match="--enable-return-routed-experts"):
        _read(_packed([None, None]))
    assert all(one.experts is None for one in _read(_packed(_experts()), bare))
    assert json.loads(VLLMDialect().rounds(GROUP)[-1][0].body)["experts"]
    assert json.loads(SGLangDialect(19).rounds(GROUP)[-1][0].body)["return_routed_experts"]
    assert "experts" not in json.loads(VLLMDialect().rounds(bare)[-1][0].body)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3", {"routing_replay": "engine"}, "has no experts; leave it off"),
        ("qwen3_moe", {"routing_replay": "actor", "megatron": {"moe_router_fusion": True}}, "the fused router"),
    ],
)
def test_what_cannot_be_replayed(tmp_path: Path, family: str, settings: dict[str, Any], message: str) -> None:
    """Said before anything is loaded; a mixture without replay is warned of."""
    config, architecture = (
        Config(actor=ActorConfig(**settings)),
        read_architecture(write_model(tmp_path, family=family, max_position_embeddings=4096)),
    )
    with pytest.raises(UserError, match=message):
        check_settings(config, architecture, 1, this_machine())
    lines = check_settings(Config(), architecture, 1, this_machine())
    assert any("warning: actor.routing_replay = off" in line for line in lines) == (family == "qwen3_moe")
