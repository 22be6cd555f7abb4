"""The settings of a job: `schema` defines it, `load` reads it, `checks` validates it."""

from dppo_megatron.config.load import load_config, save_config
from dppo_megatron.config.schema import Config

__all__ = ["Config", "load_config", "save_config"]
