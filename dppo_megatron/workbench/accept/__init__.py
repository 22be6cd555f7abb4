"""`dppo-megatron accept`: what only a device can show, as one command with one page."""
