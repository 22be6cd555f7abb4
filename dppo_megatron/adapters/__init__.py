"""The selection inside trainers that people have: `trl`, `verl`, `slime`, `nemo_rl`, a module each (docs/adapters.md).

Each imports its own trainer, or nothing beyond arrays; `pruner` is what they share. Nothing of theirs is patched.
"""
