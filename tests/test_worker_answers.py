"""What each worker of a vLLM answers to the calls of a weight sync: `dppo_do` of our extension, and `VLLMServer`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines.fake_vllm import FakeVLLM
from support.engines.servers import needs

from dppo_megatron.rollout.servers.http import BadAnswer, Http, Refused
from dppo_megatron.rollout.servers.protocol import TensorNote
from dppo_megatron.rollout.servers.vllm import VLLMServer

START, FINISH = "start_weight_update", "finish_weight_update"
WELL = {"problem": ""}
ACTIVE = {"problem": "RuntimeError: already active"}


@pytest.fixture(params=[True, False], ids=["our path", "vLLM's"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeVLLM]:
    """Four workers, of four replicas or of one."""
    with FakeVLLM("127.0.0.1", 0, "key") as server:
        model = {"architecture": None, "vocab_size": None, "device": "cpu"}
        workers = [model | {"place": place} for place in range(4)]
        server.instead = {"/get_world_size": {"world_size": 4}, "/collective_rpc": {"results": workers}}
        if request.param:
            server.instead |= {"/inference/v1/generate_arrays": {"form": 2}}
            server.instead |= {"/dppo_workers": {"replicas": [[worker] for worker in workers]}}
        yield server


def _described(fake: FakeVLLM) -> VLLMServer:
    server = VLLMServer(Http(fake.url, "key"))
    server.describe(timeout_s=10)
    return server


def test_each_workers_answer_to_a_call_is_read(fake: FakeVLLM) -> None:
    """What one of the last replica reports is the server's failure. One that answers with something else answers an
    earlier call: the server has fallen behind for good."""
    server, note = _described(fake), TensorNote("a", "float32", (1,))
    problem = {"problem": "RuntimeError: the weights stopped\ncoming"}
    fake.did = [("update_weights", [WELL, WELL, WELL, problem]), ("update_weights", [WELL, WELL, None, WELL])]
    with pytest.raises(Refused, match=r"^HTTP 500: RuntimeError: the weights stopped coming$"):
        server.receive([note], timeout_s=10)
    with pytest.raises(BadAnswer, match="Expected `object`, got `null`"):
        server.receive_shared(["offer"] * 4, [note], timeout_s=10)
    fake.did = [("finish_weight_update", [WELL] * 3)]
    with pytest.raises(BadAnswer, match="3 of 4 workers answer to finish_weight_update"):
        server.end_update("1", timeout_s=10)
    assert fake.version == "default"
    server.end_update("1", timeout_s=10)
    assert fake.version == "1"


def test_an_update_that_was_interrupted_is_finished_first(fake: FakeVLLM) -> None:
    """By its mixed weights' name no run takes them for its own. If only some workers were in it, the others begin one
    at the first try."""
    server = _described(fake)
    for first in ([ACTIVE] * 4, [WELL, ACTIVE, WELL, WELL]):
        fake.version = "1"
        fake.did = [(START, first), (START, [ACTIVE] * 4), (FINISH, [WELL] * 4), (START, [WELL] * 4)]
        server.begin_update(timeout_s=10)
        assert not fake.did and fake.version == "interrupted"
    none = [{"problem": "RuntimeError: no memory"}] * 4
    fake.did = [(START, none), (START, none), (FINISH, none), (START, none)]
    with pytest.raises(Refused, match="no memory"):
        server.begin_update(timeout_s=10)


def test_an_update_that_was_interrupted_is_finished_before_sleep(fake: FakeVLLM) -> None:
    """Not one that has ended, and not by a server whose weights are asleep."""
    server, note, problem = _described(fake), TensorNote("a", "float32", (1,)), {"problem": "RuntimeError: no memory"}
    asleep = "/sleep?level=2"
    server.begin_update(timeout_s=10)
    fake.did = [("update_weights", [WELL, problem, WELL, WELL])]
    with pytest.raises(Refused, match="no memory"):
        server.receive([note], timeout_s=10)
    for awake, expected in (("kv_cache", []), ("weights", ["/update_weight_version", START, FINISH]), ("weights", [])):
        fake.told.clear()
        server.sleep({awake}, timeout_s=10)  # type: ignore[arg-type]
        assert fake.told == [*expected, asleep]
    assert fake.version == "interrupted"
    server.begin_update(timeout_s=10)
    server.end_update("2", timeout_s=10)
    fake.told.clear()
    server.sleep({"weights"}, timeout_s=10)
    assert fake.told == [asleep] and fake.version == "2"


def test_a_server_of_several_workers_that_did_not_sleep_is_not_asked_again(fake: FakeVLLM) -> None:
    """After a worker's exception the others' answers are behind for good, so its job is to end it. An engine of one
    worker has no others."""
    server = _described(fake)
    fake.instead["/sleep"] = {"error": "no memory"}
    for world_size, expected in ((4, ["/sleep?level=2"]), (1, ["/sleep?level=2", "/sleep?level=1"])):
        server.world_size = world_size
        fake.told.clear()
        with pytest.raises(Refused, match="no memory"):
            server.sleep({"weights", "kv_cache"}, timeout_s=10)
        assert fake.told == expected


@pytest.mark.slow
@needs("vllm")
def test_what_an_interruption_leaves_in_a_worker(forked_vllm: Path) -> None:
    """vLLM's worker and its reload, in `support/engines/interrupted_worker.py`. Open layers have no data to save in
    sleep; begun again and finished, as above, an update is closed, also at a worker that failed in it. A snapshot that
    broke off is forgotten: vLLM would count its tensors, and take the layer for complete before the second file."""
    done = subprocess.run([forked_vllm, "-m", "interrupted_worker"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    problem, slept = "NotImplementedError: Cannot copy out of meta tensor; no data!", {"positions.table": [0.0, 1.0]}
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "open": [problem, slept],
        "failed": [problem, slept],
        "reloaded": ["SafetensorError", [1.0, 1.0], [2.0, 2.0]],
    }


@pytest.mark.slow
@needs("vllm")
def test_a_worker_that_fails_leaves_no_answers_behind(forked_vllm: Path) -> None:
    """In vLLM's own executor of two workers, in `support/engines/queued_answers.py`: after an exception of the first,
    the second's answer to the same call is taken for that to the next, and so on; after `dppo_do` it is not. Our path
    has the answers of all engines, and takes calls in vLLM's development mode only."""
    done = subprocess.run([forked_vllm, "-m", "queued_answers"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    failed = {"problem": "RuntimeError: no memory"}
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "raised": ["Worker failed with error 'no memory'", ["bucket 2", "bucket 1"]],
        "did": [[failed, WELL], [WELL, WELL]],
        "ray": failed,
        "posted": [{"replicas": [[failed, WELL], [failed, WELL]]}, 405],
    }
