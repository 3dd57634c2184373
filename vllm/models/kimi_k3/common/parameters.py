# SPDX-License-Identifier: Apache-2.0
"""Looking up what a tensor of the file is loaded into."""

from typing import Any

from torch import nn

from vllm.checkpoint.strictness import refuse

__all__ = ["Parameters"]


class Parameters(dict[str, Any]):
    """Parameters by name; a name that the model lacks is refused.

    Raises:
        ValueError: From the look-up. If the user lets the tensor through, it goes nowhere.
    """

    def __missing__(self, name: str) -> Any:
        kind = "nobody reads this scale" if "scale" in name.rpartition(".")[2] else "the model has no such parameter"
        refuse(
            f"{name}: {kind}. Either the quantisation config does not list the layer that the file "
            "quantises, or the file is of another model. Check both."
        )
        return _Nowhere()


class _Nowhere(nn.Module):
    """Takes a tensor and drops it."""

    def weight_loader(self, *_: Any, **__: Any) -> None:
        pass
