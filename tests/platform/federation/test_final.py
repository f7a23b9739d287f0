"""The final test: what is masked, what it writes, and what nobody else may read."""

from __future__ import annotations

import pandas as pd

from crossfed.platform.data.store import PreparedData
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.node import InProcess, Plan
from placed_nodes import NAMES, mrr, rank_by_part


def test_the_final_test_masks_training_and_validation_items(placed: tuple[Plan, InProcess]) -> None:
    plan, nodes = placed
    rank_by_part(plan, nodes, train=3, validation=2, test=1)
    measured = final_test(plan, nodes)
    assert [mrr(measured, name) for name in NAMES] == [1, 1, 1]
    rank_by_part(plan, nodes, train=0, validation=0, test=-1)
    assert all(mrr(final_test(plan, nodes), name) < 0.1 for name in NAMES), (
        "items that no part has are candidates"
    )


def test_values_per_user_are_rows_without_ids_beside_what_popularity_reaches(
    placed: tuple[Plan, InProcess],
) -> None:
    """Every user has one test item, which stands first: 1 in every metric. Popularity counts the
    training interactions, and reaches less.
    """
    plan, nodes = placed
    rank_by_part(plan, nodes, train=3, validation=2, test=1)
    measured = final_test(plan, nodes)
    for name in NAMES:
        table = pd.read_parquet(plan.run_dir / "per_user" / f"{name}.test.parquet")
        n_users = PreparedData.open(plan.data).sizes(name)[0]
        assert table["user"].tolist() == list(range(n_users))
        assert set(table["n_train"]) == {8} and set(table["n_truth"]) == {1}
        assert table["mrr_at_10"].mean() == mrr(measured, name) == 1
        popularity = measured[name].popularity
        assert popularity is not None and 0 < popularity["mrr_at_10"] < 0.6
