"""What keeping less would save, for the self-tuned rule: seconds that follow what is kept over those that do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dppo_megatron.pruning.interface import check_state

_COST_DECAY = 0.9
_FLOOR_FADE, _FLOOR_STEPS, _FLOOR_ERRORS, _LARGEST_FLOOR = 0.98, 8.0, 2.0, 0.75


def floor_share(sums: Sequence[float]) -> float:
    """Share of full seconds that remains however little is kept, from sums of 1, x, y, x^2, xy and y^2 over steps: y
    seconds, x the kept share. In [0, 0.75], and 0 unless steps differ enough to tell.

    A rollout waits for its longest completions, so seconds do not fall to nothing with their tokens. The intercept of a
    straight line, drawn to 0 by as much as it may be chance: steps of equal size say nothing about it.

    Example: steps that kept all took 10 s and those that kept half 8: the line's intercept is 6 s, the share 0.6.
    """
    count, x, y, xx, xy, yy = sums
    if count < _FLOOR_STEPS:
        return 0.0
    spread, along = xx - x * x / count, xy - x * y / count
    if spread <= 1e-9 * xx:
        return 0.0
    slope = along / spread
    intercept = (y - slope * x) / count
    left = max(yy - y * y / count - slope * along, 0.0) / (count - 2)
    error = _FLOOR_ERRORS * math.sqrt(left * xx / (count * spread))
    if intercept <= error or slope <= 0:  # seconds that fall with what is kept are not this line's
        return 0.0
    trust = 1.0 - (error / intercept) ** 2
    return min(trust * intercept / (intercept + slope), _LARGEST_FLOOR)


@dataclass(slots=True)
class MeasuredCost:
    """Of a level: what skipping or dropping all of it would leave, over what it would save."""

    cost_ratio: float = 0.0
    """Running mean of fixed over variable seconds at full batch; 0 before the first measurement."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Fading sums for `floor_share`."""

    def observe_cost(self, fixed_s: float, variable_s: float, kept_cost: float, *, has_floor: bool = False) -> None:
        """Seconds of a step that pruning saves nothing of, and those of the rest, of which it had kept `kept_cost`.

        has_floor: the rest is not proportional to what is kept; the part that is not, as measured, counts as fixed.
        """
        if variable_s <= 0 or fixed_s < 0 or kept_cost <= 0:
            return
        floor = 0.0
        if has_floor:
            seen = (1.0, kept_cost, variable_s, kept_cost**2, kept_cost * variable_s, variable_s**2)
            self.seconds = [_FLOOR_FADE * old + new for old, new in zip(self.seconds, seen, strict=True)]
            floor = floor_share(self.seconds)
        full = variable_s / (floor + (1.0 - floor) * kept_cost)
        ratio = (fixed_s + floor * full) / ((1.0 - floor) * full)
        self.cost_ratio = ratio if self.cost_ratio == 0 else _COST_DECAY * self.cost_ratio + (1 - _COST_DECAY) * ratio

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; raises ValueError on other keys."""
        check_state(state, set(asdict(self)), "the measured cost")
        self.cost_ratio = float(state["cost_ratio"])
        self.seconds = [float(each) for each in state["seconds"]]
