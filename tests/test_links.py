"""A run directory where somebody has put links in the place of files: what they lead to is not touched, by any command.

A link is a second name here, symbolic or hard, of a file or directory outside. Each command ends in one sentence, or
does its work on files of its own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
from support.cases import Choose
from support.damage import obstructed
from support.job import QUICK, job_config
from support.killing import run_whole
from support.launch import run_ranks
from support.record import unpacked, write_record
from support.tiny import write_model
from torch import float32

from dppo_megatron.files import append_to
from dppo_megatron.rollout.servers.health_file import ServerHealth
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import assets, copy_assets, hf_writer
from dppo_megatron.workbench.cli import main

pytestmark = pytest.mark.slow

SETTINGS = QUICK | {"steps": 2, "checkpoint__every_steps": 1, "rollout__prompts_per_step": 8}
SHOWN = (("report",), ("watch", "--once"))
PLANTED = (
    *(".config.yaml.new", ".run.json.new", ".metrics.jsonl.new", ".trace.jsonl.new", ".summary.json.new"),
    *(".servers.json.new", ".report.html.new", "report.html", "hf.incomplete", "hf.replaced", "servers.json"),
    *("checkpoints/latest.new", "samples/.steps_000003-000003.rank0000.parquet.new", "eval", "old", "servers"),
)
"""Names that no file has yet, and that a command may write to."""


@pytest.fixture(scope="module")
def original(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("original") / "run"
    run_whole(files, run_dir, 1, SETTINGS)
    assert main(["report", str(run_dir)]) == 0
    return run_dir


def _all_files(run_dir: Path) -> list[Path]:
    return sorted(path for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink())


def _link(path: Path, outside: Path, *, hard: bool = False) -> None:
    """Move what has the name outside, or make a file there, and link to it."""
    target = outside / str(len(list(outside.iterdir())))
    if os.path.lexists(path):
        path.rename(target)
    else:
        target.write_text("somebody's")
    os.utime(target, (1e9, 1e9))
    path.parent.mkdir(exist_ok=True)
    os.link(target, path) if hard and target.is_file() else path.symlink_to(target)


def _look(outside: Path) -> dict[str, tuple[object, int]]:
    """Of everything there, bytes or names, and the time of its last change."""
    return {
        str(path): (
            sorted(path.iterdir()) if path.is_dir() else os.readlink(path) if path.is_symlink() else path.read_bytes(),
            path.lstat().st_mtime_ns,
        )
        for path in sorted(outside.rglob("*"))
    }


def _quiet(outside: Path, what: Callable[[], object]) -> str:
    """What a command came to; nothing outside has changed."""
    before = _look(outside)
    try:
        what()
    except UserError as error:
        assert "\n" not in str(error) and 20 < len(str(error)) < 1000
        return f"refused: {error}"
    finally:
        assert _look(outside) == before
    return "done"


WAYS: dict[str, tuple[Callable[[Path], list[Path]], bool, str]] = {
    "every file": (_all_files, False, "metrics.jsonl).*symbolic link|symbolic link.*metrics.jsonl"),
    "every file but the record": (
        lambda run: [path for path in _all_files(run) if path.suffix != ".jsonl"],
        False,
        "done",
    ),
    "every file but the record, hard": (
        lambda run: [path for path in _all_files(run) if path.suffix != ".jsonl"],
        True,
        "done",
    ),
    "every file, hard": (_all_files, True, "hard link"),
    "names that are yet to be written": (lambda run: [run / name for name in PLANTED[:11]], False, "done"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_command_leaves_what_links_lead_to(
    files: Path, original: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    chosen, hard, becomes = WAYS[way]
    run_dir, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    shutil.copytree(original, run_dir, symlinks=True)
    for path in chosen(run_dir):
        _link(path, outside, hard=hard)

    def resumed() -> None:
        def train_it() -> str:
            from support.killing import train_or_die

            try:
                train_or_die(files, run_dir, 1, SETTINGS | {"steps": 3}, None)
            except UserError as error:
                return str(error)
            return ""

        if said := run_ranks(train_it, 1)[0]:
            raise UserError(said)

    came_to = _quiet(outside, resumed)
    assert (came_to == "done") == (becomes == "done"), came_to
    assert becomes == "done" or "symbolic link" in came_to or "hard link" in came_to
    for command in (["report"], ["watch", "--once"], ["eval", "--limit", "2"], ["simulate"]):
        name, *rest = command
        target = run_dir / "trace.jsonl" if name == "simulate" else run_dir
        arguments = [name, str(target), *rest]
        _quiet(outside, lambda arguments=arguments: main(arguments))  # type: ignore[misc]
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err and printed.err.count("error: ") <= 1


def test_any_name_of_a_run_as_a_link(files: Path, original: Path, tmp_path: Path, cases: Choose) -> None:
    """Files, directories and names to come, symbolic and hard, some at a time; opened as `train` does."""
    chosen, run_dir = cases("links", 15), tmp_path / "run"
    limit_s = 300 + 5 * len(chosen)
    taken = run_ranks(_open_many, 1, files, original, run_dir, chosen.numbers, timeout_s=limit_s)[0]
    chosen.tried = sum(taken.values())
    assert chosen.are_few or all(taken.values()), taken


def _open_many(files: Path, original: Path, run_dir: Path, seeds: range) -> dict[str, int]:
    from types import SimpleNamespace

    from dppo_megatron import run as run_module
    from dppo_megatron.job import prepare_job

    taken, outside = {"refused": 0, "done": 0}, run_dir.with_name("outside")
    job = prepare_job(job_config(files, run_dir, **SETTINGS | {"steps": 3}), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "Loop", lambda *_: SimpleNamespace(actor=SimpleNamespace(description="")))
        patch.setattr(run_module.RunProgress, "say", lambda *_: None)
        for seed in seeds:
            rng = random.Random(f"links {seed}")
            shutil.rmtree(run_dir, ignore_errors=True)
            shutil.rmtree(outside, ignore_errors=True)
            shutil.copytree(original, run_dir, symlinks=True)
            outside.mkdir()
            there = [path for path in run_dir.iterdir() if not path.is_symlink()]
            names = rng.sample([*there, *_all_files(run_dir), *(run_dir / name for name in PLANTED)], rng.randint(1, 4))
            for path in names:
                if path.parent.is_dir() and not path.parent.is_symlink() and not path.is_symlink():
                    _link(path, outside, hard=rng.random() < 0.3)

            def opened() -> None:
                run = run_module.Run(job)
                run.summary.write(run_dir / "summary.json")
                run._files.close()

            came_to = _quiet(outside, opened)
            taken["done" if came_to == "done" else "refused"] += 1
    return taken


def test_what_links_lead_to_is_not_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By `report` and `watch`, which show a copy of the same file: a page is handed on, and what it shows with it."""
    mark, run_dir, other = "onlyoutside", write_record(tmp_path / "run", 3), tmp_path / "other"
    samples = sorted((run_dir / "samples").iterdir())[-1].relative_to(run_dir)
    write_record(other, 3, text=mark)
    (run_dir / "summary.json").unlink()  # `watch` shows the servers of a run that has not finished
    with (other / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, mark: 0.5, "eval/x/pass@1": 0.5}) + "\n")
    (other / "config.yaml").write_text(json.dumps({"model": {"hf_path": mark}}))
    servers = {"at": 1e9, "servers": [asdict(ServerHealth("http://h:1", "out", mark, 1, 0, False))]}
    (other / "servers.json").write_text(json.dumps(servers))
    for name in ("metrics.jsonl", "config.yaml", "servers.json", samples):
        for put in (shutil.copy, os.symlink):
            shutil.rmtree(tmp_path / "shown", ignore_errors=True)
            shutil.copytree(run_dir, tmp_path / "shown")
            (tmp_path / "shown" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "shown" / name).unlink(missing_ok=True)
            put(other / name, tmp_path / "shown" / name)
            codes = {main([command, str(tmp_path / "shown"), *rest]) for command, *rest in SHOWN}
            printed, page = capfd.readouterr(), tmp_path / "shown" / "report.html"
            text = printed.out + printed.err + ("".join(unpacked(page).values()) if page.exists() else "")
            assert (mark in text) == (put is shutil.copy), (name, put)
            refused = put is os.symlink and name == "metrics.jsonl"
            assert codes == ({2} if refused else {0}) and ("symbolic link" in printed.err) == refused, (name, put)


# -------------------------------------------------------------------------------------------------- a model's files


def test_no_copy_of_a_model_leaves_its_directory(tmp_path: Path) -> None:
    """A link out of a downloaded model is refused at the start; those of Hugging Face's cache are followed."""
    secret = tmp_path / "id_rsa"
    secret.write_text("a key")
    model = write_model(tmp_path / "hub" / "snapshots" / "abc")
    blobs = tmp_path / "hub" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assets(model)
    (tmp_path / "alias").symlink_to(model)
    for source in (model, tmp_path / "alias"):
        copy = tmp_path / f"copy of {source.name}"
        copy.mkdir()
        copy_assets(source, copy)
        assert {path.name for path in copy.iterdir()} == {"config.json", "generation_config.json"}
        assert not any(path.is_symlink() for path in copy.iterdir())
    for target in (secret, Path("../../../id_rsa"), Path("../../blobs/../../id_rsa")):
        (model / "extra.json").unlink(missing_ok=True)
        (model / "extra.json").symlink_to(target)
        assert (model / "extra.json").read_text() == "a key"
        with pytest.raises(UserError, match=r"extra\.json is a link to a file outside of the model's directory"):
            assets(model)
        with (
            pytest.raises(UserError, match="outside of the model's directory"),
            hf_writer(tmp_path / "hf", model, read_architecture(model), float32),
        ):
            pass
        assert not (tmp_path / "hf.incomplete").exists()


def test_links_obstruct(tmp_path: Path) -> None:
    """What `test_damage.py` takes for a directory that need not be resumed."""
    (tmp_path / "metrics.jsonl").symlink_to("elsewhere")
    assert obstructed(tmp_path) == ["metrics.jsonl"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(("owner", "written"), [(65533, True), (65534, True), (1, False)])
def test_a_file_of_another_user_is_not_written(owner: int, written: bool) -> None:
    """As user 65533 in a directory of user 65534, where all may write: our own files and the directory's owner's."""
    with tempfile.TemporaryDirectory() as name:  # its parents can be entered by all
        path = Path(name) / "metrics.jsonl"
        path.write_bytes(b"1")
        for one, mode, user in ((path, 0o666, owner), (path.parent, 0o777, 65534)):
            one.chmod(mode)
            os.chown(one, user, -1)
        os.seteuid(65533)
        try:
            with nullcontext() if written else pytest.raises(OSError, match="belongs to another user"):
                append_to(path).write(b"2")
        finally:
            os.seteuid(0)
        assert path.read_bytes() == (b"12" if written else b"1")
