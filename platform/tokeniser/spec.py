"""What a tokeniser is made by, and its training at its first epoch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from crossfed.platform.config.settings import RunConfig
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import generators
from crossfed.platform.tokeniser import quantiser

FORMAT = 1
"""Goes into every key: raise it when the same settings come to give other semantic IDs."""


EVERY = 5
"""Epochs between two checkpoints."""


@dataclass(frozen=True, slots=True)
class Spec:
    """All that a tokeniser's numbers depend on, besides the vectors. Names as in
    `config.Tokeniser`.
    """

    kind: str
    levels: int
    codebook: int
    dim: int
    seed: int
    hidden: int = 0
    epochs: int = 0
    batch_size: int = 0
    lr: float = 0.0
    beta: float = 0.0
    entropy: float = 0.0
    collision: float = 0.0
    workers: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Spec:
        """The tokeniser of a run.

        Raises:
            CrossfedError: the method's Config does not say how many codes of how many levels it
                wants.
        """
        own, settings = config.method_config(), config.tokeniser
        levels, codebook = getattr(own, "levels", None), getattr(own, "codebook", None)
        if (
            not isinstance(levels, int)
            or not isinstance(codebook, int)
            or min(levels, codebook) < 1
        ):
            raise CrossfedError(
                f"{config.method} asks for semantic IDs, so its Config must hold the positive "
                f"whole numbers levels and codebook; "
                f"it has levels={levels}, codebook={codebook}."
            )
        shared: dict[str, Any] = {"kind": settings.kind, "dim": settings.dim, "seed": settings.seed}
        trained = {
            "hidden",
            "epochs",
            "batch_size",
            "lr",
            "beta",
            "entropy",
            "collision",
            "workers",
        }
        if settings.kind == "rqvae":
            shared |= {name: getattr(settings, name) for name in trained}
        return cls(levels=levels, codebook=codebook, **shared)

    def key(self, texts: list[str]) -> str:
        """SHA-256, in hex, over this and the keys of the text vectors."""
        told = {"format": FORMAT, "spec": asdict(self), "texts": texts}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


class Quantiser(Protocol):
    """What is used of a quantiser, whatever its kind."""

    def fit(self, x: torch.Tensor, seed: int) -> None: ...

    def codes(self, x: torch.Tensor) -> torch.Tensor: ...

    def errors(self, x: torch.Tensor) -> list[float]: ...

    def to(self, device: torch.device) -> Any: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> Any: ...


def make(spec: Spec, width: int) -> Quantiser:
    """An untrained quantiser for vectors of a width."""
    shape = (width, spec.dim, spec.levels, spec.codebook)
    if spec.kind == "residual-kmeans":
        return quantiser.ResidualKMeans(*shape)
    return quantiser.ResidualVAE(*shape, spec.hidden, generators(spec.seed, "tokeniser", "init")[1])


def start(spec: Spec, x: torch.Tensor, device: torch.device, **parallel: Any) -> Any:
    """The training of an RQ-VAE at its first epoch, on a device.

    Args:
        x: [n, width]. parallel: `wrap`, `rank` and `workers` of `quantiser.Training`.
    """
    model = make(spec, x.shape[1])
    model.fit(x, spec.seed)
    names = ("epochs", "batch_size", "lr", "beta", "entropy", "collision", "seed")
    settings = {name: getattr(spec, name) for name in names}
    return quantiser.Training(model.to(device), x.to(device), **settings, **parallel)
