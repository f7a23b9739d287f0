"""Transfer controls: what each delivers, that the rest of a run stays honest, and toys whose answer
is known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.controls import CONTROLS, MEANING, PEERS, Delivery, noise, shuffle
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.run import RunResult
from crossfed.platform.federation.runs import stored_config
from crossfed.platform.report import figures
from crossfed.platform.report.effects import grouped
from crossfed.platform.report.finished import load_runs
from crossfed.platform.report.recording import run_recorded
from crossfed.platform.tracking.tracker import Tracker
from made_runs import make_run
from toy_controls import twins


def config(
    method: str, data: Path, out: Path, *sets: str, backend: str = "inprocess", seed: int = 0
) -> RunConfig:
    values = {"data": data, "out": out, "backend": backend, "seed": seed, "tracking.enabled": False}
    return build(method, sets=["tracking.artifacts=false", *sets], values=values)


def history(run: RunResult) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run.run_dir / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def ledger(run: RunResult) -> str:
    return (run.run_dir / "ledger.jsonl").read_text()


def numbers(run: RunResult) -> dict[str, Any]:
    return {key: run.result[key] for key in ("domains", "bytes", "candidates")}


def test_noise_keeps_shape_dtype_mean_and_variance_and_nothing_else() -> None:
    """40,000 draws: the mean is off by less than 5σ/200, the deviation by less than 5σ/√80000."""
    sent = (np.random.default_rng(0).exponential(2.0, (200, 200)) + 3).astype(np.float32)
    got = noise(sent, np.random.default_rng(1))
    assert got.shape == sent.shape and got.dtype == np.float32
    assert got.mean() == pytest.approx(sent.mean(), abs=float(5 * sent.std() / 200))
    assert got.std() == pytest.approx(sent.std(), rel=5 / np.sqrt(80_000))
    assert abs(np.corrcoef(got.ravel(), sent.ravel())[0, 1]) < 5 / 200
    assert got.min() < sent.min(), "Gaussian, not drawn from the entries"


def test_noise_draws_integers_from_their_own_entries() -> None:
    sent = np.array([[0, 7], [7, 9], [7, 7]] * 50, np.int64)
    got = noise(sent, np.random.default_rng(1))
    assert got.shape == sent.shape and got.dtype == np.int64 and set(np.unique(got)) == {0, 7, 9}
    assert np.mean(got == 7) == pytest.approx(4 / 6, abs=0.15) and not np.array_equal(got, sent)


@pytest.mark.parametrize(
    "sent",
    [np.array([5], np.int64), np.array([[2.5]], np.float32), np.array(1.5), np.zeros((0, 3))],
)
def test_noise_leaves_a_single_entry_as_it_is(sent: np.ndarray) -> None:
    np.testing.assert_array_equal(noise(sent, np.random.default_rng(1)), sent)


def test_shuffle_permutes_whole_rows() -> None:
    sent = np.arange(60, dtype=np.float32).reshape(20, 3)
    got = shuffle(sent, np.random.default_rng(0))
    assert not np.array_equal(got, sent)
    np.testing.assert_array_equal(got[np.argsort(got[:, 0])], sent)
    assert shuffle(np.array(3.0), np.random.default_rng(0)) == 3.0


def inbox(seed: int) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = {
        name: {"a": rng.normal(size=(9, 2)), "b": rng.normal(size=(9, 2))} for name in ("x", "y")
    }
    for payload in found.values():
        for value in payload.values():
            value.setflags(write=False)
    return found


@pytest.mark.parametrize("control", ["noise", "shuffle"])
def test_every_draw_has_a_place_of_its_own(control: Any) -> None:
    def got(
        seed: int = 0,
        node: str = "n",
        stage: str = "s",
        round: int = 1,
        part: str = "each",
        phase: int = 0,
    ) -> Any:
        found = Delivery(control, seed, node)(stage, round, part, phase, inbox(0))
        return found["x"]["a"]

    np.testing.assert_array_equal(got(), got())
    other = [
        got(seed=1),
        got(node="m"),
        got(stage="t"),
        got(round=2),
        got(part="open"),
        got(phase=1),
    ]
    assert not any(np.array_equal(got(), value) for value in other)


@pytest.mark.parametrize("control", ["noise", "shuffle"])
def test_senders_and_keys_are_drawn_apart(control: Any) -> None:
    """The same array under two keys and from two senders arrives as four."""
    one = np.arange(40.0).reshape(20, 2)
    got = Delivery(control, 0, "n")(
        "s", 1, "each", 0, {name: {"a": one, "b": one} for name in ("x", "y")}
    )
    arrived = [got[sender][key].tobytes() for sender in ("x", "y") for key in ("a", "b")]
    assert len(set(arrived)) == 4


def test_stale_delivers_what_came_first_at_that_place() -> None:
    deliver = Delivery("stale", 0, "n")
    first = deliver("s", 1, "each", 0, inbox(1))
    np.testing.assert_array_equal(first["x"]["a"], inbox(1)["x"]["a"])
    again = deliver("s", 2, "each", 0, inbox(2))
    for sender in ("x", "y"):
        for key in ("a", "b"):
            np.testing.assert_array_equal(again[sender][key], inbox(1)[sender][key])
    for place in (("t", 2, "each", 0), ("s", 2, "close", 0), ("s", 2, "each", 1)):
        np.testing.assert_array_equal(deliver(*place, inbox(3))["x"]["a"], inbox(3)["x"]["a"])


def test_stale_after_a_change_of_shape_delivers_the_first_of_that_shape() -> None:
    deliver = Delivery("stale", 0, "n")
    for round, size in enumerate((2, 3, 3, 2), 1):
        got = deliver("s", round, "each", 0, {"x": {"a": np.full(size, float(round))}})["x"]["a"]
        assert got.tolist() == {1: [1.0] * 2, 2: [2.0] * 3, 3: [2.0] * 3, 4: [1.0] * 2}[round]


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_delivered_is_read_only_and_the_message_untouched(control: Any) -> None:
    sent = inbox(0)
    got = Delivery(control, 0, "n")("s", 1, "each", 0, sent)
    assert not any(value.flags.writeable for payload in got.values() for value in payload.values())
    np.testing.assert_array_equal(sent["x"]["a"], inbox(0)["x"]["a"])


def test_without_a_control_the_inbox_itself_is_delivered() -> None:
    sent = inbox(0)
    assert Delivery("none", 0, "n")("s", 1, "each", 0, sent) is sent


# -- whole runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return twins(tmp_path_factory.mktemp("twins") / "twins")


def test_a_deaf_method_shows_no_difference(data: Path, tmp_path: Path) -> None:
    runs = {
        control: run_recorded(
            config("toy_controls:DEAF", data, tmp_path, f"control={control}"), finish=final_test
        )
        for control in ("none", *CONTROLS)
    }
    honest = runs.pop("none")
    users = [pd.read_parquet(file) for file in sorted((honest.run_dir / "per_user").iterdir())]
    for control, run in runs.items():
        assert (
            run.result["control"] == control and f"deaf-{control}-s0-" in run.run_dir.name.lower()
        )
        assert (
            numbers(run) == numbers(honest)
            and history(run) == history(honest)
            and ledger(run) == ledger(honest)
        )
        for mine, file in zip(users, sorted((run.run_dir / "per_user").iterdir()), strict=True):
            pd.testing.assert_frame_equal(mine, pd.read_parquet(file), check_exact=True)


def test_a_method_that_copies_loses_all_of_its_gain(data: Path, tmp_path: Path) -> None:
    """Every held-out item is one of 20 in demand, and each user has bought 8 of them before: the
    peer's demand finds all of the truth among the first 20, a guess a fiftieth of it. The first
    message says nothing, so that under "stale" the toy is bit for bit the one that lives alone."""
    runs = {
        name: run_recorded(
            config(f"toy_controls:{method}", data, tmp_path, *sets), finish=final_test
        )
        for name, method, sets in [
            ("local", "ALONE", ()),
            ("honest", "COPIES", ()),
            *((control, "COPIES", (f"control={control}",)) for control in CONTROLS),
        ]
    }
    recall = {
        name: np.mean([row["test"]["recall_at_20"] for row in run.result["domains"].values()])
        for name, run in runs.items()
    }
    assert recall["honest"] == 1.0 and recall["local"] < 0.1
    for domain in ("left", "right"):
        local, stale = (runs[name].result["domains"][domain]["test"] for name in ("local", "stale"))
        assert local == stale
    for control in ("noise", "shuffle"):
        assert (recall[control] - recall["local"]) / (recall["honest"] - recall["local"]) < 0.1
    for control in CONTROLS:
        assert ledger(runs[control]) == ledger(runs["honest"])
        assert runs[control].result["bytes"] == runs["honest"].result["bytes"]


@pytest.mark.parametrize("control", CONTROLS)
def test_resumed_equals_uninterrupted(control: str, data: Path, tmp_path: Path) -> None:
    sets = ("rounds=4", f"control={control}")
    straight = run_recorded(config("toy_controls:COPIES", data, tmp_path / "straight", *sets))

    class Stop(Exception):
        pass

    def stop(row: Any) -> None:
        if row.step == 3:
            raise Stop

    broken: list[Path] = []
    with pytest.raises(Stop):
        run_recorded(
            config("toy_controls:COPIES", data, tmp_path / "broken", *sets),
            on_round=stop,
            started=broken.append,
        )
    resumed = run_recorded(stored_config(broken[0]), resume=broken[0])
    assert numbers(resumed) == numbers(straight) and history(resumed) == history(straight)


def test_stale_survives_a_resume_in_the_node_that_received(data: Path, tmp_path: Path) -> None:
    """The first message is nought; were it forgotten by the resume, round 3 would take round 3's
    for the first.
    """

    def stop(row: Any) -> None:
        if row.step == 2:
            raise KeyboardInterrupt

    started: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        run_recorded(
            config("toy_controls:COPIES", data, tmp_path, "control=stale"),
            on_round=stop,
            started=started.append,
        )
    resumed = run_recorded(stored_config(started[0]), resume=started[0])
    assert [row["metrics"]["train/left/told"] for row in history(resumed)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("control", ["stale", pytest.param("noise", marks=pytest.mark.slow)])
def test_in_process_equals_ray(control: str, data: Path, tmp_path: Path, ray_cluster: None) -> None:
    runs = [
        run_recorded(
            config(
                "toy_controls:COPIES",
                data,
                tmp_path / backend,
                f"control={control}",
                backend=backend,
            )
        )
        for backend in ("inprocess", "ray")
    ]
    assert numbers(runs[0]) == numbers(runs[1]) and history(runs[0]) == history(runs[1])


# -- configuration, labels -------------------------------------------------------------------------


def test_the_hash_of_an_honest_run_is_what_it_was_and_each_control_has_its_own(
    data: Path, tmp_path: Path
) -> None:
    hashes = {
        config("toys:AVERAGE", data, tmp_path, f"control={c}").hash() for c in ("none", *CONTROLS)
    }
    assert len(hashes) == 4 and config("toys:AVERAGE", data, tmp_path).hash() in hashes
    assert RunConfig(method="toys:AVERAGE").hash() == "a9f81738bd3d"


def test_a_figure_of_a_controlled_run_says_so() -> None:
    result = {
        "method": "m",
        "preset": "p",
        "data": {"name": "d", "synthetic": False},
        "protocol": "x",
        "seed": 1,
    }
    assert figures.About.of({**result, "control": "noise"}).line() == (
        "m (p, control noise) · d · x · seed 1"
    )
    assert (
        figures.About.of({**result, "control": "none"}).line()
        == figures.About.of(result).line()
        == "m (p) · d · x · seed 1"
    )


def test_an_unknown_control_and_a_local_method_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CrossfedError, match="control = 'nose' is not possible: input should be 'none', 'noise'"
    ):
        config("toys:AVERAGE", data, tmp_path, "control=nose")
    with pytest.raises(
        CrossfedError, match="alone receives nothing, so control=noise has nothing to replace"
    ):
        run_recorded(config("toy_controls:ALONE", data, tmp_path, "control=noise"))


def test_the_tracker_is_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter where something is replaced."""
    told: list[Any] = []
    start = Tracker.start

    def spy(
        settings: Any, run_dir: Any, name: Any, params: Any, tags: Any, *rest: Any, **more: Any
    ) -> Tracker:
        told.append(params.get("control"))
        return start(settings, run_dir, name, params, tags, *rest, **more)

    monkeypatch.setattr(Tracker, "start", spy)
    for control in ("none", "stale"):
        run_recorded(config("toy_controls:DEAF", data, tmp_path, "rounds=1", f"control={control}"))
    assert told == [None, "stale"]


def test_runs_that_differ_in_the_control_only_are_different_rows(tmp_path: Path) -> None:
    values = {"books": {"recall_at_20": np.arange(4.0)}}
    paths = [
        make_run(
            tmp_path / f"{control}-{seed}", "fedcrf", seed, values, sets=(f"control={control}",)
        )
        for control in ("none", "noise")
        for seed in (0, 1)
    ]
    text = (paths[0] / "config.yaml").read_text()
    # as before there were controls
    (paths[0] / "config.yaml").write_text(text.replace("control: none\n", ""))
    rows = grouped(load_runs(paths))
    assert {label: len(runs) for label, runs in rows.items()} == {
        "fedcrf (control=none)": 2,
        "fedcrf (control=noise)": 2,
    }


# -- what other domains contributed, and nobody else -----------------------------------------------


def by_name(run: RunResult, name: str) -> dict[str, list[float]]:
    """A training metric of the two twins, round by round."""
    return {
        d: [row["metrics"][f"train/{d}/{name}"] for row in history(run)] for d in ("left", "right")
    }


def sums(data: Path, out: Path, *sets: str, **more: Any) -> RunResult:
    return run_recorded(config("toy_controls:SUMS", data, out, *sets, **more), finish=final_test)


@pytest.mark.parametrize("control", PEERS)
def test_only_what_others_contributed_is_replaced(control: Any) -> None:
    deliver, sent = Delivery(control, 0, "server"), inbox(0)
    deliver("s", 1, "each", 0, inbox(1), "x")  # what is stale afterwards
    got = deliver("s", 2, "each", 0, sent, "x")
    for key in ("a", "b"):
        assert got["x"][key] is sent["x"][key]
        assert not np.array_equal(got["y"][key], sent["y"][key])
        assert not got["y"][key].flags.writeable
    answer = {"server": sent["x"], "y": sent["y"]}
    got = Delivery(control, 0, "x")("s", 1, "each", 0, answer)
    assert got["server"] is sent["x"], "the server's answer was made of replaced uploads already"
    assert control == "peers-stale" or not np.array_equal(got["y"]["a"], sent["y"]["a"])


def test_solo_delivers_nothing_of_others() -> None:
    deliver = Delivery("solo", 0, "server")
    assert list(deliver("s", 1, "each", 0, inbox(0), "y")) == ["y"]
    answer = {"server": inbox(0)["x"], "y": inbox(0)["y"]}
    assert list(Delivery("solo", 0, "x")("s", 1, "each", 0, answer)) == ["server"]


def test_a_domain_alone_hears_of_nobody(data: Path, tmp_path: Path) -> None:
    """The sum that a twin is answered is its own demand, of one domain, and it is told of no
    peers.
    """
    joint, solo = (sums(data, tmp_path, f"control={control}") for control in ("none", "solo"))
    for name, honest, alone in (("of", 2, 1), ("peers", 1, 0)):
        assert by_name(joint, name) == dict.fromkeys(("left", "right"), [float(honest)] * 3)
        assert by_name(solo, name) == dict.fromkeys(("left", "right"), [float(alone)] * 3)
    assert all(value > 0 for row in by_name(joint, "foreign").values() for value in row)
    assert by_name(solo, "foreign") == dict.fromkeys(("left", "right"), [0.0] * 3)
    assert [row["metrics"]["train/server/answers"] for row in history(solo)] == [1.0, 2.0, 3.0]
    assert [row["metrics"]["train/server/peers"] for row in history(solo)] == [1.0] * 3


def test_all_alone_at_once_is_each_by_itself(data: Path, tmp_path: Path) -> None:
    """Bit for bit, early stopping included: what selects and stops is a domain's own validation
    metric.
    """
    sets = ("control=solo", "rounds=6", "patience=1")
    both = sums(data, tmp_path, *sets)
    stopped = set()
    for name in ("left", "right"):
        values = config("toy_controls:SUMS", data, tmp_path, *sets)
        one = run_recorded(values.model_copy(update={"domains": (name,)}), finish=final_test)
        mine = both.result["domains"][name]
        for part in ("validation", "test"):
            assert one.result["domains"][name][part] == mine[part]
        assert one.result["domains"][name]["selected"]["round"] == mine["selected"]["round"]
        stopped.add(one.result["domains"][name]["selected"]["rounds"])
    assert max(stopped) < 6, "the toy is to stop early, or this shows nothing"


@pytest.mark.parametrize("control", PEERS)
def test_a_mean_keeps_a_domains_own_share(control: str, data: Path, tmp_path: Path) -> None:
    """Replacing all of the sum leaves nothing of a gain; replacing the peer's part of it leaves the
    own.
    """
    honest, peers = sums(data, tmp_path), sums(data, tmp_path, f"control={control}")
    assert ledger(peers).count("\n") == ledger(honest).count("\n")
    assert peers.result["bytes"] == honest.result["bytes"]
    if control == "peers-stale":  # the toy's demand never changes
        assert by_name(peers, "foreign") == by_name(honest, "foreign")
        return
    # of shuffled rows the largest stays
    assert (by_name(peers, "foreign") == by_name(honest, "foreign")) == (control == "peers-shuffle")
    found = {
        name: np.mean([row["test"]["recall_at_20"] for row in run.result["domains"].values()])
        for name, run in (("peers", peers), ("all", sums(data, tmp_path, f"control={control[6:]}")))
    }
    # noise is weaker than the own share; a shuffled peer puts as many others beside the twenty
    assert found["peers"] > (0.95 if control == "peers-noise" else 0.35)
    assert found["all"] < 0.2


@pytest.mark.parametrize("fault", ["forgets a key", "hears a peer"])
def test_an_instrument_that_is_broken_is_noticed(
    fault: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assertions above fail for a control that forgets one key, and for a solo that still hears
    a peer.
    """
    deliver = Delivery.__call__

    def broken(self: Delivery, *place: Any) -> Any:
        got, sent = dict(deliver(self, *place)), place[4]
        if fault == "forgets a key":
            return {
                name: {**payload, "b": sent[name]["b"]} if "b" in payload else payload
                for name, payload in got.items()
            }
        return sent

    monkeypatch.setattr(Delivery, "__call__", broken)
    with pytest.raises(AssertionError):
        if fault == "forgets a key":
            test_only_what_others_contributed_is_replaced("peers-noise")
        else:
            test_a_domain_alone_hears_of_nobody(data, tmp_path)


@pytest.mark.parametrize("control", ["solo", "peers-noise", "peers-stale"])
def test_a_server_for_every_domain_resumes_to_the_same_bits(
    control: str, data: Path, tmp_path: Path
) -> None:
    sets = ("rounds=4", f"control={control}", "patience=2")
    straight = sums(data, tmp_path / "straight", *sets)

    class Stop(Exception):
        pass

    def stop(row: Any) -> None:
        if row.step == 2:
            raise Stop

    broken: list[Path] = []
    with pytest.raises(Stop):
        run_recorded(
            config("toy_controls:SUMS", data, tmp_path / "broken", *sets),
            on_round=stop,
            started=broken.append,
        )
    resumed = run_recorded(stored_config(broken[0]), resume=broken[0], finish=final_test)
    assert numbers(resumed) == numbers(straight) and history(resumed) == history(straight)


@pytest.mark.slow
@pytest.mark.parametrize("control", ["solo", "peers-noise"])
def test_a_server_for_every_domain_is_the_same_on_ray(
    control: str, data: Path, tmp_path: Path, ray_cluster: None
) -> None:
    runs = [sums(data, tmp_path / b, f"control={control}", backend=b) for b in ("inprocess", "ray")]
    assert numbers(runs[0]) == numbers(runs[1]) and history(runs[0]) == history(runs[1])


def test_every_control_has_a_hash_of_its_own(data: Path, tmp_path: Path) -> None:
    hashes = {config("toys:AVERAGE", data, tmp_path, f"control={c}").hash() for c in MEANING}
    assert len(hashes) == len(MEANING) == 7


def test_a_federation_of_one_is_refused_without_the_control(data: Path, tmp_path: Path) -> None:
    values = config("toy_controls:SUMS", data, tmp_path).model_copy(update={"domains": ("left",)})
    with pytest.raises(CrossfedError, match="needs at least two domains, but got left alone"):
        run_recorded(values)
