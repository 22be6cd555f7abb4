"""vLLM imported once, and forked for each server that a trainer starts: 3 CPU seconds a start instead of 60.

A server with two data-parallel replicas is six processes, each of which imports torch and vLLM (vLLM spawns on a CPU).
Here one process imports them; whoever starts the interpreter that `interpreter` makes gets a child of it:

    trainer --starts--> this file as a client --arguments, environment, log--> this file as the parent of servers
                        (what ends it ends the server)                           '--forks--> the server --> its replicas

The server is vLLM's own module with the trainer's own command line, and a small cache. With DPPO_REHEARSED_NODE in the
trainer's environment, what a CPU has not is made up:

    a worker's GPU    the entry of CUDA_VISIBLE_DEVICES that vLLM's placement gives it, on the machine that
                      DPPO_REHEARSED_NODE names; it takes weights from memory on that GPU only, as CUDA IPC does, and
                      notes in DPPO_REHEARSED_NOTES what it then holds
    all_gatherv,      of a mixture under data parallelism, which vLLM 0.32.0 has not written for its CPU communicator
    reduce_scatterv
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_MAX_MESSAGE = 1 << 20
_PR_SET_PDEATHSIG = 1
_IN_ENGINE = Path(__file__).parents[3] / "dppo_megatron" / "rollout" / "servers" / "in_engine"


@contextlib.contextmanager
def interpreter(python: str, directory: Path) -> Iterator[Path]:
    """An executable for `rollout.servers.python` that starts servers of the vLLM in the environment of `python`."""
    address, script = directory / "socket", directory / "forked_python"
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([str(_IN_ENGINE), str(Path(__file__).parent)]),
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    with (directory / "parent.log").open("wb") as log, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()  # so that clients may come before it has imported
        parent = subprocess.Popen(
            [python, "-P", __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=[listener.fileno()],
        )
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" "{address}" "$@"\n')
    script.chmod(0o755)
    try:
        yield script
    finally:
        assert parent.stdin is not None
        parent.stdin.close()  # ends it
        parent.wait()


def group_of(process: int, script: Path) -> int:
    """The process group of the server that the process started from `script` stands for."""
    return int((script.parent / f"group_of_{process}").read_text())


def _client(address: str, arguments: list[str]) -> int:
    """In the trainer's child: have a server forked, stay while it lives, end it when asked to."""
    # A server whose replicas have died ignores SIGTERM: nothing of it may outlive a test that is interrupted.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as parent:
        parent.connect(address)
        message = json.dumps({"arguments": arguments, "environment": dict(os.environ)}).encode()
        socket.send_fds(parent, [message], [1, 2])
        server = int(parent.recv(64))
        (Path(address).parent / f"group_of_{os.getpid()}").write_text(str(server))

        def end(kind: int, _: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server, kind)

        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, end)
        return int(parent.recv(64) or 1)


def _parent(listener: socket.socket) -> None:
    """Import, then fork a keeper for each server that is asked for, until stdin ends."""
    _import_once()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no burial
    import select

    while listener in select.select([listener, sys.stdin], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(_keep(client))
        client.close()


def _keep(client: socket.socket) -> int:
    """Fork the server, in a process group of its own; tell the client how it ends, and end it when the client has."""
    message, (out, err), *_ = socket.recv_fds(client, _MAX_MESSAGE, 2)
    asked = json.loads(message)
    server = os.fork()
    if server == 0:
        client.close()
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        _serve(asked["arguments"], asked["environment"])
    client.send(str(server).encode())
    if os.fork() == 0:
        client.recv(1)  # nothing comes: the client has gone, whatever killed it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)
        os._exit(0)
    _, status = os.waitpid(server, 0)
    with contextlib.suppress(OSError):
        client.send(str(abs(os.waitstatus_to_exitcode(status))).encode())
    return 0


def _import_once() -> None:
    """What a server with its engines and workers would each import."""
    import gc
    import multiprocessing

    import dppo_vllm_extension  # noqa: F401
    import fp8_kernel
    import setproctitle
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.qwen3
    import vllm.model_executor.models.qwen3_moe
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.distributed.device_communicators import shm_broadcast

    # A worker spins for a second after each message that it reads: eight of them would have two cores for themselves.
    shm_broadcast.SpinCondition.__init__.__defaults__ = (0.0,)  # busy_loop_s
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 50
    fp8_kernel.register()
    setproctitle.getproctitle()  # it finds the place of the title now, while the environment is still that of the start
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)  # type: ignore[method-assign, assignment, arg-type, return-value]
    gc.freeze()


def _make_up_devices() -> None:
    import dppo_vllm_extension as extension

    dppo_model, take, finish = (
        extension.WorkerExtension.dppo_model,
        extension.Receiver.receive_weights,
        extension.Receiver.finish_weight_update,
    )

    def own_device(config: Any) -> str:
        """Place in vLLM's order: replica by replica, and in a replica by tensor-parallel rank."""
        place = config.data_parallel_index * config.world_size + config.rank
        return f"GPU-{os.environ['DPPO_REHEARSED_NODE']}-{os.environ['CUDA_VISIBLE_DEVICES'].split(',')[place]}"

    def model_on_device(self: Any) -> dict[str, Any]:
        self.vllm_config.parallel_config.rank = self.rank
        return dict(dppo_model(self)) | {"device": own_device(self.vllm_config.parallel_config)}

    def take_on_device(self: Any, update_info: Any) -> None:
        if update_info.memory is not None:
            update_info.memory = dict(update_info.memory)
            device, own = update_info.memory.pop("rehearsed_device"), own_device(self.parallel_config)
            if device != own:
                raise RuntimeError(f"the weights are on {device}; this worker sees only {own}")
        take(self, update_info)

    def finish_and_note(self: Any) -> None:
        finish(self)
        import hashlib

        held = hashlib.sha256()
        for name, tensor in _held(self.model):
            held.update(name.encode() + tensor.detach().float().numpy().tobytes())
        own = own_device(self.parallel_config)
        note = {"worker": own, "rank": self.parallel_config.rank, "held": held.hexdigest()}
        with open(os.environ["DPPO_REHEARSED_NOTES"], "a") as notes:
            notes.write(json.dumps(note) + "\n")

    extension.WorkerExtension.dppo_model = model_on_device
    extension.Receiver.receive_weights, extension.Receiver.finish_weight_update = take_on_device, finish_and_note


def _held(model: Any) -> Iterator[tuple[str, Any]]:
    """Names and weights of a model by which it computes. A CPU's linear layers keep theirs packed and show an empty
    one, so these are read back: the layer's product with the identity is its weight, to the last bit."""
    import torch

    yield from sorted(model.named_parameters())
    for name, layer in sorted(model.named_modules()):
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and not weight.numel():
            width = getattr(layer, "input_size_per_partition", layer.input_size)
            identity = torch.eye(width, dtype=weight.dtype)
            yield f"{name}.packed", layer.cpu_linear(identity, weight, None)


def _make_up_collectives() -> None:
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, one, dim, sizes) for one in input_]
        sizes = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))  # gloo gathers equal sizes only
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
        total = input_.contiguous().clone()
        dist.all_reduce(total, group=self.device_group)
        return total.split(sizes or len(total) // self.world_size)[self.rank_in_group].clone()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def _serve(arguments: list[str], environment: dict[str, str]) -> None:
    """Become the server: never returns."""
    try:
        os.environ.clear()
        os.environ.update(environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
        if "DPPO_REHEARSED_NODE" in environment:
            _make_up_devices()
            _make_up_collectives()
        module = arguments[arguments.index("-m") + 1]
        sys.argv = [module, *arguments[arguments.index("-m") + 2 :], "--num-gpu-blocks-override", "256"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _parent(socket.socket(fileno=int(sys.argv[1])))
    else:
        sys.exit(_client(sys.argv[1], sys.argv[2:]))
