"""A tokeniser trained by Ray: the same bits as in this process, resumable, given up in time."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crossfed.platform import checkpoint
from crossfed.platform.errors import CrossfedError
from crossfed.platform.tokeniser import tokenise as tokeniser
from crossfed.platform.tokeniser.spec import Spec, make
from sid_toy import config, files, made


def test_a_training_that_does_not_end_is_given_up() -> None:
    from crossfed.platform.tokeniser import ray_train

    class Trainer:
        def fit(self) -> None:
            threading.Event().wait(30)

    with pytest.raises(
        CrossfedError,
        match=r"not trained within 0\.05 s "
        r"\(resources\.round_timeout\)",
    ):
        ray_train._fit(Trainer(), 0.05)  # type: ignore[arg-type]


@pytest.mark.slow
def test_ray_train_gives_the_same_bits_as_this_process(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    made(config(shops, tmp_path))
    here = [path.read_bytes() for path in (*files("npy"), *files("safetensors"))]
    monkeypatch.setenv("CROSSFED_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(tokeniser, "train_here", lambda *_: pytest.fail("trained in this process"))
    handler = signal.getsignal(signal.SIGINT)
    made(config(shops, tmp_path, backend="ray"))
    assert signal.getsignal(signal.SIGINT) is handler, "Ctrl-C still ends a run"
    assert [path.read_bytes() for path in (*files("npy"), *files("safetensors"))] == here
    assert not list((tmp_path / ".tokeniser").iterdir())


def test_a_trial_of_a_search_trains_in_its_own_process(ray_cluster: None) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from crossfed.platform.tokeniser.ray_train import in_a_trial

    group = placement_group([{"CPU": 0.5}])
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    told = ray.remote(in_a_trial)
    try:
        assert ray.get(told.options(num_cpus=0.5, scheduling_strategy=inside).remote()) is True
        assert ray.get(told.options(num_cpus=0.5).remote()) is False
        assert not in_a_trial()
    finally:
        remove_placement_group(group)


@pytest.mark.slow
def test_two_workers_agree_with_one_and_an_interrupted_training_goes_on(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    """Each of two workers takes half of every batch: rounding and the regularisers' batches differ,
    the error hardly.

    The checkpoint that a training of the same key has left is where the next one goes on: one that
    is edited by hand, and is one epoch from its end, keeps what was edited.
    """
    from crossfed.platform.config.settings import Resources
    from crossfed.platform.tokeniser import ray_train

    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(300, 12, generator=g)
        + 4 * torch.randn(6, 12, generator=g)[torch.arange(300) % 6]
    )
    one = Spec.of(config(shops, tmp_path, "tokeniser.epochs=10"))
    states = {
        workers: ray_train.train(
            replace(one, workers=workers), x, tmp_path, f"key{workers}", Resources()
        )
        for workers in (1, 2)
    }
    errors = {}
    for workers, state in states.items():
        model = make(one, 12)
        model.load_state_dict(state)
        errors[workers] = model.errors(x)[-1]
    assert errors[2] == pytest.approx(errors[1], rel=0.15)
    assert not torch.equal(states[1]["codebooks"], states[2]["codebooks"])

    (kept,) = (path for path in (tmp_path / "key1").glob("checkpoint_*") if path.is_dir())
    saved = checkpoint.load(kept / "training")
    assert saved["done"] == 10
    saved["done"] = 9
    saved["model"]["up_to.bias"] += 100
    checkpoint.save(kept / "training", saved)
    again = ray_train.train(one, x, tmp_path, "key1", Resources())
    assert float((again["up_to.bias"] - states[1]["up_to.bias"]).median()) == pytest.approx(
        100, abs=1
    )
