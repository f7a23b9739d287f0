"""Tables of a study: its trials, the best, the Pareto front, the budget; in every form."""

from __future__ import annotations

import csv
import io
import math

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from rich.console import Console

from crossfed.platform.errors import CrossfedError
from crossfed.tuning.report import tables
from crossfed.tuning.report.figures import (
    optimisation_history,
)
from made_studies import (
    FRONT,
    TAU,
    add,
    new_study,
    printed,
    small,
    two,
)

# -- facts -----------------------------------------------------------------------------------------


def test_a_study_made_elsewhere_is_told_apart() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name="other")
    with pytest.raises(
        CrossfedError,
        match="study other does not come from crossfed tune: it has no user attribute 'method'",
    ):
        tables.show(study)


# -- tables ----------------------------------------------------------------------------------------


def test_the_table_of_trials_keeps_stopped_ones_apart() -> None:
    table = tables.trials_table(small())
    # best first in each
    assert [[row[1] for row in group] for group in table.groups] == [[2, 5, 0], [1, 4], [3], [6]]
    assert [[row[3] for row in group] for group in table.groups][1] == ["pruned", "pruned"]
    assert table.best == {0}
    shown = table.markdown().splitlines()
    assert shown[0] == "| trial | status | recall_at_20 | A | B | tau_a | K | rounds | time |"
    assert shown[2] == (
        "| **2** | **finished** | **0.3000** | **0.2000** | **0.4000** | **∞** | **50** | **10 "
        "/ 10** | **2 s** |"
    )
    assert shown[4] == "| * 0 | finished | 0.1000 | 0.0800 | 0.1200 | 1 | 50 | 10 / 10 | 2 s |"
    assert shown[5] == "| 1 | pruned | 0.9000 | 0.9500 | 0.8500 | 0.1 | 30 | 3 / 10 | 2 s |"
    assert shown[7] == "| 3 | failed | – | – | – | 0.1 | 70 | 4 / 10 | 2 s |"
    assert "A pruned trial's values are those it was stopped with." in shown[-1]


def test_a_stopped_trial_without_a_value_comes_last_of_its_kind() -> None:
    study = new_study()
    for value in (None, -0.1, 0.1):
        add(study, "pruned", value)
    assert [row[1] for row in tables.trials_table(study).rows] == [2, 1, 0]


def test_csv_has_everything_unrounded() -> None:
    study = new_study()
    add(
        study,
        "finished",
        1 / 3,
        {"tau_a": math.inf},
        {"tau_a": TAU},
        domains={"A": 1 / 7},
        seconds=61.25,
        cpu_seconds=120.5,
        gpu_seconds=3.5,
        bytes_up=12345,
        epsilon=2.5,
        run_id="r",
        paper=True,
    )
    add(study, "failed", None, {"tau_a": 1.0}, {"tau_a": TAU}, reason="a, b")
    first, second = csv.DictReader(io.StringIO(tables.trials_table(study).csv()))
    assert first == {
        "trial": "0",
        "paper": "1",
        "status": "finished",
        "recall_at_20": str(1 / 3),
        "A recall_at_20": str(1 / 7),
        "tau_a": "inf",
        "rounds": "10",
        "max_rounds": "10",
        "seconds": "61.25",
        "cpu_seconds": "120.5",
        "gpu_seconds": "3.5",
        "bytes_up": "12345",
        "epsilon": "2.5",
        "run_id": "r",
        "reason": "",
    }
    assert (second["recall_at_20"], second["reason"], second["paper"]) == ("", "a, b", "0")


def test_the_best_is_set_against_the_paper_s_setting() -> None:
    """0.30 against 0.10 is 200 % more."""
    assert tables.best_lines(small()) == [
        "Best recall_at_20: 0.3000, trial 2 (recall_at_20: A 0.2000, B 0.4000)",
        "  --set tau_a=.inf --set K=50",
        "  The paper's setting: 0.1000, trial 0; the best is 200.0 % higher.",
        "  Stopped with more than that, and not counted: trial 1 (0.9000 after 3 rounds).",
    ]
    assert tables.reasons(small()) == [
        "Trial 3 failed: loss | is NaN",
        "Trial 6 killed: no reason was recorded",
    ]


def test_the_best_of_every_objective() -> None:
    study = new_study(("domain:A", "bytes"), ("maximize", "minimize"))
    add(
        study,
        "finished",
        (0.1, 4000.0),
        {"flag": True},
        {"flag": CategoricalDistribution((True, None))},
        paper=True,
    )
    add(
        study,
        "finished",
        (0.1, 1000.0),
        {"flag": None},
        {"flag": CategoricalDistribution((True, None))},
    )
    for cost in (10.0, 9000.0):
        add(
            study,
            "pruned",
            (0.2, cost),
            {"flag": None},
            {"flag": CategoricalDistribution((True, None))},
        )
    assert tables.best_lines(study) == [
        "Best domain:A: 0.1000, trial 0, the paper's setting",
        "  --set flag=true",
        "  Stopped with more than that, and not counted: trial 2 (0.2000 after 3 rounds), 3 "
        "(0.2000 after 3 rounds).",
        "Best bytes: 1 kB, trial 1",
        "  --set flag=null",
        "  The paper's setting: 4 kB, trial 0; the best is 75.0 % lower.",
    ]
    assert optimisation_history(study).axes[0].get_ylabel() == "Recall@20, A"
    table = tables.pareto_table(study)
    assert table is not None
    # as good as trial 0 for fewer bytes
    assert table.markdown().splitlines()[2:3] == ["| 1 | 0.1000 | 1 kB | None |"]
    assert tables.trials_table(study).best == {1}


def test_a_paper_setting_that_was_stopped_is_not_compared_with() -> None:
    study = new_study()
    add(study, "pruned", 0.1, paper=True)
    add(study, "finished", 0.2)
    assert tables.best_lines(study)[-1] == (
        "  The paper's setting: 0.1000, trial 0, stopped after 3 rounds, so not comparable."
    )


def test_the_pareto_table() -> None:
    table = tables.pareto_table(two([*FRONT, ("finished", 0.5, math.inf)]))
    assert table is not None
    assert [(row[2], row[3]) for row in table.rows] == [
        (0.1, 1.0),
        (0.3, 4.0),
        (0.4, 8.0),
        (0.5, math.inf),
    ]
    assert table.markdown().splitlines()[5] == "| 5 | 0.5000 | ∞ | 50 |"
    assert "better is: recall_at_20 higher, epsilon lower" in table.caption
    assert tables.pareto_table(small()) is None


def test_a_narrow_terminal_drops_columns_and_says_which() -> None:
    wide, narrow = (
        printed(tables.trials_table(small()), 120),
        printed(tables.trials_table(small()), 60),
    )
    assert "Left out" not in wide
    assert "Left out for want of width: A, B, time." in narrow.replace("\n", " ")
    assert all(len(line) <= 60 for line in narrow.splitlines())
    assert "│   * 0 │ finished │       0.1000 │     1 │ 50 │ 10 / 10 │" in narrow


def test_the_best_row_is_bold_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(tables.trials_table(small()))
    bold = [
        line for line in captured.get().splitlines() if "\x1b[1m" in line and "finished" in line
    ]
    assert len(bold) == 1 and "0.3000" in bold[0]


def test_names_cannot_break_a_markdown_table() -> None:
    study = new_study()
    add(study, "finished", 0.1, {"a|b": "x|\ny"}, {"a|b": CategoricalDistribution(("x|\ny", "z"))})
    rows = tables.trials_table(study).markdown().splitlines()
    assert "a\\|b" in rows[0] and "x\\| y" in rows[2]


def test_show_tells_all() -> None:
    shown = printed(tables.show(small()))
    assert "Study first: fedcgr" in shown and "objective  maximise recall_at_20" in shown
    assert "Trial 3 failed: loss | is NaN" in shown
    assert "No importance: too few trials: 5 came to a value, 8 are needed." in shown
    assert "Pareto" not in shown and "Pareto front" in printed(tables.show(two(FRONT)))
    written = tables.markdown(two(FRONT))
    assert [line for line in written.splitlines() if line.startswith("#")] == [
        "# Study first", "## Best", "## Trials", "## Pareto front", "## Importance"
    ]  # fmt: skip


def test_the_study_for_a_page() -> None:
    lines, grids = tables.told(small())
    assert lines[0].startswith("fedcgr on ") and "Trial 3 failed: loss | is NaN" in lines
    assert [grid.title for grid in grids] == ["Trials", "Importance"]
    assert grids[0].csv() == tables.trials_table(small()).csv()
    assert grids[0].markdown() == tables.trials_table(small()).markdown()
    assert [row[0].text for row in grids[0].rows if row[0].best] == ["2"]  # type: ignore[union-attr]
    assert len(tables.told(two(FRONT))[1]) == 3


def test_the_budget_table() -> None:
    """Mean of 0.1, 0.2, 0.3 is 0.2, deviation √((0.01 + 0 + 0.01) / 2) = 0.1; rounds 10 · 3 + 3 · 2
    + 4 = 40; 7 · 4 s CPU.
    """
    one = tables.Spent.of(small(), [0.1, 0.2, 0.3])
    other = tables.Spent(
        "lightgcn",
        "second",
        "synthetic shops",
        "ratio-80-10-10",
        "recall_at_20",
        {"finished": 7},
        70,
        None,
        7300.0,
        None,
    )
    table = tables.budget_table([one, other])
    shown = table.markdown().splitlines()
    assert shown[0] == (
        "| method | trials | finished | pruned | failed | killed | rounds | CPU time | GPU time "
        "| validation recall_at_20 | test recall_at_20 | seeds |"
    )
    assert shown[2].replace("*", "") == (
        "| fedcgr | 7 | 3 | 2 | 1 | 1 | 40 | 28 s | – | 0.3000 | 0.2000 ± 0.1000 | 3 |"
    )
    assert shown[3] == "| lightgcn | 7 | 7 | 0 | 0 | 0 | 70 | – | 2:01:40 | – | – | 0 |"
    assert "protocol ratio-80-10-10" in table.caption and "full budget" in table.caption
    [row, _] = csv.DictReader(io.StringIO(table.csv()))
    assert (row["cpu_seconds"], row["gpu_seconds"], row["seeds"]) == ("28.0", "", "3")
    assert (float(row["test_mean"]), float(row["test_std"])) == pytest.approx((0.2, 0.1))
    assert row["protocol"] == "ratio-80-10-10"


def test_one_seed_has_no_deviation() -> None:
    assert "| 0.2500 | 1 |" in tables.budget_table(
        [tables.Spent.of(small(), [0.25])]
    ).markdown().replace("*", "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"protocol": "leave-one-out"},
            "differ in protocol .*: ratio-80-10-10 .first.; leave-one-out .other.",
        ),
        ({"data": "beauty"}, "differ in data"),
        ({"objective": "worst"}, "differ in objective"),
    ],
)
def test_budgets_that_do_not_compare_are_refused(change: dict[str, str], words: str) -> None:
    one = tables.Spent.of(small())
    told = {
        "method": "x",
        "study": "other",
        "data": one.data,
        "protocol": one.protocol,
        "objective": one.objective,
    } | change
    other = tables.Spent(
        **told, trials={}, rounds=0, cpu_seconds=None, gpu_seconds=None, validation=None
    )  # type: ignore[arg-type]
    with pytest.raises(CrossfedError, match=words):
        tables.budget_table([one, other])
    with pytest.raises(CrossfedError, match="No studies"):
        tables.budget_table([])
