"""`python -m dppo_megatron.rollout.client`: started by the trainer, with its setup on stdin."""

from dppo_megatron.rollout.client.process import main

main()
