"""Transfer controls: what a node receives is replaced by something of the same form that means
nothing.

A gain that survives such a control does not come from what crossed. The replacement happens at
delivery, in the receiver's own process and just before its step; the method does not know of it.
The ledger, the bytes, the checks and the privacy account stay those of the honest messages, which
leave as always.

    noise, shuffle, stale        all that a node receives is replaced, a domain's own share in an answer with it
    peers-noise, -shuffle, -stale  only what *other* domains contributed is: before the server works on it, and in
                                 messages between domains
    solo                         nothing of other domains is there: every domain is a federation of one

What belongs to whom is known without the method's help where the server has one domain to answer:
under `solo` and `peers-…` the server node holds a server of its own for every domain (`separate`).
Each is handed that domain's own upload as it was sent and the others' replaced (or none), and only
its answer to that domain leaves.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from crossfed.platform.config.settings import Control
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import SERVER, Array, Method, Payload, Scope, stream

CONTROLS: tuple[Control, ...] = ("noise", "shuffle", "stale")
"""The controls that replace all that is received."""
SOLO: Control = "solo"
"""The control under which every domain is alone."""
PEERS: tuple[Control, ...] = ("peers-noise", "peers-shuffle", "peers-stale")
"""The controls that replace what other domains contributed."""

MEANING: dict[str, str] = {
    **dict.fromkeys(CONTROLS, "no node receives what it was sent"),
    SOLO: "every domain is a federation of one",
    **dict.fromkeys(PEERS, "no domain receives what other domains contributed"),
}
"""What a control does, in a few words."""


def separate(control: Control) -> bool:
    """Whether the server node holds a server of its own for every domain."""
    return control == SOLO or control in PEERS


Place = tuple[str, str, int, str, str, str, tuple[int, ...]]
"""Where an array arrived: stage, part, phase, sender, key, and its dtype and shape."""


def check_control(method: Method, control: Control) -> None:
    """Raises CrossfedError where a control is asked for that could not change anything."""
    if control != "none" and method.scope == Scope.LOCAL:
        raise CrossfedError(
            f"{method.name} receives nothing, so control={control} has nothing to replace; "
            f"leave it out."
        )


def blame(error: BaseException, control: Control) -> None:
    """Let the sentence of a failed run say that it ran under a control, since a method may diverge
    on what means nothing.
    """
    if control != "none" and isinstance(error, CrossfedError):
        how = "leaves every domain alone" if control == SOLO else "replaces what is received"
        error.args = (f"Under control={control}, which {how}: {error}",)


def noise(value: Array, rng: np.random.Generator) -> Array:
    """An array of the same shape and dtype that tells nothing but the array's mean and variance.

    Floating-point entries become independent Gaussian draws with the mean and the variance of all
    the array's entries. Entries of any other dtype become draws with replacement from the array's
    own entries, so that declared bounds hold. An array of one entry stays as it is: its variance is
    nought, and the draw would be the entry itself. A method that sends single numbers (FedAvg's
    counts) keeps them under this control.
    """
    if value.size < 2:
        return value
    if not np.issubdtype(value.dtype, np.floating):
        return rng.choice(value.ravel(), value.shape)
    wide = value.astype(np.float64)
    return rng.normal(wide.mean(), wide.std(), value.shape).astype(value.dtype)


def shuffle(value: Array, rng: np.random.Generator) -> Array:
    """The array with its rows (first axis) in one random order.

    What does not depend on the order of rows survives: the clusters of a set of item vectors, a
    mean over rows. A scalar and an array of one row stay as they are.
    """
    return rng.permutation(value, axis=0) if value.ndim else value


class Delivery:
    """Replaces what one node receives.

    Every random draw depends on (seed, stage, round, node, part, phase, sender, key) alone, so a
    control gives the same numbers in process, on Ray and in a resumed run.

    Args:
        control: "none" delivers as sent. "noise" and "shuffle" are the functions above, drawn anew
            each round and for each array by itself. "stale" delivers what the same sender sent in
            the same stage, part, phase and key the first time; where the shape has changed since,
            the first of that shape. "peers-…" do the same with messages of domains other than
            `owner`, and deliver the rest as sent. "solo" leaves out messages of domains other than
            `owner`.
        seed: the run's. node: the receiver.

    Attributes:
        first: what arrived first at every place, under "stale"; part of the node's checkpoint.
    """

    def __init__(self, control: Control, seed: int, node: str):
        self.control, self.seed, self.node = control, seed, node
        self.kind = control.removeprefix("peers-")
        self.first: dict[Place, Array] = {}

    def __call__(
        self,
        stage: str,
        round: int,
        part: str,
        phase: int,
        inbox: Mapping[str, Payload],
        owner: str | None = None,
    ) -> Mapping[str, Payload]:
        """The inbox that the step sees: the same keys, shapes and dtypes, read-only as always.

        Args:
            owner: at a server that answers one domain, that domain; by default the receiver itself.
        """
        if self.control == "none":
            return inbox
        own = {self.node if owner is None else owner, SERVER}
        if self.control == SOLO:
            return {sender: sent for sender, sent in inbox.items() if sender in own}
        kept = own if self.control in PEERS else set()
        return {
            sender: sent
            if sender in kept
            else {
                key: self._replaced((stage, round, part, phase, sender, key), value)
                for key, value in sent.items()
            }
            for sender, sent in inbox.items()
        }

    def _replaced(self, where: tuple[str, int, str, int, str, str], value: Array) -> Array:
        stage, round, part, phase, sender, key = where
        if self.kind == "stale":
            place = (stage, part, phase, sender, key, str(value.dtype), value.shape)
            # a copy: on Ray the array is a view that would hold its message in the object store
            return _frozen(self.first.setdefault(place, np.array(value)))
        sequence = stream(self.seed, "control", stage, round, self.node, part, phase, sender, key)
        replace = noise if self.kind == "noise" else shuffle
        return _frozen(replace(value, np.random.default_rng(sequence)))


def _frozen(value: Array) -> Array:
    value = np.ascontiguousarray(value) if value.ndim else value
    value.setflags(write=False)
    return value
