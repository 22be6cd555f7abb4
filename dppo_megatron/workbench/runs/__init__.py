"""Readers of a run's files: `run_record.py` shows a person whatever there is; `trace.py` refuses damage."""
