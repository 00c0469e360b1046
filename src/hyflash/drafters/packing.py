"""Drafters that can serve on the CPU kernels, and when they leave them again.

In: `use_kernels`. Out: `packed`, the drafter's weights in the kernels' order, or None: serve on torch. Packed weights
are copies, so whatever may change the modules drops them: training, loading, moving, copying.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from hyflash.core import TargetHooks
from hyflash.drafters.feature_config import FeatureConfig
from hyflash.drafters.feature_drafter import FeatureDrafter
from hyflash.drafters.packed_drafter import PackedDrafter
from hyflash.ops.kernels import Kernels


class PackingDrafter(FeatureDrafter):
    """A drafter with a packed form."""

    def __init__(self, config: FeatureConfig, hooks: TargetHooks) -> None:
        super().__init__(config, hooks)
        self.packed: PackedDrafter | None = None
        """For serving only; training always runs on torch."""

    @abstractmethod
    def pack(self, kernels: Kernels) -> PackedDrafter | None:
        """The weights as they are now; None where the kernels cannot compute these shapes."""

    def use_kernels(self, kernels: Kernels | None) -> bool:
        """Serve with packed weights from now on, until they are trained, loaded, moved or copied.

        Drafters that are not float32, or whose shapes do not fit, stay on torch.
        """
        plain = all(weight.dtype is torch.float32 and weight.is_cpu for weight in self.parameters())
        self.packed = self.pack(kernels) if kernels is not None and plain else None
        return self.packed is not None

    def forget(self) -> None:
        """Drop what was made from the weights, because they change."""
        super().forget()
        self.packed = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": None}
