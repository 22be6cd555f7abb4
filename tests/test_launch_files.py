"""The files of examples/slurm and examples/kubernetes, rendered: what would be started, with which arguments, and
whether Slurm, pyxis, Kubernetes, torchrun and the trainer know each of them. `make test-slurm` runs the scripts on a
real Slurm; nothing has run on Kubernetes or under pyxis."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.job import REPOSITORY
from torch.distributed.run import get_args_parser

from dppo_megatron.config.load import load_config

RECIPE = "configs/h100/qwen3_8b_16gpus_dppo.yaml"
SCRIPTS = sorted((REPOSITORY / "examples" / "slurm").glob("*.sbatch"))
STEPS = {"colocated.sbatch": 1, "requeue.sbatch": 1, "split.sbatch": 2}
"""How many job steps each script starts."""

_RECORDER = """\
#!{python}
import json, os, sys, time
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
while len(open(os.environ["RECORD"]).readlines()) < int(os.environ.get("STEPS", "1")):
    time.sleep(0.01)
"""
"""Ends when all steps have come: split.sbatch ends the others with the first."""
_PYXIS = {  # SPANK options of pyxis 0.24 (its args.c): whether each takes a value
    "container-image": True,
    "container-mounts": True,
    "container-workdir": True,
    "no-container-entrypoint": False,
    "container-writable": False,
}


_HOSTS = "#!/bin/sh\nprintf 'n1\\nn2\\n'\n"


def _srun_parser() -> argparse.ArgumentParser:
    """Options of srun's and pyxis' that the scripts use, by their manuals; any other one is an error."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nodes", "ntasks", "relative", "kill-on-bad-exit", "wait", "cpus-per-task"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("output", "cpu-bind"):
        parser.add_argument(f"--{name}")
    for name, takes_value in _PYXIS.items():
        parser.add_argument(f"--{name}", **({} if takes_value else {"action": "store_true"}))  # type: ignore[arg-type]
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


_GIVEN = (RECIPE, "run_dir=/shared/runs/first", "seed=1")


def _render(
    script: Path, tmp_path: Path, given: Sequence[str] = _GIVEN, **variables: str
) -> tuple[list[argparse.Namespace], str, int]:
    """The steps that a job of `script` would start, what it prints, and its exit code."""
    programs, record = tmp_path / "bin", tmp_path / "record"
    programs.mkdir(exist_ok=True)
    record.unlink(missing_ok=True)
    for name, text in (("srun", _RECORDER.format(python=sys.executable)), ("scontrol", _HOSTS)):
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    slurm = {
        "SLURM_JOB_ID": "31007",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "96",
    }
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record)} | slurm | variables
    environment["STEPS"] = str(STEPS[script.name])
    done = subprocess.run(
        ["bash", str(script), *given],
        cwd=tmp_path,
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = record.read_text().splitlines() if record.exists() else []
    return [_srun_parser().parse_args(json.loads(line)) for line in lines], done.stdout + done.stderr, done.returncode


def _torchrun(command: list[str]) -> Any:
    """Its arguments as torchrun itself reads them; `command` may have a shell in front."""
    return get_args_parser().parse_args(command[len(command) - command[::-1].index("torchrun") :])


def _config(arguments: list[str], model: Path) -> Any:
    """The configuration that `train` or `serve` would read, all of its checks passed but those of files."""
    given = [*arguments[1:], f"model.hf_path={model}"]
    return load_config(str(REPOSITORY / arguments[0]), given, purpose="plan", writes_run=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_slurm_scripts_render(script: Path, tmp_path: Path) -> None:
    """A rank for each GPU, all of the node's cores, another port at each attempt, in a container where one is named."""
    container = {"CONTAINER_IMAGE": "/images/dppo.sqsh", "CONTAINER_MOUNTS": "/shared:/shared", "NUMA_BINDING": "node"}
    ports = []
    for variables in ({}, {"SLURM_RESTART_COUNT": "1"}, container):
        steps, said, code = _render(script, tmp_path, **variables)
        assert code == 0 and len(steps) == STEPS[script.name], said
        for step in steps:
            assert step.cpus_per_task == 96 and step.cpu_bind == "none"
            assert step.container_image == variables.get("CONTAINER_IMAGE")
            assert step.no_container_entrypoint == bool(step.container_image), "the image's own is dppo-megatron"
            if step.container_mounts:
                assert re.fullmatch(r"[^:,]+:[^:,]+(,[^:,]+:[^:,]+)*", step.container_mounts)
        [train] = [step for step in steps if "torchrun" in step.command]
        run = _torchrun(train.command)
        assert run.nproc_per_node == "8" and run.module and run.training_script == "dppo_megatron"
        assert run.numa_binding == variables.get("NUMA_BINDING")
        config = _config(run.training_script_args[1:], tmp_path)
        assert config.rollout.servers.allow_remote_endpoints
        if script.name == "split.sbatch":
            [serve] = [step for step in steps if "torchrun" not in step.command]
            assert serve.relative == 0 and train.relative == 1 and run.nnodes == "1"
            assert not config.rollout.servers.colocate
            given = serve.command[serve.command.index("serve") + 1 :]
            assert _config(given, tmp_path).rollout.servers.registry_dir == config.rollout.servers.registry_dir
        else:
            assert config.rollout.servers.colocate and run.nnodes == "2"
        ports.append(run.rdzv_endpoint)
    assert ports[0] != ports[1] and ports[0] == ports[2]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_job_has_its_nodes_memory_and_the_users_time_to_save(script: Path) -> None:
    """`--exclusive` alone brings the partition's default memory; who is preempted may give ranks longer than 20 s."""
    text = script.read_text()
    assert {"--exclusive", "--mem=0"} <= set(re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE))
    [line] = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=.*$", text, re.MULTILINE)
    show = ["bash", "-c", f"{line}; echo $TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    for given, kept in ({}, "20"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "240"}, "240"):
        assert subprocess.run(show, env=given, capture_output=True, text=True, check=True).stdout.strip() == kept


def test_servers_listen_where_the_node_is_reached(tmp_path: Path) -> None:
    """Under its name, or at its address on an interface that the user names: where the name is loopback there."""
    steps, said, _ = _render(SCRIPTS[-1], tmp_path)
    [serve] = [step for step in steps if "torchrun" not in step.command]
    program, record = tmp_path / "bin" / "dppo-megatron", tmp_path / "served"
    program.write_text(_RECORDER.format(python=sys.executable))
    program.chmod(stat.S_IRWXU)
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "RECORD": str(record), "SLURMD_NODENAME": "n1"}
    for variables in ({}, {"SERVE_INTERFACE": "lo"}):
        subprocess.run(serve.command, env=environment | variables, check=True, timeout=60)
    hosts = [json.loads(line)[-2:] for line in record.read_text().splitlines()]
    assert hosts == [["--host", "n1"], ["--host", "127.0.0.1"]], said


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
@pytest.mark.parametrize("gpus", ["", "0"])
def test_no_gpus_told_is_no_job_of_one_rank(script: Path, gpus: str, tmp_path: Path) -> None:
    """Nothing is started; the user names the number, and it counts."""
    steps, said, code = _render(script, tmp_path, SLURM_GPUS_ON_NODE=gpus)
    assert (steps, code) == ([], 2) and "RANKS_PER_NODE" in said
    steps, said, code = _render(script, tmp_path, SLURM_GPUS_ON_NODE=gpus, RANKS_PER_NODE="4")
    assert code == 0, said
    assert [_torchrun(step.command).nproc_per_node for step in steps if "torchrun" in step.command] == ["4"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_job_without_a_config_says_how_it_is_submitted(script: Path, tmp_path: Path) -> None:
    steps, said, code = _render(script, tmp_path, given=())
    assert not steps and code and f"usage: sbatch [options] {script.name} CONFIG [key=value ...]" in said


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_another_program_may_start_the_container(script: Path, tmp_path: Path) -> None:
    """All that a step starts is in it: the shell that looks for an interface, and the one that has the ranks' children
    ignore Slurm's warning, which a container's own start may undo."""
    bare, said, _ = _render(script, tmp_path)
    steps, said, code = _render(script, tmp_path, CONTAINER_COMMAND=" apptainer exec  --nv /images/*.sif")
    assert code == 0, said
    front = ["apptainer", "exec", "--nv", "/images/*.sif"]
    assert sorted(step.command for step in steps) == sorted([*front, *step.command] for step in bare)


def test_all_nodes_to_generate_is_refused(tmp_path: Path) -> None:
    """Before any step: the servers would be started, and the shell then stop at a node that is not there."""
    steps, said, code = _render(SCRIPTS[-1], tmp_path, INFERENCE_NODES="2")
    assert (steps, code) == ([], 2) and "INFERENCE_NODES=2 of --nodes=2 leaves none to train" in said


_A_WARNING = """
import sys
from torch.distributed.run import config_from_args, get_args_parser
config_from_args(get_args_parser().parse_args(["--nnodes=2", "--nproc-per-node=8", "-m", "dppo_megatron"]))
print("slurmstepd: error: *** STEP 31007.0 ON n1 CANCELLED AT 2026-11-30T17:00:00 ***", file=sys.stderr)
"""
_A_RANK_FAILS = "from torch.distributed.run import main; main(['--standalone', '-m', 'no_such_trainer'])"
_IS_ENDED = """
import os, signal, threading
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.run import main
starts = PContext.start
def start(self):
    starts(self)
    os.kill(os.getpid(), signal.SIGTERM)
PContext.start = start
main(["--standalone", "--no-python", "sleep", "60"])
"""
"""What the node's torchrun does: it warns of OMP_NUM_THREADS, before any rank starts; reports a rank that has failed;
and ends as srun asks it to, since another node's has failed."""


@functools.cache
def _written(program: str) -> str:
    """What it writes to stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240)
    assert bool(done.stderr.strip()) == bool(program)
    return done.stderr


def _attempt(tmp_path: Path, srun: str, attempt: int = 0) -> tuple[int, bool]:
    """requeue.sbatch with this program as srun: its exit code, and whether it has queued the job again."""
    programs, queued = tmp_path / "bin", tmp_path / "queued"
    programs.mkdir(exist_ok=True)
    queued.unlink(missing_ok=True)
    scontrol = f'#!/bin/sh\n[ "$1" = show ] && echo n1 || echo "$@" > "{queued}"\n'
    for name, text in (("srun", srun), ("scontrol", scontrol), ("sleep", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    slurm = {"SLURM_JOB_ID": "31007", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "96"}
    slurm |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_RESTART_COUNT": str(attempt)}
    environment = os.environ | slurm | {"PATH": f"{programs}:{os.environ['PATH']}"}
    [script] = [str(one) for one in SCRIPTS if one.name == "requeue.sbatch"]
    done = subprocess.run(["bash", script, RECIPE], cwd=tmp_path, env=environment, timeout=60)
    assert not queued.exists() or queued.read_text().split() == ["requeue", "31007"]
    return done.returncode, queued.exists()


@pytest.mark.parametrize(
    ("written_by", "code", "is_queued_again"),
    [
        ([_A_WARNING, ""], 1, True),
        ([_A_RANK_FAILS, _A_WARNING], 1, True),
        ([_A_RANK_FAILS, _IS_ENDED], 1, False),
        ([_A_RANK_FAILS, _A_RANK_FAILS], 1, False),
        (["", ""], 137, True),
        (["", ""], 127, False),
    ],
    ids=["a dead node", "a node dies", "a mistake", "a mistake on both nodes", "nothing said", "no torchrun"],
)
def test_a_job_is_queued_again_unless_ranks_failed(
    written_by: list[str], code: int, is_queued_again: bool, tmp_path: Path
) -> None:
    """Soon after its start, where a failure may be a mistake. What a torchrun writes is a real one's. A node that dies
    takes its own along, and then ranks of the other one fail too."""
    for node, program in enumerate(written_by):
        (tmp_path / f"written{node}").write_text(_written(program))
    copies = [f'cp "{tmp_path}/written{node}" "{tmp_path}/logs/31007-attempt0-node{node}.log"' for node in (0, 1)]
    fails = "\n".join(["#!/bin/sh", *copies, f"exit {code}", ""])
    assert _attempt(tmp_path, fails) == (code, is_queued_again)


_WARNED = """\
#!{python}
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
while signal.sigtimedwait([signal.SIGUSR1], 0.05) is None:
    os.kill(os.getppid(), signal.SIGUSR1)
"""
"""Slurm's warning, until the script passes it on, and ranks that then save and end."""


def test_failures_are_counted_from_the_last_attempt_that_used_its_time(tmp_path: Path) -> None:
    """A run of weeks meets more than five of them; five in a row, and then one, are too many."""
    fails, warned = "#!/bin/sh\nexit 1\n", _WARNED.format(python=sys.executable)
    script = [fails] * 5 + [warned] + [fails] * 6
    queued = [_attempt(tmp_path, srun, attempt) for attempt, srun in enumerate(script)]
    assert queued == [(1, True)] * 5 + [(0, True)] + [(1, True)] * 5 + [(1, False)]


def test_commands_of_the_cluster_page_use_all_gpus() -> None:
    """A rank for each in the container, whose entrypoint is one process, with memory to share; and in doctor's srun."""
    page = (REPOSITORY / "docs" / "cluster.md").read_text().replace("\\\n", " ")
    [line] = re.findall(r"^docker run (.*)$", page, re.MULTILINE)
    docker = argparse.ArgumentParser()
    for option in ("--gpus", "--shm-size", "--ulimit", "--cap-add", "-v", "-w", "--entrypoint"):
        docker.add_argument(option, required=True)
    docker.add_argument("image")
    docker.add_argument("arguments", nargs=argparse.REMAINDER)
    given = docker.parse_args(shlex.split(line))
    assert given.entrypoint == "torchrun" and given.v.split(":")[1] == given.w
    run = _torchrun(["torchrun", *given.arguments])
    assert run.nproc_per_node == "8" and run.module and run.training_script == "dppo_megatron"
    assert run.training_script_args[:2] == ["train", "CONFIG"]
    [step] = [one for one in re.findall(r"^srun .*$", page, re.MULTILINE) if "doctor" in one]
    assert re.search(r"--ntasks-per-node=(\d+) --gpus-per-node=\1 ", step)


def test_the_server_of_the_script_is_the_pages(tmp_path: Path) -> None:
    """Without one of these arguments replicas, or replayed experts, are refused."""
    (tmp_path / "vllm").write_text(_RECORDER.format(python=sys.executable))
    (tmp_path / "vllm").chmod(stat.S_IRWXU)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}
    page = (REPOSITORY / "docs" / "engines.md").read_text().replace("\\\n", " ")
    [shown] = re.findall(r"^VLLM_SERVER_DEV_MODE=1 vllm (serve MODEL .*)$", page, re.MULTILINE)
    script = str(REPOSITORY / "examples" / "vllm_server.sh")
    for key, guard in ({}, []), ({"VLLM_API_KEY": "x"}, ["--middleware", "dppo_vllm_guard.RequireKey"]):
        (tmp_path / "record").unlink(missing_ok=True)
        subprocess.run(["bash", script, "MODEL", "8000", "--seed", "1"], env=environment | key, check=True, timeout=60)
        expected = shlex.split(shown)
        expected[-2:-2] = guard
        assert json.loads((tmp_path / "record").read_text()) == [*expected, "--seed", "1"]


def test_kubernetes_jobset(tmp_path: Path) -> None:
    """Every field is one that JobSet's and Kubernetes' API have, as kubeflow's client generates it from them (it drops
    what they lack); the command is one that torchrun and the trainer take."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    written = yaml.safe_load((REPOSITORY / "examples" / "kubernetes" / "jobset.yaml").read_text())
    assert written["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    understood = JobsetV1alpha2JobSet.from_dict(written)
    assert understood is not None and understood.to_dict() == written

    [job] = written["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    [container] = pods["template"]["spec"]["containers"]
    values = {one["name"]: one.get("value", "1") for one in container["env"]}
    assert int(values["NODES"]) == pods["parallelism"] == pods["completions"]
    assert int(values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pods["template"]["spec"]["terminationGracePeriodSeconds"]
    (tmp_path / "torchrun").write_text(_RECORDER.format(python=sys.executable))
    (tmp_path / "torchrun").chmod(stat.S_IRWXU)
    environment = values | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}
    subprocess.run([*container["command"], *container["args"]], env=environment, check=True, timeout=60)
    run = _torchrun(["torchrun", *json.loads((tmp_path / "record").read_text())])
    name, subdomain = written["metadata"]["name"], written["metadata"]["name"]  # JobSet's default for the latter
    assert run.rdzv_endpoint == f"{name}-{job['name']}-0-0.{subdomain}:29501"
    assert int(run.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    config = _config(run.training_script_args[1:], tmp_path)
    assert config.rollout.servers.colocate and config.rollout.servers.python
    sets = [one.path for one in config.data.eval_sets.values()]
    paths = [config.run_dir, config.data.train_path, *config.data.eval_paths.values(), *sets]
    places = tuple(one["mountPath"] + "/" for one in container["volumeMounts"])
    assert len(sets) == 2 and all(path.startswith(places) for path in paths), "the image holds neither data nor runs"
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in pods["template"]["spec"]["volumes"]}
