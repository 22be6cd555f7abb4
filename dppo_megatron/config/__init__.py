"""The settings of a job: `schema` says what there is, `load` reads it, `checks` explains what is wrong with it."""

from dppo_megatron.config.load import load_config, save_config
from dppo_megatron.config.schema import Config

__all__ = ["Config", "load_config", "save_config"]
