"""TRL's GRPOTrainer with pruning: whole runs with a tiny model, several processes, checkpoints, what is refused."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest

pytest.importorskip("trl", reason="`make test-adapters` runs it")
import pandas
import torch
from tiny_trl import model, problems, pruning, reward, tokenizer, trainer
from trl import GRPOTrainer

from dppo_megatron.adapters.pruner import STATE
from dppo_megatron.adapters.settings import trl_refusals
from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig, PruningConfig
from dppo_megatron.types import UserError

NOTHING = PruningConfig(PromptPruningConfig(method="none"), CompletionPruningConfig(method="none"))


def _weights(made: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in made.model.parameters()])


def test_a_run_prunes_and_says_so_in_trls_log(tmp_path: Path) -> None:
    """Every step after the warm-up skips a quarter of the prompts and trains on fewer rows, with the labels."""
    made = trainer(tmp_path)
    trained = []
    inner = made.compute_loss

    def counted(model: Any, inputs: Any, **others: Any) -> torch.Tensor:
        trained.append(len(inputs["advantages"]))
        return inner(model, inputs, **others)

    made.compute_loss = counted
    made.train()
    rows = [row for row in made.state.log_history if "loss" in row]
    assert len(rows) == 6 and len(trained) == 6 * 4
    assert [row["prune/prompts_kept"] for row in rows] == [8.0] * 2 + [6.0] * 3 + [6.0]
    assert all(row["prune/completions_kept"] <= 8 for row in rows)
    assert max(trained) <= 2 < 8  # of the 8 rows that a micro-batch had
    assert rows[0]["ledger/prompt/dppo/exact"] == 1.0 and rows[-1]["ledger/prompt/dppo/unbiased"] == 0.75
    assert 0 < rows[-1]["ledger/completion/dppo/unbiased"] < 0.5
    assert [row.label for row in made.ledger] == ["unbiased", "unbiased"]


def test_the_completions_shown_are_those_of_the_step(tmp_path: Path) -> None:
    """TRL shows the last that there is room for, which is made for steps that skip nothing."""
    made = trainer(tmp_path, log_completions=True)
    made.train()
    kept = [row["prune/prompts_kept"] for row in made.state.log_history if "loss" in row]
    shown = [len(pandas.read_parquet(path)) for path in sorted((tmp_path / "completions").glob("*.parquet"))]
    assert shown == [4 * count for count in kept] and min(shown) < max(shown)


def test_with_nothing_pruned_it_is_trls_own_run(tmp_path: Path) -> None:
    """The same weights to the last bit: the same rows, in the same order, with the same generators."""
    ours = trainer(tmp_path / "ours", NOTHING, max_steps=4)
    ours.compact_generation = False
    ours.train()
    theirs = trainer(tmp_path / "theirs", cls=GRPOTrainer, max_steps=4)
    theirs.train()
    assert torch.equal(_weights(ours), _weights(theirs))


@pytest.mark.parametrize("multiple", [None, 4])
def test_rows_that_are_left_are_padded_to_their_like(multiple: int | None, tmp_path: Path) -> None:
    """Micro-batches from the shortest to the longest rows, each as wide as its own longest and no wider than
    `pad_to_multiple_of` asks; none of them lost."""
    made = trainer(tmp_path, max_steps=1, pad_to_multiple_of=multiple)
    seen: list[dict[str, Any]] = []
    inner = made.compute_loss

    def watched(model: Any, inputs: Any, **others: Any) -> torch.Tensor:
        seen.append(inputs)
        return inner(model, inputs, **others)

    made.compute_loss = watched
    made.train()
    widths = [batch["completion_ids"].size(1) for batch in seen]
    longest = [int(batch["completion_mask"].sum(1).max()) for batch in seen]
    assert widths == [math.ceil(one / (multiple or 1)) * (multiple or 1) for one in longest]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    assert {batch["prompt_ids"].size(1) for batch in seen} == {4}


def test_a_resumed_run_ends_as_one_that_went_through(tmp_path: Path) -> None:
    """Bit by bit, in the middle of the second epoch: the same prompts, and the same of them skipped."""
    whole = trainer(tmp_path / "whole", save_strategy="steps", save_steps=3)
    whole.train()
    middle = tmp_path / "whole" / "checkpoint-3"
    assert (middle / STATE).exists()
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(middle))
    assert torch.equal(_weights(whole), _weights(again))
    kept = [[row.get("prune/weight_max") for row in made.state.log_history[3:6]] for made in (whole, again)]
    assert kept[0] == kept[1]
    (middle / STATE).unlink()
    with pytest.raises(UserError, match="is of a run without this pruning"):
        trainer(tmp_path / "third").train(resume_from_checkpoint=str(middle))


def test_a_second_run_of_a_trainer_begins_its_own_history(tmp_path: Path) -> None:
    """Its steps have the numbers, prompts and draws of the first run's, whose outcomes must not steer them."""
    made = trainer(tmp_path, save_strategy="steps", save_steps=3)
    made.train()
    first, visits = made.pruner, made.pruner._prompts.history.arrays["visits"].sum()
    for resume in (str(tmp_path / "checkpoint-3"), None):
        made.train(resume_from_checkpoint=resume)
        assert made.pruner is not first and made.pruner._prompts.history.arrays["visits"].sum() == visits


def _on_ranks(ranks: int, folder: Path, what: str) -> None:
    """gloo, as accelerate starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(folder)]
    started = [
        subprocess.Popen([*command, *map(str, (rank, ranks, port, what))], stdout=PIPE, stderr=STDOUT)
        for rank in range(ranks)
    ]
    for process in started:
        said, _ = process.communicate(timeout=900)
        assert process.returncode == 0, said.decode()


@pytest.mark.parametrize("group", [4, 3])
def test_processes_choose_alike_and_share_the_rows(group: int, tmp_path: Path) -> None:
    """Groups that do not divide by the processes are filled up to equal shares; a resume ends bit by bit the same."""
    _on_ranks(2, tmp_path, str(group))
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(one["ranks"] == 2 and one["weights"] == found[0]["weights"] for one in found)
    assert all(one["resumed"] == one["weights"] for one in found)
    last = found[0]["history"][4]
    offered = 24 // group
    assert last["prune/prompts_offered"] == offered and last["prune/prompts_kept"] < offered
    assert last["prune/completions_offered"] == last["prune/prompts_kept"] * group


@pytest.mark.parametrize("loss", ["grpo", "dapo", "vespo, vLLM"])
def test_the_expected_gradient_of_two_processes_is_the_full_one(loss: str, tmp_path: Path) -> None:
    """Groups are split between them, and which rows a process trains on changes from draw to draw."""
    _on_ranks(2, tmp_path, loss)


def test_images_of_one_process_are_refused_on_all(tmp_path: Path) -> None:
    """Tools and prompts may have them where no column says so; TRL's rows have them where a process has one."""
    _on_ranks(2, tmp_path, "images")


REFUSED: dict[str, dict[str, Any]] = {
    "loss_type=bnpo": {"loss_type": "bnpo"},
    "top_entropy_quantile": {"top_entropy_quantile": 0.5},
    "num_iterations": {"num_iterations": 2},
    "steps_per_generation": {"steps_per_generation": 8},
    "scale_rewards=batch": {"scale_rewards": "batch"},
    "entropy_coef": {"entropy_coef": 0.01},
    "normalize_then_sum": {"multi_objective_aggregation": "normalize_then_sum"},
    "remove_unused_columns": {"remove_unused_columns": True},
    "max_completion_length=None": {"max_completion_length": None, "loss_type": "dapo"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_biased_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=name):
        trainer(tmp_path, **REFUSED[name])


def test_a_kl_term_is_refused(tmp_path: Path) -> None:
    """Apart from the others because TRL would look for the reference model first."""
    made = trainer(tmp_path)
    made.beta = 0.1
    assert trl_refusals(made, made.pruning) == ["beta=0.1: the KL term is not weighted"]


def test_images_are_refused_before_a_rollout(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train_dataset = made.train_dataset.add_column("image", [None] * 16)
    assert trl_refusals(made, made.pruning) == ["train_dataset: prompts with images, whose rows cannot be dropped"]


def test_a_figure_of_the_batch_is_no_hindrance_without_skipping(tmp_path: Path) -> None:
    trainer(tmp_path, pruning(prompts=0), scale_rewards="batch", multi_objective_aggregation="normalize_then_sum")


def test_methods_that_other_trainers_cannot_serve_are_refused(tmp_path: Path) -> None:
    """Refills and measured costs."""
    for changed, said in (
        ({"method": "dynamic_sampling"}, "more prompts"),
        ({"method": "dppo_auto"}, "fixed_cost_ratio"),
    ):
        given = PruningConfig(prompt=PromptPruningConfig(**changed))
        with pytest.raises(UserError, match=said):
            trainer(tmp_path, given).train()


def test_a_completion_that_no_function_grades_stays_out(tmp_path: Path) -> None:
    """TRL's None: no advantage, no part in the statistics."""
    made = trainer(tmp_path, max_steps=2)
    made.reward_funcs = [lambda completions, **rest: [None, *reward(completions[1:], rest["answer"][1:])]]
    made.train()
    assert made.pruner._prompts.history.arrays["visits"].sum() == 16


def test_an_evaluation_is_trls_own(tmp_path: Path) -> None:
    """Nothing is dropped, nothing learnt from it."""
    made = trainer(tmp_path, max_steps=1)
    made.train()
    before = made.pruner._prompts.history.arrays["visits"].copy()
    made.evaluate(problems(4))
    logged = [row for row in made.state.log_history if "eval_reward" in row]
    assert len(logged) == 1 and not any("prune" in name or "ledger" in name for name in logged[0])
    assert (made.pruner._prompts.history.arrays["visits"] == before).all()


def test_a_training_set_by_position_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"datasets\.Dataset"):
        made = trainer(tmp_path)
        type(made)(model=made.model, reward_funcs=reward, args=made.args, train_dataset=["1+1="])


def test_the_ten_lines_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are in docs/adapters.md, with a tiny model in place of a published one, and two steps."""
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert len(code.strip().splitlines()) <= 12
    monkeypatch.chdir(tmp_path)
    model().save_pretrained("Qwen/Qwen3-0.6B")
    tokenizer().save_pretrained("Qwen/Qwen3-0.6B")
    problems().to_json("problems.jsonl")
    small = 'output_dir="out", max_steps=2, use_cpu=True, bf16=False, max_completion_length=6, report_to="none"'
    space: dict[str, Any] = {}
    exec(code.replace('output_dir="out"', small), space)
    assert space["trainer"].state.global_step == 2 and space["trainer"].ledger
