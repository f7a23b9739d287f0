"""The accountant: totals known by hand, what counts as a release, the budget, repeats, and where
the noise comes from.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

import toys
from crossfed.platform.cli.main import app
from crossfed.platform.config.settings import Privacy, RunConfig, build
from crossfed.platform.errors import CrossfedError, LeakError
from crossfed.platform.federation.node import InProcess, NodeLost, Sent
from crossfed.platform.federation.payloads import Entry
from crossfed.platform.federation.privacy import (
    RECORD,
    UNPERTURBED,
    Accountant,
    check_releases,
    mend,
    paper_epsilon,
    read_lines,
    summary,
    tell_apart,
    tight_epsilon,
    whole_epsilon,
)
from crossfed.platform.federation.rounds import Round, check_method
from crossfed.platform.federation.runs import privacy_account, stored_config
from crossfed.platform.method import Direction, Release, noise_generator
from crossfed.platform.report.recording import run_recorded

SHOPS = ("books", "films", "games")
# ε = 2 each, ε₀ = 2
LAPLACE = Release("talk", ("x",), "laplace", "one interaction", 2.0, 1.0, 2.0, count=32)
GAUSS = Release("talk", ("x",), "gaussian", "one interaction", 1.0, 1.0, 1.0)


def config(
    method: str, shops: Path, out: Path, *sets: str, backend: str = "inprocess"
) -> RunConfig:
    values = {
        "data": shops,
        "out": out,
        "backend": backend,
        "tracking.enabled": False,
        "tracking.artifacts": False,
    }
    return build(f"toys:{method}", sets=sets, values=values)


def record(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / RECORD)


class Stop(Exception):
    """Raised after a chosen round, in place of a crash."""


def interrupted(settings: RunConfig, after: int) -> Path:
    def stop(row: Round) -> None:
        if row.step == after:
            raise Stop

    started: list[Path] = []
    with pytest.raises(Stop):
        run_recorded(settings, on_round=stop, started=started.append)
    return started[0]


@dataclass
class OnRay:
    """A run on Ray, and what its driver got to see: references it fetched, message handles,
    arrays.
    """

    run_dir: Path
    result: dict[str, Any]
    asked: set[Any]
    handles: set[Any]
    arrays: list[np.ndarray]


@pytest.fixture(scope="module")
def on_ray(shops: Path, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> OnRay:
    import ray

    seen, get = OnRay(Path(), {}, set(), set(), []), ray.get

    def look(value: Any) -> None:
        if isinstance(value, np.ndarray):
            seen.arrays.append(value)
        elif isinstance(value, Mapping):
            for inner in value.values():
                look(inner)
        elif isinstance(value, Sent):
            look(value.send)
            seen.handles.update(value.send.values())

    def spy(refs: Any, **options: Any) -> Any:
        several = isinstance(refs, list)
        seen.asked.update(refs if several else [refs])
        found = get(refs, **options)
        for value in found if several else [found]:
            look(value)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", spy)
        patch.setenv("CROSSFED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        sets = ("rounds=3", "privacy.noise_seed=0")
        done = run_recorded(
            config("WHISPER", shops, tmp_path_factory.mktemp("ray"), *sets, backend="ray")
        )
    seen.run_dir, seen.result = done.run_dir, done.result
    return seen


# -- totals ----------------------------------------------------------------------------------------


def test_the_paper_counts_rounds_and_the_whole_counts_releases() -> None:
    # 30 messages of 2K = 32 vectors with ε₀ = 2 each: T·ε₀ = 60, and 32·30·2 = 1920 under basic
    # composition
    assert paper_epsilon({LAPLACE: 30}) == 60
    assert whole_epsilon({LAPLACE: 30}, 1e-6) == 1920
    # ε = 0.5 each
    other = replace(LAPLACE, stage="warm", scale=4.0, count=3, per_round_epsilon=0.5)
    assert paper_epsilon({LAPLACE: 30, other: 2}) == 61
    assert whole_epsilon({LAPLACE: 30, other: 2}, 1e-6) == 1920 + 3


def test_one_laplace_release_costs_its_epsilon() -> None:
    one = {replace(LAPLACE, count=1): 1}
    assert tight_epsilon(one, 0.0) == whole_epsilon(one, 0.0) == 2
    # at δ the loss may exceed ε' where it does so with little mass: δ(ε') = 1 - exp((ε' - ε) / 2),
    # so ε' = ε + 2 ln(1 - δ)
    assert tight_epsilon(one, 0.1) == pytest.approx(2 + 2 * math.log(0.9), abs=1e-3)


def test_one_gaussian_release_has_the_value_of_balle_and_wang() -> None:
    # δ(ε) = Φ(½ - ε) - exp(ε) Φ(-½ - ε) at sensitivity = σ = 1; at δ = 1e-5 its root is ε = 4.3772
    def delta(epsilon: float) -> float:
        return float(
            stats.norm.cdf(0.5 - epsilon) - math.exp(epsilon) * stats.norm.cdf(-0.5 - epsilon)
        )

    epsilon = whole_epsilon({GAUSS: 1}, 1e-5)
    assert delta(epsilon) == pytest.approx(1e-5, rel=1e-6) and epsilon == pytest.approx(
        4.3772, abs=1e-4
    )
    assert tight_epsilon({GAUSS: 1}, 1e-5) == pytest.approx(epsilon, abs=1e-3)


def test_gaussian_rounds_compose_to_one_gaussian() -> None:
    # n shifts of 1/σ are one shift of √n/σ: 25 releases at σ = 5 are one at σ = 1
    assert tight_epsilon({replace(GAUSS, scale=5.0): 25}, 1e-5) == pytest.approx(
        whole_epsilon({GAUSS: 1}, 1e-5), abs=2e-3
    )
    # basic composition gives each of the 25 a 25th of δ
    single = whole_epsilon({replace(GAUSS, scale=5.0): 1}, 1e-5 / 25)
    assert whole_epsilon({replace(GAUSS, scale=5.0): 25}, 1e-5) == pytest.approx(25 * single)


def test_laplace_releases_compose_to_their_exact_curve() -> None:
    # two releases of ε = ln 3: the loss of one is ±ln 3 with probability ¾·…; the exact δ of the
    # pair by integrating over both
    release, delta = replace(LAPLACE, count=2, sensitivity=math.log(3.0), scale=1.0), 0.01
    found, shift = tight_epsilon({release: 1}, delta), math.log(3.0)
    grid = np.linspace(-25, 25, 2501)
    step = grid[1] - grid[0]
    here, there = np.exp(-abs(grid)) / 2, np.exp(-abs(grid - shift)) / 2
    p, q = np.outer(here, here), np.outer(there, there)
    assert (np.maximum(p - np.exp(found) * q, 0).sum() * step**2) == pytest.approx(delta, rel=0.01)
    assert found < 2 * shift


@pytest.mark.parametrize("split", [0.5, 0.2])
@pytest.mark.parametrize("shift", [0.5, 2.0, 5.0])
def test_moving_one_coordinate_is_the_worst_case_of_laplace_noise(
    shift: float, split: float
) -> None:
    """The hockey-stick divergence of (a, c) with a + c = shift never exceeds that of (shift) alone:
    what `tight` rests on.
    """
    grid = np.linspace(-20, 25, 1501)
    step = grid[1] - grid[0]

    def density(by: float) -> np.ndarray:
        mass = np.exp(-abs(grid - by))
        return mass / mass.sum()

    one, two = density(0), np.outer(density(0), density(0))
    one_there, two_there = (
        density(shift),
        np.outer(density(split * shift), density((1 - split) * shift)),
    )
    for epsilon in np.linspace(-shift, shift, 21):
        alpha = math.exp(epsilon)
        single = np.maximum(one - alpha * one_there, 0).sum()
        both = np.maximum(two - alpha * two_there, 0).sum()
        assert both <= single + step


def test_many_rounds_are_tighter_than_basic_composition_and_never_above_it() -> None:
    # by the central limit theorem: n·E[L] + z·√(n·Var L), with E[L] = ε + exp(-ε) - 1 = 1.135 per
    # release of ε = 2
    n, epsilon = 960, 2.0
    mean = epsilon + math.exp(-epsilon) - 1
    second = epsilon**2 / 2 + epsilon**2 * math.exp(-epsilon) / 2
    # X inside (0, ε)
    second += stats.expon.expect(lambda x: (epsilon - 2 * x) ** 2, lb=0, ub=epsilon) / 2
    about = n * mean + stats.norm.isf(1e-6) * math.sqrt(n * (second - mean**2))
    found = tight_epsilon({LAPLACE: 30}, 1e-6)
    assert found == pytest.approx(about, rel=0.02) and found < 1920
    assert tight_epsilon({LAPLACE: 30}, 0.0) == 1920
    assert tight_epsilon({LAPLACE: 30}, 1e-20) == 1920  # below what the distributions resolve
    assert tight_epsilon({replace(LAPLACE, scale=1e-6): 30}, 1e-6) == 2e6 * 960  # hardly any noise


def test_gaussian_noise_promises_nothing_without_delta() -> None:
    with pytest.raises(CrossfedError, match=r"privacy\.delta above 0"):
        Accountant(Privacy(delta=0.0), [GAUSS])


# -- what is declared ------------------------------------------------------------------------------


def declaring(**changes: Any) -> Any:
    [release] = toys.WHISPER.releases(toys.Config())
    return replace(toys.WHISPER, releases=lambda c: (replace(release, **changes),))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stage": "shout"}, "no such stage; it has talk, still"),
        ({"keys": ("y",)}, "'y' is no declared field that goes up or peer"),
        ({"stage": "still"}, "along the stage's edges"),
        ({"at": "server"}, "'x' is no declared field that goes down"),
        ({"keys": ()}, "must name its keys"),
        ({"unit": ""}, "unit of protection"),
        ({"scale": 0.0}, "declare no release"),
        ({"count": 0}, "must be positive"),
    ],
)
def test_a_release_must_speak_of_what_is_sent(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CrossfedError, match=told):
        check_method(declaring(**changes), toys.Config())


def test_releases_share_no_key_and_one_unit() -> None:
    [release] = toys.WHISPER.releases(toys.Config())
    stages = toys.WHISPER.stages(toys.Config())
    twice = replace(toys.WHISPER, releases=lambda c: (release, replace(release, count=1)))
    with pytest.raises(CrossfedError, match="'x' occurs in 2 releases of stage 'talk'"):
        check_releases(twice, toys.Config(), stages)
    units = replace(
        toys.WHISPER,
        fields=(toys.X_PEER, replace(toys.X_PEER, key="y")),
        releases=lambda c: (release, replace(release, keys=("y",), unit="one user")),
    )
    with pytest.raises(CrossfedError, match="different units"):
        check_releases(units, toys.Config(), stages)


def _rows(send: dict[str, dict[str, np.ndarray]]) -> list[Entry]:
    return [
        Entry("talk", 1, "a", to, "peer", key, v.shape, str(v.dtype), v.nbytes)
        for to, p in send.items()
        for key, v in p.items()
    ]


def test_one_message_to_several_peers_is_one_release_and_different_ones_are_several() -> None:
    release = replace(LAPLACE, keys=("u*", "v"))
    accountant, one, two = (
        Accountant(Privacy(), [release]),
        np.zeros(2, np.float32),
        np.ones(2, np.float32),
    )

    def messages(send: dict[str, dict[str, np.ndarray]]) -> list[int]:
        rows = tell_apart([release], "talk", "each", send, _rows(send))
        return [line["messages"] for line in accountant.lines("talk", "each", 0, 1, {"a": rows})]

    assert messages({"b": {"u1": one, "v": two}, "c": {"u1": one.copy(), "v": two}}) == [1]
    assert messages(
        {"b": {"u1": one, "v": two}, "c": {"u1": one, "v": one}, "d": {"u1": one, "v": two}}
    ) == [2]
    assert messages({"b": {"w": one}}) == []
    with pytest.raises(LeakError, match=r"a → b: payload key 'v' left in 'close' of stage 'talk'"):
        tell_apart([release], "talk", "close", {"b": {"v": one}}, _rows({"b": {"v": one}}))


# -- runs ------------------------------------------------------------------------------------------


def test_a_runs_totals_are_those_of_its_rounds(shops: Path, tmp_path: Path) -> None:
    # ε = 1/0.5 = 2 per release, two per message, one message a round to both peers, five rounds: 10
    # and 20
    rows: list[Round] = []
    done = run_recorded(config("WHISPER", shops, tmp_path, "rounds=5"), on_round=rows.append)
    block = done.result["privacy"]
    assert set(block["domains"]) == set(SHOPS)
    for name in SHOPS:
        [line] = block["domains"][name]["releases"]
        assert (
            line["messages"],
            line["released"],
            line["repeated"],
            line["epsilon"],
            line["norm"],
        ) == (
            5,
            10,
            0,
            2,
            "L1",
        )
        assert (
            block["domains"][name]["epsilon_paper"],
            block["domains"][name]["epsilon_whole"],
        ) == (10, 20)
        assert block["domains"][name]["epsilon_tight"] == tight_epsilon({_release(5): 5}, 1e-6) < 20
        for row in rows:
            sent = min(row.step, 5)  # the sixth round is the local stage's
            assert row.metrics[f"privacy/{name}/epsilon_paper"] == 2 * sent
            assert row.metrics[f"privacy/{name}/epsilon_whole"] == 4 * sent
    assert (
        rows[-1].metrics["privacy/max/epsilon_whole"] == 20
        and "privacy/max/epsilon_tight" not in rows[-1].metrics
    )
    assert (
        block
        == json.loads((done.run_dir / "result.json").read_text())["privacy"]
        == privacy_account(done.run_dir)
    )
    assert block["sent_as_it_is"] == [] and block["stopped_by_budget"] == {} and block["note"] == ""
    assert summary(block)[0].startswith(
        "books, films, games: ε = 10 as the paper counts, 20 whole, "
    )


def test_the_tracker_holds_the_totals_of_every_round(shops: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    values = {"data": shops, "out": tmp_path, "backend": "inprocess"}
    done = run_recorded(build("toys:WHISPER", sets=["rounds=3"], values=values))
    client, run = (
        MlflowClient(f"sqlite:///{tmp_path}/mlflow.db"),
        (done.run_dir / "mlflow_run_id").read_text().strip(),
    )
    for name, each in (("paper", 2.0), ("whole", 4.0)):
        found = client.get_metric_history(run, f"privacy/epsilon_{name}")
        assert [(point.step, point.value / each) for point in found] == [
            (1, 1),
            (2, 2),
            (3, 3),
            (4, 3),
        ]
    final = client.get_run(run).data.metrics
    tight = done.result["privacy"]["domains"]["films"]["epsilon_tight"]
    assert final["privacy/epsilon_whole"] == 12 and final["privacy/epsilon_tight"] == tight


def _release(rounds: int) -> Release:
    [release] = toys.WHISPER.releases(toys.Config(rounds=rounds))
    return release


def test_every_peer_its_own_noise_counts_by_peer(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("WHISPER", shops, tmp_path, "rounds=3", "apart=true"))
    assert {row["epsilon_whole"] for row in done.result["privacy"]["domains"].values()} == {
        3 * 2 * 4
    }


def test_the_record_is_written_before_anything_is_delivered(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    run_phase = InProcess.run_phase

    def spy(self: InProcess, stage: int, part: str, phase: int, round: int, inboxes: Any) -> Any:
        arrived = sum(len(inbox) for inbox in inboxes.values())
        path = next(tmp_path.glob("*/")) / RECORD
        seen.append((arrived, len(read_lines(path))))
        return run_phase(self, stage, part, phase, round, inboxes)

    monkeypatch.setattr(InProcess, "run_phase", spy)
    run_recorded(config("WHISPER", shops, tmp_path, "rounds=3"))
    assert seen == [(0, 0), (6, 3), (6, 6), (0, 9)]  # three senders a round, two peers each


def test_a_method_without_releases_says_so(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("GOSSIP", shops, tmp_path, "rounds=2"))
    block = done.result["privacy"]
    assert (
        block["note"] == UNPERTURBED
        and block["domains"] == {}
        and block["sent_as_it_is"] == ["talk: x (peer)"]
    )
    assert summary(block) == [UNPERTURBED]
    assert not (done.run_dir / RECORD).exists()
    shown = CliRunner().invoke(app, ["privacy", str(done.run_dir)])
    assert shown.exit_code == 0 and UNPERTURBED in shown.output
    local = run_recorded(config("CLOSES", shops, tmp_path))
    assert local.result["privacy"]["note"] == "nothing crosses"


# -- what left twice -------------------------------------------------------------------------------


def test_a_round_repeated_after_a_resume_counts_twice(shops: Path, tmp_path: Path) -> None:
    # commits after rounds 2 and 4; killed after round 3, which runs again: 6 rounds, 7 messages
    broken = interrupted(
        config("WHISPER", shops, tmp_path, "rounds=6", "checkpoint_every=2"), after=3
    )
    assert [line["round"] for line in record(broken) if line["sender"] == "books"] == [1, 2, 3]
    assert privacy_account(broken)["domains"]["books"]["epsilon_whole"] == 12
    done = run_recorded(stored_config(broken), resume=broken)
    assert [line["round"] for line in record(broken) if line["sender"] == "books"] == [
        1,
        2,
        3,
        3,
        4,
        5,
        6,
    ]
    for row in done.result["privacy"]["domains"].values():
        assert (row["epsilon_paper"], row["epsilon_whole"]) == (14, 28)
        assert row["releases"][0]["repeated"] == 1
    assert "3 messages are of rounds that ran again; they left twice and count twice" in summary(
        done.result["privacy"]
    )


@pytest.mark.slow
def test_a_round_repeated_after_a_lost_node_counts_twice(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    # nothing is committed before round 4; books dies in round 3 before anything of that round is
    # delivered: 1 2 | 1 2 3 4
    settings = ("rounds=4", "checkpoint_every=4", f"marker={tmp_path / 'died'}")
    done = run_recorded(config("WHISPER_DIES", shops, tmp_path / "runs", *settings, backend="ray"))
    assert done.result["restarts"] == 1
    assert [line["round"] for line in record(done.run_dir) if line["sender"] == "games"] == [
        1,
        2,
        1,
        2,
        3,
        4,
    ]
    assert done.result["privacy"]["domains"]["games"]["epsilon_whole"] == 6 * 4


def test_a_record_line_cut_off_in_writing_is_dropped(shops: Path, tmp_path: Path) -> None:
    broken = interrupted(
        config("WHISPER", shops, tmp_path, "rounds=4", "checkpoint_every=4"), after=2
    )
    path = broken / RECORD
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    assert (
        len(read_lines(path)) == 6
        and privacy_account(broken)["domains"]["books"]["epsilon_whole"] == 8
    )
    run_recorded(stored_config(broken), resume=broken)
    assert path.read_bytes().startswith(whole) and len(read_lines(path)) == 3 * (2 + 4)
    mend(path)
    assert len(read_lines(path)) == 3 * (2 + 4)


# -- the budget ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counting", "budget", "rounds"), [("paper", 6.5, 3), ("whole", 12.0, 3), ("tight", 12.0, 3)]
)
def test_a_run_stops_before_the_round_that_would_exceed_its_budget(
    counting: str, budget: float, rounds: int, shops: Path, tmp_path: Path
) -> None:
    # a round costs 2 as the paper counts, 4 whole, and 4 less 4·10⁻⁶ at δ
    rows: list[Round] = []
    sets = (
        f"privacy.budget={budget}",
        f"privacy.counting={counting}",
        "rounds=8",
        "evaluation.every=5",
    )
    done = run_recorded(config("WHISPER", shops, tmp_path, *sets), on_round=rows.append)
    assert [row.stage for row in rows] == ["talk"] * rounds + ["still"]
    # the last round is measured
    assert any(key.startswith("val/") for key in rows[rounds - 1].metrics)
    block = done.result["privacy"]
    assert block["stopped_by_budget"] == {"talk": rounds}
    assert block["domains"]["films"][f"epsilon_{counting}"] <= budget
    assert (
        done.result["domains"]["films"]["validation"]
        and (done.run_dir / "model/films.safetensors").is_file()
    )
    assert any("talk after round 3" in line for line in summary(block))


def test_a_budget_that_just_fits_all_rounds_stops_nothing(shops: Path, tmp_path: Path) -> None:
    # 3 · 0.1 as the paper counts is 0.3 but for rounding
    sets = ("rounds=3", "noise=10", "privacy.budget=0.3", "privacy.counting=paper")
    done = run_recorded(config("WHISPER", shops, tmp_path, *sets))
    assert done.result["privacy"]["stopped_by_budget"] == {}
    assert done.result["privacy"]["domains"]["books"]["releases"][0]["messages"] == 3


def test_a_run_refuses_to_start_what_its_budget_does_not_let_begin(
    shops: Path, tmp_path: Path
) -> None:
    started: list[Path] = []
    with pytest.raises(
        CrossfedError,
        match=r"privacy\.budget=3 does not let the first round "
        r"of stage 'talk' start",
    ):
        run_recorded(config("WHISPER", shops, tmp_path, "privacy.budget=3"), started=started.append)
    assert not (started[0] / RECORD).exists() and not (started[0] / "placement.json").exists()


def test_the_preflight_says_how_many_rounds_fit(
    shops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from crossfed.platform.console import make_progress

    run_recorded(
        config("WHISPER", shops, tmp_path, "rounds=8", "privacy.budget=13"),
        view=make_progress("plain"),
    )
    text = capsys.readouterr().out
    assert text.index("3 of 8 rounds fit the budget of 13 (whole)") < text.index("stage talk")
    assert (
        "ε = 2 as the paper counts and 4 whole after round 1" in text
        and ("12 whole after round 3") in text
    )
    assert "stopped by the budget of ε = 13 (whole): talk after round 3" in text


def test_what_left_twice_is_taken_off_the_budget(shops: Path, tmp_path: Path) -> None:
    # five rounds fit; round 3 is sent twice, so that round 5 no longer does
    sets = ("rounds=8", "checkpoint_every=2", "privacy.budget=20")
    broken = interrupted(config("WHISPER", shops, tmp_path, *sets), after=3)
    done = run_recorded(stored_config(broken), resume=broken)
    assert done.result["privacy"]["stopped_by_budget"] == {"talk": 4}
    assert done.result["privacy"]["domains"]["books"]["epsilon_whole"] == 20


def test_a_run_interrupted_before_its_first_commit_does_not_start_on_a_spent_budget(
    shops: Path, tmp_path: Path
) -> None:
    broken = interrupted(
        config("WHISPER", shops, tmp_path, "rounds=8", "checkpoint_every=8", "privacy.budget=8"),
        after=2,
    )
    with pytest.raises(
        CrossfedError,
        match=r"ε = 12 \(whole counting, 8 of it for what left "
        r"before\)",
    ):
        run_recorded(stored_config(broken), resume=broken)


def test_nor_after_a_node_was_lost_before_the_first_commit(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # lost while the first round is measured: its messages have left, nothing of it is kept, and no
    # second round fits
    each, calls = InProcess.each, []

    def lose(self: InProcess, call: str, args: Any) -> Any:
        calls.append(call)
        if calls.count("evaluate") == 1:
            raise NodeLost("books was lost")
        return each(self, call, args)

    monkeypatch.setattr(InProcess, "each", lose)
    with pytest.raises(
        CrossfedError,
        match=r"first round of stage 'talk' start: it would "
        r"bring books to ε = 8",
    ):
        run_recorded(config("WHISPER", shops, tmp_path, "privacy.budget=7"))


def test_more_messages_than_foreseen_are_not_delivered_past_the_budget(
    shops: Path, tmp_path: Path
) -> None:
    # one message a round was foreseen, each peer got its own: 8 instead of 4
    started: list[Path] = []
    with pytest.raises(CrossfedError, match="they were not delivered"):
        run_recorded(
            config("WHISPER", shops, tmp_path, "apart=true", "privacy.budget=7"),
            started=started.append,
        )
    assert not (started[0] / RECORD).exists()
    # once seen, they are planned for: two rounds of 8 fit into 17, and the third is not begun
    done = run_recorded(
        config("WHISPER", shops, tmp_path, "apart=true", "privacy.budget=21", "rounds=8")
    )
    assert done.result["privacy"]["stopped_by_budget"] == {"talk": 2}


def test_the_budget_foresees_what_leaves_at_the_ends_of_a_stage() -> None:
    release = replace(LAPLACE, count=1, parts=("open", "each", "close"))  # 2 each time
    accountant = Accountant(Privacy(budget=10.0), [release])
    plan = accountant.planned("talk", {"open": 1, "each": 3, "close": 1}, ["a"])
    assert plan == {"a": Counter({release: 5})} and accountant.over(plan) is None
    over = accountant.over(accountant.planned("talk", {"open": 1, "each": 4, "close": 1}, ["a"]))
    assert over == ("a", 12.0)
    at_server = replace(release, at="server", parts=("each",))
    assert Accountant(Privacy(), [at_server]).planned("talk", {"each": 2}, ["a"]) == {
        "server": Counter({at_server: 2})
    }


# -- noise -----------------------------------------------------------------------------------------


def test_noise_repeats_with_a_seed_and_only_then() -> None:
    def draw(*args: Any) -> list[float]:
        return noise_generator(*args).laplace(size=4).tolist()

    assert draw() != draw() and draw(None, "talk", 1) != draw(None, "talk", 1)
    assert draw(0, "talk", 1, "books") == draw(0, "talk", 1, "books")
    assert (
        len({tuple(draw(*args)) for args in [(0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1)]})
        == 4
    )


def test_noise_has_the_declared_distribution() -> None:
    drawn = noise_generator().laplace(0.0, 0.5, 20_000)
    assert stats.kstest(drawn, stats.laplace(scale=0.5).cdf).pvalue > 1e-6


def _history(run_dir: Path) -> list[dict[str, float]]:
    return [
        json.loads(line)["metrics"] for line in (run_dir / "history.jsonl").read_text().splitlines()
    ]


def test_noise_repeats_with_its_seed_alone(shops: Path, tmp_path: Path, on_ray: OnRay) -> None:
    seeded = run_recorded(config("WHISPER", shops, tmp_path, "rounds=3", "privacy.noise_seed=0"))
    assert _history(seeded.run_dir) == _history(on_ray.run_dir)
    assert "can be removed" in seeded.result["privacy"]["note"]
    # the seed of the run does not fix the noise: what is computed before any noise arrives is the
    # same, the rest is not
    fresh = [
        _history(run_recorded(config("WHISPER", shops, tmp_path, "rounds=3")).run_dir)
        for _ in range(2)
    ]
    assert fresh[0][0]["train/books/x"] == fresh[1][0]["train/books/x"]
    assert fresh[0][1]["train/books/x"] != fresh[1][1]["train/books/x"]


def test_settings_that_a_run_does_not_use_leave_its_hash(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = config("GOSSIP", shops, tmp_path)
    assert plain.hash() == config("GOSSIP", shops, tmp_path, "privacy.delta=1e-6").hash()
    assert plain.hash() != config("GOSSIP", shops, tmp_path, "privacy.budget=5").hash()
    # runs made before there were such settings can still be resumed: what is hashed does not name
    # them
    hashed: list[dict[str, Any]] = []
    dumps = json.dumps
    monkeypatch.setattr(
        json, "dumps", lambda told, **options: hashed.append(told) or dumps(told, **options)
    )
    plain.hash()
    assert hashed and "privacy" not in hashed[0]


# -- peer to peer ----------------------------------------------------------------------------------


def test_the_driver_never_fetches_what_peers_send_each_other(on_ray: OnRay) -> None:
    assert on_ray.handles and all(type(handle).__name__ == "ObjectRef" for handle in on_ray.handles)
    assert not on_ray.handles & on_ray.asked and not on_ray.arrays
    assert set(on_ray.result["placement"]) == set(SHOPS)  # no server exists
    assert {row["direction"] for row in read_lines(on_ray.run_dir / "ledger.jsonl")} == {
        str(Direction.PEER)
    }


# -- the command line ------------------------------------------------------------------------------


def test_the_command_shows_finished_and_unfinished_runs(shops: Path, tmp_path: Path) -> None:
    broken = interrupted(config("WHISPER", shops, tmp_path, "rounds=6"), after=2)
    half = CliRunner().invoke(
        app, ["privacy", broken.name, "--out", str(tmp_path)], env={"COLUMNS": "160"}
    )
    assert half.exit_code == 0, half.output
    [line] = [line for line in half.output.splitlines() if "books" in line and "│" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["books", "talk", "x", "laplace 0.5", "L1 1", "2", "2", "2 × 2", "4", "8"]
    assert "for one interaction of a domain" in half.output
    run_recorded(stored_config(broken), resume=broken)
    full = CliRunner().invoke(app, ["privacy", str(broken)], env={"COLUMNS": "160"})
    # round 2 was not committed and ran again
    assert "ε = 14 as the paper counts, 28 whole" in full.output and "count twice" in full.output


def test_methods_shows_what_leaves_under_noise() -> None:
    shown = CliRunner().invoke(app, ["methods", "toys:WHISPER"], env={"COLUMNS": "400"})
    assert (
        "noise x in talk: laplace, scale 0.5, L1 sensitivity 1 of one interaction of a domain"
    ) in shown.output
    assert "2 releases a message of ε = 2; the paper counts ε = 2 for all of it" in shown.output
