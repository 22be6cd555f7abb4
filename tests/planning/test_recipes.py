"""Every recipe of configs/h100 passes `plan` and a dry run on its GPUs; what `plan` says and refuses."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.job import REPOSITORY
from support.true_shapes import GLM, LARGEST, LONG, MODELS, write_config, write_empty_model

from dppo_megatron.config import load_config
from dppo_megatron.pruning.policies import METHODS
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.planning import timing

RECIPES = sorted((REPOSITORY / "configs" / "h100").glob("*gpus_*.yaml"))
PARTS = re.compile(r"(\w+)_(\d+)gpus_(grpo|dppo)")


def _parts(recipe: Path) -> tuple[str, str, str]:
    match = PARTS.fullmatch(recipe.stem)
    assert match, recipe
    return match.group(1), match.group(2), match.group(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of each model, and 128 problems."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in MODELS:
        write_empty_model(folder / name, name)
    rows = [json.dumps({"problem": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(128)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def _settings(folder: Path, recipe: Path) -> list[str]:
    model, gpus, _ = _parts(recipe)
    return [
        str(recipe),
        f"model.hf_path={folder / model}",
        f"data.train_path={folder / 'train.jsonl'}",
        "data.eval_sets={}",
        f"run_dir={folder / 'run'}",
        "--gpus",
        gpus,
    ]


def test_all_are_there() -> None:
    """Four models, three sizes, and twins."""
    assert {_parts(path) for path in RECIPES} == {
        (model, gpus, method) for model in MODELS for gpus in ("8", "16", "32") for method in ("grpo", "dppo")
    }


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, marks=[pytest.mark.long] * path.stem.endswith("grpo"), id=path.stem) for path in RECIPES],
)
def test_recipe_passes_plan_and_dry_run(folder: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On its GPUs, with the true shapes: it fits, and the first prompt is rendered by the chat template."""
    assert main(["plan", *_settings(folder, recipe), "--methods", "grpo", "--dry-run"]) == 0
    out = capsys.readouterr().out
    shown = out.replace("\n    ", "\n")  # a prompt's own lines are indented, so that none looks like one of ours
    assert shown.rstrip().endswith("<think>\n\n</think>") and "What is 0 + 1?\nPlease reason step by step" in shown
    assert "does not fit" not in out and not (folder / "run").exists()


def test_the_recipe_with_adapters_passes_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 billion parameters on two GPUs, where all of them would not fit."""
    recipe = REPOSITORY / "configs" / "h100" / "qwen3_8b_lora_2gpus.yaml"
    given = [f"model.hf_path={folder / 'qwen3_8b'}", f"data.train_path={folder / 'train.jsonl'}", "data.eval_sets={}"]
    line = ["plan", str(recipe), *given, f"run_dir={folder / 'run'}", "--gpus", "2", "--methods", "grpo"]
    assert main([*line, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "0.087e9 of adapters trained" in out and "does not fit" not in out and not (folder / "run").exists()
    assert main([*line, "actor.lora.rank=0"]) == 2


@pytest.mark.parametrize(
    ("model", "gpus", "parameters"),
    [(LARGEST, "128", "235.09e9 parameters"), (GLM, "64", "106.85e9 parameters, 12.80e9 of them for each token")],
)
def test_recipes_of_large_mixtures_pass_too(
    model: str, gpus: str, parameters: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With routing replay: a last pipeline stage of fewer layers; sigmoid routers, a shared expert, a first layer
    without experts."""
    write_empty_model(folder / model, model)
    recipe = REPOSITORY / "configs" / "h100" / f"{model}_{gpus}gpus.yaml"
    given = [f"model.hf_path={folder / model}", f"data.train_path={folder / 'train.jsonl'}", "data.eval_sets={}"]
    line = ["plan", str(recipe), *given, f"run_dir={folder / 'run'}", "--gpus", gpus, "--methods", "grpo"]
    assert main([*line, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "not tried here, watch mismatch/kl: experts that vllm records" in out
    assert parameters in out and "does not fit" not in out and not (folder / "run").exists()
    assert load_config(str(recipe), given, purpose="plan", writes_run=False).actor.routing_replay == "engine"
    if model == LARGEST:
        assert main([*line, "actor.megatron.num_layers_in_last_pipeline_stage=null"]) == 2
        assert "94 layers do not divide by it" in capsys.readouterr().err


def test_the_recipe_of_64k_tokens_passes_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YaRN and context parallelism; without YaRN its completions are beyond the model's positions."""
    write_empty_model(folder / LONG, LONG)
    recipe = REPOSITORY / "configs" / "math" / f"{LONG}_32gpus.yaml"
    given = [f"data.train_path={folder / 'train.jsonl'}", "data.eval_sets={}", f"run_dir={folder / 'run'}"]
    line = ["plan", str(recipe), *given, "--gpus", "32", "--methods", "grpo", "--dry-run"]
    assert main([*line, f"model.hf_path={folder / LONG}"]) == 0
    out = capsys.readouterr().out
    assert "8.19e9 parameters" in out and "does not fit" not in out and not (folder / "run").exists()
    assert main([*line, f"model.hf_path={folder / 'qwen3_8b'}"]) == 2
    assert "63488" in (said := capsys.readouterr().err) and "40960" in said


@pytest.mark.parametrize("recipe", [path for path in RECIPES if path.stem.endswith("dppo")], ids=lambda path: path.stem)
def test_twins_differ_in_pruning_only(folder: Path, recipe: Path) -> None:
    """So that they can be compared; and recipes of one model differ in their layout only."""
    model, _, _ = _parts(recipe)

    def loaded(path: Path) -> dict[str, Any]:
        """The whole config as plain values."""
        return asdict(load_config(str(path), [f"model.hf_path={folder / model}"], purpose="plan", writes_run=False))

    assert (loaded(recipe)["actor"]["routing_replay"] == "engine") == ("a3b" in model)
    dppo, grpo = loaded(recipe), loaded(recipe.with_name(recipe.name.replace("dppo", "grpo")))
    assert {key for key in dppo if dppo[key] != grpo[key]} == {"pruning", "run_dir"}
    smallest = loaded(recipe.with_name(f"{model}_8gpus_dppo.yaml"))
    for one in (dppo, smallest):  # only a job of several nodes has servers elsewhere
        one["rollout"]["servers"].pop("allow_remote_endpoints")
    assert {key for key in dppo if dppo[key] != smallest[key]} <= {"actor", "run_dir"}


@pytest.mark.parametrize("recipe", sorted(REPOSITORY.glob("configs/h100/*.yaml")), ids=lambda path: path.stem)
def test_values_have_sources(recipe: Path) -> None:
    """Every number of a model's recipe says where it comes from, on its line, the one above, or "this and the next"."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    covered = numbers = 0
    for number, line in enumerate(lines):
        covered = max(covered - 1, 0)
        if said := re.search(r"# this and the next( two)?", line):
            covered = 3 if said.group(1) else 2
        has_number = re.search(r": .*\d", line.partition("#")[0]) and "run_dir" not in line and "defaults" not in line
        plain = ("bfloat16", "max_prompt_tokens", "max_concurrent_sequences", "path:", "gpus:")
        if has_number and not any(word in line for word in plain):
            numbers += 1
            assert "#" in line or covered or lines[number - 1].lstrip().startswith("#"), line
    if "_8gpus_grpo.yaml" not in lines[1]:  # of the same job on one node, whose numbers it takes
        assert bool(numbers) != recipe.stem.endswith("_dppo"), "DPPO's recipes take their numbers from GRPO's"


def test_plan_alone_needs_config_json_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No tokenizer, no weights, no data (though that has the levels which a job sorts its problems by), no run_dir."""
    model = write_config(tmp_path, "qwen3_8b")
    recipe = str(REPOSITORY / "configs" / "h100" / "qwen3_8b_8gpus_dppo.yaml")
    settings = [f"model.hf_path={model}", "data.order=easy_first", "data.level_field=level"]
    assert main(["plan", recipe, *settings, "--json", str(tmp_path / "new" / "plan.json")]) == 0
    out, said = capsys.readouterr()
    assert "new/plan.json: its directory did not exist and was created\n" in said
    plan = json.loads((tmp_path / "new" / "plan.json").read_text(encoding="utf-8"))
    assert plan["fits"] and f"largest: {plan['largest']}" in out
    assert list(plan["phases"]) == ["generate", "sync", "log-probs", "forward", "backward", "step", "checkpoint"]
    assert list(plan["host"]) == list(plan["phases"])
    for phase in (*plan["phases"].values(), *plan["host"].values()):
        assert phase["total"] == pytest.approx(sum(v for k, v in phase.items() if k not in ("total", "stage")))
    saving = re.search(r"a stop waits for the step, a due evaluation, and (\d+) s of saving", out)
    assert saving and int(saving[1]) == round(20 * plan["seconds"]["checkpoint"])  # checkpoint.every_steps
    methods = plan["methods"]
    assert plan["refused"] == {}
    assert methods["dppo"]["step_s"] < methods["grpo"]["step_s"]
    assert methods["dppo"]["label"] == "ratio"  # the token mean's divisor


CPPO = {"cppo", "cppo_trl", "cppo_verl"}
ALLOCATION = ["pruning.completion.method=cppo", "pruning.completion.allocation=true"]


@pytest.mark.parametrize(
    ("settings", "base", "refused"),
    [
        (["pruning.completion.rate=0.95"], "grpo", {"cppo"}),
        (
            [
                *ALLOCATION,
                "pruning.completion.rate=0.25",
                "rollout.prompts_per_step=48",
                "objective.updates_per_step=32",
            ],
            "cppo",
            METHODS.keys() - CPPO,
        ),
        (
            [
                *ALLOCATION,
                "pruning.completion.rate=0.3",
                "rollout.prompts_per_step=448",
                "objective.updates_per_step=4",
            ],
            "grpo",
            set(),
        ),
    ],
)
def test_a_method_of_the_comparison_that_the_settings_do_not_fit_refuses_no_job(
    settings: list[str], base: str, refused: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With a rate of 0.95 and groups of 16 CPPO would keep no completion, and DPPO one. Named, it is refused. With its
    allocation the others' prompts may not divide into updates, GRPO's neither: the table then names its base."""
    line = ["plan", "h100/qwen3_8b_8gpus_dppo", *settings]
    assert main(line) == 0
    out = capsys.readouterr().out
    told = re.findall(r"^  (.+): not with these settings: .", out, re.MULTILINE)
    assert {name for names in told for name in names.split(", ")} == refused
    assert re.findall(r"^  (\w+) .* s a step, 1\.00x", out, re.MULTILINE)[0] == base
    assert ("; speed-ups over cppo:" in out) == (base == "cppo")
    if base == "grpo" and refused:
        assert main([*line, "--methods", "grpo,cppo"]) == 2
        assert "method=cppo would keep none of 16 completions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "options", "gpus"),
    [
        ("h100/qwen3_235b_a22b_128gpus", [], 128),  # does not fit on the 16 that its layout needs at least
        ("h100/glm_4.5_air_64gpus", [], 64),  # a dot that begins no suffix
        ("h100/qwen3_4b_16gpus_grpo", [], 16),
        ("h100/qwen3_4b_16gpus_grpo", ["--gpus", "8"], 8),
        ("math/qwen3_4b_dppo", [], 8),
    ],
)
def test_a_plan_is_for_the_gpus_that_a_recipe_is_named_for(
    recipe: str, options: list[str], gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless an option or torchrun says otherwise; which is assumed is said."""
    assert main(["plan", recipe, *options, "--methods", "grpo"]) == 0
    out = capsys.readouterr().out
    assert f"; {gpus} GPUs of 79.1 GiB, 8 a node" in out
    assert (f"assumed: {gpus} GPUs; --gpus N plans for N" in out) == (not options)


@pytest.mark.long
@pytest.mark.slow
def test_the_table_of_the_page_is_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """And so are the GiB that a recipe's comment names."""
    page = (REPOSITORY / "docs" / "plan.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (Qwen3-\S+), (\d+) H100 \| (\d+) \| (\S+)x \| (\S+)x \| (\S+)x \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for model, gpus, seconds, faster, dppo, auto in rows:
        recipe = f"h100/{model.lower().replace('-', '_')}_{gpus}gpus_dppo"
        assert main(["plan", recipe, "--gpus", gpus, "--methods", "grpo,dppo,dppo_auto"]) == 0
        out = capsys.readouterr().out
        assert re.search(rf"^  grpo .* {seconds} s a step", out, re.MULTILINE), (recipe, out)
        for method, expected in (("dppo", f"{faster}x, {dppo}x"), ("dppo_auto", f"x, {auto}x")):
            line = next(one for one in out.splitlines() if one.split()[:1] == [method])
            assert f"{expected} to the same result".replace("\u2013", "-") in line, (recipe, line)
    for name, gpus in (("glm_4.5_air", 64), ("qwen3_235b_a22b", 128)):
        recipe = REPOSITORY / "configs" / "h100" / f"{name}_{gpus}gpus.yaml"
        said = re.search(r"(\d+) GiB at most", recipe.read_text(encoding="utf-8"))
        assert main(["plan", str(recipe), "--gpus", str(gpus), "--methods", "grpo"]) == 0
        largest = re.search(r"^largest: \w+, ([\d.]+) GiB", capsys.readouterr().out, re.MULTILINE)
        assert said and largest and int(said[1]) == round(float(largest[1])), recipe


def test_a_plan_needs_no_model_where_its_sizes_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name in the recipe, by --model, and not where there is a directory of that name."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "Qwen" / "Qwen3-32B", "qwen3_8b")
    plans = {}
    for options, said in (
        ([], "assumed: the published sizes of Qwen/Qwen3-8B"),
        (["--model", "Qwen3-0.6B"], "assumed: the published sizes of Qwen3-0.6B"),
        (["model.hf_path=Qwen/Qwen3-32B"], ""),
    ):
        line = ["plan", "h100/qwen3_8b_8gpus_dppo", "--methods", "grpo", "--json", "plan.json", *options]
        assert main(line) == 0
        out = capsys.readouterr().out
        assert said in out and ("published sizes" in out) == bool(said)
        plans[said] = json.loads((tmp_path / "plan.json").read_text())["parameters"]
    assert [round(number / 1e9, 2) for number in plans.values()] == [8.19, 0.6, 8.19]


_ONE_GPU = "rollout.servers.gpus=['0']"
"""As many as servers take whose arguments are replaced."""
_SHARED = "actor.layout={tensor_parallel: 2, context_parallel: 4}"
_SMALL_CACHE = 'rollout.servers.args=[--tensor-parallel-size=4, -dp=2, --gpu-memory-utilization, "0.2"]'
_LONG = ["rollout.sampling.max_completion_tokens=5000"]
_TP4 = "rollout.servers.args=[--tensor-parallel-size=4]"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--gpu-memory", "40"], "backward needs"),
        (["--gpu-memory", "40"], "What helps: actor.optimizer.cpu_offload=1"),
        # what makes a GPU's phases smaller is no help for a node's memory, or for a server's cache
        (
            ["--host-memory", "300"],
            "generate needs 568 GiB of a node's 300 (most of it optimizer on the host) (see docs/plan.md)",
        ),
        ([_SMALL_CACHE], "of 5120 tokens. What helps: --gpu-memory-utilization 0.4 in rollout.servers.args (73.6 GiB"),
        (["packing.max_tokens_per_microbatch=100"], "must fit"),
        (
            [*_LONG, "actor.fp8=blockwise", "packing.max_tokens_per_microbatch=6100"],
            "in multiples of 1024 tokens and use 5120 of them, but the longest possible sequence takes 6023; set it to",
        ),
        (["actor.fp8=mxfp8"], "actor.fp8 = mxfp8: it needs a chip of sm_100 or newer; this one is sm_90"),
        (["actor.megatron={hidden_size: 8}"], "actor.megatron.hidden_size: is decided by"),
        (["rollout.sampling.max_completion_tokens=100000", "packing.max_tokens_per_microbatch=200000"], "positions of"),
        (["--gpus", "6"], "but the world size is 6; plan for them with --gpus 8, or a multiple (see docs/"),
        (["actor.layout.tensor_parallel=3"], "needs a multiple of 3 processes"),
        (["--mfu", "40"], "--mfu 40.0: must be in (0, 1]"),
        (
            [_ONE_GPU, "rollout.servers.args=[--gpu-memory-utilization, most]"],
            "--gpu-memory-utilization/--mem-fraction-static: invalid float value: 'most'",
        ),
        ([_ONE_GPU, 'rollout.servers.args=[--gpu-memory-utilization, "0.2"]'], "for keys and values, less than"),
        (
            [_ONE_GPU, 'rollout.servers.args=[--gpu-memory-utilization, "90"]'],
            "--gpu-memory-utilization 90.0: must be in (0, 1]",
        ),
        (['rollout.servers.args=[--tensor-parallel-size, "0"]'], "--tensor-parallel-size 0: must be at least 1"),
        (['rollout.servers.args=[--tensor-parallel-size, "1.5"]'], "--tp: invalid int value: '1.5'"),
        (['rollout.servers.args=[--tensor-parallel-size, "4"]'], "a server 8 GPUs (0,1,2,3,4,5,6,7), but its"),
        (
            ["rollout.servers.gpus=['0,1,2']", "rollout.servers.args=[--tensor-parallel-size=3]"],
            "tensor parallel 3: the model's 64 attention heads do not divide by it",
        ),
        (
            ["rollout.servers.gpus=['1,2,3,4,5,6,7,8']"],
            "rollout.servers.gpus names GPU 8, but the servers can have 0 to 7",
        ),
        (["rollout.servers.gpus=['0,1,2,3,4,5,6,6']"], "rollout.servers.gpus names a device twice"),
        (["rollout.servers.colocate=false"], "rollout.servers.gpus names GPU 0, but the trainer has all of a node"),
        (
            ["rollout.servers.gpus=[]", "rollout.servers.count=8", "rollout.servers.args=[]"],
            "rollout.servers.gpus is empty: all 8 servers would start on a node's first GPU",
        ),
        (
            [_ONE_GPU, 'rollout.servers.args=[--max-model-len, "2048"]'],
            "--max-model-len 2048: the longest sequence has 5120 tokens",
        ),
        (["rollout.quantization=fp8"], "objective.correction.level = none would train on them"),
        (["--gpus", "12", "--gpus-per-node", "8"], "--gpus 12: not a whole number of nodes (--gpus-per-node 8)"),
        (["rollout.engine=sglang"], "has --gpu-memory-utilization, which rollout.engine = sglang does not know"),
        (["--completion-tokens", "4097"], "no mean can be above rollout.sampling.max_completion_tokens = 4096"),
        (["--prompt-tokens", "2000"], "no mean can be above max_prompt_tokens = 1024"),
    ],
    ids=str,
)
def test_what_cannot_be_is_exit_2(
    tmp_path: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason, and what would help."""
    model = write_config(tmp_path, "qwen3_32b")
    recipe = str(REPOSITORY / "configs" / "h100" / "qwen3_32b_8gpus_grpo.yaml")
    settings = [recipe, f"model.hf_path={model}"]
    assert main(["plan", *settings, *options, "--methods", "grpo"]) == 2
    assert reason in capsys.readouterr().err


def test_layers_are_those_of_the_chip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An A100 gets Megatron's own, whose attention gathers sequences that are shared: the plan is that of `local`."""
    model = write_config(tmp_path, "qwen3_32b")
    recipe = str(REPOSITORY / "configs" / "h100" / "qwen3_32b_8gpus_grpo.yaml")
    settings = [recipe, f"model.hf_path={model}", _SHARED, "actor.recompute=none", "--methods", "grpo", "--json"]
    plans = {}
    for name, more in (("auto", []), ("local", ["actor.layer_spec=local"])):
        main(["plan", *settings, str(tmp_path / name), *more, "--gpu", "a100", "--gpu-memory", "300"])
        said = "planned with actor.layer_spec = local: Transformer Engine has no fused attention over packs on sm_80"
        assert (said in capsys.readouterr().out) == (name == "auto")
        plans[name] = json.loads((tmp_path / name).read_text(encoding="utf-8"))
    main(["plan", *settings, str(tmp_path / "h100"), "--gpu", "h100", "--gpu-memory", "300"])
    plans["h100"] = json.loads((tmp_path / "h100").read_text(encoding="utf-8"))
    assert plans["auto"]["phases"] == plans["local"]["phases"] != plans["h100"]["phases"]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("qwen3_30b_a3b_16gpus_grpo", ["--gpus", "16", "actor.layout.context_parallel=2"]),
        ("qwen3_32b_8gpus_grpo", ["--gpu-memory", "300", "actor.layer_spec=te", _SHARED]),
    ],
)
def test_a_plan_assumes_flash_attention(recipe: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody could plan A100s that have it: of a machine elsewhere it is said, and refused on one without."""
    said = "assumed: flash-attn is installed; Transformer Engine has no fused attention over packs on sm_80 without"
    for chip in ("a100", "h100"):
        assert main(["plan", f"h100/{recipe}", *options, "--gpu", chip, "--methods", "grpo"]) == 0
        out = capsys.readouterr().out
        assert (said in out) == (chip == "a100") and "planned with actor.layer_spec" not in out


def test_a_plan_says_where_flash_attention_does_not_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Latent attention on A100s: flash-attn 2 has one size for keys and values, and cuDNN begins with Hopper."""
    options = ["--model", "moonlight-16b-a3b", "--gpus", "16", "--methods", "grpo"]
    for chip in ("a100", "h100"):
        assert main(["plan", "h100/qwen3_30b_a3b_16gpus_grpo", *options, "--gpu", chip]) == 0
        out = capsys.readouterr().out
        assert ("not counted: all attention scores" in out) == (chip == "a100") and "flash-attn is installed" not in out


_BESIDE = ["rollout.servers.colocate=false", "rollout.servers.gpus=['4,5,6,7']", _TP4]
"""The trainer has the other half of a machine."""


@pytest.mark.parametrize(
    "options",
    [
        ["rollout.servers.launch=none", "rollout.servers.registry_dir=/x", "rollout.servers.colocate=false"],
        ["rollout.servers.count=2", "rollout.servers.gpus=['GPU-a,GPU-b,GPU-c,GPU-d','GPU-e,GPU-f,GPU-g,GPU-h']", _TP4],
        ["--gpus", "4", *_BESIDE],
        ["--gpus", "8", "--ranks-per-node", "4", *_BESIDE],
    ],
    ids=["of serve, on machines of their own", "by UUID", "beside the trainer's", "and on two machines"],
)
def test_servers_that_can_start_are_planned(tmp_path: Path, options: list[str]) -> None:
    offload = ["actor.offload=none"] if "rollout.servers.colocate=false" in options else []
    settings = [f"model.hf_path={write_config(tmp_path, 'qwen3_8b')}", *offload]
    assert main(["plan", "h100/qwen3_8b_8gpus_grpo", *settings, *options, "--methods", "grpo"]) == 0


def test_the_ranks_of_a_node_are_those_that_torchrun_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four on each of two machines, beside four GPUs for servers: planned as `--ranks-per-node 4`, and not as one
    machine that is full."""
    settings = [f"model.hf_path={write_config(tmp_path, 'qwen3_8b')}", "actor.offload=none", *_BESIDE]
    line = ["plan", "h100/qwen3_8b_8gpus_grpo", *settings, "--methods", "grpo"]
    assert main([*line, "--gpus", "8"]) == 2
    assert "but the trainer has all of a node (--ranks-per-node 8)" in capsys.readouterr().err
    assert main([*line, "--gpus", "8", "--ranks-per-node", "4"]) == 0
    told = capsys.readouterr().out
    assert "; 8 GPUs of 79.1 GiB, 4 a node" in told and "engine: vllm on 8 of GPUs of its own, 4 a replica" in told
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert main(line) == 0
    assert capsys.readouterr().out == told


def test_tensor_parallelism_over_nodes_is_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same 16 GPUs as one node and as two: every layer's sums then cross the network."""
    settings = [f"model.hf_path={write_config(tmp_path, 'qwen3_8b')}", "actor.layout.tensor_parallel=16"]
    update_s = []
    for per_node in ("16", "8"):
        given = [*settings, "--gpus", "16", "--gpus-per-node", per_node, "--methods", "grpo"]
        assert main(["plan", "h100/qwen3_8b_8gpus_grpo", *given]) == 0
        update_s.append(float(re.findall(r"update ([\d.]+)", capsys.readouterr().out)[0]))
    assert update_s[1] > 2 * update_s[0]


def test_waiting_for_a_cache_of_less_than_a_sequence_is_not_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a job does not run, and playing it took 16 s."""

    def played(*_: object) -> None:
        raise AssertionError("played")

    monkeypatch.setattr(timing, "rollout_cost", played)
    model = write_config(tmp_path, "qwen3_32b")
    recipe = str(REPOSITORY / "configs" / "h100" / "qwen3_32b_8gpus_grpo.yaml")
    assert main(["plan", recipe, f"model.hf_path={model}", "--gpu-memory", "26", "--methods", "grpo"]) == 2
    said = capsys.readouterr()
    assert "seconds of a step: not estimated, the servers' cache holds less than one sequence" in said.out
    assert "the servers have 0.0 GiB for keys and values" in said.out


def test_what_would_be_faster_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each change that is said to save seconds is planned again by hand: it fits, and the step takes what was said.
    The recipe itself has followed the advice."""
    model, at = write_config(tmp_path, "qwen3_8b"), tmp_path / "plan.json"
    recipe = str(REPOSITORY / "configs" / "h100" / "qwen3_8b_8gpus_grpo.yaml")
    settings = ["plan", recipe, f"model.hf_path={model}", "--methods", "grpo", "--json", str(at)]
    settings += [
        "actor.recompute=full",
        "packing.max_tokens_per_microbatch=12288",
    ]
    assert main(settings) == 0
    plan = json.loads(at.read_text(encoding="utf-8"))
    saved = list(plan["skipping_saves"].values())
    assert 0 < saved[0] < 0.15 and saved[0] < saved[1] < 0.3 and saved[1] < saved[2] < 0.5
    changes = {change: said for change, said in plan["faster"].items() if change.startswith(("actor.", "rollout."))}
    assert "actor.recompute=none packing.max_tokens_per_microbatch=6144" in changes
    assert "rollout.quantization=fp8 objective.correction.level=token" in changes
    for change, said in changes.items():
        assert said["step_s"] < 0.99 * plan["seconds"]["step"]
        assert main([*settings, *change.split()]) == 0
        again = json.loads(at.read_text(encoding="utf-8"))
        assert again["fits"] and again["seconds"]["step"] == pytest.approx(said["step_s"])
    most = plan["seconds"]["step"] - min(said["step_s"] for said in changes.values())
    assert f": {most:.0f} s faster a step" in capsys.readouterr().out


def test_advice_can_be_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Moments in bfloat16 and an optimizer on the host are refused together, so one is no advice for the other."""
    model = write_config(tmp_path, "qwen3_32b")
    recipe = str(REPOSITORY / "configs" / "h100" / "qwen3_32b_8gpus_grpo.yaml")
    settings = [recipe, f"model.hf_path={model}", "actor.offload=none", "actor.optimizer.moments_dtype=bfloat16"]
    assert main(["plan", *settings, "--methods", "grpo", "--gpu-memory", "70"]) == 2
    assert "cpu_offload" not in capsys.readouterr().err
    assert main(["plan", *settings, "--methods", "grpo", "actor.optimizer.cpu_offload=1"]) == 2
    assert "the optimizer's state is float32" in capsys.readouterr().err
