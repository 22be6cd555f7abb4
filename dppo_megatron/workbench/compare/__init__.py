"""The same job under several pruning methods: which reach the accuracy of the baseline, at what cost, and how surely.

    command ─▶ arms ─▶ runs ──files──▶ record ─▶ verdict ─▶ table
            what to run  processes   curves    statistics

A benchmark by the authors flatters easily. The rules against that are in `verdict.py`: the baseline is the best of
several, all curves are smoothed alike, a time is compared with the baseline's own time to the same level, and what is
within noise is called that.
"""
