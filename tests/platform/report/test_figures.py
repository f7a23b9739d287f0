"""Figures: what they show is read back from the drawn objects, not from pixels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from crossfed.platform.report.figures import (
    About,
    bytes_per_round,
    codebook_use,
    diagnostics,
    loss_curves,
    model_figures,
    pretty,
    run_figures,
    save,
    validation_curves,
)

ABOUT = About("FedCRF", "synthetic shops", "ratio-80-10-10", "3")
RESULT = {
    "method": "fedcrf",
    "preset": "small",
    "seed": 3,
    "data": {"name": "d3-u700", "synthetic": True},
    "protocol": "ratio-80-10-10",
    "domains": {
        "A": {"selected": {"stage": "finetune", "round": 2, "value": 0.9, "rounds": 3}},
        "B": {"selected": {"rounds": 3}},
    },
}


def history(sent: float = 1000.0) -> list[dict[str, Any]]:
    """Two stages of three rounds; recall of A is best in round 5, of B in round 2."""
    recalls = {"A": [1, 2, 3, 4, 9, 5], "B": [1, 8, 3, 4, 5, 6]}
    rows = []
    for step in range(1, 7):
        metrics = {f"val/{d}/recall_at_20": v[step - 1] / 10 for d, v in recalls.items()}
        metrics |= {f"val/{d}/ndcg_at_20": 0.01 * step for d in recalls} | {
            f"val/{d}/ndcg_at_10": 0.5 for d in recalls
        }
        metrics |= {
            "val/mean/recall_at_20": 0.5,
            "train/A/loss": 1.0 / step,
            "train/server/moved": 1000.0 / step**4,
        }
        stage = "pretrain" if step <= 3 else "finetune"
        rows.append(
            {
                "stage": stage,
                "round": (step - 1) % 3 + 1,
                "step": step,
                "metrics": metrics,
                "bytes_up": sent,
                "bytes_down": sent / 2,
                "seconds": 1.0,
            }
        )
    return rows


def texts(figure: Figure) -> str:
    return "\n".join(
        t.get_text() for t in figure.findobj(lambda o: hasattr(o, "get_text")) if t.get_text()
    )


def test_a_figure_says_what_it_is_about() -> None:
    for figure in run_figures(history(), RESULT).values():
        assert "fedcrf (small) · synthetic d3-u700 · ratio-80-10-10 · seed 3" in texts(figure)


def test_real_data_is_not_called_synthetic() -> None:
    about = About.of({**RESULT, "data": {"name": "beauty", "synthetic": False}, "preset": None})
    assert about == About("fedcrf", "beauty", "ratio-80-10-10", "3")


def stars(figure: Figure, panel: int = 0) -> list[tuple[float, float]]:
    return [
        (line.get_xdata()[0], line.get_ydata()[0])
        for line in figure.axes[panel].lines
        if line.get_marker() == "*"
    ]


def test_validation_curves() -> None:
    figure = validation_curves(history(), ABOUT, {"A": 5, "B": 2})
    assert figure is not None
    recall, ndcg = figure.axes
    assert (recall.get_ylabel(), ndcg.get_ylabel()) == ("Recall@20", "NDCG@20")
    first, second = (line.get_ydata() for line in recall.lines if len(line.get_xdata()) == 7)
    nan = float("nan")  # the line is broken where the stage ends
    assert np.array_equal(first, [0.1, 0.2, 0.3, nan, 0.4, 0.9, 0.5], equal_nan=True)
    assert np.array_equal(second, [0.1, 0.8, 0.3, nan, 0.4, 0.5, 0.6], equal_nan=True)
    assert stars(figure) == [(5, 0.9), (2, 0.8)]
    assert stars(figure, 1) == [(5, 0.05), (2, 0.02)]
    [boundary] = [line for line in recall.lines if list(line.get_ydata()) == [0, 1]]
    assert list(boundary.get_xdata()) == [3.5, 3.5]
    assert {"pretrain", "finetune"} <= {t.get_text() for t in recall.texts}
    assert "A  (Recall@20 0.9000)" in texts(figure)


def test_the_selected_round_is_the_result_s_and_a_domain_without_one_has_no_mark() -> None:
    figure = run_figures(history(), RESULT)["validation"]
    assert stars(figure) == [(5, 0.9)]
    assert "A  (Recall@20 0.9000)" in texts(figure)


def test_rounds_without_evaluation_are_left_out() -> None:
    rows = history()
    del rows[1]["metrics"]["val/A/recall_at_20"]
    figure = validation_curves(rows, ABOUT, {"A": 5}, ["recall_at_20"])
    assert figure is not None
    [axis] = figure.axes
    assert list(axis.lines[0].get_xdata()) == [1, 3, 3.5, 4, 5, 6]


def test_losses_and_diagnostics_have_one_panel_per_name_and_a_log_axis_for_a_wide_range() -> None:
    rows = history()
    for row in rows:
        row["metrics"] |= {"train/server/weight_A_B": 0.5, "train/A/loss_sid": 2.0}
    losses, others = loss_curves(rows, ABOUT), diagnostics(rows, ABOUT)
    assert losses is not None and others is not None
    assert [(a.get_ylabel(), a.get_yscale()) for a in losses.axes] == [
        ("loss", "linear"),
        ("loss sid", "linear"),
    ]
    assert [(a.get_ylabel(), a.get_yscale()) for a in others.axes] == [("moved", "log")]
    assert diagnostics(history()[:0], ABOUT) is None


def test_the_use_of_codebooks_per_level_and_domain() -> None:
    told = {
        "levels": 2,
        "codebook": 8,
        "perplexity": [6.0, 5.0],
        "dead_codes": [0, 1],
        "collision_rate": {"A": 0.25, "B": 0.5},
    }
    figure = codebook_use(told, ABOUT)
    assert [[p.get_height() for p in axis.patches] for axis in figure.axes] == [
        [6.0, 5.0],
        [0.0, 1.0],
        [25.0, 50.0],
    ]


def test_bytes_per_round_counts_all() -> None:
    figure = bytes_per_round(history(), ABOUT)
    assert figure is not None
    assert [p.get_height() for p in figure.axes[0].patches] == [1000.0] * 6 + [500.0] * 6
    assert "up  (total 6 kB)" in texts(figure)
    assert "down  (total 3 kB)" in texts(figure)


def test_stages_that_send_nothing_are_named_instead_of_drawn() -> None:
    rows = [
        row | ({"bytes_up": 0, "bytes_down": 0} if row["stage"] == "finetune" else {})
        for row in history()
    ]
    figure = bytes_per_round(rows, ABOUT)
    assert figure is not None
    assert len(figure.axes[0].patches) == 6
    assert "nothing is sent in finetune" in figure.axes[0].get_xlabel()


def test_a_long_run_has_lines_instead_of_bars() -> None:
    rows = [{**history()[0], "step": step} for step in range(1, 100)]
    figure = bytes_per_round(rows, ABOUT)
    assert figure is not None
    assert not figure.axes[0].patches


@pytest.mark.parametrize("rows", [[], [{**history(0)[0], "metrics": {}}]])
def test_nothing_to_show_is_no_figure(rows: list[dict[str, Any]]) -> None:
    assert run_figures(rows, RESULT) == {}


def test_one_round_of_one_domain() -> None:
    row = {**history()[0], "metrics": {"val/A/recall_at_20": 0.1}}
    assert set(run_figures([row], RESULT)) == {"validation", "bytes"}


def test_pretty() -> None:
    assert [pretty(n) for n in ("ndcg_at_20", "hit_rate_at_5", "mrr_at_10", "auc")] == [
        "NDCG@20", "Hit rate@5", "MRR@10", "Auc"
    ]  # fmt: skip


def test_saved_as_png_without_pyplot(tmp_path: Path) -> None:
    for name, figure in run_figures(history(), RESULT).items():
        path = save(figure, tmp_path / "figures" / f"{name}.png")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 300_000
    code = "import sys, crossfed.platform.report.figures; print('matplotlib.pyplot' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False\n"
    )


def test_prototypes_are_drawn_for_every_domain_that_exports_them(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    table = np.eye(4, 6, dtype=np.float32)
    table[1] = table[0]  # two prototypes that have collapsed into one
    for name in ("books", "films"):
        save_file(
            {"user_prototypes": table, "items": np.eye(5, 3, dtype=np.float32)},
            tmp_path / f"{name}.safetensors",
        )
    drawn = model_figures(tmp_path, ["books", "films"], RESULT)
    assert list(drawn) == ["user_prototypes"]
    heat, _, plane, _ = drawn["user_prototypes"].axes[:4]
    assert heat.get_title() == "books: mean |cos| 0.17, largest 1.00"  # one pair of six
    np.testing.assert_allclose(heat.images[0].get_array()[0], [1, 1, 0, 0], atol=1e-12)
    assert len(plane.collections[0].get_offsets()) == 4
