"""The documentation holds: links lead somewhere, commands are read, numbers and examples are what the code gives.

`make docs` builds the site with mkdocs. These tests do without it, and look for what a change of the code or of a page
could break.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.job import REPOSITORY, settings, write_job_files
from support.record import write_record

from dppo_megatron.config.load import load_config, read_config
from dppo_megatron.config.reference import all_settings
from dppo_megatron.config.resolved_sets import eval_set_configs
from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.config.rollout import check_rollout
from dppo_megatron.data.known import KNOWN_SETS
from dppo_megatron.pruning.policies import METHODS
from dppo_megatron.rewards.grading import GradeTask, make_grader
from dppo_megatron.types import UserError
from dppo_megatron.workbench.cli import parse, program

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.glob("*.md"))
EVERY_PAGE = [*PAGES, REPOSITORY / "README.md"]
GENERATED = ("index.md", "reference/settings.md", "reference/commands.md", "reference/python.md")
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _anchors(path: Path) -> set[str]:
    """As GitHub and mkdocs make them of headings."""
    headings = re.findall(r"^#+ (.*)$", _without_code(_text(path)), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one)).strip().lower() for one in headings]
    return {one.replace(" ", "-") for one in plain}


# ------------------------------------------------------------------------------------------------- the site


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link and picture of a page, and every heading that a link names."""
    for groups in LINK.findall(_without_code(_text(page))):
        target, _, anchor = (groups[0] or groups[1]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        to = (page.parent / target).resolve() if target else page
        assert to.exists(), f"{page.name}: {target}"
        if anchor and to.suffix == ".md":
            assert anchor in _anchors(to), f"{page.name}: {target}#{anchor}"


def _nav(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry if isinstance(entry, list) else entry.values()
    return [page for value in values for page in _nav(value)]


def test_the_pages_have_at_most_40000_words() -> None:
    """As `cat docs/*.md README.md | wc -w` counts: whoever adds some takes away what is told twice."""
    assert sum(len(_text(page).split()) for page in EVERY_PAGE) <= 40_000


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load(_text(REPOSITORY / "mkdocs.yml"))
    pages = _nav(site["nav"])
    assert len(pages) == len(set(pages))
    assert set(pages) == {path.name for path in PAGES} | set(GENERATED)
    assert site["strict"] is True


def test_the_generated_pages() -> None:
    """Every setting with its default, every command with its help, and only modules that there are."""
    hook = runpy.run_path(str(REPOSITORY / "tools" / "docs_hook.py"))
    pages = hook["pages"]()
    assert {"index.md", *(f"reference/{name}.md" for name in pages)} == set(GENERATED)
    for one in all_settings():
        assert (one.key if one.is_section else f"`{one.key}`") in pages["settings"], one.key
    for name in ("train", "watch", "report", "config", "completion", "doctor"):
        assert f"## {name}\n" in pages["commands"] and f"usage: dppo-megatron {name}" in pages["commands"]
    for module in re.findall(r"^::: (\S+)$", pages["python"], re.MULTILINE):
        path = REPOSITORY / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module


def test_the_first_page_is_the_readme() -> None:
    """Every relative link of it leads to a page or picture of the site."""
    home = runpy.run_path(str(REPOSITORY / "tools" / "docs_hook.py"))["home_page"]()
    links = [first or second for first, second in LINK.findall(_without_code(home))]
    inside = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    assert len(inside) > 20
    for link in inside:
        assert (DOCS / link).is_file(), link


def test_there_is_something_to_check() -> None:
    """A page may have no link, no command and no method; all pages together have many."""
    texts = [_text(page) for page in EVERY_PAGE]
    assert sum(len(LINK.findall(_without_code(text))) for text in texts) > 100
    assert sum(len(_commands(page)) for page in EVERY_PAGE) > 25
    assert sum(text.count("--methods ") for text in texts) > 3


def test_links_out_of_the_pages_become_names() -> None:
    """The site has no files of the repository beside its own."""
    hook = runpy.run_path(str(REPOSITORY / "tools" / "docs_hook.py"))
    assert any("](../" in _text(page) for page in PAGES)
    for page in PAGES:
        assert "](../" not in hook["on_page_markdown"](_text(page), None, None, None)
    assert "`*critic*`" in hook["on_page_markdown"](_text(DOCS / "migrating.md"), None, None, None)


# ------------------------------------------------------------------------------------------------- what pages say


def test_the_estimator_by_hand() -> None:
    """Every number of the page that a line of Python computes is what it computes."""
    done = doctest.testfile(str(DOCS / "estimator.md"), module_relative=False)
    assert done.attempted >= 10 and done.failed == 0


def test_the_table_of_draws() -> None:
    """The table of the estimator's page: its last row is the mean of the others, and the full batch's coefficients."""
    rows = re.findall(r"^\| (?:\d, \d|\*\*mean\*\*) \|(.*)\|$", _text(DOCS / "estimator.md"), re.MULTILINE)
    numbers = [[float(cell.strip(" *").replace("\u2212", "-")) for cell in row.split("|")] for row in rows]
    *draws, mean = numbers
    assert len(draws) == 3 and mean == [sum(column) / 3 for column in zip(*draws, strict=True)]
    assert mean == [0.75, -0.25, -0.25, -0.25]


def _blocks(page: Path) -> list[str]:
    """The code blocks, in any language or none: where a fence of a language was passed over, its end was taken for a
    beginning."""
    return re.findall(r"^ *```[^\n]*\n(.*?)^ *```$", _text(page), re.DOTALL | re.MULTILINE)


def _commands(page: Path) -> list[str]:
    """Lines of code blocks that begin with the command or with torchrun."""
    lines = "\n".join(_blocks(page)).replace("\\\n", " ").splitlines()
    starts = ("dppo-megatron ", "OMP_NUM_THREADS=1 torchrun ", "torchrun ")
    return [line.partition(" #")[0].strip() for line in lines if line.lstrip().startswith(starts)]


def test_a_command_behind_a_block_of_a_language_is_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```yaml\na: 1\n```\ntext\n```\ndppo-megatron watch a  # b\n```\n- x:\n  ```\n  torchrun c\n  ```\n"
    )
    assert _commands(page) == ["dppo-megatron watch a", "torchrun c"]


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda path: path.name)
def test_commands_of_the_page_are_read(page: Path) -> None:
    """By the program's own parser and reader, as far as a machine without the jobs' files can: options, keys, types and
    ranges. What is no whole command is left out: `...`, and options in brackets."""
    for line in _commands(page):
        if "..." in line or "[-" in line:
            continue
        words = shlex.split(re.sub(r".*-m dppo_megatron |dppo-megatron ", "", line))
        arguments = parse(program(), words)
        if words[0] in ("train", "compare", "plan", "serve"):
            config = "" if arguments.config.isupper() else str(REPOSITORY / arguments.config)
            read_config(config, arguments.overrides)
    for method in re.findall(r"--methods (\S+)", _text(page)):
        names = re.sub(r"@\d+", "", method.strip("`),:")).split(",")
        assert set(names) <= {*METHODS.keys(), "grpo_nonzero"}, method


def test_servers_that_others_start_serve_a_recipe_for_gpus() -> None:
    """The recipes let the trainer start servers that share its GPUs; a command with others says that these are not."""
    words = [
        shlex.split(re.sub(r".*-m dppo_megatron |dppo-megatron ", "", line))
        for page in PAGES
        for line in _commands(page)
    ]
    others = [
        one
        for one in words
        if any(word.startswith(("rollout.servers.endpoints=", "rollout.servers.registry_dir=")) for word in one)
    ]
    assert sorted(one[0] for one in others) == ["serve", "train", "train"]
    for one in others:
        given = parse(program(), one).overrides
        check_rollout(read_config(str(REPOSITORY / "configs" / "qwen3_4b.yaml"), given).rollout)


def test_the_problems_of_the_tutorial_are_what_is_trained_on(tmp_path: Path) -> None:
    blocks = _blocks(DOCS / "tutorial.md")
    [block] = [one for one in blocks if "mine.jsonl" in one]
    loop, _, train = block.partition("\ndppo-megatron train ")
    subprocess.run(["bash", "-euc", loop], cwd=tmp_path, check=True, timeout=60)
    rows = [json.loads(line) for line in _text(tmp_path / "mine.jsonl").splitlines()]
    assert len(rows) == 400 and rows[-1] == {"problem": "29+29=", "answer": "58"}
    recipe, *settings_given = shlex.split(train.replace("\\\n", " "))
    config = read_config(str(REPOSITORY / recipe), settings_given)
    assert config.data.train_path == "mine.jsonl" and not config.data.train_sets


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", DOCS / "tutorial.md"], ids=lambda path: path.name)
def test_the_first_job_on_gpus_has_its_data(page: Path) -> None:
    """The commands shown before it write every file that its recipe reads: a run without one ends with exit code 2."""
    [block] = [one for one in _blocks(page) if "model.hf_path=/" in one]
    loop, _, rest = block[block.index("for ") :].partition("\n")
    shown = ["bash", "-euc", f'dppo-megatron() {{ echo "$@"; }}; {loop}']
    said = subprocess.run(shown, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    written = set()
    for line in said:
        given = parse(program(), line.split())
        written |= {f"{given.out}/{part}.jsonl" for part in KNOWN_SETS[given.name].splits}
    [recipe] = set(re.findall(r"configs/math/\S+\.yaml", rest))
    config = read_config(str(REPOSITORY / recipe), [])
    evaluated = {one.path for one in eval_set_configs(config).values()}
    assert {config.data.train_path, *evaluated} <= written and len(evaluated) == 6


def test_what_the_pages_install_can_be_had() -> None:
    """Engines in the ranges of pyproject.toml, and this project from a clone as long as no release is on PyPI."""
    extras = tomllib.loads(_text(REPOSITORY / "pyproject.toml"))["project"]["optional-dependencies"]
    ranges = {extras[engine][0] for engine in ("vllm", "sglang")}
    said = set(re.findall(r"bin/pip install '([^']+)'", _text(DOCS / "engines.md")))
    assert said == ranges and f"'{extras['vllm'][0]}'" in _text(REPOSITORY / "README.md")
    if "(unreleased)" in _text(REPOSITORY / "CHANGELOG.md").partition("\n## ")[2].partition("\n")[0]:
        for path in (*EVERY_PAGE, *(REPOSITORY / "examples").rglob("*.py")):
            assert not re.search(r"pip install [^\n]*\bdppo-megatron\b", _text(path)), path


def test_the_steps_of_a_row_are_those_of_its_command() -> None:
    """Of the comparison in TRL: a pruned run of 60 steps is one and a half times the 40 of the comparison."""
    text = _text(DOCS / "adapters.md")
    [steps] = re.findall(r"compare configs/\S+ [^`]*\bsteps=(\d+)", text)
    [factor] = re.findall(r"--end-to-end compare --pruned-steps-factor ([\d.]+)`", text)
    [full] = re.findall(r"^\| TRL, (\d+) steps", text, re.MULTILINE)
    [pruned] = re.findall(r"^\| pruned, (\d+) steps", text, re.MULTILINE)
    assert int(full) == int(steps) and int(pruned) == round(int(steps) * float(factor))


def test_what_a_block_installs_its_commands_import() -> None:
    """`data` reads known sets with `datasets`, which the trainer needs not: the README's first job on GPUs installed
    `.[train]`, and its third command ended with exit code 2."""
    extras = tomllib.loads(_text(REPOSITORY / "pyproject.toml"))["project"]["optional-dependencies"]
    blocks = [block for page in EVERY_PAGE for block in _blocks(page)]
    installs = [(block, found[1].split(",")) for block in blocks if (found := re.search(r"-e '\.\[(.+?)\]'", block))]
    reading = [given for block, given in installs if "dppo-megatron data " in block]
    assert reading, "no block installs and reads a known set"
    for given in reading:
        assert any(line.startswith("datasets>") for extra in given for line in extras[extra]), given


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda path: path.name)
def test_files_that_the_page_names_exist(page: Path) -> None:
    """Scripts and configurations of this repository, in the text and in commands."""
    named = re.findall(
        r"(?<![\w/-])(?:configs|examples|benchmarks|tools|tests)/[\w/]+\.(?:py|yaml|sh|sbatch)\b", _text(page)
    )
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []


def test_settings_of_the_choosing_page_are_settings(tmp_path: Path) -> None:
    """Each `key=value` in backticks, on a job of its own, with every check."""
    files = write_job_files(tmp_path / "task")
    found = re.findall(r"`((?:pruning|rollout|objective)\.[^`]+=[^`]+)`", _text(DOCS / "choosing.md"))
    assert len(found) >= 5
    for given in found:
        load_config(str(REPOSITORY / "configs/quickstart.yaml"), [*settings(files, tmp_path / "run"), *given.split()])


def _graders_of_the_pages(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages' files as they stand, importable by grader processes; without bubblewrap programs run in no sandbox."""
    pages = _text(DOCS / "cookbook.md") + _text(DOCS / "math.md")
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)\n```\n", pages, re.DOTALL):
        (directory / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(directory)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), str(REPOSITORY)]))
    if not shutil.which("bwrap"):
        monkeypatch.setenv("SANDBOX", "env")


@pytest.mark.parametrize(
    ("function", "completion", "answer", "reward"),
    [
        ("code_grader:passes", "So:\n```python\ndef add(a, b):\n    return a + b\n```", "assert add(2, 3) == 5", 1.0),
        ("code_grader:passes", "```\ndef add(a, b):\n    return a - b\n```", "assert add(2, 3) == 5", 0.0),
        ("code_grader:passes", "```python\nexit(0)\n```", "assert add(2, 3) == 5", 0.0),
        ("formats:thinks_first", "<think>2 + 2</think>\n<answer>4</answer>", "4", 1.0),
        ("formats:thinks_first", "<answer>4</answer>", "4", 0.0),
        ("rules_then_judge:grade", r"\boxed{4}", "4", 1.0),
        ("rules_then_judge:grade", "no idea", "4", 0.0),
        ("short_enough:grade", r"\boxed{4}", "4", 1.0),
    ],
)
def test_graders_of_the_cookbook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, completion: str, answer: str, reward: float
) -> None:
    """And where they take an answer from `math`: none of a thought that the limit cut off."""
    _graders_of_the_pages(tmp_path, monkeypatch)
    tasks = [GradeTask(completion, answer)]
    if function in ("rules_then_judge:grade", "short_enough:grade"):
        tasks.append(GradeTask(completion, answer, prompt="2 + 2?\n<think>\n", finish_reason="length"))
    grader = make_grader(RewardConfig(function=function))
    try:
        grades = grader.grade(tasks)
    finally:
        grader.close()
    assert [(grade.failure, grade.reward) for grade in grades] == [("", reward), ("", 0.0)][: len(tasks)]


def test_a_sandbox_that_cannot_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every program graded 0."""
    _graders_of_the_pages(tmp_path, monkeypatch)
    monkeypatch.setenv("SANDBOX", "false")
    grader = make_grader(RewardConfig(function="code_grader:passes"))
    try:
        with pytest.raises(UserError, match=r"code_grader:passes' cannot be imported: CalledProcessError"):
            grader.grade([GradeTask("```\n1\n```", "assert True")])
    finally:
        grader.close()


# ------------------------------------------------------------------------------------------------- examples


def _run(name: str, *arguments: str) -> int:
    result = runpy.run_path(str(REPOSITORY / "examples" / name))["main"](*arguments)
    assert isinstance(result, int)
    return result


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("migrating.py", "usage: "),
        ("migrating.py nowhere.yaml", "nowhere.yaml: No such file"),
        ("reading_a_run.py", "usage: "),
        ("weight_table.py", "usage: "),
    ],
)
def test_an_example_without_its_file_is_told_so(command: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit, match=said):
        runpy.run_path(str(REPOSITORY / "examples" / name), run_name="__main__")


def test_reading_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("reading_a_run.py", str(write_record(tmp_path / "run", 6))) == 0
    said = capsys.readouterr().out
    assert "reward/mean" in said and "certain" in said and "so it is" in said
    shown = re.findall(r"```python\n(.*?)```", _text(DOCS / "report.md"), re.DOTALL)
    example = re.sub(r"\s+", " ", _text(REPOSITORY / "examples" / "reading_a_run.py"))
    assert shown and all(line in example for block in shown for line in block.splitlines())


def test_migrating(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in its own docstring; and what it prints is read by the trainer."""
    path = REPOSITORY / "examples" / "migrating.py"
    command, *expected = re.findall(r"^    (\S.*)$", _text(path).split('"""')[1], re.MULTILINE)
    monkeypatch.setattr(sys, "argv", [str(path), *command.split()[2:]])
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said == expected
    config = read_config("", said)
    assert (config.rollout.prompts_per_step, config.rollout.completions_per_prompt) == (128, 8)
