"""Where a final answer is looked for, and where it must not be found."""

from __future__ import annotations

import pytest

from dppo_megatron.rewards.calling import Sample
from dppo_megatron.rewards.functions import BUILT_IN, NamedFunction, Rewards, final_answer
from dppo_megatron.rewards.math.extract import extract
from dppo_megatron.rewards.math.grader import grade_math, grade_math_boxed


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"so \boxed{5}.", ["5"]),
        (r"guess \boxed{3}. finally \boxed{\frac{3}{4}}", [r"\frac{3}{4}"]),
        (r"\boxed{\frac{1}{\sqrt{2}}} $", [r"\frac{1}{\sqrt{2}}"]),
        (r"\boxed{\{1,2\}}", [r"\{1,2\}"]),
        (r"\boxed{\left\{ x \mid x > 1 \right\}}", [r"\left\{ x \mid x > 1 \right\}"]),
        (r"\boxed{x = \boxed{5}}", ["x = {5}"]),
        (r"\boxed {7}", ["7"]),
        (r"\fbox{7}", ["7"]),
        (r"\boxed 7$", ["7"]),
        (r"\\boxed{\\frac{1}{2}}", [r"\\frac{1}{2}"]),
        (r"\boxed{1} and \boxed{2}", ["1", "2"]),
        (r"$\boxed{1}$, $\boxed{2}$", ["1", "2"]),
        (r"\boxed{4}. Hence \[\boxed{4}\]", ["4"]),
        (r"The roots are \boxed{2} and \boxed{3}, so the sum is \boxed{5}.", ["5"]),
        (r"Use \boxed for answers: \boxed{5}", ["5"]),
        (r"<think>\boxed{1}</think> \boxed{2}", ["2"]),
        (r"I think \boxed{1}</think> so \boxed{2}", ["2"]),
        (r"\boxed{2} <think> or \boxed{3}", ["2"]),
        ("#### 18", ["18"]),
        ("#### 17\nno\n#### 18", ["18"]),
        ("<think>a</think><answer>18</answer>", ["18"]),
        ("The answer is 18.", ["18"]),
        ("Answer: $\\frac{1}{2}$", [r"\frac{1}{2}"]),
        ("Final Answer: The final answer is $12$. I hope it is correct.", ["12"]),
        ("A: 36", ["36"]),
        ("So it is.\n\n**Final Answer**\n\n$$44$$", ["44"]),
        ("### Final Answer:\n\\[\n\\frac12\n\\]", ["\n\\frac12\n".strip()]),
        ("**Final Answer**\n\n$$\\$50$$", [r"\ 50"]),
        ("所以答案是 $\\sqrt2$。", [r"\sqrt2"]),
        (r"\boxed{\frac24}, which could be reduced to \boxed{\frac12}", [r"\frac12"]),
        (r"Answer 1: \boxed{3}. Answer 2 (another way): \boxed{3}", ["3"]),
        (r"so $a = -\boxed{256}$.", ["-256"]),
        (r"is -\boxed{x+1}", ["-(x+1)"]),
        ("- \\boxed{5}", ["5"]),
        (r"$10-\boxed{3}$", ["3"]),
        ("We add both. Therefore, the area is $12-2=10$.", ["10"]),
        ("So he pays 30000 + 1800 = 31800 dollars in total.", ["31800 dollars"]),
        (r"This gives $3x+2x=30$, so $5x=30$ and $x=6$.", ["6"]),
        (r"We have \[2(x+1) = 2x+2.\]", ["2x+2"]),
    ],
)
def test_finds(text: str, parts: list[str]) -> None:
    """The last mark's content, boxes before weaker marks."""
    assert list(extract(text).parts) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "so x = 5",
        "If x = 5.",
        "Find y for x = 5.",
        "It is not x = 5.",
        "It may be that x = 5.",
        "We have x = 5. That is all.",
        "x = 5 is what everybody has found here.",
        r"\boxed{5 so x = 5.",
        "<think>so x = 5.",
        "The answer is 4. So x = 5. No.",
        "So the line is $3x - 15 = 0$.",
        "So $x = 4$ or $x = 5$.",
        "$x=4,x=5$",
        r"\boxed{5} and then \boxed{6",
        r"It could be \boxed{5}, or maybe \boxed{6}.",
        r"Answer 1: \boxed{5}. Answer 2 (alternative reading): \boxed{6}.",
        r"\boxed{5} from \boxed{4}; it might be \boxed{6}",
        "**Final Answer**\n\nas above, $5$",
        r"\boxed{5} and so \boxed",
        r"\boxed{\{5\}",
        r"\boxed{}",
        r"\boxed{5} no: \boxed{ }",
        r"<think>\boxed{5}</think>",
        r"<think>\boxed{5}",
        "####",
        "<answer>5",
        r"#### 5 \boxed{",
        "The answer is 5. No, wait: we have to count the edges as well.",
        "What is the answer to 2 + 3, which the problem says is 5?",
        "The wrong answer is 5.",
        "It is false that the answer is 5.",
        "Suppose the answer is 5.",
        "Not the answer: 5",
        "We reject x = 5.",
        "Therefore, 2x = 5.",
        "Hence a = 3, b = 5.",
    ],
)
def test_finds_nothing(text: str) -> None:
    """A broken or missing mark is no answer, whatever stands before it; the grade says why."""
    assert extract(text).parts == ()
    grade = grade_math(text, "5", {})
    assert (grade.reward, grade.extracted) == (0.0, None)
    assert grade.why
    assert grade.facts == {"parsed_share": 0.0, "boxed_share": 0.0}


@pytest.mark.parametrize(
    ("prompt", "text", "finish_reason", "reward"),
    [
        ("<think>\n", r"maybe \boxed{5}, or", "length", 0.0),
        ("<think>\n", r"\boxed{5}", "stop", 1.0),
        ("<think>\n", r"maybe</think> so \boxed{5} and", "length", 1.0),
        ("<think>\n\n</think>\n\n", r"so \boxed{5} and", "length", 1.0),
        ("Use <think> tags.", r"so \boxed{5} and", "length", 1.0),
    ],
)
@pytest.mark.parametrize("name", ["math", "math_boxed"])
def test_a_thought_that_the_prompt_opened(name: str, prompt: str, text: str, finish_reason: str, reward: float) -> None:
    """A box in it is no answer if the completion was cut off there. Base models end without closing it."""
    said = Rewards([NamedFunction("", BUILT_IN[name])]).grade(Sample(text, "5", {}, prompt, 9, finish_reason))
    assert said["reward"] == reward
    assert reward or said["why"] == "no final answer"


def test_the_prompts_echo_is_no_answer() -> None:
    """A completion that repeats a prompt with the reference in it is not paid for it."""
    echo = "Problem: show that the sum is 42. Put your final answer within \\boxed{}."
    assert grade_math(echo, "42", {}).reward == 0.0
    assert grade_math(f"{echo} I do not know.", "42", {}).reward == 0.0


@pytest.mark.parametrize(
    "hedge", [r"\boxed{3} \boxed{4}", r"\boxed{3} or \boxed{4}", r"\boxed{3 or 4}", r"\boxed{3, 4}"]
)
def test_hedging_is_wrong_unless_the_reference_is_the_list(hedge: str) -> None:
    """Two answers are one list."""
    assert grade_math(hedge, "3", {}).reward == 0.0
    assert grade_math(hedge, "4", {}).reward == 0.0
    assert grade_math(hedge, "3,4", {}).reward == 1.0


def test_boxes_side_by_side_may_say_the_same() -> None:
    """Each must be right then."""
    assert grade_math(r"\boxed{x=4}. \boxed{4}", "4", {}).reward == 1.0
    assert grade_math(r"\boxed{x=3}. \boxed{4}", "4", {}).reward == 0.0


def test_strict_wants_a_box() -> None:
    """`math_boxed` pays for the format too."""
    assert grade_math("The answer is 5.", "5", {}).reward == 1.0
    assert grade_math_boxed("The answer is 5.", "5", {}).reward == 0.0
    assert grade_math("So x = 5.", "5", {}).reward == 1.0
    assert grade_math("So x = 5.", "5", {}).facts["boxed_share"] == 0.0
    assert grade_math_boxed("So x = 5.", "5", {}).reward == 0.0
    assert grade_math_boxed(r"\boxed{5}", "5", {}).reward == 1.0


@pytest.mark.parametrize(
    "piece", ["{", "}", r"\boxed{", r"\boxed", r"\{", "{}", r"\boxed{}", "<think>", "#### ", "answer is "]
)
def test_a_megabyte_of_anything_is_read_in_one_pass(piece: str) -> None:
    """It ends: anything quadratic in the braces would take hours here."""
    assert grade_math(piece * (1_000_000 // len(piece)), "5", {}).reward == 0.0


def test_a_megabyte_in_a_box_is_not_parsed() -> None:
    """An answer of that length is refused with its length."""
    grade = grade_math("\\boxed{" + "1+" * 500_000 + "1}", "500001", {})
    assert grade.reward == 0.0
    assert "characters" in grade.why


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{5}", "5", 1.0),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}", 1.0),
        (r"guess \boxed{3}. finally \boxed{\frac{3}{4}}", "3", 0.0),
        (r"\boxed{3} and \boxed{4", "3", 0.0),
        ("#### 1,000", "1000", 1.0),
        ("5", "5", 0.0),
    ],
)
def test_final_answer(completion: str, answer: str, reward: float) -> None:
    """The quickstart's grader compares strings, and takes no earlier box for a last one that it cannot read."""
    assert final_answer(completion, answer) == reward
