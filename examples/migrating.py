"""Settings of a verl, TRL or slime job, each with its name here.

    python examples/migrating.py data.train_batch_size=128 actor_rollout_ref.rollout.n=8
    rollout.prompts_per_step=128
    rollout.completions_per_prompt=8

Values are carried over as they stand; where a name is not enough, a comment says what to look at.
"""

import sys

from dppo_megatron.config.other_names import other_name


def translate(given: str) -> str:
    """One `key=value`, or `--key value` written as `--key=value`, as a setting of ours."""
    name, _, value = given.partition("=")
    said = other_name(name)
    ours = said.removeprefix("here it is ")
    if ours == said:
        return f"# {given}: {said or 'not in the tables; see docs/migrating.md'}"
    key, _, rest = ours.partition(" ")
    if value == "-1" and not rest:
        return f"# {given}: {ours}, where never is 0"
    if "=" in ours or rest:
        return f"# {given}: {ours}"
    return f"{key}={value}"


if __name__ == "__main__":
    print("\n".join(translate(given) for given in sys.argv[1:]))
