"""The machines that a plan is for, and the constants that no config.json has, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30

CONTEXT_BYTES = 2 * GIB
"""CUDA context, NCCL's buffers and cuBLAS workspaces of a training process. An assumption; nvidia-smi before the first
step shows yours."""
SLEEPING_BYTES = 2 * GIB
"""What a sleeping server keeps on a GPU: its context, NCCL and CUDA graphs. An assumption."""
ENGINE_WORK_BYTES = 3 * GIB
"""What a server needs beside weights and cache: activations of a prefill, sampling, CUDA graphs. An assumption; vLLM
logs its own at start."""
FRAGMENTATION = 1.05
"""Memory that the allocator holds for activations over what their tensors take: the factor of Megatron-LM's own
estimate (megatron/training/theoretical_memory_usage.py)."""
PROCESS_HOST_BYTES = 6 * GIB
"""Host memory of one process with torch and CUDA, and of the data that it reads. An assumption."""


@dataclass(frozen=True, slots=True)
class Chip:
    memory_bytes: float
    """What programs see; less than the name suggests."""
    peak_flops: float
    """Dense bfloat16, NVIDIA's data sheets."""
    bandwidth: float
    """Bytes per second of its memory, NVIDIA's data sheets."""
    link: float
    """Bytes per second that NVLink takes in one direction, half of what the data sheets call its bandwidth."""
    capability: tuple[int, int]
    """CUDA's compute capability."""


CHIPS = {
    "h100": Chip(79.1 * GIB, 989e12, 3.35e12, 450e9, (9, 0)),  # torch: "a total capacity of 79.10 GiB"
    "h200": Chip(139.8 * GIB, 989e12, 4.8e12, 450e9, (9, 0)),
    "a100": Chip(79.1 * GIB, 312e12, 2.039e12, 300e9, (8, 0)),
    "b200": Chip(178.0 * GIB, 2250e12, 8e12, 900e9, (10, 0)),
}


@dataclass(frozen=True, slots=True)
class Site:
    gpus: int
    """GPUs of the trainer."""
    gpus_per_node: int
    gpu_memory: float
    """Bytes of one GPU."""
    peak_flops: float
    host_memory: float
    """Bytes of one node."""
    engine_gpus: int = 0
    """GPUs behind `rollout.servers.endpoints`; 0: not known."""
    bandwidth: float = CHIPS["h100"].bandwidth
    """Bytes per second of a GPU's memory."""
    link: float = CHIPS["h100"].link
    """Bytes per second from one GPU of a node to the others."""
    most_ranks: int = 0
    """Training processes on a node; 0: one for each of its GPUs."""

    @property
    def nodes(self) -> int:
        """Nodes of the trainer."""
        return max(1, -(-self.gpus // self.ranks_per_node))

    @property
    def ranks_per_node(self) -> int:
        """Training processes on one node."""
        return min(self.gpus, self.most_ranks or self.gpus_per_node)
