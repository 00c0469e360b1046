"""Options: what every config and recipe table refuses."""

from __future__ import annotations

from typing import Any

import pytest

from hyflash.drafters.block_config import DFlashConfig
from hyflash.errors import UserError


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"intermediate_size": 10**30}, r"here: intermediate_size is 1e\+30; expected a number below 2\*\*63"),
        ({"intermediate_size": 1e30}, r"intermediate_size is 1e\+30"),
        ({"target_layer_ids": [1, -(2**63)]}, r"target_layer_ids is -9.22e\+18"),
        ({"gamma": float("nan")}, "gamma is nan"),
        ({"num_layer": 1}, "Did you mean 'num_layers'"),
    ],
)
def test_values_that_no_tensor_can_have_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        DFlashConfig.parse(values, where="here")


def test_the_largest_numbers_of_64_bits_pass() -> None:
    assert DFlashConfig.parse({"intermediate_size": 2**63 - 1}, where="here").intermediate_size == 2**63 - 1
