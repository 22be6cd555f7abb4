"""A process whose hub is a small one of its own: `python hub_client.py ROOT COMMANDS.json`.

`datasets` reads HF_ENDPOINT once, when it is imported, so this needs a process; one for all commands, since importing
takes two seconds. COMMANDS holds argument lists of `dppo-megatron`; the last two run after the hub has gone. Printed
is one JSON object a command: exit code, last line of stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

from support.hub import Hub


def main(root: str, commands: str) -> None:
    """Run the commands."""
    listed = json.loads(Path(commands).read_text(encoding="utf-8"))
    with Hub(Path(root), gated="HuggingFaceH4/aime_2024", dropped="math-ai/aime25", cut="math-ai/amc23") as hub:
        os.environ["HF_ENDPOINT"] = hub.endpoint
        time.sleep = lambda _: None  # the client waits 23 s between its tries
        for command in listed[:-2]:
            _run(command)
    for command in listed[-2:]:
        _run(command)


def _run(command: list[str]) -> None:
    from dppo_megatron.workbench.cli import main as run

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = run(command)
    lines = said.getvalue().strip().splitlines()
    print(json.dumps({"command": command, "code": code, "said": lines[-1] if lines else ""}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
