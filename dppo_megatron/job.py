"""Loads and checks everything a run needs before a process group or a model is made.

So a mistake in data, tokenizer, checkpoint headers, graders, losses or policies costs seconds and not a queue slot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dppo_megatron.algorithms.objectives import PolicyLoss, check_policy_loss
from dppo_megatron.algorithms.token_values import OwnTokens, try_token_values
from dppo_megatron.config.checks import check_world_size
from dppo_megatron.config.notes import effect_notes, gspo_note, server_notes, warmup_note
from dppo_megatron.config.objective import zero_advantage_slope
from dppo_megatron.config.plugins import load_function
from dppo_megatron.config.resolved_sets import (
    eval_set_configs,
    longest_sequence,
    longest_trained,
    set_rewards,
)
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.config.server_args import check_longest
from dppo_megatron.data.cache import LazyPrompts
from dppo_megatron.data.examples import load_examples
from dppo_megatron.data.sets import ProblemSet, load_eval_sets, load_train_sets, stop_token_ids
from dppo_megatron.data.summary import data_fingerprint, report_lines
from dppo_megatron.launcher_env import launched_here
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import check_longest_trained, usable_capacity
from dppo_megatron.platform.capabilities import Machine, check_gpus, this_machine
from dppo_megatron.progress import progress
from dppo_megatron.pruning.interface import LARGEST_REWARD
from dppo_megatron.pruning.policies import check_methods, prompt_policy_class
from dppo_megatron.pruning.trial import try_policies, try_prompt_policy
from dppo_megatron.rewards.cross_check import check_installed
from dppo_megatron.rewards.grading import Graders
from dppo_megatron.rewards.start_checks import RewardBounds, check_grader, check_references, unused_grader
from dppo_megatron.types import Prompt, PromptFeatures, TrainSample, UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.hf_files import WeightReader, assets
from dppo_megatron.weights.json_files import plain
from dppo_megatron.weights.provider import check_first_layers, model_architecture
from dppo_megatron.weights.tokenizer import load_tokenizer, rowless
from dppo_megatron.weights.torch_dist import open_checkpoint


@dataclass(frozen=True)  # no slots, for cached_property
class Job:
    """A checked configuration, with everything that it refers to loaded."""

    config: Config
    architecture: Architecture
    checkpoint: WeightReader
    tokenizer: PreTrainedTokenizerBase
    train_sets: dict[str, ProblemSet]
    """By name; their prompts are numbered consecutively, in this order."""
    eval_sets: dict[str, ProblemSet]
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion besides the tokenizer's end of sequence."""
    sft_examples: list[TrainSample]
    """Empty after SFT, and in a run that resumes: no checkpoint is written before SFT has ended."""
    grade: Graders
    policy_loss: PolicyLoss | None = None
    """The user's own loss, `objective.function`."""
    token_values: OwnTokens | None = None
    reference: WeightReader | None = None
    """Weights of the KL term's reference policy; None: the policy's own at the start of RL."""
    notes: list[str] = field(default_factory=list)

    @cached_property
    def train_prompts(self) -> Sequence[Prompt]:
        """Prompts of all training sets; each one's position is its `index`."""

        def graded(one: ProblemSet) -> Sequence[Prompt]:
            if (key := self.grade.key_of(one.key)) == "reward":
                return one.prompts
            return LazyPrompts(len(one.prompts), lambda index: replace(one.prompts[index], graded_by=key))

        return LazyPrompts.joined([graded(one) for one in self.train_sets.values()])

    @cached_property
    def prompt_features(self) -> PromptFeatures:
        """The features of all training prompts."""
        return features_of([one.columns for one in self.train_sets.values()])

    @property
    def data_fingerprint(self) -> dict[str, Any]:
        """What a checkpoint stores about the data."""
        return data_fingerprint(self.train_sets, self.eval_sets, self.stop_token_ids)

    @property
    def data_report(self) -> list[str]:
        """Lines for the log: the sets, their first prompts, and oddities such as duplicates."""
        return report_lines(self.train_sets, self.eval_sets, self.stop_token_ids, self.tokenizer)

    def check_references(self) -> list[str]:
        """Grade the references of every set as if they were answers; returns lines for the log.

        Call it on one rank, which uses all of the job's limits: on 64 ranks, a judge would be asked 64 times about the
        same 2,000 references. Raises UserError as `rewards.start_checks.check_references`.
        """
        graders = self.grade.alone()
        named = [*self.train_sets.items(), *((f"eval/{name}", one) for name, one in self.eval_sets.items())]
        lines = []
        try:
            for name, loaded in named:
                key = graders.key_of(loaded.key)
                lines.append(check_references(graders[key], graders.rewards[key], name, loaded.prompts, key))
        except BaseException:
            graders.close()
            raise
        _close_idle(graders, self.config, self.train_sets if graders is self.grade else {})
        return [line for line in lines if line]

    def check_first_layers(self) -> list[str]:
        """Compare a provider's first layers with transformers', on one rank; returns lines for the log. Raises
        UserError as `weights.provider.check_first_layers`."""
        model = self.config.model
        try:
            return [check_first_layers(model, self.config.rollout.engine == "hf")] if model.provider else []
        except BaseException:
            self.grade.close()
            raise


def features_of(sets: Sequence[PromptFeatures]) -> PromptFeatures:
    """The features of all prompts of several sets, one set after the other."""
    codes: dict[str, int] = {}
    source = [np.array([codes.setdefault(name, len(codes)) for name in one.sources])[one.source] for one in sets]
    return PromptFeatures(
        np.concatenate([one.prompt_tokens for one in sets]),
        np.concatenate([one.level for one in sets]),
        np.concatenate(source),
        tuple(codes),
    )


def prepare_job(config: Config, world_size: int, *, trains: bool = True, machine: Machine | None = None) -> Job:
    """Load the data and read the checkpoint's headers.

    Args:
        trains: False for a standalone evaluation: no training data, and the actor's settings are not checked.
        machine: what the job will run on; None: this machine.

    Raises:
        UserError: anything that would fail later, except references that graders cannot read (`Job.check_references`).
    """
    if machine is None:
        check_gpus()
    architecture = model_architecture(config.model)
    if trains:
        architecture = architecture.with_adapters(config.actor.lora)
    lines = check_settings(config, architecture, world_size, machine or this_machine()) if trains else []
    if trains and machine is None and this_machine().cuda_capability is not None:
        lines += server_notes(config.rollout, launched_here())
    if trains:
        check_installed(config.reward)
        assets(config.model.hf_path)  # raises for files that must not be copied into a checkpoint
    _check_positions(config, architecture)
    with progress(f"opening {config.model.hf_path}"):
        checkpoint = open_checkpoint(config.model.hf_path, architecture)
        tokenizer = load_tokenizer(config.model.hf_path, architecture)
    reference = _open_reference(config, architecture, tokenizer) if trains else None
    eval_sets = load_eval_sets(config, tokenizer)
    train_sets = load_train_sets(config, tokenizer, eval_sets) if trains else {}
    examples: list[TrainSample] = []
    if trains and config.sft.steps:
        usable = usable_capacity(packing_layout(config.actor, world_size), config.packing.max_tokens_per_microbatch)
        longest, fits_in = min(
            (usable, " in a micro-batch (packing.max_tokens_per_microbatch)"),
            (architecture.max_positions, " in the model's positions"),
        )
        examples, notes = load_examples(
            config, tokenizer, eval_sets, max_tokens=longest, fits_in=fits_in, is_over=_resumes(config)
        )
        lines += notes
    _check_rows([*eval_sets.values(), *train_sets.values()], examples, rowless(tokenizer, architecture))
    if train_sets:
        rollout, features = config.rollout, features_of([one.columns for one in train_sets.values()])
        sizes = rollout.prompts_per_step, rollout.completions_per_prompt, rollout.sampling.max_completion_tokens
        try_prompt_policy(config.pruning.prompt, features, *sizes, config.objective.updates_per_step, config.steps)
    policy_loss: PolicyLoss | None = None
    if trains and config.objective.function:
        policy_loss = load_function("objective.function", config.objective.function)
        check_policy_loss(policy_loss, config.objective)
    token_values: OwnTokens | None = None
    if train_sets and (path := config.objective.token_values):
        function, carries = load_function("objective.token_values", path), zero_advantage_slope(config.objective) > 0
        prompt = next(one.prompts[0] for one in train_sets.values())
        token_values = try_token_values(OwnTokens(function, path, config.seed, carries), prompt)
    graders = _start_graders(config, train_sets, eval_sets, world_size)
    notes = unused_grader(config.reward) + graders.process_notes()
    if trains and config.sft.examples_path and not config.sft.steps:
        notes.append("warning: sft.steps = 0: there is no warm start, and sft.examples_path is not read")
    for name, one in eval_set_configs(config).items():
        if one.samples > 1 and one.temperature == 0:
            notes.append(
                f"warning: {name}: the {one.samples} samples of each problem are the same answer at temperature 0"
            )
    if trains and not (config.steps or config.sft.steps):
        notes.append("warning: steps = 0 and sft.steps = 0: nothing is trained; the model is only evaluated and saved")
    return Job(
        config=config,
        architecture=architecture,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        train_sets=train_sets,
        eval_sets=eval_sets,
        stop_token_ids=stop_token_ids(config, tokenizer),
        sft_examples=examples,
        grade=graders,
        policy_loss=policy_loss,
        token_values=token_values,
        reference=reference,
        notes=[*lines, *notes],
    )


def _resumes(config: Config) -> bool:
    """Whether the run resumes from a checkpoint, or ends because none is good. Incomplete ones have other names."""
    own = Path(config.run_dir, "checkpoints").glob("step_*") if config.run_dir else ()
    has_own = any(re.fullmatch(r"step_\d{6,20}", path.name) for path in own)
    return config.checkpoint.resume != "never" and (has_own or config.checkpoint.resume != "auto")


def _check_rows(sets: Sequence[ProblemSet], examples: Sequence[TrainSample], beyond: Mapping[int, str]) -> None:
    """Raise `UserError` for a prompt or SFT example with a token of `beyond`, which have no row in the embedding.
    Cached prompts are checked too, as they may be of another model with the same tokenizer."""
    if not beyond:
        return
    prompts = ((prompt.origin, prompt.token_ids) for one in sets for prompt in one.prompts)
    for origin, token_ids in chain(prompts, ((one.id, one.token_ids.tolist()) for one in examples)):
        if missing := beyond.keys() & set(token_ids):
            raise UserError(
                f"{origin}: holds {plain(beyond[min(missing)])}, a token of the model's tokenizer without a row in its"
                " embedding; take it out of the text"
            )


def with_checkpoint(job: Job, directory: Path) -> Job:
    """The same job with the weights of another checkpoint. Raises UserError as `open_checkpoint`."""
    config = replace(job.config, model=replace(job.config.model, hf_path=str(directory)))
    return replace(job, config=config, checkpoint=open_checkpoint(directory, job.architecture))


def _open_reference(
    config: Config, architecture: Architecture, tokenizer: PreTrainedTokenizerBase
) -> WeightReader | None:
    """The weights of objective.kl.reference_path, if it is set. Raises UserError unless that model can score what the
    policy writes: it runs with the policy's config.json and on the policy's tokens."""
    path, key = config.objective.kl.reference_path, "objective.kl.reference_path ="
    if not path:
        return None
    other = model_architecture(replace(config.model, hf_path=path), key)
    # These affect no computation; they differ between base and instruct models, and between a run's hf/ and its origin.
    may_differ = "max_positions", "prediction_layers"
    differ = [
        f"{item.name} is {getattr(other, item.name)}, not {getattr(architecture, item.name)}"
        for item in fields(Architecture)
        if item.name not in may_differ and getattr(other, item.name) != getattr(architecture, item.name)
    ]
    if not differ and load_tokenizer(path, other, key).get_vocab() != tokenizer.get_vocab():
        differ = ["its tokenizer has other tokens"]
    if differ:
        raise UserError(f"{key} '{path}': is another kind of model than '{config.model.hf_path}': {'; '.join(differ)}")
    return open_checkpoint(path, other, key)  # `other`, as its prediction_layers may differ


def check_settings(config: Config, architecture: Architecture, world_size: int, machine: Machine) -> list[str]:
    """Checks that need config.json, but no data and no tokenizer; `plan` runs them too.

    Returns:
        Lines for the log: pruning settings that the methods do not read, other settings without effect, and warnings
        about stale rollouts, routing in a mixture of experts and FP8 scales.

    Raises:
        UserError: impossible pruning, layout, layers or lengths.
    """
    size, selection = config.rollout.completions_per_prompt, selection_settings(config)
    minibatch = selection.planned_prompts // config.objective.updates_per_step * size
    reads = selection.reads_pass_rates
    unread = check_methods(config.pruning, group_size=size, minibatch_size=minibatch, reads_pass_rates=reads)
    longest, slope = config.rollout.sampling.max_completion_tokens, zero_advantage_slope(config.objective)
    updates = config.objective.updates_per_step
    try_policies(config.pruning, minibatch // size, size, longest, slope, updates, config.steps)
    check_actor(config, architecture, world_size, machine)
    architecture.check_servers(config.rollout)
    _check_positions(config, architecture)
    notes = effect_notes(config) + gspo_note(config) + warmup_note(config)
    return unread + notes + _warnings(config, architecture)


def _warnings(config: Config, architecture: Architecture) -> list[str]:
    notes, steps, replay = list[str](), config.rollout.async_steps, config.actor.routing_replay
    if steps and config.objective.correction.level == "none":
        notes.append(
            f"warning: rollout.async_steps = {steps} with objective.correction.level = none: completions up to {steps}"
            f" step{'s' * (steps > 1)} old are trained on as if they were new (docs/engines.md); `sequence` corrects"
            " that"
        )
    if architecture.experts is not None and replay == "off":
        notes.append(
            "warning: actor.routing_replay = off: engine and actor may send a token to different experts, which has"
            " made runs of large mixtures collapse; `engine` replays the engine's choice (docs/actor.md)"
        )
    if architecture.experts is not None and replay == "engine" and config.rollout.engine != "hf":
        engine = config.rollout.engine
        notes.append(f"not tried here, watch mismatch/kl: experts that {engine} records (docs/actor.md)")
    if config.actor.fp8 == "delayed":
        notes.append(
            "warning: actor.fp8 = delayed: scales start at 1, so a run's first update loses its smallest gradients;"
            " tensorwise computes them from the tensors themselves (docs/actor.md)"
        )
    return notes


def check_actor(config: Config, architecture: Architecture, world_size: int, machine: Machine) -> None:
    """Raise `UserError` for a layout or layers that are impossible with the model, the world size or the machine."""
    check_world_size(config, world_size)
    packs = packing_layout(config.actor, world_size)
    check_longest_trained(longest_trained(config), packs, config.packing.max_tokens_per_microbatch)
    architecture.check_layout(config.actor)
    architecture.check_bf16_layers(config.actor)
    layout = config.actor.layout
    has_experts = architecture.experts is not None
    wanted, fp8, heads = config.actor.layer_spec, config.actor.fp8, architecture.heads
    spec, _ = machine.choose_layer_spec(wanted, fp8, has_experts=has_experts, heads=heads)
    machine.check_context_parallel(spec, layout.context_parallel, heads)
    if spec == "te" and layout.context_parallel > 1 and architecture.gemma is not None:
        raise UserError(
            f"actor.layout.context_parallel = {layout.context_parallel}: Transformer Engine's attention has no windows"
            f" over packs there, which {architecture.name} needs; set it to 1, or actor.layer_spec to local"
        )
    machine.check_experts(layout.expert_parallel, layout.expert_tensor_parallel or layout.tensor_parallel)
    if has_experts:
        machine.check_mixture()
    setting = f"actor.routing_replay = {config.actor.routing_replay}"
    if config.actor.routing_replay != "off" and not has_experts:
        raise UserError(f"{setting}: {architecture.name} has no experts; leave it off")
    if config.actor.routing_replay != "off" and config.actor.megatron.get("moe_router_fusion"):
        raise UserError(
            f"{setting}: the fused router of actor.megatron.moe_router_fusion cannot replay experts; leave it out"
        )
    machine.check_optimizer(config.actor.optimizer)
    machine.check_logprob_kernel(config.actor.logprob_kernel)
    if config.actor.recompute == "selective":
        machine.check_recompute(config.actor.recompute_modules)


def _start_graders(
    config: Config, train_sets: Mapping[str, ProblemSet], eval_sets: Mapping[str, ProblemSet], world_size: int
) -> Graders:
    """Start the graders and try each on made-up answers; then end those that this rank does not need."""
    graders = Graders(set_rewards(config), shared_by=world_size)
    bounds = _reward_bounds(config) if train_sets else None
    sets = [(loaded, bounds) for loaded in train_sets.values()] + [(loaded, None) for loaded in eval_sets.values()]
    checked: set[str] = set()
    try:
        for loaded, allowed in sets:
            used = graders[graders.key_of(loaded.key)]
            if used.key not in checked and loaded.prompts:
                with progress(f"starting and trying {used.key}"):
                    check_grader(used, loaded.prompts[0], allowed)
                checked.add(used.key)
    except BaseException:
        graders.close()
        raise
    _close_idle(graders, config, train_sets)
    return graders


def _close_idle(graders: Graders, config: Config, train_sets: Mapping[str, ProblemSet]) -> None:
    """End the graders that grade no training completions on this rank. With servers the rollout clients grade them."""
    graded_here = train_sets.values() if config.rollout.engine == "hf" else ()
    graders.close(graders.rewards.keys() - {graders.key_of(loaded.key) for loaded in graded_here})


def _reward_bounds(config: Config) -> RewardBounds:
    prompt = config.pruning.prompt
    policy = prompt_policy_class(prompt.method)
    if why := policy.in_unit(prompt) or selection_settings(config).baseline_of_passes:
        return RewardBounds(0.0, 1.0, why)
    return RewardBounds(-LARGEST_REWARD, LARGEST_REWARD, "rewards are squared")


def _check_positions(config: Config, architecture: Architecture) -> None:
    longest, settings = longest_sequence(config)
    check_longest(config.rollout.servers.args, longest)
    if longest > architecture.max_positions:
        raise UserError(
            f"{settings} = {longest}, more than the {architecture.max_positions} positions of '{config.model.hf_path}'"
        )
