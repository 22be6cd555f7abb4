"""Named prompt templates, so that a run need not spell one out.

A preset fixes all four template settings, so a set that names one is independent of the templates in `data`. The texts
ask for the final answer in a box because the `math` grader reads the last box.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class Template:
    """The four settings of a template; the defaults apply where a job sets none."""

    prompt_template: str = "{problem}"
    """{problem} stands for the problem."""
    system_prompt: str = ""
    """Empty: no system turn."""
    apply_chat_template: bool = False
    """Wrap as a user turn of the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Handed to the chat template."""


PLAIN = Template()
TEMPLATES: dict[str, Template] = {
    # Qwen3's hybrid models think unless they are told not to, and then rarely finish within 4,096 tokens
    "qwen3_nothink": Template(
        prompt_template=f"{{problem}}\n{_BOXED}",
        apply_chat_template=True,
        chat_template_kwargs={"enable_thinking": False},
    ),
    "qwen3_think": Template(
        prompt_template=f"{{problem}}\n{_BOXED}",
        apply_chat_template=True,
        chat_template_kwargs={"enable_thinking": True},
    ),
    # any other chat model: Qwen2.5-Instruct, Llama-3-Instruct, Qwen3-Instruct-2507
    "chat_boxed": Template(prompt_template=f"{{problem}}\n{_BOXED}", apply_chat_template=True),
    # base models, whose chat template (if they have one) means nothing to them
    "plain_boxed": Template(prompt_template=f"Problem:\n{{problem}}\n\n{_BOXED}\n\nSolution:\n"),
    # the conversation of R1-Zero, opened for the model; the box is for the grader
    "r1": Template(
        prompt_template=(
            "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The"
            " assistant first thinks about the reasoning process in the mind and then provides the user with the"
            " answer. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer>"
            " tags, respectively, and the final answer is put within \\boxed{}.\n"
            "User: {problem}\nAssistant: <think>"
        ),
    ),
}
