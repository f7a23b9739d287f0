"""Tables as text: what is best and second, what cannot break a format, numbers unrounded in CSV."""

import csv
import io
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from crossfed.platform.report.tables import Cell, Column, Grid, p_value, pretty, spread

GRID = Grid(
    title="Test metrics",
    columns=(
        Column("method", right=False),
        Column("seeds"),
        Column("Recall@20", "books"),
        Column("Recall@20", "toys_and_games"),
    ),
    rows=(
        (
            "fed|crf_50%",
            "2",
            Cell("0.130 ± 0.014", second=True),
            Cell("0.550", best=True, mark="†"),
        ),
        ("lightgcn", "1", Cell("0.200", best=True), "0.400"),
    ),
    caption="Mean ± deviation; p < 0.05; ε = 2.",
    records=(
        {"method": "fedcrf", "mean": 0.1234567890123, "std": None},
        {"method": "lightgcn", "mean": 0.2, "std": 0.1},
    ),
    foot=(("improvement", "", "-5.0 %", "+37.5 %"),),
)


def test_markdown():
    assert GRID.markdown() == (
        "| method | seeds | books Recall@20 | toys_and_games Recall@20 |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| fed\\|crf_50% | 2 | <ins>0.130 ± 0.014</ins> | **0.550**† |\n"
        "| lightgcn | 1 | **0.200** | 0.400 |\n"
        "| improvement |  | -5.0 % | +37.5 % |\n"
        "\n"
        "Mean ± deviation; p < 0.05; ε = 2.\n"
    )


def test_latex():
    text = GRID.latex()
    assert r" &  & \multicolumn{1}{c}{books} & \multicolumn{1}{c}{toys\_and\_games} \\" in text
    assert (
        r"\cmidrule(lr){3-3}" in text
        and r"\cmidrule(lr){4-4}" in text
        and r"\cmidrule(lr){1-2}" not in text
    )
    assert r"method & seeds & Recall@20 & Recall@20 \\" in text
    assert (
        r"fed|crf\_50\% & 2 & \underline{0.130 $\pm$ 0.014} & \textbf{0.550}$^{\dagger}$ "
        r"\\"
    ) in text
    assert "improvement &  & $-$5.0 \\% & +37.5 \\% \\\\" in text
    assert r"\caption{Mean $\pm$ deviation; p $<$ 0.05; $\varepsilon$ = 2.}" in text
    assert r"\begin{tabular}{lrrr}" in text and "resizebox" not in text
    # nothing that a plain LaTeX would refuse
    assert not [character for character in text if ord(character) > 127]
    for line in text.splitlines():
        if line.endswith(r"\\"):
            assert len(re.split(r"(?<!\\)&", line)) == 4
    assert all(
        text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") == 1
        for name in ("table", "tabular")
    )


def test_latex_of_a_wide_table_is_scaled():
    wide = Grid("", tuple(Column(str(i)) for i in range(5)), (tuple("12345"),), "")
    assert r"\resizebox{\textwidth}{!}{%" in wide.latex() and r"\end{tabular}}" in wide.latex()
    assert "multicolumn" not in wide.latex()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on the path")
@pytest.mark.parametrize("columns", [1, 3], ids=["fits", "scaled"])
def test_latex_compiles(tmp_path, columns):
    r"""Whatever a method, a setting or a domain is called."""
    name = r"a&b#c_d$e%f~g^h{i}\j λ_KD ≥ 0.5"
    more = tuple(Column(f"x{number}", name) for number in range(columns * 2))
    row = (
        name,
        "1",
        Cell("0.1", best=True, mark="†"),
        Cell("–", second=True, mark="‡"),
        *["−1 %"] * len(more),
    )
    grid = replace(GRID, columns=GRID.columns + more, rows=(row,), caption=name, foot=())
    packages = r"\usepackage{booktabs,graphicx}"
    (tmp_path / "t.tex").write_text(
        rf"\documentclass{{article}}{packages}\begin{{document}}{grid.latex()}\end{{document}}",
        encoding="utf-8",
    )
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and (tmp_path / "t.pdf").is_file(), done.stdout[-1500:]
    assert "Missing character" not in done.stdout


def test_csv_is_unrounded_and_absent_values_are_empty():
    lines = list(csv.DictReader(io.StringIO(GRID.csv())))
    assert [line["method"] for line in lines] == ["fedcrf", "lightgcn"]
    assert float(lines[0]["mean"]) == 0.1234567890123 and lines[0]["std"] == ""


@pytest.mark.parametrize(
    ("p", "told"), [(0.00001, "< 0.0001"), (0.00123, "0.0012"), (0.0456, "0.046"), (1.0, "1.000")]
)
def test_p_values(p, told):
    assert p_value(p) == told


def test_small_texts():
    assert (spread(0.13, 0.0141), spread(0.13, None)) == ("0.1300 ± 0.0141", "0.1300")
    assert [pretty(name) for name in ("ndcg_at_20", "hit_rate_at_1", "recall_at_10")] == [
        "NDCG@20",
        "Hit rate@1",
        "Recall@10",
    ]
