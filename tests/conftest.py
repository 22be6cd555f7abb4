"""What every test needs, and no more: one thread for each process, megatron-core prepared, GPU tests skipped aloud, and
an order in which two workers end together (`pytest -n 2`, see docs/testing.md)."""

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cases import CHOSEN, PASSED, PROPERTY, cases  # noqa: F401 (a fixture)
from support.executed import Executed

# Before torch: ranks are forked from this process, and an OpenMP pool does not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns in each rank otherwise, for the same reason
# Many tests read a command's only line. On a slow machine there would be lines about its imports as well.
os.environ["DPPO_PROGRESS"] = "off"
# What is imported is here to stay: to look at all of it again and again while it grows takes a third of the time until
# the first test. `pytest_collection_finish` turns the collector on.
gc.disable()

# A shell that starts the tests in the background has SIGINT ignored, and so would every command that a test interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ENGINES = (
    *("test_server_generation", "test_server_sync", "test_server_troubles"),
    *("test_recipes_run", "test_engine_launch", "test_real_math"),
)
"""Files that start real servers: one worker has them all, so that at most two servers need their 2 GB at a time."""
LONGEST = (
    *ENGINES,
    "test_nccl_layouts",
    "test_fuzz_config",
    "test_texts",
    "test_resume",
    "test_recipes",
    "test_faults",
    "test_save_failures",
    "test_actor_layouts",
    "test_doctor_cluster",
    "test_pool",
    "test_hf_parity",
    "test_unbiased_actor",
    "test_report_browser",
    "test_pipeline",
    "test_pruning_labels",
    "test_serve",
    "test_trackers",
    "test_updates_per_step",
    "test_budgets",
    "test_control_answers",
    "test_hostile_servers",
    "test_weight_sync",
    "test_plan_memory",
    "test_lint",
    "test_fuzz_data",
    "test_data_plane",
    "test_pruning_bias_sizes",
    "test_gpu_ready",
    "test_package",
    "test_actor_settings",
    "test_training",
    "test_fuzz_runs",
    "test_conversion",
    "test_accept",
    "test_offload",
    "test_links",
    "test_roofline",
    "test_pruning_custom",
    "test_command_line",
    "test_damage",
    "test_pruning_designs",
    "test_simulate",
    "test_messages",
    "test_progress_everywhere",
    "test_security",
    "test_timeline",
    "test_identity",
    "test_compare_runs",
    "test_platform",
    "test_evaluation",
    "test_checkpoints",
    "test_rollout_client",
    "test_servers_everywhere",
    "test_arithmetic",
    "test_pruning_shapes",
    "test_families",
    "test_sharing_the_card",
    "test_weight_stream",
    "test_selection_guards",
    "test_fuzz_model",
    "test_objectives",
    "test_hf_engine",
    "test_run_directory",
    "test_samples",
    "test_watch",
    "test_data_hub",
    "test_engines",
)
"""Started first: a long file that started last would leave the other workers idle."""


@contextlib.contextmanager
def _environment_restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ |= before
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture(scope="module", autouse=True)
def _environment_of_a_module() -> Iterator[None]:
    """What a module's fixtures put into the environment is gone when its tests have run."""
    with _environment_restored():
        yield


@pytest.fixture(autouse=True)
def _environment_of_a_test() -> Iterator[None]:
    """What a test puts there too: a PYTHONPATH for one engine's servers had every later `python -c` import torch."""
    with _environment_restored():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems and a model for small jobs (`support/job.py`), a module's own."""
    from support.job import write_job_files

    return write_job_files(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def forked_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An interpreter for `rollout.servers.python` whose vLLM servers start in 3 CPU seconds: it is imported once."""
    from support.engines import forked_vllm, servers

    with forked_vllm.interpreter(servers.PYTHON["vllm"], tmp_path_factory.mktemp("vllm")) as script:
        yield script


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _name(nodeid: str) -> str:
    """`test_resume` of `tests/test_resume.py::test_signals[1]`."""
    return _file(nodeid).rpartition("/")[2].removesuffix(".py")


def pytest_configure(config: pytest.Config) -> None:
    """In each process that runs tests. The one that hands them out to workers needs no torch: 3 s sooner they start."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        gc.enable()
        return
    import torch

    from dppo_megatron import platform

    if not torch.cuda.is_available():  # before anything imports Triton: its own functions read it when they are defined
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    platform.prepare()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        items.sort(key=lambda item: LONGEST.index(name) if (name := _name(item.nodeid)) in LONGEST else len(LONGEST))
    import torch

    if torch.cuda.is_available() or "DPPO_GPU_TESTS_ANYWHERE" in os.environ:  # test_gpu_ready.py
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """For the fixture `cases`."""
    if call.when == "call":
        item.user_properties += [(PROPERTY, str(one)) for one in item.stash.get(CHOSEN, [])]
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed
    return report


def _executed(config: pytest.Config) -> Executed:
    stats = config.pluginmanager.get_plugin("terminalreporter").stats  # type: ignore[union-attr]
    return Executed.of([one for name in ("passed", "failed", "error", "skipped") for one in stats.get(name, [])])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the table of what was executed; a run that must not be green is red."""
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    executed = _executed(session.config)
    if cache := getattr(session.config, "cache", None):
        cache.set("executed/generators", executed.generators)
        cache.set("executed/skips", executed.skips)
    if executed.faults() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was executed, and how many random cases each property was tried on."""
    executed = _executed(config)
    if executed.tests or executed.skips:
        terminalreporter.section("executed")
        terminalreporter.write("\n".join(executed.lines()) + "\n")
    reports = [one for name in ("passed", "failed") for one in terminalreporter.stats.get(name, [])]
    lines = sorted(
        f"{report.nodeid}: {text}"
        for report in reports
        if report.when == "call"
        for name, text in report.user_properties
        if name == PROPERTY
    )
    if lines:
        terminalreporter.section("random cases tried")
        terminalreporter.write("\n".join(lines) + "\n")


def pytest_collection_finish() -> None:
    """A million objects of torch, transformers and sympy are here to stay: no later collection looks at them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share its fixtures, so a worker gets whole files, in the order above."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "engines" if _name(nodeid) in ENGINES else _file(nodeid)

    config.option.loadscopereorder = False  # it would order by the number of tests, not by their length
    return ByFile(config, log)
