"""A Hugging Face checkpoint to a Megatron distributed checkpoint that loads at any layout.

    python tools/convert_hf_to_megatron.py --hf Qwen3-8B --out qwen3-8b --tp 4 --pp 2

The same as `dppo-megatron convert to-megatron`; docs/checkpoints.md says what is promised.
"""

from __future__ import annotations

import sys

from dppo_megatron.workbench.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
