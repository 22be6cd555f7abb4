"""`dppo-megatron report`: from whatever a run has left, one page; `test_report_browser.py` opens it."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.record import unpacked, write_record

from dppo_megatron.pruning import LedgerRow
from dppo_megatron.pruning.interface import percent
from dppo_megatron.types import UserError
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.report.findings import findings
from dppo_megatron.workbench.report.page import read_samples, write_page
from dppo_megatron.workbench.runs.run_record import read_run


def test_a_long_run_is_there_in_full(tmp_path: Path) -> None:
    """Every step of 1,000, and samples that would fill the page several times over, in a file that a browser opens at
    once; benchmarks/report.py has the seconds, and 512 x 16 completions a step, of which a page has the same."""
    sampled = range(961, 1001)
    run = write_record(tmp_path / "run", 1000, group=16, sampled=sampled, groups=2, tokens=1000)
    write_page(tmp_path / "report.html", [read_run(run)])
    held = unpacked(tmp_path / "report.html")
    data = json.loads(held["report-data"])["runs"][0]
    assert len(data["steps"]) == 1001 and len(data["columns"]["reward/mean"]) == 1001
    assert {f"samples-0-{step}" for step in sampled} <= held.keys()
    assert (tmp_path / "report.html").stat().st_size < 15e6


def test_a_short_run_takes_little(tmp_path: Path) -> None:
    """The quickstart's 40 steps of 64 x 8; its own report takes 2.8 MB, because its texts repeat each other."""
    text = "21-6=15 15+9=24 24-3=21 21+4=25 25-2=23 23+1=24 #### 24"
    run = write_record(tmp_path / "run", 40, prompts=64, sampled=range(1, 41), text=text)
    write_page(tmp_path / "report.html", [read_run(run)])
    assert (tmp_path / "report.html").stat().st_size < 4e6
    assert len(json.loads(unpacked(tmp_path / "report.html")["samples-0-40"])) == 64


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    """No address is loaded: the policy in the page forbids it, and no element of it names one."""
    write_page(tmp_path / "report.html", [read_run(write_record(tmp_path / "run", 3))])
    page = (tmp_path / "report.html").read_text()
    assert "default-src 'none'" in page
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)", page)


@pytest.mark.parametrize("left", ["finished", "stopped", "crashed", "running"])
def test_every_state_of_a_run(tmp_path: Path, left: str) -> None:
    run = write_record(tmp_path / "run", 5)
    if left != "finished":
        (run / "summary.json").unlink()
        shutil.rmtree(run / "samples")
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 6, "reward/me')  # a kill, or a line in the making
    if left in ("crashed", "running"):
        (run / "lock.json").write_text("{}")
        if left == "crashed":
            os.utime(run / "lock.json", (1, 1))
    record = read_run(run)
    assert record.status == left and record.steps == [0, 1, 2, 3, 4, 5] and record.notes == []
    write_page(tmp_path / "report.html", [record])


def test_damage_is_counted(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", 5)
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    lines[2] = b"\xff\x00 not a line"
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines))
    (run / "config.yaml").write_text("a: [")
    (run / "summary.json").write_text("{")
    for one in (run / "samples").iterdir():
        one.write_bytes(b"PAR1 damaged")
    record = read_run(run)
    assert record.steps == [0, 1, 3, 4, 5]
    assert [note.split(":")[0].split(" ")[0] for note in record.notes] == [
        "metrics.jsonl",
        "summary.json",
        "config.yaml",
    ]
    write_page(tmp_path / "report.html", [record])


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    run = write_record(tmp_path / "run", 2)
    assert main(["report", str(run), "--out", str(tmp_path)]) == 2
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").exists()
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no step yet"):
        read_run(run)
    capsys.readouterr()
    assert main(["report", str(run)]) == 2
    assert "holds no step yet" in (said := capsys.readouterr().err) and "dppo-megatron watch RUN" in said
    good, out = write_record(tmp_path / "good", 2), tmp_path / "both.html"
    assert main(["report", str(run), str(good), "--out", str(out)]) == 0
    assert "holds no step yet; it is left out" in capsys.readouterr().err
    assert [one["name"] for one in json.loads(unpacked(out)["report-data"])["runs"]] == ["good"]


def test_findings_name_their_steps(tmp_path: Path) -> None:
    found = findings(read_run(write_record(tmp_path / "run", 6)))
    assert [(one.level, one.steps) for one in found] == [("bad", "2"), ("warning", "1-6")]
    assert "rollout/stragglers" in found[1].text


def test_figures_of_older_and_of_biased_runs(tmp_path: Path) -> None:
    """Entropy was 0 where nothing was trained, and is now of all that was rolled out; what a biased method measures on
    what it kept is judged as the policy's."""
    trained = "prune/completions_trained"
    rows: list[dict[str, object]] = [
        {
            "step": 1,
            trained: 0,
            "train/entropy": 0.0,
            "pack/padding": 1.0,
            "kept/product_ess": 0.5,
            "rollout/truncated_count": 2.0,
        },
        {"step": 2, trained: 0, "train/entropy": 0.3, "kept/product_ess": 0.6, "rollout/truncated_share": 0.7},
        {"step": 3, trained: 8, "train/entropy": 0.0, "kept/mismatch/logprob_abs_diff_mean": 9.0, "pack/padding": 0.0},
        {"step": 4, trained: 8, "train/entropy": 0.0, "reward/mean": 0.95},  # solved: nothing to explore for
        {"step": 5, trained: 0, "reward/mean": 1.0},  # nor to train on
    ]
    rows[2]["reward/mean"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    assert run.columns["train/entropy"] == [None, 0.3, 0.0, 0.0, None]
    assert run.columns["kept/product_ess"] == [0.5, 0.6, None, None, None]
    assert run.columns["pack/padding"] == [None, None, 0.0, None, None]
    assert run.columns["rollout/truncated_share"] == [None, 0.7, None, None, None]
    found = {one.text.split(" (")[1]: one.steps for one in findings(run) if " (" in one.text}
    assert found == {
        "kept/mismatch/logprob_abs_diff_mean)": "3",
        "rollout/truncated_share)": "2",
        "train/entropy, reward/mean)": "3",
        "prune/completions_trained)": "1-2",
    }


@pytest.mark.parametrize(
    ("rollout", "speeds"),
    [
        ("{}", [200.0, None]),
        ("{async_steps: 1}", [100.0, 50.0]),
        ("{async_steps: 1, servers: {colocate: true}}", [200.0, None]),
    ],
)
def test_tokens_a_second_of_what_is_generated_beside_the_rest(
    tmp_path: Path, rollout: str, speeds: list[float | None]
) -> None:
    """The seconds of such a rollout are what was waited for it, here half a step's or none: a speed over them would be
    any number."""
    rows = [{"step": step, "tokens/generated": 1000, "time/rollout_s": 10 - 5 * step, "time/step_s": 10 * step}
            for step in (1, 2)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(f"rollout: {rollout}\n")
    assert read_run(tmp_path).columns["tokens/generated_per_s"] == speeds


def test_a_bias_is_told_once(tmp_path: Path) -> None:
    """As the mean over the steps; a step without gradient has none, and adds no note. Of a note with numbers, the last
    step's stays."""
    rows = [LedgerRow("any", 0.5, "biased", "a rule").with_bias(size) for size in (0.9, 3.8, None)]
    lines = [{"step": k, "prune/ledger": [asdict(row)]} for k, row in enumerate(rows, 1)]
    assert [row.note for row in rows] == ["a rule; bias about 90 %", "a rule; bias about 380 %", "a rule"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert findings(read_run(tmp_path))[0].text == "any changes the expected gradient (bias 240 %): a rule"
    for k, line in enumerate(lines, 1):
        line["prune/ledger"] = [asdict(LedgerRow("any", 0.5, "unbiased", f"lowers the rate to 0.{k}"))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).ledger[0]["notes"] == ["lowers the rate to 0.3"]


def test_percent_is_never_a_power_of_ten() -> None:
    shares = [0.0, 1.234e-4, 0.0123, 0.906, 0.997, 3.0, 3.8, 123.4]
    expected = ["0 %", "0.012 %", "1.2 %", "91 %", "100 %", "300 %", "380 %", "12000 %"]
    assert [percent(share) for share in shares] == expected


def test_notes_are_about_what_can_be_mended(tmp_path: Path) -> None:
    """Room in a step's only micro-batch is no fault; in several it is. The variance of skipping has to be beyond
    chance, and what counts is the last step's, which is over twenty."""
    run = write_record(tmp_path / "run", 6)
    record, plain = read_run(run), len(findings(read_run(run)))
    for count, expected in ((1.0, plain), (2.0, plain + 1)):
        record.columns |= {"pack/fill": [None] + [0.3] * 6, "pack/microbatches": [None] + [count] * 6}
        assert len(findings(record)) == expected
    assert findings(record)[-1].steps == "1-6" and "not half full" in findings(record)[-1].text
    for realised, noted in ((1.29, 0), (1.31, 1)):
        columns = {
            "predicted_effect": [1.2] * 6,
            "realised_effect": [9.0] * 5 + [realised],
            "realised_error": [0.033] * 6,
        }
        record.columns |= {f"prune/prompt_{name}": [None, *values] for name, values in columns.items()}
        assert len(findings(record)) == plain + 1 + noted
    assert "1.31 times the variance, 1.20 was predicted" in findings(record)[-1].text


def test_samples_fit_into_their_room(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", 100, prompts=4, text="x" * 500, sampled=range(1, 101))
    whole, small = read_samples(run, "", 10**9), read_samples(run, "", 200_000)
    assert len(whole.steps) == 40 and min(whole.steps) == 1 and max(whole.steps) == 100
    assert {len(groups) for groups in whole.steps.values()} == {4}
    assert 50_000 < len(json.dumps(small.steps)) < 400_000
    assert all(small.groups_in_step[step] == 4 for step in small.steps)
    assert whole.recorded_steps == small.recorded_steps == 100


def test_steps_without_samples_are_not_counted_or_chosen(tmp_path: Path) -> None:
    """A merged file of every tenth step holds 64 steps, not 631. Those of other ranks' files count once; files that
    cannot be read are named."""
    run = write_record(tmp_path / "run", 640, prompts=1, group=2, sampled=range(10, 641, 10))
    (merged,) = (run / "samples").iterdir()
    found = read_samples(run, "", 10**9)
    assert found.recorded_steps == 64 and len(found.steps) == 40
    assert all(step % 10 == 0 and groups for step, groups in found.steps.items())
    shutil.copy(merged, merged.with_name("steps_000010-000640.rank0001.parquet"))
    wrong = [merged.with_name(f"steps_000001-000009.rank000{rank}.parquet") for rank in range(4)]
    wrong[0].write_bytes(b"PAR1 no more")
    pq.write_table(pa.table({"step": pa.array([2, None], pa.int32())}), wrong[1])
    pq.write_table(pa.table({"step": ["2"]}), wrong[2])
    pq.write_table(pa.table({"steps": [2]}), wrong[3])
    found = read_samples(run, "", 10**9)
    assert found.recorded_steps == 64 and found.unreadable == {path.name for path in wrong}


def test_of_groups_too_large_for_all_steps_some_steps_have_one(tmp_path: Path) -> None:
    """Spread over the run, the last step first; and that one is there, however large it is."""
    run = write_record(tmp_path / "run", 40, prompts=2, text="x" * 5000, sampled=range(1, 41))
    [one] = read_samples(run, "", 1).steps.items()
    assert one[0] == 40 and len(one[1]) == 1
    few = sorted(read_samples(run, "", 5 * 8 * 5500).steps)
    assert few == [8, 16, 24, 32, 40]
