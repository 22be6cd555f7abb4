"""`dppo-megatron accept`: one command and one page for what only a GPU can show."""
