"""SGLang's server with a check of its key at every path.

    DPPO_SERVER_KEY=... python dppo_sglang_server.py ARGUMENTS OF sglang.launch_server

SGLang takes a key on its command line only, where every user of the machine can read it, and writes its arguments, the
key among them, to its log. Here the key comes from the environment and goes to a middleware of the application's
alone, before SGLang starts it. Nothing of SGLang is patched.

A file of its own, beside the check that it shares with vLLM, because it runs in the engine's environment.
"""

from __future__ import annotations

import os
import sys

from dppo_vllm_guard import RequireKey

KEY_VARIABLE = "DPPO_SERVER_KEY"


def main() -> None:
    """What `sglang.launch_server` does, behind the check."""
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    arguments = prepare_server_args(sys.argv[1:])
    if getattr(arguments, "tokenizer_worker_num", 1) > 1:
        # its workers import the application afresh, without the check
        raise SystemExit("dppo_sglang_server: --tokenizer-worker-num above 1 would leave the server without its key")
    http_server.app.add_middleware(RequireKey, variable=KEY_VARIABLE)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
