"""A large training set is read once on a machine: out of its file, whatever became of it, come the same prompts."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizer import TEMPLATE, chat_tokenizer
from support.cases import Choose

from dppo_megatron.config.data import EvalSetConfig, TrainSetConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.data import cache, sets
from dppo_megatron.data.rows import read_rows
from dppo_megatron.data.sets import ProblemSet, load_eval_sets, load_train_sets
from dppo_megatron.data.summary import data_fingerprint, report_lines
from dppo_megatron.types import UserError

Sets = dict[str, ProblemSet]
TOKENIZER = chat_tokenizer()


@pytest.fixture(autouse=True)
def _small_sets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LEAST_BYTES", 1)


def _load(config: Config, cache_path: Path | None, tokenizer: Any = TOKENIZER) -> Sets:
    config.data.cache_path = "" if cache_path is None else str(cache_path)
    return load_train_sets(config, tokenizer, load_eval_sets(config, tokenizer))


def _unread(monkeypatch: pytest.MonkeyPatch, config: Config, cache_path: Path, tokenizer: Any = TOKENIZER) -> Sets:
    """As loaded while nothing but evaluation sets may be read."""
    evaluated = load_eval_sets(config, tokenizer)
    config.data.cache_path = str(cache_path)
    with monkeypatch.context() as context:
        context.setattr(sets, "read_rows", lambda *_: pytest.fail("the set is read"))
        return load_train_sets(config, tokenizer, evaluated)


def _seen(found: Sets, config: Config) -> dict[str, Any]:
    """All that a job knows of its training sets; a cache's own line apart."""
    evaluated = load_eval_sets(config, TOKENIZER)
    prompts = cache.LazyPrompts.joined([one.prompts for one in found.values()])
    assert len(prompts) == sum(len(one.prompts) for one in found.values())
    assert prompts[1:-1] == list(prompts)[1:-1] and prompts[-1] == prompts[len(prompts) - 1]
    columns = {name: [np.asarray(getattr(one.columns, of)).tolist() for of in _COLUMNS] for name, one in found.items()}
    return {
        "prompts": [repr(prompt) for prompt in prompts],
        "columns": repr(columns),
        "fingerprint": data_fingerprint(found, {}),
        "lines": [line for line in report_lines(found, evaluated, (), TOKENIZER) if "its prompts " not in line],
        "counts": [(one.filtered, one.dropped, dict(one.held_out), one.prompts[0].text) for one in found.values()],
    }


_COLUMNS = ("prompt_tokens", "level", "source", "sources")


def _is_mapped(found: Sets, folder: Path) -> bool:
    maps = Path("/proc/self/maps").read_text()
    return str(folder) in maps and all(type(one.prompts) is not list for one in found.values())


# --------------------------------------------------------------------------------------------------- the same prompts


def _rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(count):
        if rows and rng.random() < 0.2:  # again, with the same answer or another one
            rows.append(rng.choice(rows) | ({"answer": str(number)} if rng.random() < 0.5 else {}))
            continue
        text = " ".join(rng.choice(("find", "é漢", "\u2028", "$x^2$", "\U0001f600", "{problem}")) for _ in range(6))
        row: dict[str, Any] = {"problem": f"{number}: {text}", "answer": rng.choice((str(number), f"${number}$"))}
        more: dict[str, Any] = {
            "source": rng.choice(("a", "b", "", "é")),
            "level": rng.choice((1, "Level 3", "easy", "", 0.5)),
            "extra": rng.choice((None, True, "\ud800", {"deep": [1, {"x": "y"}]}, 10**30, [])),
        }
        rows.append(row | {name: value for name, value in more.items() if rng.random() < 0.7})
    return rows


def _write(rng: random.Random, folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """The rows as JSON Lines, where 0.5 may be spelled 0.50, or as Parquet."""
    if rng.random() < 0.5:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines.replace("0.5}", "0.50}").replace("0.5,", "0.50,"))
        return folder / f"{name}.jsonl"
    columns = [{"problem": row["problem"], "answer": row["answer"], "source": row.get("source")} for row in rows]
    numbers = pa.array([rng.random() for _ in rows], rng.choice((pa.float16(), pa.float32(), pa.float64())))
    table = pa.Table.from_pylist(columns).append_column("level", numbers)
    pq.write_table(
        table.append_column("extra", pa.array([{"index": n} for n in range(len(rows))])), folder / f"{name}.pq"
    )
    return (folder / f"{name}.pq").rename(folder / f"{name}.parquet")


def _config(rng: random.Random, folder: Path) -> Config:
    config = Config()
    first, second = _rows(rng, rng.randrange(4, 40)), _rows(rng, rng.randrange(4, 20))
    held_out = rng.sample(first, 3) + _rows(rng, 3) if rng.random() < 0.7 else []
    one = TrainSetConfig(path=str(_write(rng, folder, "one", first)), limit=rng.choice((0, 0, 3, 10)))
    two = TrainSetConfig(path=str(_write(rng, folder, "two", second + rng.sample(first, 2))))
    one.max_prompt_tokens, one.overlong = rng.choice((60, 5000)), "filter"
    one.where = rng.choice((None, None, ["answer != $3$"], ["nowhere == 1"]))
    two.level_is = rng.choice(("difficulty", "solve_rate"))
    config.data.train_sets = dict([("one", one), ("two", two)][: rng.choice((1, 2))])
    config.data.contamination = rng.choice(("warn", "drop", "refuse"))
    config.data.template = rng.choice(("", "chat_boxed", "qwen3_think", "plain_boxed"))
    config.rollout.prompts_per_step = 2
    if held_out:
        (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
        config.data.eval_sets = {"e": EvalSetConfig(path=str(folder / "eval.jsonl"))}
    return config


def test_the_same_prompts_with_a_cache(tmp_path: Path, cases: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, order, columns, fingerprints, lines and errors: read without one, while it is written, and out of it,
    where the source is not opened at all."""
    chosen = cases("prompt cache", 60)
    outcomes = {"read": 0, "refused": 0, "kept": 0}
    for number in chosen:
        rng, folder = random.Random(number), tmp_path / str(number)
        folder.mkdir()
        config = _config(rng, folder)
        try:
            without = _seen(_load(config, None), config)
        except UserError as error:
            for _ in range(2):
                with pytest.raises(UserError) as refused:
                    _load(config, folder / "cache")
                assert str(refused.value) == str(error), number
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        first = _load(config, folder / "cache")
        assert _seen(first, config) == without, number
        if "cannot be kept" not in str([one.notes for one in first.values()]):
            outcomes["kept"] += 1
            assert _is_mapped(first, folder)  # the rank that wrote it has no other copy
            again = _unread(monkeypatch, config, folder / "cache")
            assert _seen(again, config) == without and _is_mapped(again, folder), number
    if not chosen.are_few:
        assert outcomes["kept"] > 0.9 * outcomes["read"] > 0 and outcomes["refused"], outcomes


# ------------------------------------------------------------------------------------------------ when it is not used


def _plain(folder: Path, rows: int = 60) -> Config:
    lines = [{"problem": f"What is {i} + {i}?", "answer": f"{2 * i:04}", "source": "abc"[i % 3]} for i in range(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "test.jsonl").write_text(json.dumps({"problem": "Another?", "answer": "1"}) + "\n")
    config = Config()
    config.data.train_sets = {"t": TrainSetConfig(path=str(folder / "train.jsonl"))}
    config.rollout.prompts_per_step = 2
    return config


def _file(folder: Path) -> Path:
    [found] = folder.glob("*.arrow")
    return found


def test_a_damaged_file_is_written_again(tmp_path: Path, cases: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut, changed, emptied, filled with zeros, or another set's: the same prompts, and a whole file after it."""
    config, folder = _plain(tmp_path), tmp_path / "cache"
    wanted = _seen(_load(config, folder), config)
    path = _file(folder)
    whole, other = path.read_bytes(), tmp_path / "other"
    config.data.train_sets["t"].limit = 9
    _load(config, other)
    config.data.train_sets["t"].limit = 0
    for number in cases("damaged cache", 60):
        rng = random.Random(number)
        place, end = sorted(rng.sample(range(len(whole) + 1), 2))
        damaged = rng.choice(
            (
                whole[:place],
                whole[:place] + whole[end:],
                whole[:place] + bytes(end - place) + whole[end:],
                whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :],
                whole + whole[:place],
                b"",
                _file(other).read_bytes(),
            )
        )
        path.write_bytes(damaged)
        if damaged != whole:
            assert _seen(_load(config, folder), config) == wanted, number
        assert _seen(_unread(monkeypatch, config, folder), config) == wanted, number


def _edit(config: Config, path: Path) -> None:
    """To the same size, with the old time of change put back."""
    before = path.stat()
    path.write_text(path.read_text().replace('"0002"', '"0003"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def _evaluates(config: Config, path: Path) -> None:
    config.data.eval_sets = {"e": EvalSetConfig(path=str(path.with_name("test.jsonl")))}


CHANGES: dict[str, Callable[[Config, Path], Any]] = {
    "rows": _edit,
    "limit": lambda config, path: setattr(config.data.train_sets["t"], "limit", 9),
    "where": lambda config, path: setattr(config.data, "where", ["source != a"]),
    "template": lambda config, path: setattr(config.data, "template", "plain_boxed"),
    "max_prompt_tokens": lambda config, path: setattr(config.data, "max_prompt_tokens", 77),
    "name of the set": lambda config, path: setattr(
        config.data, "train_sets", {"u": TrainSetConfig(path=str(config.data.train_sets["t"].path))}
    ),
    "contamination": lambda config, path: setattr(config.data, "contamination", "drop"),
    "an evaluation set": _evaluates,
    "chat template": lambda config, path: chat_tokenizer(TEMPLATE + " "),
    "end of sequence": lambda config, path: chat_tokenizer(eos="<|im_end|>"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_prompts_is_read_again(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only that: unchanged, nothing is read."""
    config, folder = _plain(tmp_path), tmp_path / "cache"
    _load(config, folder)
    _unread(monkeypatch, config, folder)
    tokenizer = CHANGES[change](config, tmp_path / "train.jsonl") or TOKENIZER
    with pytest.raises(pytest.fail.Exception, match="the set is read"):
        _unread(monkeypatch, config, folder, tokenizer)


def test_other_code_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout changes without a new version. The file of the older code goes once nobody has read it for a month;
    half a file of a killed process after a day, at a start that finds its own too; another set's as its own."""
    config, folder = _plain(tmp_path), tmp_path / "cache"
    _load(config, folder)
    first = _file(folder)
    left, others = folder / f".{first.name}.7.new", folder / f"{'0' * 32}.{'0' * 32}.arrow"
    recent = folder / f".{first.name}.8.new"
    for number, day in enumerate((20, 40, 40)):
        then = time.time() - 86_400 * day
        for path in (first, left, others):
            path.touch()
            os.utime(path, (then, then))
        recent.touch()
        if number == 1:
            _unread(monkeypatch, config, folder)  # which is a use
        with monkeypatch.context() as context:
            context.setattr(cache, "_versions", lambda number=number: [number])
            with pytest.raises(pytest.fail.Exception, match="the set is read"):
                _unread(context, config, folder)
            _load(config, folder)
        assert (first.exists(), left.exists(), others.exists(), recent.exists()) == (
            number < 2,
            False,
            not number,
            True,
        )
        if number == 1:
            os.utime(recent, (then, then))
            _unread(monkeypatch, config, folder)
            assert not recent.exists()


@pytest.mark.parametrize("is_large", [False, True])
def test_a_set_that_is_staged_anew_has_one_file(
    tmp_path: Path, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By six jobs, or machines that share the folder, each at another time: it is read once. Of a source too large to
    be hashed at every start each time makes another file, which takes no other's away."""
    config, folder = _plain(tmp_path), tmp_path / "cache"
    source = tmp_path / "train.jsonl"
    if is_large:
        monkeypatch.setattr(cache, "_MOST_BYTES", 1)
    for number in range(6):
        content = source.read_bytes()
        source.unlink()
        source.write_bytes(content)
        os.utime(source, (number, number))
        if is_large or not number:
            _load(config, folder)
        _unread(monkeypatch, config, folder)
    assert len(list(folder.glob("*.arrow"))) == (6 if is_large else 1)


def test_a_set_that_changes_while_it_is_read_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts are of neither content; the next start reads it again."""
    config, folder = _plain(tmp_path), tmp_path / "cache"

    def changed(path: str, *more: str) -> Any:
        yield from read_rows(path, *more)
        if path.endswith("train.jsonl"):
            _edit(config, Path(path))

    with monkeypatch.context() as context:
        context.setattr(sets, "read_rows", changed)
        [line] = _load(config, folder)["t"].notes
    assert "cannot be kept" in line and "the set has changed while it was read" in line
    assert not list(folder.glob("*.arrow"))


@pytest.mark.parametrize("while_it", ["is read", "is forced to the disk"])
def test_a_file_that_another_machine_maps_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_it: str
) -> None:
    """Without common locks two machines read the set at the same time. The pages of a replaced file are gone on NFS: a
    rank that touches one is killed."""
    config, folder = _plain(tmp_path), tmp_path / "cache"
    wanted, faster = _seen(_load(config, None), config), list[tuple[Sets, int]]()

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def other_machine() -> None:
        if not faster:
            faster.append(({}, 0))
            with monkeypatch.context() as itself:
                itself.setattr(os, "getpid", lambda: 0)
                faster[0] = _load(config, folder), _file(folder).stat().st_ino

    def read(path: str, *more: str) -> Any:
        if path.endswith("train.jsonl") and while_it == "is read":
            other_machine()
        return read_rows(path, *more)

    def fsync(descriptor: int) -> None:
        other_machine()
        os.fdatasync(descriptor)

    with monkeypatch.context() as context:
        context.setattr(cache.fcntl, "flock", no_locks)
        context.setattr(sets, "read_rows", read)
        context.setattr(os, "fsync", fsync)
        found = _load(config, folder)
    assert _seen(found, config) == _seen(faster[0][0], config) == wanted
    assert _is_mapped(found, folder) and _file(folder).stat().st_ino == faster[0][1]
    assert {path.suffix for path in folder.iterdir()} == {".arrow", ".lock"}


def test_what_another_user_could_have_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that others may write to, one of another user, and a link: each is replaced by our own."""
    config, folder = _plain(tmp_path), tmp_path / "cache"
    _load(config, folder)
    path, ways = _file(folder), ["others may write", "a link"] + ["another's"] * (os.geteuid() == 0)
    assert path.stat().st_mode & 0o777 == 0o600
    for way in ways:
        if way == "others may write":
            path.chmod(0o620)
        elif way == "a link":
            path.rename(tmp_path / "elsewhere.arrow")
            path.symlink_to(tmp_path / "elsewhere.arrow")
        else:
            os.chown(path, 12345, -1)
        with pytest.raises(pytest.fail.Exception, match="the set is read"):
            _unread(monkeypatch, config, folder)
        _load(config, folder)
        _unread(monkeypatch, config, folder)


def test_no_file_is_a_line_and_no_error(tmp_path: Path) -> None:
    """A directory that cannot be made, values that JSON has no form for, a chat template with the date in it."""
    config = _plain(tmp_path)
    (tmp_path / "file").write_text("")
    [line] = _load(config, tmp_path / "file" / "cache")["t"].notes
    assert "cannot be kept" in line and "every start reads the set: " in line
    rows = {"problem": ["a", "b"], "answer": ["1", "2"], "day": [date(2026, 1, 2)] * 2}
    pq.write_table(pa.table(rows), tmp_path / "dated.parquet")
    config.data.train_sets["t"].path = str(tmp_path / "dated.parquet")
    found = _load(config, tmp_path / "cache")["t"]
    assert "type date is not JSON" in found.notes[0] and found.prompts[1].row["day"] == date(2026, 1, 2)
    config.data.template = "chat_boxed"
    dated = chat_tokenizer("{{ strftime_now('%d') }}" + TEMPLATE)
    [said] = _load(config, tmp_path / "cache", dated)["t"].notes
    assert "writes the date or draws at random" in said and "checkpoint.may_change=[data.train_sets.t]" in said
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


# ------------------------------------------------------------------------------------------------- ranks of a machine

_FORK = multiprocessing.get_context("fork")


def _rank(config: Config, folder: Path, reads: Any, begun: Any, go_on: int, seen: Any) -> None:
    def counted(path: str, *more: str) -> Any:
        if path.endswith("train.jsonl"):
            with reads.get_lock():
                reads.value += 1
            begun.set()
            os.read(go_on, 1)
        return read_rows(path, *more)

    vars(sets)["read_rows"] = counted  # in this process only
    seen.put(_seen(_load(config, folder), config))


@pytest.mark.parametrize("is_killed", [False, True])
def test_ranks_wait_for_the_one_that_reads(tmp_path: Path, is_killed: bool) -> None:
    """One of four reads; killed on the way, the others end with the same prompts all the same."""
    config, folder = _plain(tmp_path), tmp_path / "cache"
    wanted = _seen(_load(config, None), config)
    reads, begun, seen = _FORK.Value("i", 0), _FORK.Event(), _FORK.Queue()
    waits, goes_on = os.pipe()  # and no event, whose setter would wait for a killed process
    ranks = [_FORK.Process(target=_rank, args=(config, folder, reads, begun, waits, seen)) for _ in range(4)]
    ranks[0].start()
    begun.wait()
    for rank in ranks[1:]:
        rank.start()
    if is_killed:
        left = next(folder.glob("*.lock")).with_suffix("")
        half = left.with_name(f".{left.name}.arrow.{ranks[0].pid}.new")
        half.write_text("half of it")
        os.utime(half, (0, 0))
        assert ranks[0].pid is not None
        os.kill(ranks[0].pid, signal.SIGKILL)
        ranks[0].join()
    os.write(goes_on, bytes(4))
    waited = ranks[1:] if is_killed else ranks
    assert [seen.get(timeout=600) for _ in waited] == [wanted] * len(waited)
    for rank in waited:
        rank.join()
        assert rank.exitcode == 0
    assert is_killed or reads.value == 1
    _load(config, folder)
    assert {path.suffix for path in folder.iterdir()} == {".arrow", ".lock"}
