"""A Megatron distributed checkpoint, from training or converted, to a Hugging Face checkpoint.

    python tools/convert_megatron_to_hf.py --checkpoint runs/x/checkpoints/step_000020 --out hf --dtype bf16

The same as `dppo-megatron convert to-hf`; docs/checkpoints.md says what is promised.
"""

from __future__ import annotations

import sys

from dppo_megatron.workbench.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
