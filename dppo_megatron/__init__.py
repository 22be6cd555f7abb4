"""Dynamic Pruning Policy Optimization (arXiv 2603.04135) on Megatron-core. The entry point is `dppo_megatron.train`."""

__version__ = "0.1.0"
