"""A run's files as others read them: `run_record.py` for a person, whatever their state; `trace.py` refuses damage."""
