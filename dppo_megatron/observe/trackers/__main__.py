"""`python -m dppo_megatron.observe.trackers NAME`: started by the trainer, with its messages on stdin."""

from dppo_megatron.observe.trackers.process import main

main()
