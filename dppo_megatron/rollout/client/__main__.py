"""`python -m dppo_megatron.rollout.client`: started by the trainer, with its setup on stdin."""

from dppo_megatron.rollout.client.process import main
from dppo_megatron.texts import guard_errors

guard_errors()
main()
