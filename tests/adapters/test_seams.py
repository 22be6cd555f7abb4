"""What the adapters rest on in releases of TRL and verl: one that moves it is a sentence and not a puzzle."""

from __future__ import annotations

import inspect
import re

import pytest

pytest.importorskip("trl", reason="`make test-adapters` runs it")
pytest.importorskip("verl", reason="`make test-adapters` runs it")
import trl
import verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.v1 import PPOTrainerSync

from dppo_megatron.adapters.settings import TRL_DIVISORS, VERL_BY_SEQUENCE, VERL_LOSSES

TRL_METHODS = {
    "_generate_and_score_completions": ["inputs"],
    "_generate_single_turn": ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "_inner_training_loop": ["batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_get_train_sampler": ["dataset"],
    "_prepare_inputs": ["generation_batch"],
    "_save_checkpoint": ["model", "trial"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
}
VERL_METHODS = {
    "_init_dataloader": [],
    "_next_train_batch": ["num_prompts"],
    "_step_once": ["metrics", "timing_raw", "sample_batch_size"],
    "_balance_batch": ["batch", "metrics", "logging_prefix", "keep_minibatch"],
    "_compute_advantage": ["batch", "metrics"],
    "_save_checkpoint": [],
    "_load_checkpoint": [],
}
TRL_USES = (
    *("num_items_in_batch", "current_gradient_accumulation_steps", "per_token_loss.size(0)"),
    *("_entropy_bonus_enabled", "aux_loss_enabled", "top_entropy_quantile"),
)
"""What `_compute_loss` divides by, and the terms that are refused."""
OF_ROWS = {
    *(
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "num_items_in_batch",
        "tool_mask",
    ),
    *("old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps", "ref_per_token_logps"),
}
OF_IMAGES = {
    *(
        "pixel_values",
        "image_grid_thw",
        "pixel_attention_mask",
        "spatial_shapes",
        "image_sizes",
        "num_images",
        "num_tiles",
    ),
    *("token_type_ids", "mm_token_type_ids", "image_position_ids"),
}


@pytest.mark.parametrize(
    ("release", "cls", "name", "expected"),
    [
        *((f"trl {trl.__version__}", trl.GRPOTrainer, name, given) for name, given in TRL_METHODS.items()),
        *((f"verl {verl.__version__}", PPOTrainerSync, name, given) for name, given in VERL_METHODS.items()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_methods_that_are_overridden_are_there(release: str, cls: type, name: str, expected: list[str]) -> None:
    method = getattr(cls, name, None)
    assert method is not None, f"{release}: {cls.__name__}.{name} is gone; the adapter overrides it"
    found = list(inspect.signature(method).parameters)[1:]
    assert found == expected, f"{release}: {cls.__name__}.{name} takes {found}, the adapter expects {expected}"


def test_trls_losses_are_those_that_were_looked_at() -> None:
    """A new one is refused until its divisor is in the table."""
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    named = re.findall(r'self\.loss_type (?:==|in|!=) (\[[^]]*\]|"\w+")', source)
    losses = {name for text in named for name in re.findall(r'"(\w+)"', text)}
    assert losses == {*TRL_DIVISORS, "bnpo"}, f"trl {trl.__version__}: losses {sorted(losses)}"
    gone = [text for text in TRL_USES if text not in source]
    assert not gone, f"trl {trl.__version__}: _compute_loss does not use {gone} any more"


def test_trls_rows_have_the_fields_that_are_dropped_with_them() -> None:
    """Each is a tensor of rows, except those of images, which are refused, and the count of tokens."""
    source = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    found = set(re.findall(r'^        (?:    )*output\["(\w+)"\] =|^            "(\w+)": ', source, re.MULTILINE))
    names = {name for pair in found for name in pair if name}
    assert "num_images" in names, f"trl {trl.__version__}: what says that a batch has images?"
    names -= OF_IMAGES
    assert names == OF_ROWS, f"trl {trl.__version__}: a batch has {sorted(names ^ OF_ROWS)} more or less"


def test_verls_losses_are_aggregated_as_they_are_told() -> None:
    """But for those of which only one way is let through."""
    fixed = {
        name
        for name in VERL_LOSSES
        if "loss_agg_mode=loss_agg_mode" not in inspect.getsource(POLICY_LOSS_REGISTRY[name])
    }
    assert fixed <= {*VERL_BY_SEQUENCE}, f"verl {verl.__version__}: {sorted(fixed)} do not read loss_agg_mode"


def test_verls_losses_are_those_that_were_looked_at() -> None:
    refused = {"clip_cov", "kl_cov", "geo_mean", "dro", "bypass_mode"}
    found = set(POLICY_LOSS_REGISTRY)
    assert found == {*VERL_LOSSES, *refused}, f"verl {verl.__version__}: losses {sorted(found)}"
