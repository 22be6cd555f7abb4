"""`python -m dppo_megatron COMMAND`: the command line where the installed script is not on the path, as in torchrun."""

from __future__ import annotations

import sys

from dppo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
