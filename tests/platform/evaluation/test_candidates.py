"""Sampled candidates: never known, never twice, uniform, the same every time, and stored so that
damage is noticed.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation import candidates
from crossfed.platform.evaluation.candidates import draw, load_or_draw


def known_items(rng, n_users, n_items, most):
    """Random known items per user, unsorted and partly repeated, as (indptr, items)."""
    rows = [rng.choice(n_items, rng.integers(0, most + 1), replace=False) for _ in range(n_users)]
    rows = [np.concatenate([row, row[:2]]) for row in rows]
    return np.concatenate([[0], np.cumsum([len(row) for row in rows])]), np.concatenate(
        rows
    ).astype(np.int64)


@pytest.mark.parametrize(
    ("n_items", "n", "most"),
    [(60, 5, 20), (60, 30, 30), (60, 40, 20), (5000, 99, 50), (400, 1, 399)],
)
@pytest.mark.parametrize("block", [200, 2**21])
def test_unknown_distinct_and_in_range(monkeypatch, n_items, n, most, block):
    monkeypatch.setattr(candidates, "_BLOCK_ENTRIES", block)
    indptr, items = known_items(np.random.default_rng(0), 40, n_items, most)
    users = np.random.default_rng(1).permutation(40)[:30]
    drawn = draw(users, indptr, items, n_items, n, seed=7)
    assert drawn.items.shape == (30, n) and drawn.items.dtype == np.int32
    assert (drawn.users == users).all()
    for user, row in zip(users, drawn.items, strict=True):
        assert len(set(row.tolist())) == n and row.min() >= 0 and row.max() < n_items
        assert (np.diff(row) > 0).all()
        assert not set(row.tolist()) & set(items[indptr[user] : indptr[user + 1]].tolist())


def test_all_that_is_left_is_drawn_when_just_enough():
    """Items 0 … 5, known 1 and 4: four candidates are 0, 2, 3, 5."""
    drawn = draw(np.array([0]), np.array([0, 2]), np.array([4, 1]), 6, 4, seed=0)
    assert drawn.items.tolist() == [[0, 2, 3, 5]]


@pytest.mark.parametrize(("n_items", "n"), [(12, 3), (12, 7)])
def test_every_unknown_item_is_equally_likely(n_items, n):
    """20,000 users with the same two known items. Each of the 10 others comes n/10 of the time, and
    each pair equally often: a chi-square of the pair counts, with a fixed seed, that drawing ends
    of rows more often would fail."""
    n_users = 20_000
    indptr, items = 2 * np.arange(n_users + 1), np.tile([3, 8], n_users)
    drawn = draw(np.arange(n_users), indptr, items, n_items, n, seed=11).items
    left = np.setdiff1d(np.arange(n_items), [3, 8])
    counts = np.bincount(drawn.ravel(), minlength=n_items)[left]
    # Draws within a row exclude each other, which shrinks the variance of a count by (1 - n/10) and
    # scales the statistic.
    expected = n_users * n / 10
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - n / 10) * 10 / 9)
    assert stats.chi2.sf(statistic, 9) > 0.001
    together = np.zeros((n_items, n_items))
    member = np.zeros((n_users, n_items))
    member[np.arange(n_users)[:, None], drawn] = 1
    together = (member.T @ member)[np.ix_(left, left)][np.triu_indices(10, 1)]
    assert together == pytest.approx(n_users * n * (n - 1) / 90, rel=0.1)


def test_the_same_seed_draws_the_same_and_another_does_not():
    indptr, items = known_items(np.random.default_rng(0), 20, 300, 10)
    first = draw(np.arange(20), indptr, items, 300, 9, seed=1)
    again = draw(np.arange(20), indptr, items, 300, 9, seed=1)
    other = draw(np.arange(20), indptr, items, 300, 9, seed=2)
    assert (first.items == again.items).all() and first.id == again.id
    assert first.sha256 != other.sha256


def test_the_identifier_names_size_and_content():
    drawn = draw(np.arange(1), np.array([0, 0]), np.array([], np.int64), 50, 9, seed=1)
    assert drawn.id == f"sampled-9:{drawn.sha256[:12]}" and len(drawn.sha256) == 64
    other = candidates.Candidates(drawn.users + 1, drawn.items, 50)
    assert other.id != drawn.id


def test_the_drawing_is_unchanged():
    """A change here changes every sampled number in every published table."""
    indptr, items = known_items(np.random.default_rng(0), 20, 300, 10)
    assert draw(np.arange(20), indptr, items, 300, 9, seed=1).sha256[:12] == "bd994282bc6d"


def test_too_few_unknown_items_name_the_user():
    indptr, items = np.array([0, 1, 4]), np.array([0, 0, 1, 2])
    with pytest.raises(CrossfedError, match=r"user row 1 has only 2 items .* asks for 3"):
        draw(np.arange(2), indptr, items, 5, 3, seed=0)


def test_stored_once_and_loaded_after(tmp_path, monkeypatch):
    indptr, items = known_items(np.random.default_rng(0), 20, 300, 10)
    arguments = (np.arange(20), indptr, items, 300, 9, 1)
    first = load_or_draw(tmp_path / "new", "test", *arguments)
    monkeypatch.setattr(candidates, "draw", lambda *_: pytest.fail("drawn again"))
    again = load_or_draw(tmp_path / "new", "test", *arguments)
    assert again.id == first.id and again.items.dtype == np.int32 and again.n_items == 300
    assert (again.items == first.items).all() and (again.users == first.users).all()
    assert [path.name for path in (tmp_path / "new").iterdir()] == [
        next((tmp_path / "new").glob("test-9-*.parquet")).name
    ]


def test_other_data_is_another_file(tmp_path):
    indptr, items = known_items(np.random.default_rng(0), 20, 300, 10)
    load_or_draw(tmp_path, "test", np.arange(20), indptr, items, 300, 9, 1)
    load_or_draw(tmp_path, "test", np.arange(19), indptr, items, 300, 9, 1)
    load_or_draw(tmp_path, "test", np.arange(20), indptr, (items + 1) % 300, 300, 9, 1)
    load_or_draw(tmp_path, "test", np.arange(20), indptr, items, 300, 9, 2)
    load_or_draw(tmp_path, "test", np.arange(20), indptr, items, 301, 9, 1)
    # one item more of user 1 and less of user 0
    shifted = np.concatenate([[0, indptr[1] - 1], indptr[2:]])
    load_or_draw(tmp_path, "test", np.arange(20), shifted, items, 300, 9, 1)
    load_or_draw(tmp_path, "test", np.arange(20), indptr, items, 300, 8, 1)
    load_or_draw(tmp_path, "validation", np.arange(20), indptr, items, 300, 9, 1)
    assert len(list(tmp_path.glob("*.parquet"))) == 8


def test_racing_processes_agree(tmp_path):
    indptr, items = known_items(np.random.default_rng(0), 20, 300, 10)
    with ThreadPoolExecutor(4) as pool:
        ids = list(
            pool.map(
                lambda _: (
                    load_or_draw(tmp_path, "test", np.arange(20), indptr, items, 300, 9, 1).id
                ),
                range(8),
            )
        )
    assert len(set(ids)) == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["items", "metadata", "truncated", "text"])
def test_a_damaged_file_is_noticed(tmp_path, damage):
    indptr, items = known_items(np.random.default_rng(0), 20, 300, 10)
    arguments = (tmp_path, "test", np.arange(20), indptr, items, 300, 9, 1)
    load_or_draw(*arguments)
    path = next(tmp_path.glob("*.parquet"))
    if damage == "items":
        table = pq.read_table(path)
        pq.write_table(table.take(list(range(19, -1, -1))), path)
    elif damage == "metadata":
        pq.write_table(pq.read_table(path).replace_schema_metadata({}), path)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        path.write_text("user,items\n")
    with pytest.raises(CrossfedError, match="delete it to draw") as error:
        load_or_draw(*arguments)
    assert str(path) in str(error.value)


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CrossfedError, match="cannot store the sampled candidates"):
        load_or_draw(
            tmp_path / "file",
            "test",
            np.arange(1),
            np.array([0, 0]),
            np.array([], np.int64),
            30,
            9,
            1,
        )
