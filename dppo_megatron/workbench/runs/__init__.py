"""A run's files as others read them: `record.py` for a person, whatever their state; `trace.py` refuses damage."""
