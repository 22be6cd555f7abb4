"""Every setting of a training job, once, with its meaning under it.

One tree of plain dataclasses rather than an argument namespace: each part of the code is handed its own section and
nothing else, so a signature shows what a function depends on. Units are in the names. `layers.py` checks types, the
range at each field checks values, `checks.py` checks how settings fit together. `page` is the page in docs/ that
explains a section; `free_at_resume` marks what may differ when a run resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dppo_megatron.config.data import DataConfig
from dppo_megatron.config.objective import ObjectiveConfig
from dppo_megatron.config.observe import ObserveConfig
from dppo_megatron.config.pruning import PruningConfig
from dppo_megatron.config.ranges import COUNT, FREE_AT_RESUME, SECONDS, ranged
from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.config.rollout import RolloutConfig

UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of `actor.megatron` that divide layers, and may change as `actor.layout` may."""
INTERLEAVED_GROUP = "microbatch_group_size_per_vp_stage"
"""The field of `actor.megatron` that the planner goes by too."""
OF_VIRTUAL_STAGES = (INTERLEAVED_GROUP, "overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "batch_p2p_comm")
"""Refused without them, or with them, so they may change as `actor.layout` may."""


@dataclass
class ModelConfig:
    page = "actor.md"
    hf_path: str = ""
    """Directory of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer). The RL run starts from it."""
    provider: str = ""
    """mbridge's class that describes a family without rows of its own here: `mbridge`, the one registered for the
    model_type, or `module:Class`, yours. The first layers are compared with transformers' at start. "": own rows."""
    ignore_config_keys: list[str] = field(default_factory=list)
    """Keys of its config.json that are not known here and change nothing that the model computes. Any other unknown
    key with a value that is on is refused."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameter and activation type. bfloat16 keeps float32 main parameters in the optimizer."""


@dataclass
class SftConfig:
    """An optional supervised phase before RL, through the same actor. Off while `steps` is 0."""

    page = "sft.md"
    examples_path: str = ""
    """JSON Lines file of worked solutions: the problem field of `data` and `completion_field`."""
    completion_field: str = "completion"
    """Field of a row that holds the solution's text; the end-of-sequence token is appended. The same as the problem
    field: a list of messages, the last one of which, the assistant's, is the solution."""
    steps: int = ranged(0, COUNT)
    """Optimizer steps."""
    examples_per_step: int = ranged(128, "[1, 1000000]")
    """Worked solutions per optimizer step."""
    learning_rate: float = ranged(1e-3, "(0, 100]")
    """Peak learning rate, constant after the warm-up."""
    lr_warmup_steps: int = ranged(10, COUNT)
    """Steps of linear warm-up from 0."""


@dataclass
class PackingConfig:
    page = "packing.md"
    free_at_resume = True
    max_tokens_per_microbatch: int = ranged(16384, "[1, 100000000]")
    """Hard cap of one packed micro-batch, rounded down to what the layout and number format run. The longest possible
    sequence must fit, or the run does not start."""
    mode: Literal["balanced", "window", "first_fit_decreasing", "none"] = "balanced"
    """`balanced`: fewest micro-batches, then even step time over ranks and pipeline slots. `window`: the paper's Dense
    Prompt Packing, window-based greedy. `first_fit_decreasing`: what most packers do. `none`: one sequence a
    micro-batch, the unpacked baseline."""
    window: int = ranged(64, "[1, 1000000]")
    """Sequences that mode=window chooses from; the other modes see all."""


@dataclass
class LayoutConfig:
    free_at_resume = True
    tensor_parallel: int = ranged(1, "[1, 65536]")
    """Tensor-parallel size."""
    pipeline_parallel: int = ranged(1, "[1, 65536]")
    """Pipeline stages: 1F1B, or interleaved with virtual_pipeline above 1."""
    virtual_pipeline: int = ranged(1, "[1, 65536]")
    """Model chunks per pipeline stage (interleaved schedule). Above 1 every pack of a step is padded to one length."""
    context_parallel: int = ranged(1, "[1, 65536]")
    """Ranks that share each sequence (zig-zag halves); for contexts that do not fit one rank."""
    expert_parallel: int = ranged(1, "[1, 65536]")
    """Ranks that share the experts of a mixture-of-experts model."""
    expert_tensor_parallel: int = ranged(0, "[0, 65536]")
    """Tensor-parallel size inside experts; 0: as tensor_parallel."""
    sequence_parallel: bool = True
    """Shard activations over the tensor-parallel ranks; without effect at tensor_parallel=1."""


@dataclass
class OptimizerConfig:
    learning_rate: float = ranged(1e-6, "(0, 100]")
    """Peak learning rate of the RL phase."""
    min_learning_rate: float = ranged(0.0, "[0, 100]")
    """Learning rate at the last update; used by the decaying schedules."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    lr_warmup_steps: int = ranged(0, COUNT)
    """Optimizer updates of linear warm-up from 0."""
    weight_decay: float = ranged(0.0, "[0, 100]")
    """Decoupled weight decay."""
    adam_beta1: float = ranged(0.9, "[0, 1)")
    """Decay of Adam's first moment."""
    adam_beta2: float = ranged(0.95, "[0, 1)")
    """Decay of Adam's second moment."""
    adam_eps: float = ranged(1e-8, "(0, 1]")
    """Adam's epsilon."""
    max_grad_norm: float = ranged(1.0, "[0, 1e9]")
    """Global gradient-norm clip; 0 turns clipping off."""
    distributed: bool = True
    """Shard optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""
    moments_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of both of Adam's moments (Megatron's exp_avg_dtype and exp_avg_sq_dtype). Fewer bits than float32 need
    Transformer Engine's Adam (Megatron's precision-aware optimizer), model.dtype=bfloat16 and `distributed`."""
    main_params_dtype: Literal["float32", "float16"] = "float32"
    """Of the optimizer's own parameters; float16 needs what fewer bits for the moments need."""
    cpu_offload: float = ranged(0.0, "[0, 1]")
    """1: the optimizer's state lives, and is stepped, on the host: less device memory for a slower step. Needs
    `distributed`, model.dtype=bfloat16 and Transformer Engine. What leaves only while servers generate is
    `actor.offload`."""


@dataclass
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) on linear layers, which alone are trained then. Off while `rank` is 0."""

    rank: int = ranged(0, "[0, 4096]")
    """Rows of an adapter's A and columns of its B; 0: every parameter is trained."""
    alpha: float = ranged(32.0, "(0, 1e6]")
    """The product of B and A is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Projections with an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (latent attention:
    q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj), or all-linear for every one of them."""
    experts: bool = False
    """Adapters on the projections of each expert of a mixture too, and as PEFT has it not on shared experts and dense
    layers. With Transformer Engine experts then run one by one instead of in one grouped product."""


@dataclass
class ActorConfig:
    page = "actor.md"
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """How the model is split over ranks; data parallelism takes the remaining factor of the world size."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the RL phase; SFT overrides the learning rate."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train adapters in place of all parameters."""
    recompute: Literal["none", "selective", "full"] = field(default="none", metadata=FREE_AT_RESUME)
    """Activation recomputation: `full` recomputes every layer in the backward pass, `selective` only the parts of
    each layer that recompute_modules names."""
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """What recompute = selective recomputes, by Megatron's names: core_attn, mlp, moe; with Transformer Engine also
    moe_act (grouped experts) and layernorm."""
    offload: Literal["auto", "none", "optimizer", "all"] = field(default="auto", metadata=FREE_AT_RESUME)
    """What leaves the device while colocated servers generate: `optimizer` frees gradients and takes main parameters
    and moments to pinned host memory, `all` the weights too. `auto`: all on GPUs with rollout.servers.colocate, else
    none."""
    overlap_grad_reduce: bool = field(default=False, metadata=FREE_AT_RESUME)
    """Send gradients between data-parallel ranks while the last micro-batch's backward pass still runs, in buckets of
    actor.ddp.bucket_size elements."""
    overlap_param_gather: bool = field(default=False, metadata=FREE_AT_RESUME)
    """Gather updated parameters from data-parallel ranks, layer by layer, while the next update's forward pass runs;
    the last update of a step is gathered before anyone reads its weights. Worth something with
    objective.updates_per_step above 1. Needs overlap_grad_reduce and the distributed optimizer."""
    layer_spec: Literal["auto", "te", "local"] = field(default="auto", metadata=FREE_AT_RESUME)
    """Layers of the model: `te` is Transformer Engine's (CUDA), `local` Megatron's own with this project's packed
    attention. `auto` takes te where it is installed and a CUDA device is there."""
    logprob_chunk_tokens: int = ranged(2048, "[1, 100000000]", free_at_resume=True)
    """Tokens whose full-vocabulary float32 logits exist at a time when log-probabilities are taken."""
    logprob_kernel: Literal["auto", "triton", "torch"] = field(default="auto", metadata=FREE_AT_RESUME)
    """What computes log-probabilities and entropy of a chunk: fused `triton` kernels (CUDA), or `torch`'s operations,
    which read the logits some ten times instead of once. `auto` takes triton where it can run."""
    fp8: Literal["off", "tensorwise", "delayed", "blockwise", "mxfp8"] = "off"
    """FP8 recipe of Transformer Engine for the linear layers; H100: tensorwise, delayed or blockwise. mxfp8 needs a
    Blackwell chip. Run `dppo-megatron doctor --fp8-gate CONFIG` before a long job."""
    fp8_bf16_layers: int = ranged(0, "[0, 10000]")
    """This many first and as many last layers stay in bfloat16 (not with fp8=delayed)."""
    routing_replay: Literal["off", "engine", "actor"] = "off"
    """Of a mixture of experts: `engine` sends every trained token to the experts that it went to while it was sampled,
    in the pass for old log-probabilities and in the update; `actor` to those of the actor's own pass before the first
    update. See [actor.md](actor.md)."""
    megatron: dict[str, Any] = field(
        default_factory=dict, metadata={"free_at_resume": (*UNEVEN_STAGES, *OF_VIRTUAL_STAGES)}
    )
    """Fields of Megatron's TransformerConfig by their own names, such as {moe_router_fusion: true, moe_permute_fusion:
    true}, checked against the installed version. What other settings decide is refused."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's DistributedDataParallelConfig, such as {overlap_grad_reduce: true, bucket_size: 40000000,
    grad_reduce_in_fp32: false}, checked likewise."""


@dataclass
class EvalConfig:
    """When to evaluate, and how sets are sampled unless a set says otherwise."""

    page = "evaluation.md"
    free_at_resume = True
    every_steps: int = ranged(0, COUNT)
    """Evaluate every so many steps, beside the one before and the one after training; 0: only those two."""
    samples: int = ranged(1, "[1, 65536]")
    """Completions of every problem."""
    temperature: float = ranged(0.0, "[0, 100]")
    """0 is greedy."""
    top_p: float = ranged(1.0, "(0, 1]")
    """Smallest set of tokens with this probability."""
    top_k: int = ranged(0, "[0, 10000000]")
    """The k most likely tokens; 0: all."""
    max_completion_tokens: int = ranged(0, "[0, 100000000]")
    """Longest answer; 0: as rollout.sampling.max_completion_tokens."""


@dataclass
class CheckpointConfig:
    page = "checkpoints.md"
    free_at_resume = True
    every_steps: int = ranged(0, COUNT)
    """Save a resumable checkpoint every so many steps, beside the one at the end; 0: only at the end."""
    keep: int = ranged(2, COUNT)
    """Good checkpoints that stay; older ones are removed after a newer one is complete. 0: all."""
    async_save: bool = False
    """Write while the next rollout runs, through Megatron's asynchronous save (`async` is a keyword of Python). The
    checkpoint becomes visible at the end of the step in which the last rank has finished writing."""
    resume: str = "auto"
    """`auto`: resume from the newest good checkpoint of run_dir, or begin where there is none. `never`: a run_dir that
    holds a run is an error. A directory (runs/x/checkpoints/step_000020): begin a new run_dir from that checkpoint;
    once run_dir has checkpoints of its own, as `auto`."""
    may_change: list[str] = field(default_factory=list)
    """Settings, or sections of them, that may differ from those of the run that is resumed, beside those that may
    differ anyway (docs/checkpoints.md), such as [actor.optimizer.learning_rate]. Pruning methods may not."""


@dataclass
class GuardConfig:
    """What stops a run that has gone wrong, with exit code 3 and a checkpoint."""

    page = "checkpoints.md"
    free_at_resume = True
    max_skipped_updates: int = ranged(5, COUNT)
    """An update whose loss or gradient is not finite is skipped; this many in a row stop the run. 0: the first."""
    watchdog_s: float = ranged(300.0, "[0, 1e8]")
    """If a rank gives no sign of life for this long, it is named and the others stop. 0: no watchdog."""
    rendezvous_timeout_s: float = ranged(600.0, SECONDS)
    """How long the ranks wait for each other at the start; then they exit and free their GPUs."""


@dataclass
class Config:
    """A whole training job."""

    page = "configuration.md"
    run_dir: str = field(default="", metadata=FREE_AT_RESUME | {"page": "run_directory.md"})
    """Where the run writes; see docs/run_directory.md. If it already holds this run, the run resumes."""
    seed: int = ranged(0, "[0, 9223372036854775807]", why="it seeds 64-bit generators")
    """Seeds data order, sampling and every selection draw, each through its own counter-based stream."""
    steps: int = ranged(100, COUNT, free_at_resume=True)
    """RL steps: one rollout and `objective.updates_per_step` optimizer updates each. 0: only SFT, evaluated
    and saved under hf/."""
    threads_per_rank: int = ranged(0, "[0, 1024]", free_at_resume=True)
    """CPU threads of torch in each rank; 0: cores of the machine divided by the ranks on it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model that is trained."""
    data: DataConfig = field(default_factory=DataConfig)
    """Problems to train and evaluate on."""
    sft: SftConfig = field(default_factory=SftConfig)
    """Supervised phase before RL."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Grading."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Advantage, policy loss, KL, corrections, and the updates on each rollout."""
    pruning: PruningConfig = field(default_factory=PruningConfig)
    """What is skipped before rollout and dropped before the update."""
    packing: PackingConfig = field(default_factory=PackingConfig)
    """Micro-batches."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """Megatron-core: layout and optimizer."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation during training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Guards and the watchdog."""
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    """What is left for people to look at."""
