"""Transfer controls: what a node receives is replaced by something of the same form that means nothing.

A gain that survives such a control does not come from what crossed. The replacement happens at delivery, in the
receiver's own process and just before its step; the method does not know of it. The ledger, the bytes, the checks
and the privacy account stay those of the honest messages, which leave as always.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from crossfed.platform.config.settings import Control
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Array, Method, Payload, Scope, stream

CONTROLS: tuple[Control, ...] = ("noise", "shuffle", "stale")
"""The controls that replace anything."""

Place = tuple[str, str, int, str, str, str, tuple[int, ...]]
"""Where an array arrived: stage, part, phase, sender, key, and its dtype and shape."""


def check_control(method: Method, control: Control) -> None:
    """Raises CrossfedError when a control is asked for that could not change anything."""
    if control != "none" and method.scope == Scope.LOCAL:
        raise CrossfedError(
            f"{method.name} receives nothing, so control={control} has nothing to replace; leave it out."
        )


def blame(error: BaseException, control: Control) -> None:
    """Let the sentence of a failed run say that it ran under a control, since a method may diverge on what means nothing."""
    if control != "none" and isinstance(error, CrossfedError):
        error.args = (f"Under control={control}, which replaces what is received: {error}",)


def noise(value: Array, rng: np.random.Generator) -> Array:
    """An array of the same shape and dtype that tells nothing but the array's mean and variance.

    Floating-point entries become independent Gaussian draws with the mean and the variance of all the array's entries.
    Entries of any other dtype become draws with replacement from the array's own entries, so that declared bounds hold.
    An array of one entry stays as it is: its variance is nought, and the draw would be the entry itself. A method that
    sends single numbers (FedAvg's counts) keeps them under this control.
    """
    if value.size < 2:
        return value
    if not np.issubdtype(value.dtype, np.floating):
        return rng.choice(value.ravel(), value.shape)
    wide = value.astype(np.float64)
    return rng.normal(wide.mean(), wide.std(), value.shape).astype(value.dtype)


def shuffle(value: Array, rng: np.random.Generator) -> Array:
    """The array with its rows (first axis) in one random order.

    What does not depend on the order of rows survives: the clusters of a set of item vectors, a mean over rows. A scalar
    and an array of one row stay as they are.
    """
    return rng.permutation(value, axis=0) if value.ndim else value


class Delivery:
    """Replaces what one node receives.

    Every random draw depends on (seed, stage, round, node, part, phase, sender, key) alone, so a control gives the same
    numbers in process, on Ray and in a resumed run.

    Args:
        control: "none" delivers as sent.
            "noise" and "shuffle" are the functions above, drawn anew each round and for each array by itself.
            "stale" delivers what the same sender sent in the same stage, part, phase and key the first time; where the
            shape has changed since, the first of that shape.
        seed: the run's. node: the receiver.

    Attributes:
        first: what arrived first at every place, under "stale"; part of the node's checkpoint.
    """

    def __init__(self, control: Control, seed: int, node: str):
        self.control, self.seed, self.node = control, seed, node
        self.first: dict[Place, Array] = {}

    def __call__(
        self, stage: str, round: int, part: str, phase: int, inbox: Mapping[str, Payload]
    ) -> Mapping[str, Payload]:
        """The inbox that the step sees: the same senders, keys, shapes and dtypes, read-only as always."""
        if self.control == "none":
            return inbox
        return {
            sender: {
                key: self._replaced((stage, round, part, phase, sender, key), value) for key, value in sent.items()
            }
            for sender, sent in inbox.items()
        }

    def _replaced(self, where: tuple[str, int, str, int, str, str], value: Array) -> Array:
        stage, round, part, phase, sender, key = where
        if self.control == "stale":
            place = (stage, part, phase, sender, key, str(value.dtype), value.shape)
            # a copy: on Ray the array is a view that would hold its message in the object store
            return _frozen(self.first.setdefault(place, np.array(value)))
        sequence = stream(self.seed, "control", stage, round, self.node, part, phase, sender, key)
        replace = noise if self.control == "noise" else shuffle
        return _frozen(replace(value, np.random.default_rng(sequence)))


def _frozen(value: Array) -> Array:
    value = np.ascontiguousarray(value) if value.ndim else value
    value.setflags(write=False)
    return value
