"""What a run reports: its directory and logs, phase timers, progress, summary, signals and the watchdog."""
