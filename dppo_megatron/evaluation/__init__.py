"""Evaluation: scores a model on problem sets, during training or on its own (docs/evaluation.md).

    sets -> sample and grade (evaluator.py) -> samples (eval_samples.py) -> scores (eval_scores.py)

Sampling needs an engine and grading needs graders. Everything after `samples` is arithmetic on plain values, so scores
can be recomputed from `samples.jsonl` without either.
"""
