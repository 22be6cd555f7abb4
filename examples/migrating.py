"""Settings of a verl, TRL, slime, NeMo-RL or OpenRLHF job, each with its name here.

    python examples/migrating.py data.train_batch_size=128 actor_rollout_ref.rollout.n=8
    rollout.prompts_per_step=128
    rollout.completions_per_prompt=8

A file is read whole: .yaml, or a launch script (.sh, .sbatch) with its key=value words and --flags. Values are copied
as they are written, and a line without `#` is one that the trainer accepts; where a name is not enough, a comment says
what to look at. A YAML file's own `defaults` are not followed.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Template

import yaml

from dppo_megatron.config.load import read_config
from dppo_megatron.config.other_names import other_name, other_names
from dppo_megatron.config.ranges import check_ranges
from dppo_megatron.config.reference import all_settings
from dppo_megatron.types import UserError

KINDS = {one.key: one.kind for one in all_settings()}
FOUND = "here it is "


def translate(given: str) -> str:
    """One `key=value`, or `--key value` written as `--key=value`, as a setting of this trainer; else a comment."""
    name, _, value = given.partition("=")
    if (own := name.lstrip("-").replace("-", "_")) in KINDS:
        return checked(given, f"{own}={value}")
    answer = other_name(name, value)
    ours = answer.removeprefix(FOUND)
    if ours == answer:
        return f"# {given}: {answer or 'not in the tables; see docs/migrating.md'}"
    if value in ("null", "~", ""):
        return f"# {given}: {ours}; not set there"
    key, _, note = ours.partition(" ")
    if value == "-1" and key.endswith(".every_steps"):
        return f"# {given}: {ours}, where never is 0"
    if note or ("=" in ours and value.lower() not in ("true", "false")):
        return f"# {given}: {ours}"
    if "=" in ours:
        return checked(given, ours)
    word = other_names().get(f"{key}={value.replace('-', '_').lower()}", "")
    if key == "data.chat_template_kwargs" and (argument := name.partition("chat_template_kwargs.")[2]):
        return checked(given, f"{key}.{argument}={value}")
    if word and (" (" in word or not word.startswith(f"{FOUND}{key}=")):
        return f"# {given}: {word.removeprefix(FOUND)}"
    value = word.removeprefix(f"{FOUND}{key}=") or value
    return checked(given, f"{key}.val={value}" if key == "data.eval_paths" else f"{key}={value}")


def checked(given: str, line: str) -> str:
    """`line` if the trainer accepts it, else a comment."""
    key, _, value = line.partition("=")
    lists = value.startswith("[") and not KINDS.get(key, "").startswith("list")  # the trainer would read it as one path
    if "$" in value or lists:
        return f"# {given}: {key}, with {'one value' if lists else 'what the variable holds'}"
    try:
        check_ranges(read_config("", [line]))
    except UserError as error:
        return f"# {given}: {key}; {str(error).partition(': ')[2]}"
    return line


def translated(given: Iterable[str]) -> Iterator[str]:
    """All settings of a job. Those in a section that is off, or that contradict an earlier one, become comments."""
    given = list(given)
    off = re.findall(r"^[+]*(.+)\.enabled?=(?:false|False)$", "\n".join(given), re.MULTILINE)
    taken: dict[str, str] = {}
    for one in given:
        line = translate(one)
        key, _, value = line.partition("=")
        section = next((name for name in off if one.lstrip("+").startswith(f"{name}.")), "")
        if section and not line.startswith("#"):
            line = f"# {one}: off there, with {section}"
        elif not line.startswith("#") and taken.setdefault(key, value) != value:
            line = f"# {one}: {key}, which is {taken[key]} above"
        yield line


def of_yaml(values: object, above: str = "") -> Iterator[str]:
    """Each nested key with its dots, and its value as it is written."""
    if isinstance(values, dict):
        for name, value in values.items():
            if above or name != "defaults":
                yield from of_yaml(value, f"{above}.{name}" if above else str(name))
    elif isinstance(values, list):
        yield f"{above}=[{', '.join(map(str, values))}]"
    else:
        yield f"{above}={values}"


def of_script(text: str) -> Iterator[str]:
    """The dotted key=value words and the --flags of a script, in all of its branches. Variables to which it assigns
    only one value are substituted."""
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$\{(\w+):-([^${}]*)\}", r"\2", line)
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation of several lines
            words = line.split()
        while words and (assigned := re.fullmatch(r"(?:(\w+)=(.*)|export)", words[0])):
            name, value = assigned.groups()
            if name and value.startswith("("):  # an array: its words follow
                words[0] = value[1:]
                break
            if name:
                value = Template(value).safe_substitute(variables)
                is_sure = "$" not in value and variables.get(name, value) == value  # branches may differ
                variables[name] = value if is_sure else f"${{{name}}}"
            del words[0]
        words = [word.removesuffix(")") if word.count(")") > word.count("(") else word for word in words]
        yield from of_words([Template(word).safe_substitute(variables) for word in words])


def of_words(words: list[str]) -> Iterator[str]:
    """The settings of one command line: a flag takes the words up to the next flag, and is true without any."""
    flag = ""
    values: list[str] = []
    for word in [*words, "--"]:
        is_setting = re.match(r"[+~]*[A-Za-z_]\w*(\.[\w-]+)+=", word)
        if flag and (word.startswith("--") or is_setting):
            yield f"{flag}={' '.join(values) or 'true'}"
            flag = ""
        if is_setting or re.match(r"--[A-Za-z][\w.-]*=", word):
            yield word
        elif re.fullmatch(r"--[A-Za-z][\w.-]*", word):
            flag, values = word, []
        elif word and "[@]" not in word:
            values.append(word)


def read(argument: str) -> Iterator[str]:
    """The settings in a file, or in one word of the command line."""
    path = Path(argument)
    if path.suffix in (".yaml", ".yml", ".sh", ".sbatch") and "=" not in argument:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            sys.exit(f"{argument}: {error.strerror}")
        is_yaml = path.suffix in (".yaml", ".yml")
        yield from of_yaml(yaml.load(text, yaml.BaseLoader)) if is_yaml else of_script(text)  # values stay text
    else:
        yield argument if "=" in argument else f"{argument}=true"


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python examples/migrating.py FILE or KEY=VALUE ...")
    print("\n".join(translated(line for argument in sys.argv[1:] for line in read(argument))))
