"""Renders problems into prompts: template text, the tokenizer's chat template, and the tokens that end a turn."""

from __future__ import annotations

import contextlib
import inspect
import re
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jinja2 import Environment, TemplateSyntaxError
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from dppo_megatron.config.resolved_sets import ResolvedSet, Template
from dppo_megatron.data.fields import Messages, section_of
from dppo_megatron.data.rows import growing_at_most
from dppo_megatron.texts import reason
from dppo_megatron.types import UserError

_TEMPLATE_BYTES = 2**30
_TEMPLATE_CPU_S = 5.0
"""Most CPU seconds to render one prompt; the longest templates in use take some milliseconds."""
_MARK = "Xq7turn"
"""Placeholder for an assistant's text, to see what the chat template appends to it."""
_DATE = "26 Jul 2024"
"""Llama's own default of `date_string`. Without it, Llama 3.2's template writes today's date into every prompt."""
_DATE_SWITCH = re.compile(r"\bdate_string\s+(?:is\s|or\s)|\bnot\s+date_string\b|\bdate_string\s*\|\s*d(?:efault)?\b")
"""Matches a template that writes today's date only if `date_string` is not given."""
_ENDS_OF_SGLANG = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Added tokens at which SGLang always ends a completion (0.5.23, `attach_additional_stop_token_ids`)."""


def check_template(settings: ResolvedSet, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` unless the tokenizer's chat template can be used as the settings say."""
    template = settings.template
    if not template.apply_chat_template:
        return
    source = chat_template_of(tokenizer)
    if source is None:
        raise UserError(
            f"{settings.key}: the prompt needs a chat template (apply_chat_template or a named template), but the"
            " model's tokenizer has none; use a plain one (template=plain_boxed, without apply_chat_template; for rows"
            f" of messages with problem_field={settings.problem_field}.0.content), or add a chat_template.jinja"
        )
    if _raises_to_powers(source):
        raise UserError(
            f"{settings.key}: the tokenizer's chat template raises to a power (**), which no prompt needs and which may"
            " never end; remove it"
        )
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in template.chat_template_kwargs:
        if name in own:
            raise UserError(f"{settings.key}: chat_template_kwargs.{name} is set by the trainer itself; leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise UserError(
                f"{settings.key}: chat_template_kwargs.{name} has no effect: this tokenizer's chat template never reads"
                f" it; correct its name, or set {section_of(settings)}.chat_template_kwargs={{}}, as the template"
                " chat_boxed does"
            )


def varies(source: str) -> bool:
    """Whether a chat template may render other prompts at the next start."""
    writes_date = "strftime_now" in source and not _DATE_SWITCH.search(source)
    return writes_date or re.search(r"\brandom\b", source) is not None


def unstable(settings: ResolvedSet, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A warning about prompts that may differ at the next start."""
    if not settings.template.apply_chat_template or not varies(chat_template_of(tokenizer) or ""):
        return []
    return [
        "warning: the tokenizer's chat template writes the date or draws at random, so that prompts may differ at a"
        f" resume, which refuses other training prompts without checkpoint.may_change=[{settings.key}]"
    ]


def _raises_to_powers(source: str) -> bool:
    """Whether a template uses `**`: even with small numbers it may be a C operation for hours, which no signal ends."""
    with contextlib.suppress(TemplateSyntaxError):  # transformers reports the mistake when it renders
        return any((kind, text) == ("operator", "**") for _, kind, text in Environment().lex(source))
    return False


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The source of the tokenizer's chat template; None if it has none."""
    try:
        return str(tokenizer.get_chat_template()) if tokenizer.chat_template else None
    except ValueError:  # several named templates without a default
        return None


def render(
    problems: Sequence[str | Messages],
    origins: Sequence[str],
    settings: ResolvedSet,
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """The texts of the prompts, as the model gets them. Raises UserError for messages that cannot be a prompt, or that
    the chat template refuses."""
    template, texts = settings.template, list[str]()
    is_problem_only = template.prompt_template == "{problem}"  # then the row and the prompt share one text
    for problem, origin in zip(problems, origins, strict=True):
        if template.apply_chat_template:
            chat = _chat(problem, origin, template)
            try:
                texts.append(_filled_in(chat, template, tokenizer, generates=True))
            except Exception as error:  # a template is a program: it can raise anything, on purpose or not
                why = f"the tokenizer's chat template fails on this prompt: {reason(error)}"
                raise UserError(f"{origin}: {why}") from None
        elif isinstance(problem, str):
            texts.append(problem if is_problem_only else template.prompt_template.replace("{problem}", problem))
        else:
            raise UserError(
                f"{origin}: the problem is a list of messages, which needs the tokenizer's chat template; set"
                f" {section_of(settings)}.apply_chat_template=true, or {section_of(settings)}.template to one that has"
                f" it (chat_boxed). The text of the last turn alone: {section_of(settings)}.problem_field="
                f"{settings.problem_field}.{len(problem) - 1}.content"
            )
    return texts


def unfilled(template: Template) -> list[str]:
    """A warning about placeholders that are not filled in, such as {answer}, but not the one in `\\boxed{answer}`."""
    texts = f"{template.prompt_template.replace('{problem}', '')} {template.system_prompt}"
    names = dict.fromkeys(re.findall(r"(?<![\\\w}])\{\w+\}", texts))
    why = "only {problem} is filled in, in prompt_template"
    return [f"warning: the template has {', '.join(names)}, which the model gets verbatim: {why}"] if names else []


def turn_end_tokens(template: Template, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special token that the chat template appends to an assistant's text, unless it is the end of sequence.

    Qwen's templates end a turn with <|im_end|>, but the end of sequence of the base model's tokenizer is <|endoftext|>.
    Without this, a model that has learned to end turns would generate to the token limit.
    """
    if not template.apply_chat_template:
        return []
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": _MARK}]
    try:
        text = _filled_in(chat, template, tokenizer, generates=False)
    except Exception:  # a template without assistant turns has no end-of-turn token
        return []
    _, mark, suffix = text.rpartition(_MARK)
    ids = tokenizer(suffix, add_special_tokens=False)["input_ids"] if mark and suffix else []
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [ids[0]] if ids and ids[0] in special and ids[0] != tokenizer.eos_token_id else []


def model_ends(hf_path: str, tokenizer: PreTrainedTokenizerBase, engine: str) -> list[int]:
    """End-of-sequence tokens in generation_config.json and config.json besides the tokenizer's, and SGLang's own.

    By itself SGLang ends completions at all of them, and vLLM at config.json's if there is no generation_config.json.
    Every engine gets them as stop tokens, so that all end alike, and such an end is not taken for a server's fault. An
    ordinary token that only config.json names is probably a mistake: the default of a class with another vocabulary.

    Raises:
        UserError: a file is not JSON, transformers refuses it, or it names something that is not a token; or the engine
            would end completions at such an ordinary token.
    """
    generation, config = Path(hf_path) / "generation_config.json", Path(hf_path) / "config.json"
    ends = _named_ends(GenerationConfig, generation)
    reads_config = engine == "sglang" or (engine == "vllm" and not generation.is_file())
    plausible = {*ends, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for token in _named_ends(AutoConfig, config):
        if token in plausible:
            ends.append(token)
        elif reads_config and token < len(tokenizer):
            raise UserError(
                f"{config}: {engine} would end completions at '{tokenizer.decode([token])}', token {token}, which the"
                " file names or which is the default of its model_type: write the model's own eos_token_id into it"
            )
    added = tokenizer.get_added_vocab()
    ends += [added[name] for name in _ENDS_OF_SGLANG if name in added]
    # an id that the tokenizer lacks (the file may belong to another one) can never be generated
    known = [token for token in dict.fromkeys(ends) if token < len(tokenizer)]
    return [token for token in known if token != tokenizer.eos_token_id]


def _named_ends(kind: type[GenerationConfig | AutoConfig], path: Path) -> list[int]:
    """The eos_token_id of a file as transformers, and so engines, read it: Llama's class has token 2 as its default."""
    if not path.is_file():
        return []
    try:  # an engine, or a later load of the trained model, would fail at what transformers refuses here
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stops = kind.from_pretrained(str(path.parent), trust_remote_code=False).eos_token_id
    except Exception as error:  # its validators raise their own classes, and TypeErrors from deep inside
        raise UserError(f"{path}: transformers refuses it: {reason(error)}") from None
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise UserError(f"{path}: eos_token_id names {token!r}, which is not a token")
    return listed


def _chat(problem: str | Messages, origin: str, template: Template) -> Messages:
    """The conversation to render, with the template's text in the last user turn."""
    chat = [{"role": "user", "content": problem}] if isinstance(problem, str) else [dict(turn) for turn in problem]
    if chat[-1]["role"] not in ("user", "tool"):
        raise UserError(f"{origin}: the last message is the {chat[-1]['role']}'s; the model answers a user's")
    if template.prompt_template != "{problem}":
        last = next((turn for turn in reversed(chat) if turn["role"] == "user"), None)
        if last is None:
            raise UserError(f"{origin}: prompt_template goes into the last user turn, but no message is the user's")
        last["content"] = template.prompt_template.replace("{problem}", last["content"])
    if template.system_prompt:
        if chat[0]["role"] in ("system", "developer"):
            raise UserError(f"{origin}: the messages begin with a system turn, and system_prompt is set; keep one")
        chat.insert(0, {"role": "system", "content": template.system_prompt})
    return chat


def _filled_in(chat: Messages, template: Template, tokenizer: PreTrainedTokenizerBase, *, generates: bool) -> str:
    """The chat as text. Raises whatever the template raises, and TimeoutError if it computes too long.

    Jinja's sandbox limits what a template can access, but not its time or memory. A signal stops it between two
    bytecodes, or within a product of huge integers. Like all signals it works only in the main thread, where data are
    read. Text that keeps doubling fills the memory within that time, so this process may grow by at most 1 GiB.
    """

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"it took more than {_TEMPLATE_CPU_S:g} s of CPU")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _TEMPLATE_CPU_S)
    try:
        writes_today = "strftime_now" in (chat_template_of(tokenizer) or "")  # others have a fixed date or none
        extra = ({"date_string": _DATE} if writes_today else {}) | template.chat_template_kwargs
        with growing_at_most(_TEMPLATE_BYTES):
            return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generates, **extra))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def sequence_start(template: Template, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS token, if the tokenizer puts it before a text, for prompts without a chat template (which would add it):
    Gemma and Llama were never trained without it. Qwen's tokenizers have none."""
    if template.apply_chat_template or tokenizer.bos_token_id is None:
        return []
    return [token for token in tokenizer("x")["input_ids"][:1] if token == tokenizer.bos_token_id]


def tokenize(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    shared: Sequence[int],
    most: int,
    start: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Token ids of each text, in one call.

    Args:
        shared: result of `shared_ids`, so that equal ids are one int object: a million prompts of a hundred tokens are
            0.8 GB of pointers, and would be another 3 GB of equal integers.
        most: tokens that the caller accepts. Of a text that must have more only the beginning is tokenized, because
            60 MB would take 90 s and up to 18 GB.
        start: `sequence_start`, put before the ids of each text that has any and does not begin with it.
    """
    longest = max(2**20, 128 * (most + 1))  # no token of a vocabulary in use is longer than 128 characters
    begun = [text[:longest] for text in texts]
    batches: list[list[int]] = tokenizer(begun, add_special_tokens=False)["input_ids"] if begun else []
    begin = list(start)
    batches = [begin + ids if ids and ids[:1] != begin else ids for ids in batches]
    return [tuple(map(shared.__getitem__, ids)) for ids in batches]


def shared_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """[vocabulary] a list whose item i is the token id i, one int object for each."""
    return list(range(max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))))
