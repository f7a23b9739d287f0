"""Result tables: what they state, what they refuse to mix, and what they say, cell by cell."""

import copy
import csv
import io
import re

import pytest

from crossfed.platform.report.tables import table
from crossfed.platform.seam import CrossfedError


def result(method: str, seed: int, books: float, toys: float, **changes) -> dict:
    domains = {
        name: {
            "validation": {"recall_at_20": value + 0.1, "ndcg_at_20": value / 2},
            "test": {"recall_at_20": value, "ndcg_at_20": value / 2},
        }
        for name, value in (("books", books), ("toys_and_games", toys))
    }
    return {
        "method": method,
        "seed": seed,
        "protocol": "ratio-80-10-10",
        "candidates": {"books": "full:100", "toys_and_games": "full:70"},
        "data_fingerprint": "ab12",
        "domains": domains,
    } | changes


RESULTS = [result("fedcrf", 1, 0.12, 0.5), result("lightgcn", 1, 0.2, 0.4), result("fedcrf", 2, 0.14, 0.6)]


def test_mean_and_deviation_over_seeds():
    """0.12 and 0.14: mean 0.13, sample deviation 0.01·√2; one seed has none."""
    made = table(RESULTS, ["Recall@20"])
    books, toys = made.cells["fedcrf"]
    assert (books.mean, books.std) == pytest.approx((0.13, 0.01 * 2**0.5))
    assert (toys.mean, made.cells["lightgcn"][0].std) == (pytest.approx(0.55), None)
    assert made.seeds == {"fedcrf": (1, 2), "lightgcn": (1,)}
    assert [cell.best for cell in made.cells["fedcrf"]] == [False, True]
    assert [cell.best for cell in made.cells["lightgcn"]] == [True, False]


def test_markdown():
    text = table(RESULTS, ["recall@20"]).markdown(digits=3)
    assert text == (
        "| method | seeds | books recall_at_20 | toys_and_games recall_at_20 |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| fedcrf | 2 | 0.130 ± 0.014 | **0.550 ± 0.071** |\n"
        "| lightgcn | 1 | **0.200** | 0.400 |\n"
        "\n"
        "Test metrics, mean ± standard deviation over seeds; protocol ratio-80-10-10; "
        "candidates books full:100, toys_and_games full:70; data ab12.\n"
    )


def test_latex():
    text = table(RESULTS, ["recall@20", "ndcg@20"], label=lambda run: f"{run['method']}_50%").latex(digits=2)
    assert r"\multicolumn{2}{c}{books} & \multicolumn{2}{c}{toys\_and\_games} \\" in text
    assert r"method & seeds & recall\_at\_20 & ndcg\_at\_20 & recall\_at\_20 & ndcg\_at\_20 \\" in text
    assert r"fedcrf\_50\% & 2 & 0.13 $\pm$ 0.01 & 0.07 $\pm$ 0.01 & \textbf{0.55 $\pm$ 0.07} & " in text
    assert r"protocol ratio-80-10-10; candidates books full:100, toys\_and\_games full:70; data ab12" in text
    assert r"\begin{tabular}{lrcccc}" in text
    for line in text.splitlines():
        if line.endswith(r"\\") and "multicolumn" not in line:
            assert len(re.split(r"(?<!\\)&", line)) == 6


def test_csv_is_unrounded_and_states_everything_on_every_line():
    made = table(RESULTS, ["recall@20", "ndcg@20"])
    lines = list(csv.DictReader(io.StringIO(made.csv())))
    assert len(lines) == 2 * 2 * 2
    assert {line["protocol"] for line in lines} == {"ratio-80-10-10"} and {line["data"] for line in lines} == {"ab12"}
    first = lines[0]
    assert (first["method"], first["domain"], first["split"], first["metric"]) == (
        "fedcrf",
        "books",
        "test",
        "recall_at_20",
    )
    assert float(first["mean"]) == made.cells["fedcrf"][0].mean and float(first["std"]) == made.cells["fedcrf"][0].std
    assert (first["seeds"], first["candidates"], first["best"]) == ("1 2", "full:100", "0")
    assert lines[-1]["candidates"] == "full:70" and lines[-1]["std"] == ""


def test_validation_and_a_choice_of_domains():
    made = table(RESULTS, ["recall@20"], split="validation", domains=["toys_and_games"])
    assert made.columns == (("toys_and_games", "recall_at_20"),)
    assert made.cells["lightgcn"][0].mean == pytest.approx(0.5)
    assert made.caption.startswith("Validation") and "books" not in made.caption


def test_equal_means_are_both_best():
    made = table([result("a", 1, 0.5, 0.5), result("b", 1, 0.5, 0.4)], ["recall@20"])
    assert [made.cells[method][0].best for method in "ab"] == [True, True]


def test_pooled_training_is_marked_not_private():
    made = table([*RESULTS, result("lightgcn", 1, 0.3, 0.7, scope="pooled")], ["recall@20"])
    assert list(made.cells) == ["fedcrf", "lightgcn", "lightgcn (not private)"]


def test_one_candidate_set_for_all_domains():
    made = table([result("a", 1, 0.5, 0.5, candidates="sampled-99:abc")], ["recall@20"])
    assert made.candidates == {"books": "sampled-99:abc", "toys_and_games": "sampled-99:abc"}


def test_the_candidates_of_the_split_shown():
    """Validation and test users have candidates of their own; a result may tell both."""
    run = result("a", 1, 0.5, 0.5, candidates={"books": "sampled-99:test", "toys_and_games": "sampled-99:test"})
    run["domains"]["books"]["validation_candidates"] = "sampled-99:validation"
    assert table([run], ["recall@20"]).candidates["books"] == "sampled-99:test"
    assert table([run], ["recall@20"], split="validation").candidates["books"] == "sampled-99:validation"


def test_the_seed_of_the_split_is_stated():
    made = table([result("a", 1, 0.5, 0.5, split_seed=42)], ["recall@20"])
    assert "protocol ratio-80-10-10 (split seed 42)" in made.caption


@pytest.mark.parametrize(
    ("changes", "what", "both"),
    [
        ({"split_seed": 7}, "protocol", ("ratio-80-10-10", "split seed 7")),
        ({"protocol": "leave-one-out"}, "protocol", ("ratio-80-10-10", "leave-one-out")),
        ({"data_fingerprint": "cd34"}, "data fingerprint", ("ab12", "cd34")),
        (
            {"candidates": {"books": "full:100", "toys_and_games": "sampled-99:5d41"}},
            "candidate set of toys_and_games",
            ("full:70", "sampled-99:5d41"),
        ),
    ],
)
def test_what_is_not_comparable_is_not_mixed(changes, what, both):
    with pytest.raises(CrossfedError) as error:
        table([*RESULTS, result("other", 3, 0.1, 0.1, **changes)], ["recall@20"])
    told = str(error.value)
    assert what in told and all(value in told for value in both) and "other seed 3" in told


def test_the_same_seed_twice_is_refused():
    with pytest.raises(CrossfedError, match="two results of fedcrf have seed 2"):
        table([*RESULTS, copy.deepcopy(RESULTS[2])], ["recall@20"])


def test_what_is_missing_is_named():
    with pytest.raises(CrossfedError, match="no test map_at_20 for books; it has recall_at_20, ndcg_at_20"):
        table(RESULTS, ["map@20"])
    with pytest.raises(CrossfedError, match="no domain music; it has books, toys_and_games"):
        table(RESULTS, ["recall@20"], domains=["music"])
    with pytest.raises(CrossfedError, match="unknown metric"):
        table(RESULTS, ["recal@20"])
    with pytest.raises(CrossfedError, match="no results"):
        table([], ["recall@20"])


def test_names_cannot_break_the_markdown():
    text = table([result("a|b", 1, 0.5, 0.5)], ["recall@20"]).markdown()
    assert "| a\\|b | 1 |" in text
