"""One domain's finished model: whom it knows, and what it recommends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.export import files, user_digest

K = 10
"""How many items are recommended where the request does not say."""


FALLBACK_USERS = 2_000
"""How many users' rankings the answer to an unknown user is made of, at most."""


_BLOCK = 256


Scorer = Callable[[npt.NDArray[np.int64]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Answer:
    """What is recommended to one user.

    Attributes:
        user: as asked for. known: False when the answer is the fallback.
        items: the source's item ids, best first; equal scores in row order. rows: their row
            numbers.
        scores: the method's scores; of the fallback, mean reciprocal ranks.
    """

    user: str
    known: bool
    items: tuple[str, ...]
    rows: tuple[int, ...]
    scores: tuple[float, ...]


class DomainModel:
    """One domain's finished model.

    Args:
        run_dir: holds `config.yaml` and `model/` with the domain's files; a run's directory, or a
            model artifact's.

    Raises:
        CrossfedError: the run has not finished, has no such domain, or a file is damaged.
    """

    def __init__(self, run_dir: Path, domain: str) -> None:
        from crossfed.platform.federation.runs import load_scorer

        self.domain = domain
        self._scorer: Scorer = load_scorer(run_dir, domain)
        _, users, items = files(run_dir / "model", domain)
        try:
            index, self.items = pq.read_table(users), pq.read_table(items)["id"].to_pylist()
            self._key = bytes.fromhex((index.schema.metadata or {})[b"key"].decode())
            self._digests, self._rows = index["digest"].to_numpy(), index["row"].to_numpy()
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise CrossfedError(
                f"{run_dir} does not say who and what its model of {domain} is about "
                f"({error}); it was made by an earlier "
                "version, or is damaged: run it again."
            ) from error

    @cached_property
    def _places(self) -> dict[str, int]:
        return {item: row for row, item in enumerate(self.items)}

    def row(self, user: str) -> int | None:
        """The row number of a user; None for one that the model does not know."""
        digest = user_digest(self._key, user)
        place = int(np.searchsorted(self._digests, digest))
        return (
            int(self._rows[place])
            if place < len(self._rows) and self._digests[place] == digest
            else None
        )

    def item_rows(self, items: Iterable[str]) -> list[int]:
        """Row numbers of items.

        Raises:
            CrossfedError: the domain has no such item.
        """
        items = [str(item) for item in items]
        if unknown := [item for item in items if item not in self._places]:
            raise CrossfedError(
                f"exclude names the item {unknown[0]!r}, which domain {self.domain} does not have"
            )
        return [self._places[item] for item in items]

    @cached_property
    def fallback(self) -> torch.Tensor:
        """Scores [n_items] for a user nobody knows: the mean reciprocal rank of every item over the
        known users.

        Over `FALLBACK_USERS` of them, evenly spaced by row, where there are more.
        """
        n_users = len(self._rows)
        users = np.unique(
            np.linspace(0, n_users - 1, min(n_users, FALLBACK_USERS)).astype(np.int64)
        )
        total = torch.zeros(len(self.items), dtype=torch.float64)
        for first in range(0, len(users), _BLOCK):
            scores = self._scores(users[first : first + _BLOCK])
            order = scores.argsort(dim=1, descending=True, stable=True)
            worth = torch.where(
                scores.gather(1, order) > -torch.inf,
                1 / torch.arange(1, scores.shape[1] + 1.0),
                0.0,
            )
            total.index_add_(0, order.flatten(), worth.flatten().double())
        return (total / len(users)).float()

    def _scores(self, users: npt.NDArray[np.int64]) -> torch.Tensor:
        return self._scorer(users).detach().to("cpu", torch.float32).clone()

    def recommend(
        self,
        users: Sequence[str],
        counts: Sequence[int] | None = None,
        exclude: Sequence[Sequence[int]] | None = None,
    ) -> list[Answer]:
        """Recommend to users; who is unknown gets the fallback.

        Args:
            users: the source's ids. counts: how many items each, `K` by default. exclude: item row
                numbers to leave out.

        Raises:
            CrossfedError: a count below 1.
        """
        counts = [K] * len(users) if counts is None else counts
        if len(counts) and min(counts) < 1:
            raise CrossfedError(f"k is {min(counts)}; it must be 1 or more")
        answers: list[Answer] = []
        for first in range(0, len(users), _BLOCK):
            block = range(first, min(first + _BLOCK, len(users)))
            rows = [self.row(users[place]) for place in block]
            known = [row for row in rows if row is not None]
            scored = iter(self._scores(np.array(known, np.int64)) if known else ())
            for place, row in zip(block, rows, strict=True):
                scores = self.fallback.clone() if row is None else next(scored)
                if exclude is not None and len(exclude[place]):
                    scores[torch.tensor(exclude[place], dtype=torch.long)] = -torch.inf
                answers.append(self._best(users[place], row is not None, scores, counts[place]))
        return answers

    def _best(self, user: str, known: bool, scores: torch.Tensor, count: int) -> Answer:
        values, order = scores.sort(descending=True, stable=True)
        kept = min(count, int((values > -torch.inf).sum()))
        rows = tuple(order[:kept].tolist())
        return Answer(
            user, known, tuple(self.items[row] for row in rows), rows, tuple(values[:kept].tolist())
        )
