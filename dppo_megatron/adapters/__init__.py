"""The selection inside trainers that people have, a module each (docs/adapters.md); nothing of theirs is patched."""
