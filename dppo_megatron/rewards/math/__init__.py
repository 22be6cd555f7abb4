"""The `math` grader: from a completion's final answer and a reference to 0 or 1 (docs/math.md)."""
