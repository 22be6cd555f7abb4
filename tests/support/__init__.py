"""What several tests use: jobs, launches on several ranks, kills, damage."""
