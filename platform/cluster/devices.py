"""Which device a node's tensors belong on."""

from __future__ import annotations

import torch

from crossfed.platform.config.settings import RunConfig
from crossfed.platform.errors import CrossfedError


def local_device(config: RunConfig) -> torch.device:
    """The device of nodes in this process.

    Raises:
        CrossfedError: a GPU was asked for and there is none.
    """
    wanted = config.resources.gpus_per_domain
    if config.resources.device == "cpu" or not wanted:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CrossfedError(
            f"resources.gpus_per_domain={wanted:g} asks for a GPU, but torch sees none here; "
            f"set it to 0 to run on the CPU."
        )
    return torch.device("cuda", 0)
