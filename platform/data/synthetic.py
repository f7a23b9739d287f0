"""Synthetic shops: generated multi-domain data with readable item text, for a first run and for
tests of scale.

Nothing here was observed; the manifest says so, and so must everything that shows a number made
from it.

Every domain is a shop with its own product types. What is common to all shops are *tastes*: a taste
has its brands, prefers some values of each shared attribute (style, note, quality, audience,
occasion), and the words for these values are the same in every shop. An item has one taste, which
draws its attributes, and one type; its text names both.

    a_ut = s_taste <w_u, v_t>       interest of user u in taste t, w_u ~ N(0, I), v_t a random unit vector
    b_uy = s_type <w'_u, z_y>       interest in product type y of this shop
    p(i | u) ∝ pop_i exp(a_ut(i) + b_uy(i)),   without replacement,   pop_i ∝ (rank_i + q)^(-s)

v_t is the same in all shops: which attribute words are liked by the same people holds everywhere
but cannot be read off the words themselves. That is what domains can learn from each other. A user
who is in several shops keeps the id, w_u and w'_u. Users keep buying within a taste for a while, so
that the order of interactions carries information too.

Three dials turn this off by degrees, for data in which it is known how much there is to transfer:
`shared`, the share of tastes that are common to all shops (the others have vectors, words and
brands of the shop's own); `smallest`, how many users the last shop has beside the others;
`taste_in_text`, whether an item's text says anything about its taste. `overlap` is a fourth. Their
defaults change nothing.

Memory grows with the number of interactions (a few bytes each), users and items; never with users ×
items.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from crossfed.platform.data.store import PreparedData, Writer
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import stream

VERSION = 1
"""Of the generator; goes into the recipe. Raise it when the same arguments come to give other data.
"""

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "small": {
            "domains": 3,
            "users": 1_500,
            "items": 1_000,
            "interactions_per_user": 7.0,
            "overlap": 0.0,
        },
        "medium": {
            "domains": 3,
            "users": 20_000,
            "items": 10_000,
            "interactions_per_user": 12.0,
            "overlap": 0.1,
        },
        # The sizes of Amazon Book–Movie in P2P-IAGR's Table 4, with its 18,031 shared users.
        "large": {
            "domains": ("books", "movies"),
            "users": (603_000, 123_000),
            "items": (367_000, 50_000),
            "interactions_per_user": (14.75, 13.75),
            "overlap": 18_031 / 123_000,
        },
    }
)
"""Arguments of `generate` by name of size; "small" is what a run without data uses."""

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

_TASTES = 24
_TASTE_WIDTH, _TYPE_WIDTH = 8, 4
_TASTE_STRENGTH, _TYPE_STRENGTH = 2.4, 1.2
_FAVOURITES, _LOOSE = (0.7, 0.2), 0.1
"""How often an item's attribute has its taste's first and second choice, and how often any value.
"""
_SKEW = 0.8
"""Exponent of the popularity."""
_LEAST = 5
"""Interactions of the least active user."""
_USERS_AT_ONCE, _ITEMS_AT_ONCE = 8_192, 16_384
_START = 1_640_995_200
"""2022-01-01, the first possible timestamp."""
_DAY = 86_400

_SHARED: Mapping[str, tuple[str, ...]] = {
    "style": (
        *("rustic", "minimalist", "vintage", "modern", "bohemian", "nordic", "tropical", "coastal"),
        *("industrial", "romantic", "playful", "elegant", "futuristic", "festive", "gothic", "zen"),
    ),
    "note": (
        *("lavender", "lemon", "vanilla", "mint", "rose", "cinnamon", "coconut", "honey"),
        *("cherry", "ginger", "jasmine", "cedar", "matcha", "peach", "sage", "cocoa"),
    ),
    "quality": (
        *(
            "organic",
            "handmade",
            "recycled",
            "vegan",
            "fair-trade",
            "luxury",
            "budget",
            "award-winning",
        ),
        *(
            "imported",
            "locally made",
            "limited-edition",
            "refillable",
            "travel-size",
            "family-size",
        ),
        *("professional", "certified"),
    ),
    "audience": (
        *(
            "kids",
            "students",
            "beginners",
            "collectors",
            "athletes",
            "pet lovers",
            "new parents",
            "commuters",
        ),
        *(
            "gamers",
            "hikers",
            "artists",
            "night owls",
            "seniors",
            "musicians",
            "teachers",
            "newlyweds",
        ),
    ),
    "occasion": (
        *(
            "birthdays",
            "weddings",
            "picnics",
            "winter holidays",
            "road trips",
            "housewarmings",
            "game nights",
        ),
        *(
            "spa days",
            "study sessions",
            "brunch",
            "camping weekends",
            "movie nights",
            "graduation",
            "anniversaries",
        ),
        *("office parties", "rainy days"),
    ),
}

_SHOPS: Mapping[str, tuple[str, ...]] = {
    "kitchen": (
        *(
            "frying pan",
            "chef knife",
            "mixing bowl",
            "cutting board",
            "tea kettle",
            "baking tray",
            "coffee grinder",
        ),
        *(
            "spice rack",
            "stock pot",
            "rolling pin",
            "salad spinner",
            "measuring cups",
            "toaster",
            "blender",
        ),
        *("cake stand", "oven mitts", "garlic press", "whisk", "colander", "storage jar"),
    ),
    "food": (
        *(
            "granola",
            "herbal tea",
            "coffee beans",
            "trail mix",
            "pasta sauce",
            "jam",
            "crackers",
            "olive oil",
        ),
        *(
            "chocolate bar",
            "popcorn",
            "noodles",
            "protein bar",
            "hot sauce",
            "pancake mix",
            "dried fruit",
            "cookies",
        ),
        *("soup mix", "peanut butter", "sparkling water", "rice"),
    ),
    "beauty": (
        *(
            "face cream",
            "shampoo",
            "lip balm",
            "body lotion",
            "nail polish",
            "hand soap",
            "hair mask",
            "perfume",
        ),
        *(
            "eye shadow",
            "sunscreen",
            "bath salts",
            "face serum",
            "conditioner",
            "makeup brush",
            "mascara",
        ),
        *("shaving gel", "foot scrub", "hair brush", "cleansing oil", "deodorant"),
    ),
    "office": (
        *(
            "notebook",
            "gel pen",
            "desk lamp",
            "stapler",
            "paper tray",
            "desk organizer",
            "sticky notes",
            "binder",
        ),
        *(
            "whiteboard",
            "mouse pad",
            "desk calendar",
            "label maker",
            "pencil case",
            "office chair",
            "envelopes",
        ),
        *("highlighter set", "paper clips", "document folder", "planner", "monitor stand"),
    ),
    "garden": (
        *(
            "planter",
            "watering can",
            "seed kit",
            "garden gloves",
            "bird feeder",
            "wind chime",
            "pruning shears",
        ),
        *(
            "lawn chair",
            "garden hose",
            "plant stand",
            "compost bin",
            "solar lantern",
            "trellis",
            "potting soil",
        ),
        *("fire pit", "garden gnome", "hammock", "rain gauge", "raised bed", "doormat"),
    ),
    "toys": (
        *(
            "puzzle",
            "board game",
            "building blocks",
            "plush bear",
            "toy train",
            "card game",
            "doll house",
            "kite",
        ),
        *(
            "craft kit",
            "yo-yo",
            "toy robot",
            "marble run",
            "play tent",
            "stacking rings",
            "model airplane",
        ),
        *("water blaster", "toy piano", "slime kit", "action figure", "jump rope"),
    ),
    "sports": (
        *(
            "yoga mat",
            "water bottle",
            "running belt",
            "tennis racket",
            "dumbbell set",
            "bike helmet",
            "gym bag",
        ),
        *(
            "resistance bands",
            "soccer ball",
            "swim goggles",
            "foam roller",
            "jump trainer",
            "climbing chalk",
        ),
        *(
            "sweatband",
            "golf balls",
            "balance board",
            "skateboard",
            "fishing rod",
            "ankle weights",
            "dart set",
        ),
    ),
    "pets": (
        *(
            "dog leash",
            "cat tree",
            "pet bed",
            "chew toy",
            "food bowl",
            "cat litter",
            "dog collar",
            "grooming brush",
        ),
        *(
            "fish tank",
            "bird cage",
            "dog treats",
            "cat tunnel",
            "pet carrier",
            "flea comb",
            "scratching post",
        ),
        *("dog coat", "hamster wheel", "training pads", "pet fountain", "catnip mouse"),
    ),
    "travel": (
        *(
            "suitcase",
            "travel pillow",
            "passport holder",
            "luggage tag",
            "packing cubes",
            "day pack",
            "toiletry bag",
        ),
        *(
            "travel adapter",
            "eye mask",
            "money belt",
            "duffel bag",
            "travel journal",
            "neck wallet",
            "rain poncho",
        ),
        *("beach towel", "sun hat", "sandals", "travel mug", "laundry bag", "compression socks"),
    ),
    "music": (
        *(
            "guitar strings",
            "drum sticks",
            "ukulele",
            "microphone",
            "sheet music",
            "metronome",
            "keyboard stand",
        ),
        *(
            "guitar strap",
            "harmonica",
            "headphones",
            "vinyl record",
            "speaker",
            "music stand",
            "violin bow",
        ),
        *("tambourine", "audio cable", "guitar picks", "recorder flute", "turntable", "kalimba"),
    ),
    "books": (
        *(
            "mystery novel",
            "cookbook",
            "travel guide",
            "poetry collection",
            "biography",
            "fantasy saga",
        ),
        *(
            "history book",
            "picture book",
            "science book",
            "romance novel",
            "thriller",
            "graphic novel",
        ),
        *(
            "essay collection",
            "craft manual",
            "short stories",
            "memoir",
            "self-help book",
            "atlas",
            "art book",
        ),
        "language course",
    ),
    "movies": (
        *(
            "comedy",
            "documentary",
            "western",
            "crime drama",
            "space opera",
            "musical",
            "horror film",
            "love story",
        ),
        *(
            "animated film",
            "war film",
            "concert film",
            "heist film",
            "fairy tale",
            "nature series",
            "sitcom",
        ),
        *("martial arts film", "silent film", "road movie", "superhero film", "courtroom drama"),
    ),
}

_SYLLABLES = (
    *(
        "al",
        "bel",
        "cor",
        "dan",
        "el",
        "fen",
        "gal",
        "hol",
        "is",
        "jor",
        "kel",
        "lum",
        "mar",
        "nor",
        "or",
        "pel",
    ),
    *("quin", "ros", "sol", "tal", "ul", "ver", "wil", "xan", "yar", "zel"),
)
_ENDINGS = ("a", "o", "is", "en", "ora", "ex", "ley", "ton", "mere", "wick", "ine", "ano")
_LINES = (
    *(
        "Harbor",
        "Willow",
        "Summit",
        "Meadow",
        "Ember",
        "Orchard",
        "Canyon",
        "Lantern",
        "Juniper",
        "Voyage",
    ),
    *(
        "Prairie",
        "Cascade",
        "Aurora",
        "Cottage",
        "Breeze",
        "Granite",
        "Marina",
        "Thicket",
        "Horizon",
        "Pebble",
    ),
)
_TEMPLATES = (
    "{brand} {line} {style} {type}, {note}. {quality} {type} for {audience}, made for {occasion}.",
    "{style} {quality} {type} by {brand}, {line} series, in {note}. A favourite of {audience} "
    "at {occasion}.",
    "{brand} {quality} {note} {type}. {style} design from the {line} range, for {audience} and "
    "for {occasion}.",
    "{quality} {type} with {note}, {brand} {line}. Its {style} look suits {occasion}; loved by "
    "{audience}.",
)


def generate(
    out: Path,
    domains: int | Sequence[str] = 3,
    users: int | Sequence[int] = 1_500,
    items: int | Sequence[int] = 1_000,
    interactions_per_user: float | Sequence[float] = 7.0,
    overlap: float = 0.0,
    seed: int = 0,
    shared: float = 1.0,
    smallest: float = 1.0,
    taste_in_text: bool = True,
) -> PreparedData:
    """Generate prepared data. The same arguments give the same bytes on the same machine and
    library versions.

    Args:
        out: the directory to make.
        domains: how many shops, or their names (see `shops`); shops beyond the list get a number,
            as in kitchen-2.
        users, items, interactions_per_user: the size of each domain, one value for all or one per
            domain. Users and items are exact. Activity is long-tailed with about this mean and at
            least 5; nobody has more than a quarter of the items. Every item occurs, and where there
            is room at least 5 times.
        overlap: share of the smallest domain's users who are in every domain; all others are in
            one.
        seed: of everything.
        shared: share of the tastes that are the same in all shops. At 0 nothing that is learned in
            one shop holds in another, whether by users (their wishes meet other vectors) or by text
            (the same words go with other tastes).
        smallest: users of the last shop as a share of the number given for it.
        taste_in_text: with False the words of a text are drawn apart from the item's taste, and
            only its product type is told.

    Raises:
        CrossfedError: sizes that cannot be met, an unknown shop, or a disk that cannot be written.
    """
    names = _names(domains)
    if not 0.0 < smallest <= 1.0:
        raise CrossfedError(
            f"Synthetic data: smallest is {smallest}; it is a share of users, above 0 and up to 1."
        )
    if not 0.0 <= shared <= 1.0:
        raise CrossfedError(
            f"Synthetic data: shared is {shared}; it is a share of tastes, from 0 to 1."
        )
    if smallest < 1:
        each = [users] * len(names) if isinstance(users, int) else list(users)
        users = [*each[:-1], round(smallest * each[-1])]
    sizes = _sizes(names, users, items, interactions_per_user)
    if not 0.0 <= overlap <= 1.0:
        raise CrossfedError(
            f"Synthetic data: overlap is {overlap}; it is a share of users, from 0 to 1."
        )
    if seed < 0:
        raise CrossfedError(f"Synthetic data: seed is {seed}; it must not be negative.")
    n_shared = round(overlap * min(size.users for size in sizes))
    recipe = {
        "synthetic": "generated by crossfed, nothing in it was observed",
        "version": VERSION,
        "domains": list(names),
        "users": [size.users for size in sizes],
        "items": [size.items for size in sizes],
        "interactions_per_user": [size.per_user for size in sizes],
        "overlap": overlap,
        "seed": seed,
        **turned(shared=shared, smallest=smallest, taste_in_text=taste_in_text),
    }
    everywhere = _rng(seed, "shared users").standard_normal(
        (n_shared, _TASTE_WIDTH + _TYPE_WIDTH), np.float32
    )
    most = max(size.items for size in sizes)
    tastes = _Tastes.draw(_rng(seed, "tastes"), most)
    common = _rng(seed, "common tastes").permutation(_TASTES) < round(shared * _TASTES)
    with Writer(out, recipe, synthetic=True) as writer:
        first_own = n_shared
        for name, size in zip(names, sizes, strict=True):
            mine = (
                tastes if common.all() else tastes.but(common, _rng(seed, "own tastes", name), most)
            )
            _generate_domain(writer, name, size, mine, everywhere, first_own, seed, taste_in_text)
            first_own += size.users - n_shared
    return PreparedData.open(out)


DIALS: Mapping[str, Any] = MappingProxyType({"shared": 1.0, "smallest": 1.0, "taste_in_text": True})
"""What dials are by default. They came later: data made without them are described as before."""


def turned(**arguments: Any) -> dict[str, Any]:
    """Arguments of `generate` without the dials that are as by default."""
    return {
        key: value for key, value in arguments.items() if key not in DIALS or value != DIALS[key]
    }


def ensure(root: Path, **arguments: Any) -> Path:
    """The directory below `root` that holds the data of these arguments of `generate`, generated
    where it is not there.

    Of several processes that want the same data at once, one generates it and the others wait.

    Raises:
        CrossfedError: as `generate` does.
    """
    described = json.dumps({"version": VERSION, **turned(**arguments)}, sort_keys=True)
    out = root / f"synthetic-{hashlib.sha256(described.encode()).hexdigest()[:12]}"
    if out.exists():
        return out
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{out.name}.lock"):
            if not out.exists():
                generate(out, **arguments)
    except OSError as error:
        raise CrossfedError(
            f"Cannot write synthetic data below {root}: {error.strerror or error}; make room "
            f"there, "
            "or set CROSSFED_CACHE to a folder that can be written."
        ) from error
    return out


def shops() -> tuple[str, ...]:
    """Names of the shops there are words for."""
    return tuple(_SHOPS)


@dataclass(frozen=True, slots=True)
class _Size:
    users: int
    items: int
    per_user: float


def _names(domains: int | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(domains, int):
        if unknown := [name for name in domains if name not in _SHOPS]:
            raise CrossfedError(
                f"Synthetic data: there is no shop {unknown[0]!r}; take some "
                f"of {', '.join(_SHOPS)}."
            )
        if len(set(domains)) < len(domains) or not domains:
            raise CrossfedError("Synthetic data: name at least one shop, and every shop once.")
        return tuple(domains)
    if domains < 1:
        raise CrossfedError(f"Synthetic data: domains is {domains}; it must be at least 1.")
    every = list(_SHOPS)
    return tuple(
        every[i % len(every)] + (f"-{i // len(every) + 1}" if i >= len(every) else "")
        for i in range(domains)
    )


def _sizes(
    names: Sequence[str],
    users: int | Sequence[int],
    items: int | Sequence[int],
    per_user: float | Sequence[float],
) -> list[_Size]:
    columns: list[Sequence[Any]] = []
    for what, given in (("users", users), ("items", items), ("interactions_per_user", per_user)):
        column = [given] * len(names) if isinstance(given, (int, float)) else list(given)
        if len(column) != len(names):
            raise CrossfedError(
                f"Synthetic data: {len(column)} values of {what} for {len(names)} domains; "
                f"give one for all or one each."
            )
        columns.append(column)
    sizes = [_Size(int(u), int(i), float(p)) for u, i, p in zip(*columns, strict=True)]
    for name, size in zip(names, sizes, strict=True):
        if size.users < 10 or size.items < 4 * _LEAST:
            raise CrossfedError(
                f"Synthetic data: domain {name} has {size.users} users and {size.items} items; "
                f"take at least 10 users and {4 * _LEAST} items."
            )
        if not _LEAST <= size.per_user <= size.items / 4:
            raise CrossfedError(
                f"Synthetic data: domain {name} has {size.per_user} interactions per user; "
                f"take at least {_LEAST} and at most a quarter of its {size.items} items."
            )
        if size.users * size.per_user < 2 * size.items:
            raise CrossfedError(
                f"Synthetic data: domain {name} has {size.items} items and only about "
                f"{size.users * size.per_user:.0f} interactions; take at least two "
                f"interactions per item."
            )
    return sizes


def _rng(seed: int, *where: str) -> np.random.Generator:
    return np.random.default_rng(stream(seed, "synthetic", *where))


@dataclass(frozen=True, slots=True)
class _Tastes:
    """What all shops share.

    Attributes:
        vectors: v, float32 [T, 8], of length one.
        preferred: attribute -> cumulative probability of its values, [T, n_values].
        brands: names of the brands of each taste.
    """

    vectors: npt.NDArray[np.float32]
    preferred: Mapping[str, Floats]
    brands: tuple[tuple[str, ...], ...]

    @classmethod
    def draw(cls, rng: np.random.Generator, n_items: int) -> _Tastes:
        vectors = _unit(rng.standard_normal((_TASTES, _TASTE_WIDTH), np.float32))
        preferred = {}
        for attribute, values in _SHARED.items():
            # Each value is the favourite of as many tastes as any other, and each taste has a
            # second choice.
            weights = np.full((_TASTES, len(values)), _LOOSE / len(values))
            for weight in _FAVOURITES:
                favourite = np.concatenate(
                    [rng.permutation(len(values)) for _ in range(-(-_TASTES // len(values)))]
                )
                weights[np.arange(_TASTES), favourite[:_TASTES]] += weight
            preferred[attribute] = np.cumsum(weights, axis=1)
        return cls(vectors, preferred, _brands(rng, int(np.clip(n_items // (_TASTES * 8), 1, 40))))

    def but(self, kept: npt.NDArray[np.bool_], rng: np.random.Generator, n_items: int) -> _Tastes:
        """The same where `kept` [T] says so; vectors, words and brands of its own elsewhere."""
        own = _Tastes.draw(rng, n_items)
        return _Tastes(
            np.where(kept[:, None], self.vectors, own.vectors),
            {
                key: np.where(kept[:, None], table, own.preferred[key])
                for key, table in self.preferred.items()
            },
            tuple(
                mine if keep else other
                for keep, mine, other in zip(kept, self.brands, own.brands, strict=True)
            ),
        )


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _generate_domain(
    writer: Writer,
    name: str,
    size: _Size,
    tastes: _Tastes,
    shared: npt.NDArray[np.float32],
    first_own: int,
    seed: int,
    taste_in_text: bool,
) -> None:
    """One shop: users (the shared ones first, then shuffled into the others), catalogue,
    interactions, text.
    """
    rng = _rng(seed, "users", name)
    own = rng.standard_normal((size.users - len(shared), shared.shape[1]), np.float32)
    numbers = np.concatenate([np.arange(len(shared)), np.arange(first_own, first_own + len(own))])
    rows = rng.permutation(size.users)
    numbers, wishes = numbers[rows], np.concatenate([shared, own])[rows]

    catalogue = _Catalogue.draw(_rng(seed, "catalogue", name), size.items, tastes)
    counts = _activity(_rng(seed, "activity", name), size)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    bought = np.empty(indptr[-1], np.int32)
    rng = _rng(seed, "interactions", name)
    for start in range(0, size.users, _USERS_AT_ONCE):
        end = min(start + _USERS_AT_ONCE, size.users)
        bought[indptr[start] : indptr[end]] = _choose(
            wishes[start:end], counts[start:end], catalogue, rng
        )
    least = max(1, min(_LEAST, len(bought) // (2 * size.items), size.users // 4))
    _lift(bought, counts, catalogue.taste, least, _rng(seed, "lift", name))

    domain = writer.open_domain(name)
    rng = _rng(seed, "order", name)
    for start in range(0, size.users, _USERS_AT_ONCE):
        end = min(start + _USERS_AT_ONCE, size.users)
        users, items, times = _order(
            bought[indptr[start] : indptr[end]], counts[start:end], catalogue.taste, rng
        )
        domain.append_interactions(users + start, items, times)
        domain.append_users([f"user-{number:07d}" for number in numbers[start:end]])
    rng = _rng(seed, "text", name)
    types = rng.permutation(_SHOPS[name.partition("-")[0]]).tolist()
    for start in range(0, size.items, _ITEMS_AT_ONCE):
        end = min(start + _ITEMS_AT_ONCE, size.items)
        told = catalogue.taste[start:end]
        if not taste_in_text:
            told = _rng(seed, "text without taste", name, str(start)).integers(
                0, _TASTES, end - start
            )
        texts = _texts(told, catalogue.type[start:end], tastes, types, rng)
        domain.append_items([f"{name}-{item:07d}" for item in range(start, end)], texts)


@dataclass(frozen=True, slots=True)
class _Catalogue:
    """A shop's items, and what is needed to draw them by popularity within a cell, that is one
    taste and type.

    Attributes:
        taste, type: int64 [n_items].
        taste_vectors: v times its strength, [T, 8]. type_vectors: z times its strength, [Y, 4].
        by_cell: items sorted by cell [n_items]; below: popularity of all items before each of them
            [n_items + 1].
        cell_start: where a cell begins in `by_cell` [T * Y + 1]. mass: popularity of a cell [T, Y].
    """

    taste: Ints
    type: Ints
    taste_vectors: Floats
    type_vectors: Floats
    by_cell: Ints
    below: Floats
    cell_start: Ints
    mass: Floats

    @classmethod
    def draw(cls, rng: np.random.Generator, n_items: int, tastes: _Tastes) -> _Catalogue:
        n_types = min(20, max(4, n_items // 15))
        # Shops differ in the tastes they serve.
        taste = rng.choice(_TASTES, n_items, p=rng.dirichlet(np.full(_TASTES, 3.0)))
        type_weights = rng.permutation(1.0 / (np.arange(n_types) + 3.0))
        kind = rng.choice(n_types, n_items, p=type_weights / type_weights.sum())
        popularity = rng.permutation((np.arange(n_items) + 1.0 + 0.02 * n_items) ** -_SKEW)
        cell = taste * n_types + kind
        by_cell = np.argsort(cell, kind="stable")
        below = np.concatenate([[0.0], np.cumsum(popularity[by_cell])])
        cell_start = np.searchsorted(cell[by_cell], np.arange(_TASTES * n_types + 1))
        return cls(
            taste=taste,
            type=kind,
            taste_vectors=_TASTE_STRENGTH * tastes.vectors.astype(np.float64),
            type_vectors=_TYPE_STRENGTH
            * _unit(rng.standard_normal((n_types, _TYPE_WIDTH), np.float32)).astype(float),
            by_cell=by_cell,
            below=below,
            cell_start=cell_start,
            mass=np.diff(below[cell_start]).reshape(_TASTES, n_types),
        )


def _activity(rng: np.random.Generator, size: _Size) -> Ints:
    """Interactions per user, int64 [n_users]: 5 plus a log-normal excess of the mean that is left,
    rounded at random.
    """
    excess = (size.per_user - _LEAST) * np.exp(rng.standard_normal(size.users) - 0.5)
    return np.minimum(
        _LEAST + np.floor(excess + rng.random(size.users)).astype(np.int64), size.items // 4
    )


def _pick(weights: Floats, rng: np.random.Generator) -> Ints:
    """One column per row, in proportion to the weights [n, k]."""
    cumulative = np.cumsum(weights, axis=1)
    return (rng.random((len(weights), 1)) * cumulative[:, -1:] >= cumulative[:, :-1]).sum(axis=1)


def _choose(
    wishes: npt.NDArray[np.float32], counts: Ints, shop: _Catalogue, rng: np.random.Generator
) -> Int32s:
    """Distinct items for every user, concatenated user by user, [sum of counts].

    Draws that a user has already are drawn again, each time with half the interest, so that a
    narrow user comes to an end.
    """
    n_items = len(shop.taste)
    held: Ints = np.empty(0, np.int64)  # user * n_items + item, sorted
    missing, interest = counts, 1.0
    while missing.any():
        active = np.flatnonzero(missing)
        scaled = interest * wishes[active].astype(np.float64)
        for_taste = np.exp(scaled[:, :_TASTE_WIDTH] @ shop.taste_vectors.T)
        for_type = np.exp(scaled[:, _TASTE_WIDTH:] @ shop.type_vectors.T)
        row = np.repeat(np.arange(len(active)), missing[active])
        # p(t, y) ∝ e^a_t e^b_y mass_ty, drawn as p(t) p(y | t); then an item of the cell by
        # popularity.
        taste = _pick((for_taste * (for_type @ shop.mass.T))[row], rng)
        kind = _pick(for_type[row] * shop.mass[taste], rng)
        cell = taste * shop.mass.shape[1] + kind
        low, high = shop.below[shop.cell_start[cell]], shop.below[shop.cell_start[cell + 1]]
        place = (
            np.searchsorted(shop.below, low + rng.random(len(row)) * (high - low), side="right") - 1
        )
        place = np.minimum(place, shop.cell_start[cell + 1] - 1)  # rounding may reach the next cell
        held = np.unique(np.concatenate([held, active[row] * n_items + shop.by_cell[place]]))
        missing = counts - np.bincount(held // n_items, minlength=len(counts))
        interest /= 2
    return (held % n_items).astype(np.int32)


def _lift(bought: Int32s, counts: Ints, taste: Ints, least: int, rng: np.random.Generator) -> None:
    """Give every item at least `least` buyers, in place: buyers of a popular item of the same taste
    take it instead.
    """
    n_items, indptr = len(taste), np.concatenate([[0], np.cumsum(counts)])
    same_taste = True
    while True:
        sold = np.bincount(bought, minlength=n_items)
        wanted = np.repeat(np.arange(n_items), np.maximum(least - sold, 0))
        if not len(wanted):
            return
        wanted = rng.permutation(wanted)
        spare = np.flatnonzero((sold > least)[bought])
        group = (
            taste[bought[spare]].astype(np.int8) if same_taste else np.zeros(len(spare), np.int8)
        )
        spare = spare[np.argsort(group, kind="stable")]
        ends = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=_TASTES))])
        mine = taste[wanted] if same_taste else np.zeros(len(wanted), np.int64)
        room = ends[mine + 1] - ends[mine]
        wanted, mine, room = wanted[room > 0], mine[room > 0], room[room > 0]
        given = spare[ends[mine] + (rng.random(len(wanted)) * room).astype(np.int64)]
        keep = _allowed(given, wanted, bought, indptr, sold - least, rng)
        bought[given[keep]] = wanted[keep]
        same_taste = len(keep) > 0  # nothing left to give within the tastes: take from any


def _allowed(
    given: Ints, wanted: Ints, bought: Int32s, indptr: Ints, surplus: Ints, rng: np.random.Generator
) -> Ints:
    """Which of the exchanges `bought[given] = wanted` go together: no interaction twice, no item of
    a user twice, and no item given away beyond its surplus."""
    user = np.searchsorted(indptr, given, side="right") - 1
    length = indptr[user + 1] - indptr[user]
    exchange = np.repeat(np.arange(len(given)), length)
    within = np.arange(len(exchange)) - np.repeat(np.cumsum(length) - length, length)
    owned = np.zeros(len(given), bool)
    owned[exchange[bought[indptr[user][exchange] + within] == wanted[exchange]]] = True
    keep = np.flatnonzero(~owned)
    keep = keep[np.unique(given[keep], return_index=True)[1]]
    keep = keep[np.unique(user[keep] * len(surplus) + wanted[keep], return_index=True)[1]]
    keep = rng.permutation(keep)
    keep = keep[np.argsort(bought[given[keep]], kind="stable")]
    item = bought[given[keep]]
    rank = np.arange(len(item)) - np.searchsorted(item, item, side="left")
    return keep[rank < surplus[item]]


def _order(
    bought: Int32s, counts: Ints, taste: Ints, rng: np.random.Generator
) -> tuple[Ints, Ints, Ints]:
    """Users, items and increasing times of a block of users; a user's interactions of one taste
    tend to be neighbours.
    """
    user = np.repeat(np.arange(len(counts)), counts)
    when = rng.random((len(counts), _TASTES))[user, taste[bought]] + 0.3 * rng.random(len(user))
    order = np.lexsort((when, user))
    gaps = 60 + (rng.exponential(10.0 * _DAY, len(user))).astype(np.int64)
    first = np.cumsum(counts) - counts
    gaps[first] = rng.integers(0, 730 * _DAY, len(counts))
    passed = np.cumsum(gaps)
    return (
        user,
        bought[order].astype(np.int64),
        _START + passed - np.repeat(passed[first] - gaps[first], counts),
    )


def _brands(rng: np.random.Generator, per_taste: int) -> tuple[tuple[str, ...], ...]:
    """Invented brand names, each of one taste and sold in every shop, [T][per_taste]."""
    names: dict[str, None] = {}
    while len(names) < _TASTES * per_taste:
        middle = "".join(rng.choice(_SYLLABLES, rng.integers(1, 3)))
        names[(middle + rng.choice(_ENDINGS)).capitalize()] = None
    every = list(names)
    return tuple(tuple(every[t * per_taste : (t + 1) * per_taste]) for t in range(_TASTES))


def _texts(
    taste: Ints, kind: Ints, tastes: _Tastes, types: Sequence[str], rng: np.random.Generator
) -> list[str]:
    """Readable product text of a block of items; `types` are the names of the shop's product
    types.
    """
    drawn = {
        attribute: (rng.random((len(taste), 1)) >= tastes.preferred[attribute][taste])
        .sum(axis=1)
        .clip(max=15)
        .tolist()
        for attribute in _SHARED
    }
    brand, line, template = (
        rng.integers(0, high, len(taste)).tolist()
        for high in (len(tastes.brands[0]), len(_LINES), len(_TEMPLATES))
    )
    texts = []
    for row, (t, y) in enumerate(zip(taste.tolist(), kind.tolist(), strict=True)):
        text = _TEMPLATES[template[row]].format(
            brand=tastes.brands[t][brand[row]],
            line=_LINES[line[row]],
            type=types[y],
            **{attribute: _SHARED[attribute][drawn[attribute][row]] for attribute in _SHARED},
        )
        texts.append(". ".join(sentence[0].upper() + sentence[1:] for sentence in text.split(". ")))
    return texts
