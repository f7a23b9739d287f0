"""The data set table that papers print: users, items, interactions, average length, density,
overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossfed.platform.data.store import PreparedData


@dataclass(frozen=True)
class DomainRow:
    """One domain.

    Attributes:
        domain: its name. users, items, interactions: how many.
        average_length: interactions per user. density: interactions / (users · items).
        items_without_text: how many items have no text.
    """

    domain: str
    users: int
    items: int
    interactions: int
    average_length: float
    density: float
    items_without_text: int


@dataclass(frozen=True)
class OverlapRow:
    """Users shared by two domains, or by all.

    Attributes:
        domains: their names. users: users in each of them. ratio: the share of these among users in
            any of them.
    """

    domains: tuple[str, ...]
    users: int
    ratio: float


def table(data: PreparedData) -> list[DomainRow]:
    """One row per domain, in the data's order; read from the manifest alone."""
    rows = []
    for name, counts in data.manifest["domains"].items():
        users, items, n = counts["users"], counts["items"], counts["interactions"]
        rows.append(
            DomainRow(
                name, users, items, n, n / users, n / (users * items), counts["items_without_text"]
            )
        )
    return rows


def overlaps(data: PreparedData) -> list[OverlapRow]:
    """One row per pair of domains, and one for all domains where there are more than two."""
    return [
        OverlapRow(tuple(o["domains"]), o["users"], o["users"] / o["of"])
        for o in data.manifest["overlap"]
    ]
