"""From published files to prepared data by a recipe: `prepare(SPEC.yaml, DIR)`.

A spec names the domains, the files of each and the recipe; `shipped()` lists those that come with
crossfed. The steps, each counted in the manifest under `domains.<name>.preparation`:

1. rows without user or item are dropped, then rows by the recipe: `missing_time`, `required`,
   `cancellations`, `min_quantity`, `min_rating`, and the domain's `keep`;
2. rows are ordered by time; equal times by the `ties` rule;
3. of rows that agree in the `unique` columns the first or last in that order is kept
   (`duplicates`);
4. users with fewer than `user_core` and items with fewer than `item_core` interactions are dropped,
   over and over until none is left; with `users: shared` users that are not in every domain are
   dropped in the same loop;
5. texts are joined and cleaned; with `without_text: drop` items without text go, and step 4 is
   repeated;
6. users and items are numbered in the order of their ids.

What each step took is told on the screen as well, and what looks odd: ids such as `nan`, dates of
another age, ids that are numbers of each domain's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from crossfed.platform.data import plausibility
from crossfed.platform.data.columns import stable_order
from crossfed.platform.data.readers import (
    Progress,
    Source,
    Table,
    Texts,
    joined,
    read_items,
    read_table,
)
from crossfed.platform.data.store import PreparedData, Writer, valid_domain_name
from crossfed.platform.data.text import join_fields
from crossfed.platform.errors import CrossfedError
from crossfed.platform.registry import nearest
from crossfed.platform.yaml_text import load_yaml

Report = Callable[[str], None]
_MATCHED = 0.5
"""The share of items with a row in the item files below which it is told with examples."""
Rows = npt.NDArray[np.int64]
Core = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RowFilter(_Strict):
    """Keeps a row by the words in one of its columns, upper or lower case alike."""

    column: str = Field(description="a part or a column of the interactions")
    contains: tuple[str, ...] = Field(
        (), description="keep only rows with at least one of these in it; all rows where empty"
    )
    lacks: tuple[str, ...] = Field((), description="drop rows with any of these in it")


class Recipe(_Strict):
    """How rows become interactions."""

    unique: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        ("user", "item"),
        description="the parts or columns in which two rows agree that count as one interaction",
    )
    duplicates: Literal["first", "last", "all"] = Field(
        "first",
        description="which of such rows is kept, in time order; all keeps every row, and is "
        "refused where a user then has an "
        "item more than once",
    )
    missing_time: Literal["drop", "error"] = Field(
        "error",
        description="rows without a time are dropped and counted, or refused; `required: "
        "[time]` drops them, too",
    )
    min_rating: float | None = Field(
        None, description="the lowest rating that is kept; not given: all"
    )
    min_quantity: float | None = Field(
        None, description="the lowest quantity that is kept; not given: all"
    )
    cancellations: Literal["keep", "drop"] = Field(
        "keep", description="drop removes rows whose order number begins with C"
    )
    required: tuple[str, ...] = Field((), description="parts or columns that must not be empty")
    user_core: Core = Field(5, description="the fewest interactions of a user; 0 does not filter")
    item_core: Core = Field(5, description="the fewest interactions of an item; 0 does not filter")
    ties: Literal["file", "item"] = Field(
        "file",
        description="the order of one user's interactions at one time: as in the file, "
        "or by item id",
    )
    text: tuple[str, ...] = Field(
        (), description="the text fields in the order in which they are joined; empty for none"
    )
    without_text: Literal["keep", "drop", "fail"] = Field(
        "keep", description='items without text are kept with "" and counted, dropped, or refused'
    )

    @property
    def drops_missing_times(self) -> bool:
        """Whether rows without a time are dropped."""
        return self.missing_time == "drop" or "time" in self.required


class Counts(_Strict):
    """A domain's size as a paper prints it."""

    users: int
    items: int
    interactions: int

    def __str__(self) -> str:
        return f"{self.users:,} users, {self.items:,} items, {self.interactions:,} interactions"


def _several(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


class DomainSpec(_Strict):
    """A domain: its files, and where its recipe differs from the spec's."""

    interactions: Annotated[tuple[Source, ...], BeforeValidator(_several), Field(min_length=1)] = (
        Field(
            description="the file of interactions, or a list of such files, which are read one "
            "after the other"
        )
    )
    items: Annotated[tuple[Source, ...], BeforeValidator(_several)] = Field(
        (),
        description="the files of item texts, the first with text for an item counts; without "
        "any, texts are columns of the "
        "interactions and an item takes its most frequent value",
    )
    keep: tuple[RowFilter, ...] = Field((), description="which rows belong to the domain")
    recipe: Recipe = Field(Recipe(), description="what differs from the spec's recipe")
    paper: Counts | None = Field(
        None,
        description="users, items and interactions that the paper prints; a difference "
        "is told, not refused",
    )

    @property
    def sources(self) -> tuple[Source, ...]:
        """All files of the domain."""
        return (*self.interactions, *self.items)


class Spec(_Strict):
    """Domains and recipe of one data set."""

    name: str = Field(description="of the data set; for people")
    description: str = Field("", description="for people")
    users: Literal["all", "shared"] = Field(
        "all", description="all, or only those shared by every domain"
    )
    recipe: Recipe = Field(Recipe(), description="for every domain, before its own differences")
    domains: Annotated[dict[str, DomainSpec], Field(min_length=1)] = Field(
        description="the domains by name, in this order"
    )

    @model_validator(mode="after")
    def _domains_are_usable(self) -> Self:
        for name in self.domains:
            if not valid_domain_name(name):
                raise ValueError(
                    f"domain name {name!r}: take letters, digits, '_', '-' and "
                    f"'.', and not 'server'"
                )
        if self.users == "shared" and len(self.domains) < 2:
            raise ValueError("users: shared needs at least two domains")
        return self

    def recipe_of(self, domain: str) -> Recipe:
        """The recipe of one domain."""
        own = self.domains[domain].recipe
        return self.recipe.model_copy(
            update={name: getattr(own, name) for name in own.model_fields_set}
        )


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
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CrossfedError(f"The spec {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise CrossfedError(
            f"The spec {path} is not YAML: {' '.join(str(error).split())}."
        ) from error
    except (
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:
        # PyYAML's, for dates that there are not, and numbers and brackets without end
        raise CrossfedError(f"The spec {path} is not YAML: {error}.") from error
    try:
        return Spec.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        loc = first["loc"]
        if isinstance(content, dict):
            loc = _as_written(loc, content)
        place = ".".join(str(part) for part in loc) or "the spec"
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = _model_at(first["loc"][:-1]).model_fields
            message = f"no such key{nearest(str(loc[-1]), known)}".rstrip(".")
        raise CrossfedError(f"The spec {path} is wrong at {place}: {message}.") from error


def _as_written(loc: tuple[int | str, ...], content: Any) -> tuple[int | str, ...]:
    """A place without the number 0 of a list that was written as its only entry."""
    written: list[int | str] = []
    for part in loc:
        if isinstance(part, int) and not isinstance(content, list):
            continue
        written.append(part)
        if isinstance(content, dict):
            content = content.get(part)
        elif isinstance(content, list) and isinstance(part, int) and part < len(content):
            content = content[part]
    return tuple(written)


def _model_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The model whose keys stand at a place of a spec."""
    model: type[BaseModel] = Spec
    for part in loc:
        if model is Spec and part == "domains":
            model = DomainSpec
        elif isinstance(part, str) and (model, part) in _MODELS:
            model = _MODELS[model, part]
    return model


_MODELS: dict[tuple[type[BaseModel], str], type[BaseModel]] = {
    (Spec, "recipe"): Recipe,
    (DomainSpec, "recipe"): Recipe,
    (DomainSpec, "interactions"): Source,
    (DomainSpec, "items"): Source,
    (DomainSpec, "keep"): RowFilter,
    (DomainSpec, "paper"): Counts,
}


def keys() -> dict[str, list[tuple[str, str, str]]]:
    """Every key that a spec may hold: place → (key, default, meaning)."""
    places: dict[str, type[BaseModel]] = {
        "spec": Spec,
        "spec: domains.NAME": DomainSpec,
        "recipe (of a spec or a domain)": Recipe,
        "a source: domains.NAME.interactions, domains.NAME.items": Source,
        "a filter: domains.NAME.keep": RowFilter,
    }
    return {
        place: [
            (
                key,
                "" if info.is_required() else _default(info.get_default()),
                info.description or "",
            )
            for key, info in model.model_fields.items()
        ]
        for place, model in places.items()
    }


def _default(value: Any) -> str:
    if value is None or isinstance(value, BaseModel) or value in ((), {}, ""):
        return ""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _spec_path(spec: str | Path) -> Path:
    path = Path(spec)
    if path.is_file():
        return path
    if str(spec) in shipped():
        return shipped()[str(spec)]
    raise CrossfedError(
        f"There is no spec {spec}; give a YAML file or one of {', '.join(shipped())}."
    )


@dataclass
class _Domain:
    """A domain on its way: rows in time order, users and items still as codes of `user_ids` and
    `item_ids`.
    """

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
        self.texts = {
            name: Texts(column.codes[rows], column.values) for name, column in self.texts.items()
        }

    @property
    def wanted(self) -> dict[str, int]:
        """Ids of the items that are left → code."""
        return {
            self.item_ids[code]: code for code in np.flatnonzero(np.bincount(self.items)).tolist()
        }


def prepare(
    spec: str | Path, out: Path, sources: Path | None = None, report: Report = lambda message: None
) -> PreparedData:
    """Prepare data by a spec.

    Args:
        spec: a YAML file, or the name of a shipped spec. out: the directory to make.
        sources: the directory that the spec's paths are relative to; None is the spec's own.
        report: is given one line about each step, for the terminal.

    Raises:
        CrossfedError: the spec or a source is wrong, a domain is left empty, or `out` cannot be
            written.
    """
    plan = load_spec(spec)
    base = _base(spec, sources)
    paths = _existing(plan, base)
    with Writer(out, _described(plan)) as writer:
        for name, path in paths.items():
            writer.add_source(name, path)
        if plan.users == "shared":
            domains = [_load(plan, name, paths, report) for name in plan.domains]
            _cores(domains, report, shared=True)
            texts = [_texts(domain, paths, report) for domain in domains]
            if any(
                _drop_without_text(domain, text)
                for domain, text in zip(domains, texts, strict=True)
            ):
                _cores(domains, report, shared=True)
            for domain, text in zip(domains, texts, strict=True):
                _write(writer, domain, text, report)
        else:
            for name in plan.domains:
                domain = _load(plan, name, paths, report)
                _cores([domain], report, shared=False)
                text = _texts(domain, paths, report)
                if _drop_without_text(domain, text):
                    _cores([domain], report, shared=False)
                _write(writer, domain, text, report)
    data = PreparedData.open(out)
    for note in plausibility.shared_numbers(data):
        report(f"note: {note}")
    return data


def _base(spec: str | Path, sources: Path | None) -> Path:
    if sources is not None:
        if not Path(sources).is_dir():
            raise CrossfedError(f"The directory of sources {sources} does not exist.")
        return Path(sources)
    path = _spec_path(spec)
    if path in shipped().values():
        raise CrossfedError(
            f"The spec {path.stem} comes with crossfed; say where its files are with --sources DIR."
        )
    return path.parent


def _existing(plan: Spec, base: Path) -> dict[str, Path]:
    """Every source's path by its name in the spec; all that are missing are told at once."""
    wanted = {s.path: s for d in plan.domains.values() for s in d.sources}
    paths = {name: base / name for name in wanted}
    if missing := [name for name, path in paths.items() if not path.is_file()]:
        told = [
            f"{name} (published at {p})" if (p := wanted[name].published) else name
            for name in missing
        ]
        raise CrossfedError(
            f"{base} lacks {', '.join(told)}; put the files there, or give another --sources DIR."
        )
    return paths


def _described(plan: Spec) -> dict[str, Any]:
    """The recipe as the manifest keeps it: all that decides the result, and no place on a disk."""
    domains = {}
    for name, domain in plan.domains.items():
        described = domain.model_dump(
            mode="json", exclude={"recipe", "paper"}, exclude_defaults=True
        )
        if len(domain.interactions) == 1:
            described["interactions"] = described["interactions"][0]
        domains[name] = described | {"recipe": plan.recipe_of(name).model_dump(mode="json")}
    return {"name": plan.name, "users": plan.users, "domains": domains}


def _load(plan: Spec, name: str, paths: Mapping[str, Path], report: Report) -> _Domain:
    """Read a domain's interactions and carry out steps 1 to 3."""
    spec, recipe = plan.domains[name], plan.recipe_of(name)
    fields = () if spec.items else recipe.text
    columns = dict.fromkeys(
        ["user", "item", *recipe.required, *(f.column for f in spec.keep), *fields]
    )
    columns |= dict.fromkeys(recipe.unique)
    columns.pop("time", None)
    if recipe.cancellations == "drop":
        columns["order"] = None
    numbers = [
        n
        for n, low in (("rating", recipe.min_rating), ("quantity", recipe.min_quantity))
        if low is not None
    ]
    tables = []
    for source in spec.interactions:
        report(f"{name}: reading {source.path}")
        table = read_table(
            paths[source.path], source, list(columns), numbers, recipe.drops_missing_times
        )
        report(f"{name}: {_read(source.path, table.described, table.progress)}")
        tables.append(table)
    table = joined(tables)
    for note in (*table.notes, *plausibility.ids(table.texts), *plausibility.dates(table)):
        report(f"{name}: note: {note}")
    counts: dict[str, Any] = {
        "layout": table.layout,
        "times": table.time_kind,
        **table.progress.counts(),
    }
    rows, dropped = _filtered(table, spec, recipe)
    order = _in_time_order(table, rows, recipe)
    kept = order[_first_or_last(table, order, recipe)]
    dropped["duplicates"] = len(order) - len(kept)
    counts["dropped"] = {reason: n for reason, n in dropped.items() if n}
    if counts["dropped"]:
        report(
            f"{name}: {_dropped(counts['dropped'], recipe)}; {len(kept):,} of "
            f"{table.progress.rows:,} rows are left"
        )
    users, items = table.texts["user"], table.texts["item"]
    if not len(kept):
        files = ", ".join(source.path for source in spec.interactions)
        raise CrossfedError(
            f"Domain {name}: no row of {files} is left after the recipe's filters "
            f"({', '.join(f'{reason}: {n}' for reason, n in counts['dropped'].items())}); "
            f"loosen them."
        )
    return _Domain(
        name=name,
        spec=spec,
        recipe=recipe,
        users=users.codes[kept],
        items=items.codes[kept],
        times=table.times.whole[kept],
        user_ids=users.values,
        item_ids=items.values,
        texts={
            field: Texts(table.texts[field].codes[kept], table.texts[field].values)
            for field in fields
        },
        counts=counts,
    )


def _read(path: str, described: str, progress: Progress) -> str:
    """What was read of a file, in words."""
    words = f"{progress.rows:,} rows in {path} (read as {described})"
    if progress.broken:
        words += (
            f", {progress.broken:,} broken lines, the first {progress.first_broken} "
            f"({progress.reason})"
        )
    if progress.stray:
        words += f", {progress.stray:,} with a quotation mark taken as a character"
    return words


def _dropped(dropped: Mapping[str, int], recipe: Recipe) -> str:
    """What the recipe dropped, in words."""
    words = {"duplicates": f"repeated in {', '.join(recipe.unique)} ({recipe.duplicates} kept)"}
    return "dropped " + ", ".join(
        f"{n:,} {words.get(reason, reason)}" for reason, n in dropped.items()
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
        if column != "time":
            drop(f"without {column}", table.texts[column].codes >= 0)
    if table.times.missing is not None:
        drop("without time", ~table.times.missing)
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
            return any(word in value for word in contains) and not any(
                word in value for word in lacks
            )

        drop(f"by words in {row_filter.column}", _by_value(table.texts[row_filter.column], stays))
    return np.flatnonzero(keep), dropped


def _by_value(column: Texts, test: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    """Apply a test to every distinct value, and to "" for rows without one."""
    results = np.array([*(test(value) for value in column.values), test("")], bool)
    return results[column.codes]  # code -1 is the last


def _in_time_order(table: Table, rows: Rows, recipe: Recipe) -> Rows:
    """Step 2: by time, then by the tie rule, then by place in the file (sorting is stable)."""
    if recipe.ties == "file":
        return table.times.order(rows)
    items = table.texts["item"]
    rank = np.empty(len(items.values), np.int64)
    rank[sorted(range(len(items.values)), key=items.values.__getitem__)] = np.arange(
        len(items.values)
    )
    return table.times.order(rows, rank[items.codes[rows]])


def _first_or_last(table: Table, order: Rows, recipe: Recipe) -> npt.NDArray[np.bool_]:
    """Step 3: a mask over `order`."""
    if recipe.duplicates == "all":
        return np.ones(len(order), bool)
    columns: dict[str, npt.NDArray[Any]] = {
        c: table.texts[c].codes[order] for c in recipe.unique if c != "time"
    }
    if "time" in recipe.unique:
        columns["time"] = table.times.whole[order]
        if table.times.nanoseconds is not None:
            columns["time, nanoseconds"] = table.times.nanoseconds[order]
    return _alone(list(columns.values()), recipe.duplicates)


def _alone(
    columns: list[npt.NDArray[Any]], keep: Literal["first", "last"]
) -> npt.NDArray[np.bool_]:
    """Of rows that agree in all columns the first or the last: mask [n]."""
    n, key, width = len(columns[0]), np.zeros(len(columns[0]), np.int64), 1
    for column in columns if n else ():
        low, high = int(column.min()), int(column.max())
        width *= high - low + 1
        if width * n >= 2**62:  # too wide for one number that also holds the place
            import pandas as pd  # half a second that is seldom needed

            return ~pd.DataFrame(dict(enumerate(columns))).duplicated(keep=keep).to_numpy()
        key = key * (high - low + 1) + (column - low)
    order = stable_order(key)
    key = key[order]
    other = np.ones(n, bool)
    if keep == "first":
        other[1:] = key[1:] != key[:-1]
    else:
        other[:-1] = key[1:] != key[:-1]
    mask = np.empty(n, bool)
    mask[order] = other
    return mask


def core(
    users: npt.NDArray[np.integer], items: npt.NDArray[np.integer], user_core: int, item_core: int
) -> npt.NDArray[np.bool_]:
    """The largest set of rows in which every user has at least `user_core` and every item
    `item_core` rows.

    Args:
        users, items: [n] codes. Returns: mask [n]. The result does not depend on the order of
            dropping.
    """
    keep = np.ones(len(users), bool)
    while True:
        stays = np.bincount(users[keep], minlength=1)[users[keep]] >= user_core
        stays &= np.bincount(items[keep], minlength=1)[items[keep]] >= item_core
        if stays.all():
            return keep
        keep[np.flatnonzero(keep)[~stays]] = False


def _present(codes: npt.NDArray[np.int32]) -> int:
    """How many different codes there are."""
    return int(np.count_nonzero(np.bincount(codes))) if len(codes) else 0


def _cores(domains: list[_Domain], report: Report, shared: bool) -> None:
    """Step 4, to a fixed point over all domains given."""
    before = [(len(d.users), _present(d.users), _present(d.items)) for d in domains]
    while True:
        size = sum(len(d.users) for d in domains)
        for domain in domains:
            domain.keep(
                core(domain.users, domain.items, domain.recipe.user_core, domain.recipe.item_core)
            )
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
                    f"Domain {domain.name} is emptied by its {recipe.user_core}-core of users "
                    f"and {recipe.item_core}-core of "
                    f"items{' with shared users only' if shared else ''} (before it: {users} "
                    f"users, {items} items, "
                    f"{rows} interactions); lower user_core and item_core, or give more data."
                )
        if sum(len(d.users) for d in domains) == size:
            break
    for domain, (rows, _, _) in zip(domains, before, strict=True):
        if rows > len(domain.users):
            dropped = domain.counts["dropped"]
            dropped["by k-core"] = dropped.get("by k-core", 0) + rows - len(domain.users)
            recipe = domain.recipe
            report(
                f"{domain.name}: {recipe.user_core}-core of users and {recipe.item_core}-core "
                f"of items"
                f"{' with shared users only' if shared else ''}: {rows:,} → "
                f"{len(domain.users):,} interactions"
            )


def _texts(domain: _Domain, paths: Mapping[str, Path], report: Report) -> dict[str, str]:
    """Step 5: item id → text for the items that are left; an item without text may be absent."""
    recipe, counts = domain.recipe, domain.counts
    if not recipe.text:
        return {}
    if not domain.spec.items:
        texts = _texts_of_rows(domain)
        counts["text_fields"] = {
            field: len(set(domain.items[c.codes >= 0])) for field, c in domain.texts.items()
        }
        return texts
    found: dict[str, str] = {}
    with_field = dict.fromkeys(recipe.text, 0)
    wanted = domain.wanted
    others: list[str] = []
    counts["item_files"] = {}
    for source in domain.spec.items:
        report(f"{domain.name}: reading {source.path}")
        without = {item for item in wanted if not found.get(item)}
        read = read_items(paths[source.path], source, recipe.text, without)
        report(
            f"{domain.name}: {_read(source.path, read.described, read.progress)}, "
            f"{len(read.texts):,} of its items wanted"
        )
        for note in read.notes:
            report(f"{domain.name}: note: {note}")
        found |= read.texts
        others += read.others
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
    _matched(domain, found, others, report)
    return found


def _matched(domain: _Domain, found: Mapping[str, str], others: list[str], report: Report) -> None:
    """Refuse item files that hold none of the domain's items, and say where they hold few."""
    wanted = sorted(domain.wanted.keys() - found.keys())
    if len(found) >= _MATCHED * len(domain.wanted):
        return
    files = ", ".join(source.path for source in domain.spec.items)
    here, there = (" and ".join(map(repr, ids)) or "none" for ids in (wanted[:2], others[:2]))
    told = f"{len(found):,} of {len(domain.wanted):,} items have a row in {files}"
    examples = f"without one are e.g. {here}, and of the ids there e.g. {there} are not wanted"
    if not found:
        raise CrossfedError(
            f"Domain {domain.name}: {told}; {examples}. Ids must be written alike on both "
            f"sides: name the right column "
            "as `columns: {item: …}` of the items, or take the items out."
        )
    report(f"{domain.name}: note: only {told}; {examples}")


def _texts_of_rows(domain: _Domain) -> dict[str, str]:
    """Every item's most frequent value of each field; of equally frequent ones the earliest."""
    best: dict[int, dict[str, object]] = {}
    for field, column in domain.texts.items():
        filled = np.flatnonzero(column.codes >= 0)
        pairs = (
            domain.items[filled].astype(np.int64) * max(len(column.values), 1)
            + column.codes[filled]
        )
        distinct, first, n = np.unique(pairs, return_index=True, return_counts=True)
        items, values = np.divmod(distinct, max(len(column.values), 1))
        order = np.lexsort((first, -n, items))
        _, top = np.unique(items[order], return_index=True)
        for item, value in zip(
            items[order][top].tolist(), values[order][top].tolist(), strict=True
        ):
            best.setdefault(item, {})[field] = column.values[value]
    return {
        domain.item_ids[item]: join_fields(row, domain.recipe.text) for item, row in best.items()
    }


def _drop_without_text(domain: _Domain, texts: Mapping[str, str]) -> bool:
    """Apply the rule for items without text; whether any went."""
    without = [item for item in domain.wanted if not texts.get(item)]
    if not without or domain.recipe.without_text == "keep":
        return False
    if domain.recipe.without_text == "fail" or len(without) == len(domain.wanted):
        raise CrossfedError(
            f"Domain {domain.name}: {len(without)} of {len(domain.wanted)} items have no text, "
            f"{min(without)} among them; set "
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
    _refuse_repeats(domain, users, items, len(item_ids))
    writer.add_domain(
        domain.name,
        users,
        items,
        domain.times,
        user_ids,
        item_ids,
        [texts.get(i, "") for i in item_ids],
        counts,
    )


def _refuse_repeats(domain: _Domain, users: Rows, items: Rows, n_items: int) -> None:
    """No split can part a user's interactions with one item: training would show what is tested."""
    if domain.recipe.duplicates != "all" and set(domain.recipe.unique) <= {"user", "item"}:
        return  # step 3 left none
    pairs = np.sort(users * n_items + items)
    again = pairs[1:][pairs[1:] == pairs[:-1]]
    if not len(again):
        return
    user, item = divmod(int(again[0]), n_items)
    user_id = sorted(domain.user_ids[code] for code in np.unique(domain.users))[user]
    item_id = sorted(domain.item_ids[code] for code in np.unique(domain.items))[item]
    raise CrossfedError(
        f"Domain {domain.name}: {len(again):,} of {len(users):,} interactions repeat a user "
        f"and an item (user {user_id!r} "
        f"has item {item_id!r} {1 + int((again == again[0]).sum())} times), and every split "
        f"would show in training what it "
        "tests; set `duplicates: first` or `last` with `unique: [user, item]`."
    )


def _numbered(
    codes: npt.NDArray[np.int32], ids: list[str]
) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Number the ids that occur from 0 in their own order."""
    present = sorted(
        np.flatnonzero(np.bincount(codes, minlength=len(ids))).tolist(), key=ids.__getitem__
    )
    number = np.full(len(ids), -1, np.int64)
    number[present] = np.arange(len(present))
    return number[codes], [ids[code] for code in present]


__all__ = [
    "Counts",
    "DomainSpec",
    "Recipe",
    "RowFilter",
    "Spec",
    "core",
    "keys",
    "load_spec",
    "prepare",
    "shipped",
]
