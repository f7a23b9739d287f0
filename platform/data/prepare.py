"""From published files to prepared data by a recipe: `prepare(SPEC.yaml, DIR)`.

A spec names the domains, the files of each and the recipe; `shipped()` lists those that come with crossfed. The steps, each
counted in the manifest under `domains.<name>.preparation`:

1. rows without user or item are dropped, then rows by the recipe: `required`, `cancellations`, `min_quantity`,
   `min_rating`, and the domain's `keep`;
2. rows are ordered by time; equal times by the `ties` rule;
3. of rows that agree in the `unique` columns the first or last in that order is kept (`duplicates`);
4. users with fewer than `user_core` and items with fewer than `item_core` interactions are dropped, over and over until none
   is left; with `users: shared` users that are not in every domain are dropped in the same loop;
5. texts are joined and cleaned; with `without_text: drop` items without text go, and step 4 is repeated;
6. users and items are numbered in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from crossfed.platform.data.readers import Source, Table, Texts, read_items, read_table
from crossfed.platform.data.store import PreparedData, Writer, valid_domain_name
from crossfed.platform.data.text import join_fields
from crossfed.platform.errors import CrossfedError

Report = Callable[[str], None]
Rows = npt.NDArray[np.int64]
Core = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RowFilter(_Strict):
    """Keeps a row by the words in one of its columns, upper or lower case alike.

    Attributes:
        column: a part or a column of the interactions.
        contains: keep only rows with at least one of these in it; all rows where empty.
        lacks: drop rows with any of these in it.
    """

    column: str
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


class Recipe(_Strict):
    """How rows become interactions.

    Attributes:
        unique: the parts or columns in which two rows agree that count as one interaction.
        duplicates: which of such rows is kept, in time order; `all` keeps every row.
        min_rating, min_quantity: the lowest that is kept; None keeps all.
        cancellations: `drop` removes rows whose order number begins with C.
        required: parts or columns that must not be empty.
        user_core, item_core: the fewest interactions of a user and of an item; 0 does not filter.
        ties: the order of one user's interactions at one time: as in the `file`, or by `item` id.
        text: the text fields in the order in which they are joined; empty for none.
        without_text: items without text are kept with "" and counted, dropped, or refused.
    """

    unique: Annotated[tuple[str, ...], Field(min_length=1)] = ("user", "item")
    duplicates: Literal["first", "last", "all"] = "first"
    min_rating: float | None = None
    min_quantity: float | None = None
    cancellations: Literal["keep", "drop"] = "keep"
    required: tuple[str, ...] = ()
    user_core: Core = 5
    item_core: Core = 5
    ties: Literal["file", "item"] = "file"
    text: tuple[str, ...] = ()
    without_text: Literal["keep", "drop", "fail"] = "keep"


class Counts(_Strict):
    """A domain's size as a paper prints it."""

    users: int
    items: int
    interactions: int

    def __str__(self) -> str:
        return f"{self.users:,} users, {self.items:,} items, {self.interactions:,} interactions"


class DomainSpec(_Strict):
    """A domain: its files, and where its recipe differs from the spec's.

    Attributes:
        interactions: the file of interactions.
        items: the files of item texts, the first that has an item counts; where there are none, texts are columns of the
            interactions and an item takes its most frequent value.
        keep: which rows belong to the domain.
        recipe: what differs from the spec's recipe.
        paper: the size that the paper prints; a difference is reported, not refused.
    """

    interactions: Source
    items: tuple[Source, ...] = ()
    keep: tuple[RowFilter, ...] = ()
    recipe: Recipe = Recipe()
    paper: Counts | None = None


class Spec(_Strict):
    """Domains and recipe of one data set.

    Attributes:
        name, description: for people. users: all, or only those shared by every domain.
        recipe: for every domain, before its own differences. domains: by name, in this order.
    """

    name: str
    description: str = ""
    users: Literal["all", "shared"] = "all"
    recipe: Recipe = Recipe()
    domains: Annotated[dict[str, DomainSpec], Field(min_length=1)]

    @model_validator(mode="after")
    def _domains_are_usable(self) -> Self:
        for name in self.domains:
            if not valid_domain_name(name):
                raise ValueError(f"domain name {name!r}: take letters, digits, '_', '-' and '.', and not 'server'")
        if self.users == "shared" and len(self.domains) < 2:
            raise ValueError("users: shared needs at least two domains")
        return self

    def recipe_of(self, domain: str) -> Recipe:
        """The recipe of one domain."""
        own = self.domains[domain].recipe
        return self.recipe.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


def shipped() -> dict[str, Path]:
    """The specs that come with crossfed, by name."""
    folder = Path(str(files("crossfed.platform.data.specs")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_spec(spec: str | Path) -> Spec:
    """Read a spec from a file, or a shipped one by its name.

    Raises:
        CrossfedError: no such spec, or the first thing in it that is wrong, with its place.
    """
    path = _spec_path(spec)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CrossfedError(f"The spec {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise CrossfedError(f"The spec {path} is not YAML: {' '.join(str(error).split())}.") from error
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        # PyYAML's, for dates that there are not, and numbers and brackets without end
        raise CrossfedError(f"The spec {path} is not YAML: {error}.") from error
    try:
        return Spec.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the spec"
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "no such key"
        raise CrossfedError(f"The spec {path} is wrong at {place}: {message}.") from error


def _spec_path(spec: str | Path) -> Path:
    path = Path(spec)
    if path.is_file():
        return path
    if str(spec) in shipped():
        return shipped()[str(spec)]
    raise CrossfedError(f"There is no spec {spec}; give a YAML file or one of {', '.join(shipped())}.")


@dataclass
class _Domain:
    """A domain on its way: rows in time order, users and items still as codes of `user_ids` and `item_ids`."""

    name: str
    spec: DomainSpec
    recipe: Recipe
    users: npt.NDArray[np.int32]
    items: npt.NDArray[np.int32]
    times: npt.NDArray[np.int64]
    user_ids: list[str]
    item_ids: list[str]
    texts: dict[str, Texts]
    counts: dict[str, Any]

    def keep(self, rows: npt.NDArray[Any]) -> None:
        """Leave only these rows (a mask, or positions in order)."""
        self.users, self.items, self.times = self.users[rows], self.items[rows], self.times[rows]
        self.texts = {name: Texts(column.codes[rows], column.values) for name, column in self.texts.items()}

    @property
    def wanted(self) -> dict[str, int]:
        """Ids of the items that are left → code."""
        return {self.item_ids[code]: int(code) for code in np.unique(self.items)}


def prepare(
    spec: str | Path, out: Path, sources: Path | None = None, report: Report = lambda message: None
) -> PreparedData:
    """Prepare data by a spec.

    Args:
        spec: a YAML file, or the name of a shipped spec. out: the directory to make.
        sources: the directory that the spec's paths are relative to; None is the spec's own.
        report: is given one line about each step, for the terminal.

    Raises:
        CrossfedError: the spec or a source is wrong, a domain is left empty, or `out` cannot be written.
    """
    plan = load_spec(spec)
    base = _base(spec, sources)
    paths = _existing(plan, base)
    with Writer(out, _described(plan)) as writer:
        for name, path in paths.items():
            writer.add_source(name, path)
        if plan.users == "shared":
            domains = [_load(plan, name, paths, report) for name in plan.domains]
            _cores(domains, shared=True)
            texts = [_texts(domain, paths, report) for domain in domains]
            if any(_drop_without_text(domain, text) for domain, text in zip(domains, texts, strict=True)):
                _cores(domains, shared=True)
            for domain, text in zip(domains, texts, strict=True):
                _write(writer, domain, text, report)
        else:
            for name in plan.domains:
                domain = _load(plan, name, paths, report)
                _cores([domain], shared=False)
                text = _texts(domain, paths, report)
                if _drop_without_text(domain, text):
                    _cores([domain], shared=False)
                _write(writer, domain, text, report)
    return PreparedData.open(out)


def _base(spec: str | Path, sources: Path | None) -> Path:
    if sources is not None:
        if not Path(sources).is_dir():
            raise CrossfedError(f"The directory of sources {sources} does not exist.")
        return Path(sources)
    path = _spec_path(spec)
    if path in shipped().values():
        raise CrossfedError(f"The spec {path.stem} comes with crossfed; say where its files are with --sources DIR.")
    return path.parent


def _existing(plan: Spec, base: Path) -> dict[str, Path]:
    """Every source's path by its name in the spec; all that are missing are told at once."""
    wanted = {s.path: s for d in plan.domains.values() for s in (d.interactions, *d.items)}
    paths = {name: base / name for name in wanted}
    if missing := [name for name, path in paths.items() if not path.is_file()]:
        told = [f"{name} (published at {p})" if (p := wanted[name].published) else name for name in missing]
        raise CrossfedError(f"{base} lacks {', '.join(told)}; put the files there, or give another --sources DIR.")
    return paths


def _described(plan: Spec) -> dict[str, Any]:
    """The recipe as the manifest keeps it: all that decides the result, and no place on a disk."""
    domains = {}
    for name, domain in plan.domains.items():
        described = domain.model_dump(mode="json", exclude={"recipe", "paper"}, exclude_defaults=True)
        domains[name] = described | {"recipe": plan.recipe_of(name).model_dump(mode="json")}
    return {"name": plan.name, "users": plan.users, "domains": domains}


def _load(plan: Spec, name: str, paths: Mapping[str, Path], report: Report) -> _Domain:
    """Read a domain's interactions and carry out steps 1 to 3."""
    spec, recipe = plan.domains[name], plan.recipe_of(name)
    fields = () if spec.items else recipe.text
    columns = dict.fromkeys(["user", "item", *recipe.required, *(f.column for f in spec.keep), *fields])
    columns |= dict.fromkeys(column for column in recipe.unique if column != "time")
    if recipe.cancellations == "drop":
        columns["order"] = None
    numbers = [n for n, low in (("rating", recipe.min_rating), ("quantity", recipe.min_quantity)) if low is not None]
    report(f"{name}: reading {spec.interactions.path}")
    table = read_table(paths[spec.interactions.path], spec.interactions, list(columns), numbers)
    counts: dict[str, Any] = {"layout": table.layout, "times": table.time_kind, **table.progress.counts()}
    rows, dropped = _filtered(table, spec, recipe)
    order = _in_time_order(table, rows, recipe)
    kept = order[_first_or_last(table, order, recipe)]
    dropped["duplicates"] = len(order) - len(kept)
    counts["dropped"] = {reason: n for reason, n in dropped.items() if n}
    users, items = table.texts["user"], table.texts["item"]
    if not len(kept):
        raise CrossfedError(
            f"Domain {name}: no row of {spec.interactions.path} is left after the recipe's filters "
            f"({', '.join(f'{reason}: {n}' for reason, n in counts['dropped'].items())}); loosen them."
        )
    return _Domain(
        name=name,
        spec=spec,
        recipe=recipe,
        users=users.codes[kept],
        items=items.codes[kept],
        times=table.times[kept] // table.time_step,
        user_ids=users.values,
        item_ids=items.values,
        texts={field: Texts(table.texts[field].codes[kept], table.texts[field].values) for field in fields},
        counts=counts,
    )


def _filtered(table: Table, spec: DomainSpec, recipe: Recipe) -> tuple[Rows, dict[str, int]]:
    """Step 1: the rows that stay, in file order, and how many each rule dropped."""
    keep = np.ones(table.progress.rows, bool)
    dropped: dict[str, int] = {}

    def drop(reason: str, stays: npt.NDArray[np.bool_]) -> None:
        nonlocal keep
        dropped[reason] = dropped.get(reason, 0) + int((keep & ~stays).sum())
        keep &= stays

    for column in dict.fromkeys(("user", "item", *recipe.required)):
        drop(f"without {column}", table.texts[column].codes >= 0)
    if recipe.cancellations == "drop":
        drop("cancellations", ~_by_value(table.texts["order"], lambda order: order[:1] in "Cc"))
    if recipe.min_quantity is not None:
        drop("below min_quantity", table.numbers["quantity"] >= recipe.min_quantity)
    if recipe.min_rating is not None:
        drop("below min_rating", table.numbers["rating"] >= recipe.min_rating)
    for row_filter in spec.keep:
        contains = [word.casefold() for word in row_filter.contains] or [""]
        lacks = [word.casefold() for word in row_filter.lacks]

        def stays(value: str, contains: list[str] = contains, lacks: list[str] = lacks) -> bool:
            value = value.casefold()
            return any(word in value for word in contains) and not any(word in value for word in lacks)

        drop(f"by words in {row_filter.column}", _by_value(table.texts[row_filter.column], stays))
    return np.flatnonzero(keep), dropped


def _by_value(column: Texts, test: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    """Apply a test to every distinct value, and to "" for rows without one."""
    results = np.array([*(test(value) for value in column.values), test("")], bool)
    return results[column.codes]  # code -1 is the last


def _in_time_order(table: Table, rows: Rows, recipe: Recipe) -> Rows:
    """Step 2: by time, then by the tie rule, then by place in the file (sorting is stable)."""
    if recipe.ties == "file":
        return rows[np.argsort(table.times[rows], kind="stable")]
    items = table.texts["item"]
    rank = np.empty(len(items.values), np.int64)
    rank[sorted(range(len(items.values)), key=items.values.__getitem__)] = np.arange(len(items.values))
    return rows[np.lexsort((rank[items.codes[rows]], table.times[rows]))]


def _first_or_last(table: Table, order: Rows, recipe: Recipe) -> npt.NDArray[np.bool_]:
    """Step 3: a mask over `order`."""
    if recipe.duplicates == "all":
        return np.ones(len(order), bool)
    columns = {c: table.times[order] if c == "time" else table.texts[c].codes[order] for c in recipe.unique}
    return ~pd.DataFrame(columns).duplicated(keep=recipe.duplicates).to_numpy()


def core(
    users: npt.NDArray[np.integer], items: npt.NDArray[np.integer], user_core: int, item_core: int
) -> npt.NDArray[np.bool_]:
    """The largest set of rows in which every user has at least `user_core` and every item `item_core` rows.

    Args:
        users, items: [n] codes. Returns: mask [n]. The result does not depend on the order of dropping.
    """
    keep = np.ones(len(users), bool)
    while True:
        stays = np.bincount(users[keep], minlength=1)[users[keep]] >= user_core
        stays &= np.bincount(items[keep], minlength=1)[items[keep]] >= item_core
        if stays.all():
            return keep
        keep[np.flatnonzero(keep)[~stays]] = False


def _cores(domains: list[_Domain], shared: bool) -> None:
    """Step 4, to a fixed point over all domains given."""
    before = [(len(d.users), len(np.unique(d.users)), len(np.unique(d.items))) for d in domains]
    while True:
        size = sum(len(d.users) for d in domains)
        for domain in domains:
            domain.keep(core(domain.users, domain.items, domain.recipe.user_core, domain.recipe.item_core))
        if shared:
            present = [{d.user_ids[code] for code in np.unique(d.users)} for d in domains]
            everywhere = set.intersection(*present)
            for domain in domains:
                stays = np.array([user in everywhere for user in domain.user_ids], bool)
                domain.keep(stays[domain.users])
        for domain, (rows, users, items) in zip(domains, before, strict=True):
            if not len(domain.users):
                recipe = domain.recipe
                raise CrossfedError(
                    f"Domain {domain.name} is emptied by its {recipe.user_core}-core of users and {recipe.item_core}-core of "
                    f"items{' with shared users only' if shared else ''} (before it: {users} users, {items} items, "
                    f"{rows} interactions); lower user_core and item_core, or give more data."
                )
        if sum(len(d.users) for d in domains) == size:
            break
    for domain, (rows, _, _) in zip(domains, before, strict=True):
        if rows > len(domain.users):
            dropped = domain.counts["dropped"]
            dropped["by k-core"] = dropped.get("by k-core", 0) + rows - len(domain.users)


def _texts(domain: _Domain, paths: Mapping[str, Path], report: Report) -> dict[str, str]:
    """Step 5: item id → text for the items that are left; an item without text may be absent."""
    recipe, counts = domain.recipe, domain.counts
    if not recipe.text:
        return {}
    if not domain.spec.items:
        texts = _texts_of_rows(domain)
        counts["text_fields"] = {field: len(set(domain.items[c.codes >= 0])) for field, c in domain.texts.items()}
        return texts
    found: dict[str, str] = {}
    with_field = dict.fromkeys(recipe.text, 0)
    wanted = domain.wanted
    counts["item_files"] = {}
    for source in domain.spec.items:
        report(f"{domain.name}: reading {source.path}")
        read = read_items(paths[source.path], source, recipe.text, wanted.keys() - found.keys())
        found |= read.texts
        for field, n in read.with_field.items():
            with_field[field] += n
        counts["item_files"][source.path] = {
            "layout": read.layout,
            "items": len(read.texts),
            "duplicates": read.duplicates,
            **read.progress.counts(),
        }
    counts["text_fields"] = with_field
    counts["items_without_row"] = len(wanted.keys() - found.keys())
    return found


def _texts_of_rows(domain: _Domain) -> dict[str, str]:
    """Every item's most frequent value of each field; of equally frequent ones the earliest."""
    best: dict[int, dict[str, object]] = {}
    for field, column in domain.texts.items():
        filled = np.flatnonzero(column.codes >= 0)
        pairs = domain.items[filled].astype(np.int64) * max(len(column.values), 1) + column.codes[filled]
        distinct, first, n = np.unique(pairs, return_index=True, return_counts=True)
        items, values = np.divmod(distinct, max(len(column.values), 1))
        order = np.lexsort((first, -n, items))
        _, top = np.unique(items[order], return_index=True)
        for item, value in zip(items[order][top].tolist(), values[order][top].tolist(), strict=True):
            best.setdefault(item, {})[field] = column.values[value]
    return {domain.item_ids[item]: join_fields(row, domain.recipe.text) for item, row in best.items()}


def _drop_without_text(domain: _Domain, texts: Mapping[str, str]) -> bool:
    """Apply the rule for items without text; whether any went."""
    without = [item for item in domain.wanted if not texts.get(item)]
    if not without or domain.recipe.without_text == "keep":
        return False
    if domain.recipe.without_text == "fail" or len(without) == len(domain.wanted):
        raise CrossfedError(
            f"Domain {domain.name}: {len(without)} of {len(domain.wanted)} items have no text, {min(without)} among them; set "
            "`without_text` to keep or drop, or add a field to `text`."
        )
    gone = np.zeros(len(domain.item_ids), bool)
    gone[[domain.wanted[item] for item in without]] = True
    rows = gone[domain.items]
    domain.counts["dropped"]["items without text"] = int(rows.sum())
    domain.keep(~rows)
    return True


def _write(writer: Writer, domain: _Domain, texts: Mapping[str, str], report: Report) -> None:
    """Step 6, and hand the domain over."""
    users, user_ids = _numbered(domain.users, domain.user_ids)
    items, item_ids = _numbered(domain.items, domain.item_ids)
    sizes = Counts(users=len(user_ids), items=len(item_ids), interactions=len(users))
    report(f"{domain.name}: {sizes}")
    counts, paper = domain.counts, domain.spec.paper
    if paper is not None and paper != sizes:
        counts["paper"] = paper.model_dump()
        report(f"{domain.name}: the paper has {paper}")
    writer.add_domain(
        domain.name, users, items, domain.times, user_ids, item_ids, [texts.get(i, "") for i in item_ids], counts
    )


def _numbered(codes: npt.NDArray[np.int32], ids: list[str]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Number the ids that occur from 0 in their own order."""
    present = sorted(np.unique(codes).tolist(), key=ids.__getitem__)
    number = np.full(len(ids), -1, np.int64)
    number[present] = np.arange(len(present))
    return number[codes], [ids[code] for code in present]


__all__ = ["Counts", "DomainSpec", "Recipe", "RowFilter", "Spec", "core", "load_spec", "prepare", "shipped"]
