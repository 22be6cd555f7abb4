"""Generates pages of the documentation site from the code, and rewrites links from its pages to files outside docs/.

mkdocs calls the two functions whose names begin with `on_`. Nothing that they generate is checked in: a page that is
written at every build cannot be older than the code.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from dppo_megatron.config.pruning import PruningConfig  # noqa: E402
from dppo_megatron.config.reference import Setting, all_settings  # noqa: E402
from dppo_megatron.pruning.policies import COMPLETION_POLICIES, PROMPT_POLICIES  # noqa: E402

_PYTHON = (
    ("Pruning as a library", "dppo_megatron.pruning"),
    ("A policy of your own", "dppo_megatron.pruning.custom"),
    ("Designs", "dppo_megatron.pruning.designs"),
    ("What one training step is made of", "dppo_megatron.types"),
    ("Losses", "dppo_megatron.algorithms.policy_losses"),
    ("What a loss is given", "dppo_megatron.algorithms.tokens"),
    ("Packing", "dppo_megatron.packing.planner"),
    ("Engines", "dppo_megatron.rollout.engine"),
    ("Reading a run", "dppo_megatron.workbench.runs.run_record"),
)
"""Modules of the Python reference: what examples and extensions import."""


POLICIES: dict[str, dict[str, Any]] = {"prompt": {**PROMPT_POLICIES}, "completion": {**COMPLETION_POLICIES}}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=home_page()))
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository into plain names, since the site does not know where the repository is.
    The page on other trainers gets the list that the program reads, the one on pruning which method reads what."""
    if page is not None and page.file.src_uri.startswith("reference/"):
        return markdown
    others = (ROOT / "docs" / "other_names.txt").read_text(encoding="utf-8")
    markdown = markdown.replace("<!-- other names -->", others)
    if "<!-- settings of methods -->" in markdown:
        markdown = markdown.replace("<!-- settings of methods -->", "\n\n".join(map(settings_of_methods, POLICIES)))
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def home_page() -> str:
    """README.md, as the site's first page: links into docs/ become links between pages, other files plain names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    inside = re.sub(r"\]\(docs/", "](", text)
    inside = re.sub(r"\[docs/([\w.]+)\]", r"[\1]", inside)
    return re.sub(r"\[([^\]]+)\]\((?:dppo_megatron|configs|examples|benchmarks|tests)/[^)]*\)", r"`\1`", inside)


def settings_of_methods(level: str) -> str:
    """A table of the settings of `pruning.prompt` or `pruning.completion`, and the methods that read each."""
    rows = [f"| `pruning.{level}.` | read by |", "|---|---|"]
    for item in fields(getattr(PruningConfig(), level)):
        if item.name != "method":
            readers = (f"`{name}`" for name, policy in POLICIES[level].items() if item.name in policy.reads)
            rows.append(f"| `{item.name}` | {', '.join(readers)} |")
    return "\n".join(rows)


def pages() -> dict[str, str]:
    """Name -> Markdown of the generated pages."""
    return {"settings": settings_page(), "commands": commands_page(), "python": python_page()}


def settings_page() -> str:
    """Every setting, by section."""
    lines = ["# Settings", "", "Every setting, from the schema. In the terminal: `dppo-megatron config KEY`.", ""]
    for one in all_settings():
        if one.is_section:
            lines += [
                f"{'#' * (2 + one.key.count('.'))} {one.key}",
                "",
                f"{one.meaning} See [{one.page}](../{one.page}).",
                "",
            ]
        else:
            lines += [*_setting(one), ""]
    return "\n".join(lines)


def _setting(one: Setting) -> Iterator[str]:
    facts = ", ".join(fact for fact in (one.kind, f"default `{one.default}`", one.allowed) if fact)
    yield f"**`{one.key}`** ({facts})"
    yield f":   {_plain(one.meaning)}" + (f" ({_plain(one.why)})" if one.why else "")
    yield f"    Defined in `{one.file}`."


def _plain(text: str) -> str:
    """Text of the schema as Markdown, with what looks like HTML or a reference escaped."""
    return re.sub(r"([<\[\]|_*])", r"\\\1", text) if "`" not in text else text.replace("<", "&lt;")


def commands_page() -> str:
    """The help of every command, as the terminal prints it."""
    from dppo_megatron.workbench.cli import program

    parser = program()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parts = ["# Commands", ""]
    for name, command in commands.choices.items():
        parts += [f"## {name}", "", "```text", command.format_help().strip(), "```", ""]
    return "\n".join(parts)


def python_page() -> str:
    """What examples and extensions import, from the docstrings."""
    parts = ["# Python", "", "The parts of the package that stand alone, or that an extension meets.", ""]
    for title, module in _PYTHON:
        parts += [f"## {title}", "", f"::: {module}", ""]
    return "\n".join(parts)
