"""Every setting of a training job, once, with its meaning under it.

One tree of plain dataclasses rather than an argument namespace: each part of the code is given only its own section,
so a signature shows what a function depends on. Units are in the names. `layers.py` checks types, the range at each
field checks values, `checks.py` checks how settings fit together. `page` is the page in docs/ that explains a section;
`free_at_resume` marks settings that may change when a run resumes.
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
"""Fields of `actor.megatron` that divide the layers among stages; like `actor.layout`, they may change at a resume."""
INTERLEAVED_GROUP = "microbatch_group_size_per_vp_stage"
"""A field of `actor.megatron` that packing and the memory plan read too."""
OF_VIRTUAL_STAGES = (INTERLEAVED_GROUP, "overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "batch_p2p_comm")
"""Whether these are accepted depends on the number of virtual stages, so they may change at a resume as it may."""


@dataclass
class ModelConfig:
    page = "actor.md"
    hf_path: str = ""
    """Directory of the Hugging Face checkpoint to train (config.json, *.safetensors, tokenizer)."""
    provider: str = ""
    """For a model family that this project does not know: the mbridge class that describes it. `mbridge` takes the one
    registered for the model_type, `module:Class` one of your own. At start the first layers are compared with those of
    transformers. Empty: a family that this project knows."""
    ignore_config_keys: list[str] = field(default_factory=list)
    """Keys of the model's config.json to ignore: unknown here, and without effect on what the model computes. Any other
    unknown key is refused unless its value is off (null, false, 0 or empty)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters and activations. With bfloat16 the optimizer keeps main parameters in float32."""


@dataclass
class SftConfig:
    """An optional supervised phase before RL, with the same actor. Off while `steps` is 0."""

    page = "sft.md"
    examples_path: str = ""
    """Worked solutions, in any format of data.train_path. Each row has data.problem_field and `completion_field`."""
    completion_field: str = "completion"
    """Field of a row that holds the solution's text; the end-of-sequence token is appended. If this is the same as
    data.problem_field, that field holds a list of messages, and the last one (the assistant's) is the solution."""
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
    """Most tokens in one packed micro-batch, rounded down to the multiple that the layout and number format need. The
    longest possible sequence must fit, or the run does not start."""
    mode: Literal["balanced", "window", "first_fit_decreasing", "none"] = "balanced"
    """`balanced`: as few micro-batches as possible, then equal time over ranks and pipeline slots. `window`: the
    paper's Dense Prompt Packing, a greedy choice within a window. `first_fit_decreasing`: the usual heuristic. `none`:
    one sequence per micro-batch, the unpacked baseline."""
    window: int = ranged(64, "[1, 1000000]")
    """Number of sequences that mode=window chooses from; the other modes see all of them."""


@dataclass
class LayoutConfig:
    free_at_resume = True
    tensor_parallel: int = ranged(1, "[1, 65536]")
    """Tensor-parallel size."""
    pipeline_parallel: int = ranged(1, "[1, 65536]")
    """Pipeline stages. The schedule is 1F1B, or interleaved with virtual_pipeline above 1."""
    virtual_pipeline: int = ranged(1, "[1, 65536]")
    """Model chunks per pipeline stage (interleaved schedule). Above 1, all packs of a step are padded to one length."""
    context_parallel: int = ranged(1, "[1, 65536]")
    """Ranks that share each sequence (zig-zag halves), for contexts that do not fit on one rank."""
    expert_parallel: int = ranged(1, "[1, 65536]")
    """Ranks that share the experts of a mixture-of-experts model."""
    expert_tensor_parallel: int = ranged(0, "[0, 65536]")
    """Tensor-parallel size inside each expert; 0: the same as tensor_parallel."""
    sequence_parallel: bool = True
    """Shard activations over the tensor-parallel ranks. No effect at tensor_parallel=1."""


@dataclass
class OptimizerConfig:
    learning_rate: float = ranged(1e-6, "(0, 100]")
    """Peak learning rate of the RL phase."""
    min_learning_rate: float = ranged(0.0, "[0, 100]")
    """Learning rate at the last update, for the linear and cosine schedules."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning-rate schedule after the warm-up."""
    lr_warmup_steps: int = ranged(0, COUNT)
    """Linear warm-up from 0, in optimizer updates."""
    weight_decay: float = ranged(0.0, "[0, 100]")
    """Decoupled weight decay (AdamW)."""
    adam_beta1: float = ranged(0.9, "[0, 1)")
    """Decay of Adam's first moment."""
    adam_beta2: float = ranged(0.95, "[0, 1)")
    """Decay of Adam's second moment."""
    adam_eps: float = ranged(1e-8, "(0, 1]")
    """Adam's epsilon."""
    max_grad_norm: float = ranged(1.0, "[0, 1e9]")
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    distributed: bool = True
    """Shard optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""
    moments_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of both of Adam's moments (Megatron's exp_avg_dtype and exp_avg_sq_dtype). bfloat16 and float16 need
    Transformer Engine's Adam (Megatron's precision-aware optimizer), model.dtype=bfloat16 and `distributed`."""
    main_params_dtype: Literal["float32", "float16"] = "float32"
    """Type of the optimizer's main parameters. float16 has the same requirements as 16-bit moments."""
    cpu_offload: float = ranged(0.0, "[0, 1]")
    """1: the optimizer's state stays on the host and is updated there: less device memory, a slower step. Needs
    `distributed`, model.dtype=bfloat16 and Transformer Engine. actor.offload offloads only while servers generate."""


@dataclass
class LoraConfig:
    """Train low-rank adapters (arXiv 2106.09685) on linear layers and freeze the rest. Off while `rank` is 0."""

    rank: int = ranged(0, "[0, 4096]")
    """Rank of the adapters: rows of A, columns of B. 0: no adapters, every parameter is trained."""
    alpha: float = ranged(32.0, "(0, 1e6]")
    """The product of B and A is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Projections that get an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (latent attention:
    q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj), or all-linear for all of these."""
    experts: bool = False
    """In a mixture of experts, adapt the projections of each routed expert; as in PEFT, shared experts and dense
    feed-forward layers get no adapters. With Transformer Engine experts then run one by one, not as one GEMM."""


@dataclass
class ActorConfig:
    page = "actor.md"
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """How the model is split over ranks; data parallelism takes the remaining factor of the world size."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the RL phase; the SFT phase has its own learning rate."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train low-rank adapters instead of all parameters."""
    recompute: Literal["none", "selective", "full"] = field(default="none", metadata=FREE_AT_RESUME)
    """Activation recomputation: `full` recomputes every layer in the backward pass, `selective` only the parts of
    each layer that recompute_modules names."""
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"], metadata=FREE_AT_RESUME)
    """What recompute=selective recomputes, by Megatron's names: core_attn, mlp, moe; with Transformer Engine also
    moe_act (grouped experts) and layernorm."""
    offload: Literal["auto", "none", "optimizer", "all"] = field(default="auto", metadata=FREE_AT_RESUME)
    """What leaves the device while colocated servers generate. `optimizer`: gradients are freed, main parameters and
    moments move to pinned host memory. `all`: the weights move too. `auto`: `all` on GPUs with
    rollout.servers.colocate, else `none`."""
    overlap_grad_reduce: bool = field(default=False, metadata=FREE_AT_RESUME)
    """Reduce gradients over data-parallel ranks in buckets (actor.ddp.bucket_size) during the last micro-batch's
    backward pass."""
    overlap_param_gather: bool = field(default=False, metadata=FREE_AT_RESUME)
    """Gather updated parameters from data-parallel ranks, layer by layer, during the next update's forward pass. The
    last update of a step is gathered before its weights are read, so this helps only with objective.updates_per_step
    above 1. Needs overlap_grad_reduce and actor.optimizer.distributed."""
    layer_spec: Literal["auto", "te", "local"] = field(default="auto", metadata=FREE_AT_RESUME)
    """Which layers the model is built of: `te`, Transformer Engine's (CUDA), or `local`, Megatron's own with this
    project's packed attention. `auto` takes te where it is installed and there is a CUDA device."""
    logprob_chunk_tokens: int = ranged(2048, "[1, 100000000]", free_at_resume=True)
    """Tokens whose log-probabilities are computed at a time: bounds the float32 logits of the full vocabulary."""
    logprob_kernel: Literal["auto", "triton", "torch"] = field(default="auto", metadata=FREE_AT_RESUME)
    """What computes log-probabilities and entropy of a chunk: fused `triton` kernels (CUDA), or `torch` operations,
    which read the logits about ten times instead of once. `auto` takes triton where it can run."""
    fp8: Literal["off", "tensorwise", "delayed", "blockwise", "mxfp8"] = "off"
    """FP8 recipe of Transformer Engine for the linear layers. An H100 runs tensorwise, delayed and blockwise; mxfp8
    needs a Blackwell chip. Run `dppo-megatron doctor --fp8-gate CONFIG` before a long job."""
    fp8_bf16_layers: int = ranged(0, "[0, 10000]")
    """Keep this many layers at each end of the model in bfloat16 (not with fp8=delayed)."""
    routing_replay: Literal["off", "engine", "actor"] = "off"
    """For a mixture of experts. `engine`: the pass for old log-probabilities and the update send each token to the
    experts that the engine chose when it sampled the token. `actor`: updates send it to those that the actor chose in
    its own pass before the first update. See [actor.md](actor.md)."""
    megatron: dict[str, Any] = field(
        default_factory=dict, metadata={"free_at_resume": (*UNEVEN_STAGES, *OF_VIRTUAL_STAGES)}
    )
    """Fields of Megatron's TransformerConfig by their own names, such as {moe_router_fusion: true, moe_permute_fusion:
    true}, checked against the installed version. Fields that another setting decides are refused."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's DistributedDataParallelConfig, such as {overlap_grad_reduce: true, bucket_size: 40000000,
    grad_reduce_in_fp32: false}, checked likewise."""


@dataclass
class EvalConfig:
    """When to evaluate, and how sets are sampled unless a set says otherwise."""

    page = "evaluation.md"
    free_at_resume = True
    every_steps: int = ranged(0, COUNT)
    """Evaluate every this many steps, and also before and after training; 0: only before and after."""
    samples: int = ranged(1, "[1, 65536]")
    """Completions sampled for each problem."""
    temperature: float = ranged(0.0, "[0, 100]")
    """Sampling temperature; 0: greedy."""
    top_p: float = ranged(1.0, "(0, 1]")
    """Sample from the smallest set of tokens with at least this much probability."""
    top_k: int = ranged(0, "[0, 10000000]")
    """Sample from the k most likely tokens; 0: all."""
    max_completion_tokens: int = ranged(0, "[0, 100000000]")
    """Most tokens of a completion; 0: as rollout.sampling.max_completion_tokens."""


@dataclass
class CheckpointConfig:
    page = "checkpoints.md"
    free_at_resume = True
    every_steps: int = ranged(0, COUNT)
    """Save a resumable checkpoint every this many steps, and also at the end; 0: only at the end."""
    keep: int = ranged(2, COUNT)
    """How many of the newest good checkpoints to keep; older ones are removed once a newer one is complete. 0: all."""
    async_save: bool = False
    """Write checkpoints while the next step runs, through Megatron's asynchronous save. A checkpoint becomes visible at
    the end of the step in which the last rank has finished writing."""
    resume: str = "auto"
    """`auto`: resume from the newest good checkpoint of run_dir, or begin a new run if there is none. `never`: it is an
    error if run_dir already holds a run. A directory (runs/x/checkpoints/step_000020): begin a new run_dir from that
    checkpoint; once run_dir has checkpoints of its own, the same as `auto`."""
    may_change: list[str] = field(default_factory=list)
    """More settings or sections that may differ from those of the run that is resumed, such as
    [actor.optimizer.learning_rate]; docs/checkpoints.md lists those that always may, and those that never may."""


@dataclass
class GuardConfig:
    """What stops a run that has gone wrong, with exit code 3 and a checkpoint."""

    page = "checkpoints.md"
    free_at_resume = True
    max_skipped_updates: int = ranged(5, COUNT)
    """An update whose loss or gradient is not finite is skipped; this many in a row, or one if 0, stop the run."""
    watchdog_s: float = ranged(300.0, "[0, 1e8]")
    """If a rank sends no heartbeat for this long, the others report which one and stop. 0: no watchdog."""
    rendezvous_timeout_s: float = ranged(600.0, SECONDS)
    """How long the ranks wait for each other at the start before they exit and free their GPUs."""


@dataclass
class Config:
    page = "configuration.md"
    run_dir: str = field(default="", metadata=FREE_AT_RESUME | {"page": "run_directory.md"})
    """Where the run writes; see docs/run_directory.md. If it already holds this run, the run resumes."""
    seed: int = ranged(0, "[0, 9223372036854775807]", why="it seeds 64-bit generators")
    """Seeds data order, sampling and every selection draw, each through its own counter-based stream."""
    steps: int = ranged(100, COUNT, free_at_resume=True)
    """RL steps: a rollout and `objective.updates_per_step` updates each. 0: only SFT, then evaluated and saved."""
    threads_per_rank: int = ranged(0, "[0, 1024]", free_at_resume=True)
    """CPU threads of torch in each rank; 0: the machine's cores divided by the ranks on it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model that is trained."""
    data: DataConfig = field(default_factory=DataConfig)
    """Problems to train and evaluate on."""
    sft: SftConfig = field(default_factory=SftConfig)
    """Supervised phase before RL."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How completions are generated: engine, servers, sampling, weight sync."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How completions are graded."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Advantage, policy loss, KL, corrections, and the updates on each rollout."""
    pruning: PruningConfig = field(default_factory=PruningConfig)
    """Which prompts are skipped before rollout, and which completions are dropped before the update."""
    packing: PackingConfig = field(default_factory=PackingConfig)
    """How sequences are packed into micro-batches."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The Megatron-core model: layout, optimizer, precision."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """When to evaluate, and how evaluation sets are sampled."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When to save, and what to resume from."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Limits that stop a run that has gone wrong."""
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    """What a run records besides metrics: samples, traces, timelines, profiles, trackers."""
