"""What conversion needs: seconds, and peak memory relative to the largest safetensors file, on a random model.

    python benchmarks/conversion.py [--layers 16] [--shard-gb 0.5] [--json FILE]

Each direction runs in a process of its own, whose peak resident memory is read at its end: the kernel's VmHWM, since
getrusage starts from the peak of the parent, which has made the model. The memory of Python, torch and the package
before the first tensor is measured in the same process and subtracted, because it does not grow with the model. The
growth has to stay below 1.3 x the largest safetensors file plus one layer.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors
import torch

from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import hf_writer
from dppo_megatron.weights.mapping import hf_shapes

_CHILD = """
import json, sys, time
from pathlib import Path
import dppo_megatron.convert as convert
def peak():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024
direction, source, target, shard_gb = sys.argv[1:5]
base, start = peak(), time.perf_counter()
if direction == "to-megatron":
    convert.hf_to_megatron(Path(source), Path(target))
else:
    convert.megatron_to_hf(Path(source), Path(target), shard_gb=float(shard_gb))
print(json.dumps({"seconds": time.perf_counter() - start, "base_bytes": base, "peak_bytes": peak()}))
"""


def make_model(directory: Path, num_layers: int, shard_gb: float) -> dict[str, int]:
    """A random Qwen3 of bfloat16 weights under `directory`; returns its sizes in bytes."""
    source = directory / "config"
    source.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    (source / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(source)
    shapes = hf_shapes(architecture)
    shard_bytes = int(shard_gb * 1e9)
    with hf_writer(directory / "hf", source, architecture, torch.bfloat16, max_shard_bytes=shard_bytes) as writer:
        for name, shape in shapes.items():
            writer.put(name, torch.randn(shape).bfloat16())
    files = [path.stat().st_size for path in (directory / "hf").glob("*.safetensors")]
    layer = sum(torch.Size(shape).numel() * 2 for name, shape in shapes.items() if ".layers.0." in name)
    return {"model_bytes": sum(files), "largest_file_bytes": max(files), "layer_bytes": layer}


def measure(direction: str, source: Path, target: Path, shard_gb: float) -> dict[str, Any]:
    """Run one direction in a fresh process."""
    command = [sys.executable, "-c", _CHILD, direction, str(source), str(target), str(shard_gb)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--shard-gb", type=float, default=0.5)
    parser.add_argument("--dir", help="where to work (default: the system's temporary directory)")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        directory = Path(folder)
        sizes = make_model(directory, arguments.layers, arguments.shard_gb)
        bound = 1.3 * sizes["largest_file_bytes"] + sizes["layer_bytes"]
        print(
            f"model {sizes['model_bytes'] / 1e9:.2f} GB, largest file {sizes['largest_file_bytes'] / 1e9:.2f} GB,"
            f" a layer {sizes['layer_bytes'] / 1e9:.2f} GB; bound {bound / 1e9:.2f} GB"
        )
        print(f"{'direction':<14}{'seconds':>9}{'GB/s':>7}{'peak GB':>9}{'of it model':>13}{'x largest file':>16}")
        rows = {}
        for direction, source, target in (("to-megatron", "hf", "megatron"), ("to-hf", "megatron", "back")):
            row = measure(direction, directory / source, directory / target, arguments.shard_gb)
            growth = row["peak_bytes"] - row["base_bytes"]
            row |= {"growth_bytes": growth, "growth_per_largest_file": growth / sizes["largest_file_bytes"]}
            row["within_bound"] = growth < bound
            rows[direction] = row
            print(
                f"{direction:<14}{row['seconds']:>9.1f}{sizes['model_bytes'] / 1e9 / row['seconds']:>7.2f}"
                f"{row['peak_bytes'] / 1e9:>9.2f}{growth / 1e9:>13.2f}{row['growth_per_largest_file']:>16.2f}"
            )
    if arguments.json:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__}
        machine["safetensors"] = safetensors.__version__
        record = sizes | {"bound_bytes": bound, "directions": rows, "machine": machine}
        Path(arguments.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
