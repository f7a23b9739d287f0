"""The device of nodes in this process."""

from __future__ import annotations

import pytest

from crossfed.platform.cluster.devices import local_device
from crossfed.platform.config.settings import build
from crossfed.platform.errors import CrossfedError


def test_a_gpu_asked_for_where_there_is_none() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    config = build("lightgcn", sets=["resources.gpus_per_domain=1"])
    with pytest.raises(CrossfedError, match="asks for a GPU, but torch sees none here"):
        local_device(config)
