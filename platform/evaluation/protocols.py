"""Evaluation protocols: how interactions are split, and which items the truth is ranked among.

A number without its protocol says nothing: sampled candidates raise every metric, and splits differ
in what they hold out. Each protocol has an identifier that travels with every result. Splits and
sampled candidates have a seed of their own, apart from the run's, so that every method and run is
measured on the same items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crossfed.platform.errors import CrossfedError


@dataclass(frozen=True, slots=True)
class Protocol:
    """A split rule and a candidate rule.

    Attributes:
        id: the protocol's name in configurations, results and tables.
        split: the split rule's name in `crossfed.platform.data.splits`.
        negatives: how many sampled items a user's truth is ranked among; None ranks all items the
            user has not seen.
        description: one sentence for people.
    """

    id: str
    split: str
    negatives: int | None
    description: str


PROTOCOLS: dict[str, Protocol] = {
    protocol.id: protocol
    for protocol in (
        Protocol(
            "ratio-80-10-10",
            "ratio-80-10-10",
            None,
            "Each user's interactions are split 80/10/10 at random; all unseen items are ranked.",
        ),
        Protocol(
            "ratio-80-10-10-time",
            "ratio-80-10-10-time",
            None,
            "Each user's interactions are split 80/10/10 in time order; all unseen items are "
            "ranked.",
        ),
        Protocol(
            "leave-one-out",
            "leave-one-out",
            None,
            "Each user's last interaction is the test, the one before it the validation; all "
            "unseen items are ranked.",
        ),
        Protocol(
            "leave-one-out-99",
            "leave-one-out",
            99,
            "As leave-one-out, but the truth is ranked among 99 sampled items the user never "
            "interacted with.",
        ),
        Protocol(
            "leave-one-out-999",
            "leave-one-out",
            999,
            "As leave-one-out, but the truth is ranked among 999 sampled items the user never "
            "interacted with.",
        ),
        Protocol(
            "temporal-cut",
            "temporal-cut",
            None,
            "Two points in time, the same for all users, part training, validation and test; "
            "all unseen items ranked.",
        ),
    )
}
"""Every protocol by its identifier."""


def get_protocol(id: str) -> Protocol:
    """The protocol of that identifier.

    Raises:
        CrossfedError: there is none; names the allowed ones.
    """
    try:
        return PROTOCOLS[id]
    except KeyError:
        raise CrossfedError(
            f"unknown protocol {id!r}; choose one of {', '.join(PROTOCOLS)}"
        ) from None


def told_protocol(result: Mapping[str, Any]) -> str:
    """The protocol of a run's numbers, from its `result.json`; of a model measured again also the
    one of its rounds.
    """
    trained = (result.get("evaluated") or {}).get("protocol", result["protocol"])
    return str(result["protocol"]) + (
        "" if trained == result["protocol"] else f" (trained and selected under {trained})"
    )
