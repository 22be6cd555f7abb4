"""What others say reaches no terminal, log or page as more than text: servers, graders, models, files, settings.

Thirty strings that a terminal would obey, or that contain what looks like a line of ours, through every command and
every way in which a line is printed. Which ways there are is read from the package's code.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from support.cases import Choose
from support.job import REPOSITORY, write_job_files
from support.killing import train_or_die
from support.launch import run_ranks
from support.record import unpacked, write_record

import dppo_megatron
from dppo_megatron.evaluation.eval_samples import write_samples
from dppo_megatron.evaluation.eval_scores import EvalSample
from dppo_megatron.observe.progress_display import Progress, RunProgress, print_line
from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.measures import log_failures
from dppo_megatron.rewards.pool import Grader
from dppo_megatron.rollout.servers.health_file import HEALTH, ServerHealth
from dppo_megatron.rollout.servers.http import brief, excerpt
from dppo_megatron.texts import entry, guard_errors, log, logged, one_line, plain, reason, show
from dppo_megatron.types import Grade, GradeTask, RunAborted, UserError
from dppo_megatron.workbench.accept import record as accept_page
from dppo_megatron.workbench.accept.bars import STEPS
from dppo_megatron.workbench.accept.record import Ran, Record
from dppo_megatron.workbench.cli import main, program
from dppo_megatron.workbench.commands.terminal import say
from dppo_megatron.workbench.compare.runs import check_end
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

FORGED = "rollout: forged"
_BEGINNINGS = (
    *("\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]52;c;cGFzdGU=\x07", "\x1b[31m", "\x1bc", "\x1b[6n", "\x1bP1$r\x1b\\"),
    *("\x9b2J", "\x9d0;title\x9c", "\x90q\x9c", "\x85", "\x84", "\x07", "\x08" * 40, "\x0b", "\x0c", "\r", "\r\n"),
    *("\n", "\n\n", "\t", "\x00", "\x7f", "\u202e", "\u2066", "\u2028", "\u2029", "\ufeff", "\ud800", "\U000e0041"),
)
HOSTILE = [f"it said {one}{FORGED}" for one in _BEGINNINGS]
assert len(HOSTILE) == 30


def check(printed: str, where: str, longest: int = 20_000) -> None:
    """Nothing that a terminal obeys or hides, no line of ours that is not ours, and an end."""
    bad = {c for c in printed if not c.isprintable() and c != "\n"}
    assert not bad, f"{where}: {bad} in {printed[:2000]!a}"
    forged = [line for line in printed.split("\n") if line.startswith(FORGED)]
    assert not forged, f"{where}: {printed[:2000]!a}"
    assert len(printed) < longest, f"{where}: {len(printed)} characters"


# ----------------------------------------------------------------------------------------------------- ways to print

MAY_PRINT = {
    "texts.py": "`show`",
    "__main__.py": "`interrupted`",
    "workbench/commands/completion.py": "code for a shell, from nothing but our own names",
    "workbench/commands/watch.py": "rich, of texts that went through `one_line`",
    "rollout/servers/in_engine/dppo_wire.py": "JSON in ASCII, for the process that has asked",
}
_PRINTS = re.compile(r"\bprint\(|(stdout|stderr|_stream)\.write\(|console\.print|\.write\(.*file=|warnings\.warn\(")


def test_there_is_one_way_to_print() -> None:
    """A new call of print has to be looked at, here."""
    package = Path(dppo_megatron.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _PRINTS.search(f"{ast.unparse(node.func)}("):
                found.add(str(path.relative_to(package)))
    assert found <= {*MAY_PRINT}, found - {*MAY_PRINT}


MAY_WRITE = {
    "files.py": "the one way",
    "workbench/cli.py": "devnull",
    "workbench/commands/terminal.py": "devnull",
    "observe/trackers/process.py": "devnull",
    "rewards/worker.py": "devnull, its own pipe, /proc",
    "observe/json_lines.py": "what `open_own` has opened",
    "observe/timeline.py": "gzip around what `replacing` has opened",
    "observe/run_directory.py": "a run's directory, which its user names",
    "checkpoint/store.py": "a new directory, which gets its name when it is whole",
    "checkpoint/writers.py": "a file in memory",
    "rewards/messages.py": "a file in memory",
    "checkpoint/checkpoint_dir.py": "in that",
    "weights/torch_dist.py": "in that",
    "weights/hf_files.py": "`aside`, which is such a directory, and what is put there",
    "rollout/sync/channels.py": "a new directory of rollout.sync.dir",
    "rollout/client/remote.py": "a new directory of mode 700",
    "steps/first_layers.py": "a temporary directory of mode 700",
    "adapters/pruner.py": "in a checkpoint of the other trainer",
    "steps/trace.py": "what `replacing` has opened",
    "rollout/launched_servers.py": "rollout.servers.registry_dir, which its user names",
    "data/known.py": "where `data --out` says",
    "workbench/quickstart/make.py": "where `quickstart --out` says, aside",
    "workbench/quickstart/tiny_model.py": "in that",
    "workbench/accept/jobs.py": "in a step's new directory",
    "workbench/accept/workload.py": "in a step's new directory",
    "workbench/accept/runner.py": "a step's new directory",
    "workbench/commands/accept.py": "--out",
    "workbench/commands/compare.py": "--out",
    "workbench/compare/runs.py": "a new directory of --out",
    "workbench/commands/init.py": "a new directory that its user names",
    "workbench/commands/parser.py": "--json FILE, which its user names: /dev/stdout too",
}
_WRITES = re.compile(
    r"\.(write_text|write_bytes|mkdir|makedirs|touch|save_pretrained|symlink_to|mkstemp)\(|\b(torch|np)\.savez?\(|\bsave_file\(|shutil\.copy"
)


def _opens_to_write(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if not re.search(r"(^|\.)(open|fdopen)$", name):
        return bool(_WRITES.search(f"{name}("))
    modes = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    written = ("O_WRONLY", "O_RDWR", "O_CREAT")
    texts = [one.value for one in modes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return any(re.fullmatch(r"[rwxabt+]*[wxa+][rwxabt+]*", text) for text in texts) or any(
        flag in ast.unparse(one) for one in modes for flag in written
    )


def test_there_is_one_way_to_write_a_file() -> None:
    """`files.py`, which follows no link; where a file is opened otherwise or a directory made, it is said here why."""
    package = Path(dppo_megatron.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _opens_to_write(node):
                found.add(str(path.relative_to(package)))
    assert found == {*MAY_WRITE}, (found - {*MAY_WRITE}, {*MAY_WRITE} - found)


def _bar(text: str) -> None:
    progress = RunProgress(3, visible=True)
    progress.say(text)
    with Progress(text, 3, "answers", clock=iter(range(0, 1000, 100)).__next__) as shown:
        shown(1)
        shown.note(text)


def _logged(text: str) -> None:
    log_failures(logging.getLogger("hostile"), [text], [Grade(float("nan"), failure=text, why=text)])


WAYS: dict[str, Callable[[str], object]] = {
    "show": show,
    "say": say,
    "print_line": print_line,
    "log": logged(show)(log),
    "a run's and a task's progress": _bar,
    "a grader's failure": _logged,
    "a traceback": lambda text: sys.excepthook(ValueError, ValueError(text), None),
    "a thread's traceback": lambda text: threading.excepthook(
        threading.ExceptHookArgs((OSError, OSError(text), None, None))
    ),
    "a library's log": lambda text: logging.getLogger("library").warning("it read %s", text),
    "a server's answer": lambda text: show(f"rollout: server 1: {excerpt(json.dumps({'error': text}).encode())}"),
    "a server's bytes": lambda text: show(f"rollout: server 1: {excerpt(text.encode(errors='replace'))}"),
    "a server's exception": lambda text: show(f"rollout: server 1: {brief(ValueError(text))}"),
}


def test_the_log_has_one_place_for_all_threads() -> None:
    """The innermost; and what printing raises is raised where the line was logged."""
    outer: list[str] = []
    inner: list[str] = []
    with logged(outer.append), ThreadPoolExecutor(1) as thread:
        with logged(inner.append):
            thread.submit(log, "100 %s", "b").result()
        thread.submit(log, "c").result()
        with logged(lambda line: os.write(-1, line.encode())), pytest.raises(OSError, match="Bad file"):
            log("d")
    log("after a run")
    assert (outer, inner) == (["c"], ["100 %s", "b"])


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_print(way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((sys, "excepthook"), (threading, "excepthook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    guard_errors()
    log = logging.getLogger()
    monkeypatch.setattr(log, "handlers", [])  # as in a program that has set up none
    for text in [*HOSTILE, "\n".join([FORGED] * 3), "x" * 10**6, "\x1b" * 10**6]:
        WAYS[way](text)
        printed = capsys.readouterr()
        said = printed.out + printed.err
        assert way == "a run's and a task's progress" or said.strip(), way
        if text.startswith(FORGED):
            assert said.split("\n").count(FORGED) <= 2  # `text` itself was printed as if it were ours
        else:
            check(said, f"{way}: {text[:100]!a}", 50_000)


def test_texts_by_hand() -> None:
    assert plain("déjà vu, 数学 √2\n") == "déjà vu, 数学 √2\n"
    assert plain("\x1b[1m\u202e\ud800") == "\\x1b[1m\\u202e\\ud800"
    assert entry("a server said\nrollout: fine") == "a server said\n    rollout: fine"
    assert one_line(" a\n\n b\tc ", 5) == "a b c" and len(one_line("y" * 10**7, 200)) == 200
    assert reason(ValueError(" first\nsecond")) == "first" and reason(KeyError()) == "KeyError"


# --------------------------------------------------------------------------------------------------------- commands


def _ended(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:  # argparse's
        return int(str(ended.code))


COMMANDS: dict[str, list[list[str]]] = {
    **{
        name: [[name, "{}"]]
        for name in ("train", "compare", "plan", "watch", "report", "serve", "config", "completion")
    },
    "simulate": [["simulate", "{}"], ["simulate", "{}", "--methods", "{}"]],
    "quickstart": [["quickstart", "{}"], ["quickstart", "{}={}"], ["quickstart", "--seed", "{}"]],
    "doctor": [["doctor", "{}"], ["doctor", "--json", "{}", "{}"]],
    "accept": [["accept", "--only", "{}"], ["accept", "--model", "{}"]],
    "eval": [
        ["eval", "{}"],
        ["eval", "m", "--sets", "{}"],
        ["eval", "--compare", "{}", "{}"],
        ["eval", "--rescore", "{}"],
    ],
    "convert": [["convert", "{}"], ["convert", "to-hf", "--checkpoint", "{}", "--out", "{}"]],
    "data": [["data", "{}", "--out", "d"], ["data", "math", "--out", "d", "--from", "{}"]],
    "init": [["init", "{}"]],
}
CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
SETTINGS = (
    *("model.hf_path={}", "data.train_path={}", "reward.function={}", "rollout.engine={}", "{}={}"),
    *("rollout.servers.endpoints=['{}']", "rollout.servers.api_key_env={}", "data.eval_paths.x={}", "seed={}", "--{}"),
)


def test_every_command_is_tried() -> None:
    [choices] = [action.choices for action in program()._actions if action.choices]
    assert set(choices) == set(COMMANDS)


def test_what_is_typed_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cases: Choose
) -> None:
    """Names of files, settings and their values in the mistakes of every command: each line with one of the texts, and
    as many times as many cases as there are texts are all."""
    monkeypatch.chdir(tmp_path)
    lines = [*(line for lines in COMMANDS.values() for line in lines), *(["train", CONFIG, one] for one in SETTINGS)]
    lines += [["plan", CONFIG, one] for one in SETTINGS]
    for case in cases("typed", len(lines)):
        line, text = lines[case % len(lines)], HOSTILE[(case + case // len(lines)) % len(HOSTILE)]
        code = _ended([word.replace("{}", text) for word in line])
        printed = capfd.readouterr()
        assert code == 2 or (code == 0 and line[0] in ("init", "plan")), (line, text, code, printed)
        check(printed.out + printed.err, f"{line} {text!a}")


@pytest.mark.parametrize("first", [0, 10, 20])
def test_what_files_hold(first: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run's record, samples, servers and settings; a trace; evaluations; a plan by a file of that name."""
    texts = (HOSTILE * 2)[first : first + 10]
    in_files = [text.replace("\ud800", "?") for text in texts]  # a file holds no half of a character
    run = write_record(tmp_path / "run", 3, text=texts[0])
    (run / "summary.json").unlink()
    (run / "lock.json").write_text("{}")
    with open(run / "metrics.jsonl", "a") as file:
        row: dict[str, object] = {"step": 4, "reward/mean": 0.5, "time/step_s": 1.0, "reward/failed_count": 9.0}
        row |= {f"eval/{text}/pass@1": 0.5 for text in texts}
        ledger = [{"name": text, "kept_fraction": 0.5, "label": "biased", "note": text} for text in texts]
        file.write(json.dumps(row | {"prune/ledger": ledger}) + "\n")
    servers = [asdict(ServerHealth(text, text, text, 1, 2, False)) for text in texts]
    (run / HEALTH).write_text(json.dumps({"at": 1e9, "servers": servers}))
    settings = {"model": {"hf_path": texts[1]}, "rollout": {"engine": texts[2]}, texts[3]: texts}
    (run / "config.yaml").write_text(json.dumps(settings))
    assert main(["watch", str(run), "--once"]) == 0
    check(capfd.readouterr().out, "watch")
    assert main(["report", str(run)]) == 0
    failed = {step.name: Ran("failed", text) for step, text in zip(STEPS, texts, strict=False)}
    accept_page.write_page(
        tmp_path / "accept.html", Record({"model": ""}, {"device": texts[4], "report": [[texts[5], texts[6]]]}, failed)
    )
    for html in (run / "report.html", tmp_path / "accept.html"):
        data = [text for name, text in unpacked(html).items() if name != "plotly"]
        page = html.read_text(encoding="utf-8") + "".join(data)
        assert not {c for c in page if not c.isprintable() and c not in "\n\t"}, html
    samples = [
        EvalSample(text, text, 0, n, text, text, text, 3, "stop", float(n), bool(n), text, text, False)
        for text in texts
        for n in (0, 1)
    ]
    for name in ("a", "b"):
        write_samples(tmp_path / name / "samples.jsonl", samples)
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capfd.readouterr()
    check(printed.out + printed.err, "report, eval")
    write_tiny_qwen3(tmp_path / "model", seed=0)
    capfd.readouterr()  # what transformers prints of it
    for text in in_files[:4]:
        damaged = tmp_path / f"{text.replace(chr(0), ' ')}.jsonl"
        damaged.write_text(json.dumps({"format": text}) + "\n" + json.dumps({"step": text, text: text}) + "\n")
        assert _ended(["simulate", str(damaged)]) == 2
        config = damaged.with_suffix(".yaml")
        config.write_text(Path(CONFIG).read_text())
        model = f"model.hf_path={tmp_path / 'model'}"
        assert _ended(["plan", str(config), model, "--methods", "grpo"]) in (0, 2)
    printed = capfd.readouterr()
    check(printed.out + printed.err, "simulate, plan", 100_000)


@pytest.mark.parametrize("code", [1, 2, 3])
def test_what_a_run_of_compare_said(code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (one.replace("\ud800", "\ufffd") for one in HOSTILE):  # as bytes are read that are no UTF-8
        for said in (f"error: {text}", f"stopped: {text}", text):
            with pytest.raises((UserError, RunAborted)) as ended:
                check_end(tmp_path, code, said)
            say(f"stopped: {ended.value}")
            check(capsys.readouterr().err, text)


def test_what_graders_print_below_python(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its descriptors and by its children: all of it is shown, as a grader's, and nobody waits for its end."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    function = NamedFunction("", "hostile_graders:prints_below", key="reward.function")
    grader = Grader([function], processes=1, timeout_s=60.0, memory_mb=0)
    texts = [*(text.replace("\ud800", "\udcff") for text in HOSTILE), FORGED, f"{FORGED}\n{FORGED}", "last"]
    began = time.monotonic()
    grades = grader.grade([GradeTask(text, "1", {}, text) for text in texts])
    grader.close()
    assert [grade.reward for grade in grades] == [1.0] * len(texts) and time.monotonic() - began < 600
    printed = capfd.readouterr()
    check(printed.err, "a grader's output", 50_000)
    assert all(line.startswith("grader: ") for line in printed.err.splitlines()), printed.err
    for way in ("written: ", "a child: ", "buffered: "):
        assert printed.err.count(f"{way}it said ") == printed.err.count(f"{way}last") * len(HOSTILE) == len(HOSTILE)
    assert printed.err.count(FORGED) == 3 * (len(HOSTILE) + 3) and "\\x1b[2J" in printed.err


@pytest.mark.slow
def test_the_log_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems, references and sources that hold such strings, a grader that prints, raises and returns them, and a
    path that a shell would run, in the log of a whole run and its advice."""
    files = write_job_files(tmp_path / "task")
    for name in ("train.jsonl", "heldout.jsonl"):
        rows = [json.loads(line) for line in (files / name).read_text().splitlines()]
        for number, row in enumerate(rows):
            text = HOSTILE[number % len(HOSTILE)].replace("\ud800", "").replace("\x00", "")
            row |= {"answer": text, "source": text}
        (files / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    run_dir = tmp_path / "a b'; touch x"
    extra: dict[str, object] = {"reward__function": "hostile_graders:repeats", "sft__steps": 2, "steps": 2}
    extra |= {"reward__min_self_consistency": 0, "reward__max_failed_share": 1.0}
    run_ranks(train_or_die, 1, files, run_dir, 1, extra, None)
    printed = capfd.readouterr()
    said = "".join(line for line in (printed.out + printed.err).splitlines(keepends=True) if "it said" in line)
    assert len(said) > 1000
    check(said, "the log of a run", 10**8)
    check("\n".join(line for line in printed.out.splitlines()), "all of the log", 10**8)
    [advice] = [line for line in printed.out.splitlines() if line.startswith("see it: ")]
    assert shlex.split(advice)[2:] == ["dppo-megatron", "report", str(run_dir)]


# ----------------------------------------------------------------------------------------------------------- advice


def test_paths_in_advice_are_one_word_of_a_shell(tmp_path: Path) -> None:
    """`dppo-megatron train PATH` for a run directory of any name, as a real shell reads it."""
    from dppo_megatron.rollout.servers.directory import Directory
    from dppo_megatron.run import Run

    run_dir = tmp_path / "a b'; touch x"
    run_dir.mkdir()
    run = Run.__new__(Run)
    run._directory = run_dir
    advice = run._how_to_resume().partition("or: ")[2]
    with pytest.raises(UserError) as ended:
        Directory(run_dir).wait_for(1, 0.0, lambda _: True)
    serving = str(ended.value).partition("Start them with: ")[2]
    for command, wanted in (
        (advice, ["train", str(run_dir / "config.yaml"), "--resume", "auto"]),
        (serving, ["serve", "CONFIG", f"rollout.servers.registry_dir={run_dir}"]),
    ):
        words = subprocess.run(
            ["bash", "-c", f"dppo-megatron() {{ printf '%s\\n' \"$@\"; }}; {command}"],
            capture_output=True, text=True, cwd=tmp_path, check=True,
        ).stdout.splitlines()  # fmt: skip
        assert words == wanted
    assert os.listdir(tmp_path) == [run_dir.name]
