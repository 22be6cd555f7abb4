"""The trackers: what each tool has of a run, read back with its own reader; and what a tool cannot do to a run.

The tools are real, in processes of their own as in training, and offline: every address is a closed port of this
machine, so an attempt to reach the network fails instead of succeeding somewhere else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.logged import logged_lines
from support.wandb_reading import history, records

from dppo_megatron.config.observe import ObserveConfig, TrackingConfig, check_observe
from dppo_megatron.frames import FrameBuffer, framed
from dppo_megatron.observe.trackers import process, sink
from dppo_megatron.observe.trackers.process import (
    ENCODER,
    Begin,
    EndRun,
    Mark,
    Mlflow,
    Sink,
    StepLine,
    metric_name,
    scrubbed,
    serve,
)
from dppo_megatron.observe.trackers.sink import Trackers, numbers
from dppo_megatron.observe.trackers.sink import settings as flat_settings
from dppo_megatron.types import UserError

TOOLS = ["tensorboard", "wandb", "mlflow", "trackio"]
RUN = "0123456789abcdef"
SECRET = "canary0123456789canary0123456789canary01"
CLOSED = "http://127.0.0.1:9"


@pytest.fixture(scope="module", autouse=True)
def readers_tell_nobody() -> None:
    """MLflow's reader here would; the trackers' own processes see to it themselves."""
    os.environ.update(DO_NOT_TRACK="true", MLFLOW_DISABLE_TELEMETRY="true")


def _begin(directory: Path, resumed_step: int | None = None) -> Begin:
    config = {"rollout.engine": "hf", "seed": 3, "actor.x": None}
    return Begin(RUN, str(directory), "arithmetic", "night-012345", ["tag"], True, config, resumed_step)


def _line(step: int, shift: float = 0.0) -> StepLine:
    rows = [["2 + 2 = ?", "it is <b>4|</b>", 1.0]] if step == 2 else []
    metrics = {"reward/mean": step / 8 + shift, "eval/held out/pass@1": 0.5, "observed": float(step)}
    return StepLine(step, 1.7e9 + step, metrics, ["prompt", "text", "reward"] if rows else [], rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that was killed after step 5, and resumed from a checkpoint of step 3 to step 6. What TensorBoard is told
    of steps 4 and 5 is other the second time, to see which of both it shows."""
    directory = tmp_path_factory.mktemp("run") / "trackers"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            patch.setenv(name, CLOSED)
        patch.delenv("TRACKIO_DIR", raising=False)
        for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN"):
            patch.setenv(name, SECRET)
        said = logged_lines()
        for resumed_step, steps, shift in ((None, range(6), 0.0), (3, range(4, 7), 0.5)):
            begin = _begin(directory, resumed_step)
            begin.config["seed"] = 7 if shift else 3
            trackers = Trackers(TOOLS, begin, 300.0)
            for step in steps:
                trackers.step(_line(step, shift))
            trackers.close(finished=step == 6)
            assert not trackers.failures, said
        keeping = {line.split()[1] for line in said if "has steps up to 5 from before this resume at step 3" in line}
        assert keeping == set(TOOLS) - {"tensorboard"}, said
    yield directory


@pytest.mark.slow
def test_tensorboard_has_every_step_once(run: Path) -> None:
    """After a resume, what was written before of the same steps is gone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    values = {event.step: event.value for event in read.Scalars("reward/mean")}
    assert values == {step: step / 8 + (0.5 if step > 3 else 0.0) for step in range(7)}
    assert [event.step for event in read.Scalars("reward/mean")] == list(range(7))
    assert [event.wall_time for event in read.Scalars("eval/held out/pass@1")] == [1.7e9 + step for step in range(7)]
    [table] = read.Tensors("samples/text_summary")
    assert table.step == 2 and b"it is &lt;b&gt;4&#124;&lt;/b&gt;" in table.tensor_proto.string_val[0]
    configs = {event.step: event.tensor_proto.string_val[0] for event in read.Tensors("config/text_summary")}
    assert b"rollout.engine" in configs[0] and b"|seed|3|" in configs[0] and b"|seed|7|" in configs[3]


@pytest.mark.slow
def test_tensorboard_has_the_settings_of_a_resume_before_the_first_line(tmp_path: Path) -> None:
    """The checkpoint of step 0, whose line waits: there is no step before it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = Sink("tensorboard", process.TOOLS["tensorboard"]())
    for message in (_begin(tmp_path, -1), _line(0), EndRun(True)):
        sink.take(message)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [event.step for event in read.Tensors("config/text_summary")] == [0]


@pytest.mark.parametrize(
    ("tool", "folder"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("trackio", "trackio"), ("mlflow", "mlruns"), ("mlflow", "")],
)
def test_no_tracker_follows_a_link(tool: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of its folder, or of all of them: it fails, which the run does not, and nothing is written there."""
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    outside, trackers = tmp_path / "outside", tmp_path / "run" / "trackers"
    outside.mkdir()
    (trackers / folder).parent.mkdir(parents=True)
    (trackers / folder).symlink_to(outside)
    begin = Begin(RUN, str(trackers), "p", "n", [], offline=True, config={}, resumed_step=None)
    with pytest.raises(OSError, match="symbolic link"):
        Sink(tool, process.TOOLS[tool]()).take(begin)
    assert not list(outside.iterdir())


@pytest.mark.slow
def test_wandb_goes_on_with_the_same_run(run: Path) -> None:
    """Two directories of one id, no step twice, steps rising: what `wandb sync` merges."""
    stores = sorted(run.glob(f"wandb/offline-run-*-{RUN}/run-{RUN}.wandb"))
    assert len(stores) == 2
    rows = [row for store in stores for row in history(store)]
    assert [row["_step"] for row in rows] == list(range(7))
    assert [row["reward/mean"] for row in rows] == [*(step / 8 for step in range(6)), 6 / 8 + 0.5]
    assert rows[2]["samples/_type"] == "table-file"
    table = json.loads((stores[0].parent / "files" / rows[2]["samples/path"]).read_text())
    assert table == {"columns": ["prompt", "text", "reward"], "data": [["2 + 2 = ?", "it is <b>4|</b>", 1.0]]}
    [opened] = [one.run for one in records(stores[0]) if one.WhichOneof("record_type") == "run"][:1]
    assert (opened.run_id, opened.project, opened.display_name) == (RUN, "arithmetic", "night-012345")
    assert list(opened.tags) == ["tag"]
    config = {item.key: json.loads(item.value_json) for item in opened.config.update}
    assert config["rollout.engine"] == "hf" and config["seed"] == 3


@pytest.mark.slow
def test_mlflow_goes_on_with_the_same_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run in the experiment, each metric with each step once."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("arithmetic")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "night-012345"
    assert found.data.params["rollout.engine"] == "hf" and found.data.params["seed"] == "3"
    assert found.data.tags["dppo_megatron.run"] == RUN and "tag" in found.data.tags
    values = {one.step: one.value for one in client.get_metric_history(found.info.run_id, "reward/mean")}
    assert values == {step: step / 8 + (0.5 if step == 6 else 0.0) for step in range(7)}
    assert len(client.get_metric_history(found.info.run_id, "eval/held out/pass_at_1")) == 7
    artifacts = client.list_artifacts(found.info.run_id, "samples")
    assert [one.path for one in artifacts] == ["samples/step_000002.json"]


@pytest.mark.slow
def test_trackio_goes_on_with_the_same_run(run: Path) -> None:
    """One run in its database, each step once."""
    with contextlib.closing(sqlite3.connect(run / "trackio" / "arithmetic.db")) as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics order by step").fetchall()
        [[config]] = database.execute("select config from configs").fetchall()
    assert [row[2] for row in rows] == list(range(7))
    assert {row[0] for row in rows} == {"night-012345"} and len({row[1] for row in rows}) == 1
    metrics = [json.loads(row[3]) for row in rows]
    assert [one["reward/mean"] for one in metrics] == [*(step / 8 for step in range(6)), 6 / 8 + 0.5]
    assert "it is <b>4|</b>" in json.dumps(metrics[2]["samples"])
    assert json.loads(config)["rollout.engine"] == "hf"


@pytest.mark.slow
def test_no_file_holds_a_secret(run: Path) -> None:
    """Credentials come from the environment and stay there."""
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_killed_trainer_leaves_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages end without an `EndRun`: everything is delivered, and the run is marked."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    messages = [_begin(tmp_path), _line(0), _line(1)]
    answers = io.BytesIO()
    torn = framed(ENCODER.encode(_line(2)))[:-9]  # it was killed while it wrote
    told = io.BytesIO(b"".join(framed(ENCODER.encode(one)) for one in messages) + torn)
    serve(Sink("mlflow", Mlflow()), told, answers)
    assert [json.loads(one) for one in FrameBuffer().feed(answers.getvalue())] == [{"failure": "", "note": ""}] * 3
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    found = client.get_run(Mark.read(tmp_path / "mlflow.json").id)
    assert found.info.status == "FAILED" and found.data.metrics["reward/mean"] == 1 / 8


def test_a_run_that_begins_again_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint nothing says that its steps would be the same."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    ids = set()
    for _ in range(2):
        one = Sink("mlflow", Mlflow())
        for message in (_begin(tmp_path), _line(0), EndRun(True)):
            one.take(message)
        ids.add(Mark.read(tmp_path / "mlflow.json").id)
    assert len(ids) == 2


# ------------------------------------------------------------------------------------------------- what goes wrong


def test_a_tool_that_cannot_begin(tmp_path: Path) -> None:
    """Said once, counted for every step; the other tool gets all."""
    (tmp_path / "tensorboard").write_text("in the way")
    said = logged_lines()
    trackers = Trackers(["tensorboard", "trackio"], _begin(tmp_path), 300.0)
    for step in range(3):
        trackers.step(_line(step))
    trackers.close(finished=True)
    [line] = said
    assert line.startswith("warning: tracker tensorboard: ") and "it gets nothing from this run" in line
    assert trackers.failures == 4
    assert Mark.read(tmp_path / "trackio.json").last_step == 2


ANSWER = """read_frame(sys.stdin.buffer.read) and sys.stdout.buffer.write(framed(b'{"failure": ""}')) and not \\
    sys.stdout.buffer.flush()"""


def _program(text: str) -> Callable[..., subprocess.Popen[bytes]]:
    def start(name: str, limit_s: float) -> subprocess.Popen[bytes]:
        program = f"import sys; from dppo_megatron.frames import framed, read_frame\n{text}"
        return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    return start


def test_a_tool_that_hangs_takes_no_time_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes nothing, for ever: steps are handed over all the same, and its process is ended."""
    monkeypatch.setattr(sink, "_start", _program("import time; time.sleep(10_000)"))
    said = logged_lines()
    trackers = Trackers(["wandb"], _begin(tmp_path), 0.2)
    for step in range(500):
        trackers.step(_line(step))
    dropped = trackers.failures
    assert dropped >= 500 - 64
    trackers.close(finished=True)
    assert trackers.failures > dropped
    assert len(said) == 1 and "slower than the steps" in said[0]


@pytest.mark.slow
def test_a_tool_that_hangs_takes_no_time_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first never answers and uses up all of the time at the end; the second has taken the end meanwhile."""
    programs = {"mlflow": "import time; time.sleep(10_000)", "wandb": f"while {ANSWER}: pass"}
    monkeypatch.setattr(sink, "_start", lambda name, limit_s: _program(programs[name])(name, limit_s))
    said = logged_lines()
    trackers = Trackers(["mlflow", "wandb"], _begin(tmp_path), 6.0)
    trackers.step(_line(0))
    trackers.close(finished=True)
    [line] = said
    assert line.startswith("warning: tracker mlflow: ")


def test_a_text_that_is_no_unicode_is_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name from a command line in another encoding: this step is lost, and the others arrive."""
    monkeypatch.setattr(sink, "_start", _program(f"while {ANSWER}: pass"))
    said = logged_lines()
    trackers = Trackers(["wandb"], _begin(tmp_path), 300.0)
    trackers.step(StepLine(0, 0.0, {"eval/caf\udce9/pass@1": 1.0}, [], []))
    trackers.step(_line(1))
    trackers.close(finished=True)
    assert trackers.failures == 1 and len(said) == 1 and "not valid Unicode" in said[0]


def test_a_tool_whose_process_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first answer, as by the kernel for want of memory."""
    monkeypatch.setattr(sink, "_start", _program(ANSWER))
    said = logged_lines()
    trackers = Trackers(["wandb"], _begin(tmp_path), 300.0)
    for step in range(5):
        trackers.step(_line(step))
    trackers.close(finished=True)
    assert said == ["warning: tracker wandb: its process has ended (logged once; the run goes on)"]
    assert trackers.failures >= 5


def test_a_failure_does_not_show_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that nobody listens at, with a password in its address."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{SECRET}@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    said = logged_lines()
    begin = _begin(tmp_path)
    trackers = Trackers(["mlflow"], Begin(**{**_fields(begin), "offline": False}), 300.0)
    trackers.step(_line(0))
    trackers.close(finished=True)
    assert trackers.failures and len(said) == 1 and "127.0.0.1" in said[0]
    assert SECRET not in "".join(said)


def _fields(begin: Begin) -> dict[str, Any]:
    return {name: getattr(begin, name) for name in begin.__struct_fields__}


def test_scrubbing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdef123")
    monkeypatch.setenv("SHORT_KEY", "a")
    monkeypatch.setenv("ANOTHER_KEY", "abcdef123456")  # which begins as the other one
    assert scrubbed("bad key abcdef123 at https://me:pw@host/x") == "bad key *** at https://***@host/x"
    assert scrubbed("bad key abcdef123456") == "bad key ***"


@pytest.mark.parametrize("dots", range(460, 500, 3))
def test_half_of_a_secret_is_not_shown(dots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool's long message is cut, wherever the secret stands in it."""

    class Tells:
        def begin(self, *_: object) -> None:
            raise ValueError("." * dots + SECRET)

    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    answers = io.BytesIO()
    serve(Sink("x", Tells()), io.BytesIO(framed(ENCODER.encode(_begin(tmp_path)))), answers)  # type: ignore[arg-type]
    assert b"ValueError: ..." in answers.getvalue() and SECRET[:5].encode() not in answers.getvalue()


# -------------------------------------------------------------------------------------------- names and settings


@settings(deadline=None)  # the first example imports mlflow
@given(st.lists(st.text(min_size=1, max_size=30), min_size=2, max_size=2, unique=True))
def test_mlflow_takes_every_name_and_none_twice(names: list[str]) -> None:
    """By MLflow's own check. Evaluation sets are called what users call them."""
    from mlflow.utils.validation import _validate_metric_name

    made = [metric_name(name) for name in names]
    for name in made:
        _validate_metric_name(name)
    assert made[0] != made[1]


def test_names_of_ours_stay_readable() -> None:
    assert metric_name("train/grad_norm") == "train/grad_norm"
    assert metric_name("eval/aime24/pass@1_se") == "eval/aime24/pass_at_1_se"


def test_numbers_and_settings() -> None:
    line = {
        "reward/mean": None,
        "train/loss": float("nan"),
        "tokens/trained": 7,
        "prune/ledger": [{"name": "prompt dppo", "kept_fraction": 0.75, "label": "unbiased", "note": ""}],
    }
    assert numbers(line) == {"tokens/trained": 7.0, "ledger/prompt dppo": 0.75}
    assert flat_settings({"a": {"b": [1, 2], "c": {}}, "d": True}) == {"a.b": "[1, 2]", "a.c": "{}", "d": True}


def test_a_tracker_that_is_not_installed_is_found_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"mlflow needs the package mlflow-skinny, .*dppo-megatron\[trackers\]"):
        check_observe(ObserveConfig(trackers=["mlflow"]))
    check_observe(ObserveConfig())
    monkeypatch.undo()
    (tmp_path / "no_such_tool" / "run-1").mkdir(parents=True)  # as wandb leaves ./wandb
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="needs the package no_such_tool"):
        check_observe(ObserveConfig(trackers=["no_such_tool"]))  # type: ignore[list-item]
    with pytest.raises(UserError, match="named twice"):
        check_observe(ObserveConfig(trackers=["wandb", "wandb"]))


def test_wandb_without_credentials_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ask for them on the terminal, or fail, in the middle of a start."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    online = ObserveConfig(trackers=["wandb"])
    with pytest.raises(UserError, match="no credentials"):
        check_observe(online)
    check_observe(ObserveConfig(trackers=["wandb"], tracking=TrackingConfig(offline=True)))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_observe(online)
    (tmp_path / "netrc").write_bytes(b"\xff\xfe\x00machine")
    with pytest.raises(UserError, match="no credentials"):
        check_observe(online)
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    check_observe(online)
