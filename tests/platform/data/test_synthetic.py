"""Synthetic shops: determinism, sizes, overlap, what can be learned from them, memory."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from crossfed.platform.config.settings import RunConfig, Synthetic
from crossfed.platform.data.artifacts import ArtifactStore
from crossfed.platform.data.store import PreparedData
from crossfed.platform.data.synthetic import _SHARED, DIALS, PRESETS, ensure, generate, shops
from crossfed.platform.errors import CrossfedError


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return generate(tmp_path_factory.mktemp("synthetic") / "small", **PRESETS["small"])


def test_same_seed_same_bytes_in_another_process(small: PreparedData, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from crossfed.platform.data.synthetic import "
        "PRESETS, generate\n"
        "generate(Path(sys.argv[1]), **PRESETS['small'])"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "again")], check=True)
    assert hashes(tmp_path / "again") == hashes(small.path)
    other = generate(tmp_path / "other", **PRESETS["small"], seed=1)
    assert other.fingerprint != small.fingerprint
    assert other.item_texts("kitchen") != small.item_texts("kitchen")


def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A domain that takes several blocks of users is whole: sizes, order, one id each."""
    monkeypatch.setattr("crossfed.platform.data.synthetic._USERS_AT_ONCE", 64)
    monkeypatch.setattr("crossfed.platform.data.synthetic._ITEMS_AT_ONCE", 16)
    data = generate(tmp_path / "x", domains=1, users=300, items=100, interactions_per_user=8)
    users, _, _ = data.interactions("kitchen")
    assert np.array_equal(np.unique(users), np.arange(300))
    assert len(set(data.user_ids("kitchen"))) == 300
    assert len(set(data.item_ids("kitchen"))) == len(data.item_texts("kitchen")) == 100


def test_it_says_that_it_is_synthetic(small: PreparedData) -> None:
    assert small.synthetic
    assert small.manifest["recipe"]["synthetic"].startswith("generated")
    assert small.manifest["recipe"]["seed"] == 0


def test_sizes_activity_and_times(small: PreparedData) -> None:
    assert small.domains == ("kitchen", "food", "beauty")
    for name in small.domains:
        users, items, times = small.interactions(name)
        n_users, n_items = small.sizes(name)
        assert (n_users, n_items) == (PRESETS["small"]["users"], PRESETS["small"]["items"])
        activity, sold = (
            np.bincount(users, minlength=n_users),
            np.bincount(items, minlength=n_items),
        )
        assert activity.min() == 5
        assert sold.min() >= 5
        assert abs(activity.mean() / PRESETS["small"]["interactions_per_user"] - 1) < 0.05
        # long tails: the mean is well above the median, and the most popular item far above both
        assert activity.mean() > 1.1 * np.median(activity)
        assert sold.max() > 4 * np.median(sold)
        assert len(np.unique(users * n_items + items)) == len(users)
        same_user = np.diff(users) == 0
        assert (np.diff(times)[same_user] > 0).all()
        assert times.min() >= 1_640_995_200


@pytest.mark.parametrize(("overlap", "shared"), [(0.0, 0), (0.25, 50), (1.0, 200)])
def test_overlap_is_exact(tmp_path: Path, overlap: float, shared: int) -> None:
    data = generate(
        tmp_path / "x",
        domains=("garden", "toys", "pets"),
        users=(300, 200, 250),
        items=60,
        interactions_per_user=(6, 7, 8),
        overlap=overlap,
    )
    ids = [set(data.user_ids(name)) for name in data.domains]
    assert [len(names) for names in ids] == [300, 200, 250]
    assert (
        len(ids[0] & ids[1])
        == len(ids[0] & ids[2])
        == len(ids[1] & ids[2])
        == len(ids[0] & ids[1] & ids[2])
        == shared
    )
    assert [np.ptp(data.interactions(n)[0]) + 1 for n in data.domains] == [300, 200, 250]


def test_shared_users_want_the_same_in_every_shop(tmp_path: Path) -> None:
    """Profiles by shared attribute words of one person in two shops are closer than those of two
    people.
    """
    data = generate(
        tmp_path / "x",
        domains=("office", "sports"),
        users=400,
        items=200,
        interactions_per_user=15,
        overlap=0.5,
    )
    profiles = {name: attribute_profiles(data, name) for name in data.domains}
    one, other = data.user_ids("office"), data.user_ids("sports")
    shared = sorted(set(one) & set(other))
    left = profiles["office"][[one.index(user) for user in shared]]
    right = profiles["sports"][[other.index(user) for user in shared]]
    likeness = left @ right.T
    own = np.diag(likeness)
    others = likeness[~np.eye(len(likeness), dtype=bool)]
    assert own.mean() - others.mean() > 8 * others.std() / np.sqrt(len(own))


def attribute_profiles(data: PreparedData, name: str) -> npt.NDArray[np.float64]:
    """How often each shared attribute value is in the texts a user bought, centred and of length
    one, [n_users, 80].
    """
    from crossfed.platform.data.synthetic import _SHARED

    values = [value for attribute in _SHARED.values() for value in attribute]
    texts = [text.lower() for text in data.item_texts(name)]
    named = np.array([[value in text for value in values] for text in texts], np.float64)
    users, items, _ = data.interactions(name)
    profiles = np.zeros((data.sizes(name)[0], len(values)))
    np.add.at(profiles, users, named[items] - named.mean(axis=0))
    return profiles / np.linalg.norm(profiles, axis=1, keepdims=True)


def test_text_is_readable_and_names_all_shared_attributes(small: PreparedData) -> None:
    from crossfed.platform.data.synthetic import _SHARED, _SHOPS

    for name in small.domains:
        texts = small.item_texts(name)
        assert len(set(texts)) > 0.99 * len(texts)
        for text in texts:
            assert text[0].isupper()
            assert text.endswith(".")
            assert 40 < len(text) < 200
            assert sum(kind in text.lower() for kind in _SHOPS[name]) >= 1
            for values in _SHARED.values():
                assert any(value in text.lower() for value in values)


def test_text_tells_what_is_liked(small: PreparedData, tmp_path: Path) -> None:
    """Held-out items of a user are closer in text to the rest of the history than items of like
    popularity are.
    """
    for name in small.domains:
        _, vectors, _ = ArtifactStore(tmp_path).ensure_text(small.item_texts(name), "hashing:512")
        users, items, _ = small.interactions(name)
        rng = np.random.default_rng(0)
        held = rng.permutation(len(users))[:2000]
        rest = np.setdiff1d(np.arange(len(users)), held)
        profile = np.zeros((small.sizes(name)[0], 512))
        np.add.at(profile, users[rest], vectors[items[rest]])
        truth = np.einsum("nd,nd->n", profile[users[held]], vectors[items[held]])
        chance = np.einsum("nd,nd->n", profile[users[held]], vectors[rng.permutation(items[held])])
        wins = (truth > chance).mean()
        assert wins > 0.55, name


def test_neighbours_in_time_share_a_taste(small: PreparedData, tmp_path: Path) -> None:
    _, vectors, _ = ArtifactStore(tmp_path).ensure_text(small.item_texts("food"), "hashing:512")
    users, items, _ = small.interactions("food")
    near = np.einsum("nd,nd->n", vectors[items[:-1]], vectors[items[1:]])[np.diff(users) == 0]
    apart = np.einsum("nd,nd->n", vectors[items[:-3]], vectors[items[3:]])[users[:-3] == users[3:]]
    assert near.mean() > apart.mean() + 3 * apart.std() / np.sqrt(len(apart))


def test_catalogue_that_few_users_must_cover(tmp_path: Path) -> None:
    data = generate(tmp_path / "x", domains=1, users=40, items=160, interactions_per_user=9, seed=3)
    users, items, _ = data.interactions("kitchen")
    assert (np.bincount(items, minlength=160) >= 1).all()
    assert len(np.unique(users * 160 + items)) == len(users)


def test_more_domains_than_shops_in_the_list(tmp_path: Path) -> None:
    data = generate(
        tmp_path / "x", domains=len(shops()) + 1, users=20, items=20, interactions_per_user=5
    )
    assert data.domains[-1] == "kitchen-2"
    assert data.item_texts("kitchen-2") != data.item_texts("kitchen")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"domains": 0}, "at least 1"),
        ({"domains": ("kitchen", "moon")}, "no shop 'moon'"),
        ({"domains": ("kitchen", "kitchen")}, "every shop once"),
        ({"users": 3}, "domain kitchen has 3 users"),
        ({"items": 3}, "3 items"),
        ({"users": (100, 100)}, "2 values of users for 3 domains"),
        ({"interactions_per_user": 2.0}, "at least 5"),
        ({"interactions_per_user": 300.0}, "a quarter of its 1000 items"),
        ({"users": 100, "items": 1000}, "at least two interactions per item"),
        ({"overlap": 1.5}, "from 0 to 1"),
        ({"seed": -1}, "must not be negative"),
    ],
)
def test_sizes_that_cannot_be_met(tmp_path: Path, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(CrossfedError, match=says):
        generate(tmp_path / "x", **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_ensure_generates_once(tmp_path: Path) -> None:
    sizes = {"domains": 1, "users": 50, "items": 40, "interactions_per_user": 6.0}
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure(tmp_path, **sizes))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    made = (found[0] / "manifest.json").stat().st_mtime_ns
    assert (ensure(tmp_path, **sizes) / "manifest.json").stat().st_mtime_ns == made
    assert ensure(tmp_path, **sizes, seed=1) != found[0]


def test_ensure_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CrossfedError, match="Cannot write synthetic data below"):
        ensure(tmp_path / "file" / "below", domains=1)


def test_memory_stays_far_below_users_times_items(tmp_path: Path) -> None:
    """25,000 × 20,000 in float32 would be 2 GB; 300,000 interactions take under 200 MB over what
    the imports take.
    """
    program = (
        "import resource, sys; from pathlib import Path; from crossfed.platform.data.synthetic "
        "import generate\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "generate(Path(sys.argv[1]), 1, 25_000, 20_000, 12.0)\n"
        "print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) / 1024 < 200


@pytest.mark.slow
def test_size_of_amazon_books_and_movies(tmp_path: Path) -> None:
    data = generate(tmp_path / "x", **PRESETS["large"])
    assert [data.sizes(name) for name in data.domains] == [(603_000, 367_000), (123_000, 50_000)]
    assert data.manifest["overlap"][0]["users"] == 18_031
    assert abs(data.manifest["domains"]["books"]["interactions"] / 8_890_000 - 1) < 0.01
    assert abs(data.manifest["domains"]["movies"]["interactions"] / 1_690_000 - 1) < 0.01


# -- dials -----------------------------------------------------------------------------------------


def liked_together(data: PreparedData, name: str) -> npt.NDArray[np.float64]:
    """How often the words of an attribute are liked by the same users, beyond chance, [16, 16].

    Of users' shares s of the words of their items: the correlations of the columns of s.
    """
    notes = _SHARED["note"]
    texts = data.item_texts(name)
    word = np.array([next(i for i, w in enumerate(notes) if w in text.lower()) for text in texts])
    users, items, _ = data.interactions(name)
    counts = np.zeros((data.sizes(name)[0], len(notes)))
    np.add.at(counts, (users, word[items]), 1)
    return np.corrcoef((counts / counts.sum(1, keepdims=True)).T)


def agreement(data: PreparedData) -> float:
    """Correlation between two shops of which words are liked together."""
    one, two = (liked_together(data, name)[np.triu_indices(16, 1)] for name in data.domains[:2])
    return float(np.corrcoef(one, two)[0, 1])


@pytest.fixture(scope="module")
def dialled(tmp_path_factory: pytest.TempPathFactory) -> dict[float, PreparedData]:
    folder = tmp_path_factory.mktemp("dials")
    sizes = {"domains": 2, "users": 4000, "items": 800, "interactions_per_user": 12}
    return {
        shared: generate(folder / str(shared), **sizes, shared=shared) for shared in (0.0, 0.5, 1.0)
    }


def test_what_is_liked_together_is_common_by_as_much_as_the_dial_says(
    dialled: dict[float, PreparedData],
) -> None:
    found = {shared: agreement(data) for shared, data in dialled.items()}
    assert abs(found[0.0]) < 0.3 < found[1.0]
    assert found[0.0] < found[0.5] < found[1.0]


def test_the_dial_changes_nobody_else(dialled: dict[float, PreparedData]) -> None:
    """The same users as often, and the same item ids, whatever is shared."""
    for name in dialled[0.0].domains:
        one, other = (dialled[shared] for shared in (0.0, 1.0))
        assert one.user_ids(name) == other.user_ids(name) and one.sizes(name) == other.sizes(name)
        counts = [np.bincount(data.interactions(name)[0]) for data in (one, other)]
        assert np.array_equal(*counts)


def test_text_without_taste_says_nothing_of_who_likes_what(tmp_path: Path) -> None:
    """Which words are liked together is then chance: the mean |correlation| of two words falls to
    that of noise.
    """
    sizes = {"domains": 1, "users": 4000, "items": 800, "interactions_per_user": 12}
    told, untold = (
        generate(tmp_path / str(dial), **sizes, taste_in_text=dial) for dial in (True, False)
    )
    sizes_of = [
        np.abs(liked_together(data, "kitchen")[np.triu_indices(16, 1)]).mean()
        for data in (told, untold)
    ]
    assert sizes_of[1] < 0.75 * sizes_of[0]
    for part in (0, 1, 2):  # who buys what is the same
        assert np.array_equal(
            told.interactions("kitchen")[part], untold.interactions("kitchen")[part]
        )


def test_the_smallest_domain_is_as_small_as_wanted(tmp_path: Path) -> None:
    data = generate(
        tmp_path / "x", domains=3, users=600, items=100, interactions_per_user=7, smallest=0.25
    )
    assert [data.sizes(name)[0] for name in data.domains] == [600, 600, 150]


def test_dials_as_by_default_leave_no_trace(small: PreparedData, tmp_path: Path) -> None:
    again = generate(tmp_path / "again", **PRESETS["small"], **DIALS)
    assert hashes(again.path) == hashes(small.path)
    tiny = {"domains": 1, "users": 40, "items": 30, "interactions_per_user": 6}
    assert ensure(tmp_path / "kept", **tiny) == ensure(tmp_path / "kept", **tiny, **DIALS)
    assert ensure(tmp_path / "kept", **tiny) != ensure(tmp_path / "kept", **tiny, shared=0.5)
    base = RunConfig(method="lightgcn")
    assert base.model_copy(update={"synthetic": Synthetic(shared=0.5)}).hash() != base.hash()


@pytest.mark.parametrize(
    "dial", [{"shared": 1.5}, {"shared": -0.1}, {"smallest": 0.0}, {"smallest": 2.0}]
)
def test_dials_that_are_no_share_are_refused(dial: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match=f"{next(iter(dial))} is .*; it is a share of"):
        generate(tmp_path / "x", **dial)
