"""Evaluation: what a model scores on problem sets, while it trains and alone (docs/evaluation.md).

    sets -> sample and grade (evaluator.py) -> samples (eval_samples.py) -> scores (eval_scores.py)

Sampling and grading need an engine and a grader. Everything after `samples` is arithmetic on plain values, so scores
can be recomputed from `samples.jsonl` without either.
"""
