"""What a job will need and cost, from its settings and config.json alone; docs/plan.md has the formulas and checks."""
