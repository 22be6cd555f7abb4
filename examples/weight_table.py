"""Compares the weight table's names and shapes for a model directory with those of transformers.

    python examples/weight_table.py runs/task_seed0/model

The first thing to run after adding rows for a new family: it builds only empty tensors, so it takes seconds at any
size. Exit code 1 if a name or a shape differs.
"""

import sys

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.mapping import full_shape, hf_shapes, table

RENAMED = {
    "mixtral": {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."},
}
"""model_type -> parts of names in memory, and what they are in the checkpoint."""


def by_checkpoint_name(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters of a transformers model by their names in its checkpoint.

    For dense models the names are the same. From version 5 on, transformers fuses a layer's experts into two tensors in
    memory, while checkpoints and every engine keep one tensor per expert; here each is a view into the fused tensor.
    Mixtral's checkpoint also has other names for them.
    """
    renamed = RENAMED.get(str(getattr(model.config, "model_type", "")), {})
    named: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, fused in enumerate(parameter.unbind()):
                gate, up = fused.chunk(2)
                named |= {f"{stem}.{expert}.gate_proj.weight": gate, f"{stem}.{expert}.up_proj.weight": up}
        elif last == "down_proj":
            named |= {f"{stem}.{expert}.down_proj.weight": down for expert, down in enumerate(parameter.unbind())}
        else:
            named[name] = parameter
    named |= {name: bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for name, stored in renamed.items():
        named = {one.replace(name, stored): tensor for one, tensor in named.items()}
    return named


def differences(hf_path: str) -> list[str]:
    """A line for each tensor that only one side has, or whose shape differs."""
    ours = hf_shapes(read_architecture(hf_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(hf_path, trust_remote_code=False), trust_remote_code=False
        )
    theirs = {name: tuple(parameter.shape) for name, parameter in by_checkpoint_name(model).items()}
    return [
        f"{name}: {ours.get(name, 'not in the table')} here, {theirs.get(name, 'none')} in transformers"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def main(hf_path: str) -> int:
    """Print the table, then what differs."""
    architecture = read_architecture(hf_path)
    for key, names in table(architecture).items():
        print(f"{key:<55} {full_shape(key, architecture)!s:<16} {' + '.join(names)}")
    found = differences(hf_path)
    print("\n".join(found) if found else f"{architecture.name}: every name and shape is that of transformers")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/weight_table.py MODEL_DIRECTORY")
    try:
        sys.exit(main(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
