"""Every published way of selecting prompts, completions or tokens for GRPO, on one task (docs/referee.md)."""
