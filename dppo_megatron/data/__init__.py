"""Problem sets: rows to prompts, worked solutions to training samples, and the order in which prompts are visited."""
