"""Problem sets: rows to prompts, worked solutions to training samples, and the order prompts are visited in."""
