"""The interface of a method: everything that it sees, and all that it hands back.

No Ray, no MLflow, no input or output happens here. A method is a set of *stages*; a stage is a
number of *rounds*; a round is a sequence of *phases*; a phase is one *step* function run at every
domain or at the server:

    step(state, inbox, ctx) -> Out(send, metrics)

`state` is the node's own object and never leaves the node; only `send` does, as *payloads*: named
NumPy arrays, each declared by the method as a `Field` and checked by the platform before it leaves
the sender.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

if typing.TYPE_CHECKING:
    import torch

SERVER = "server"
"""The server's node name; no domain may carry it."""

Array = npt.NDArray[Any]
Payload = Mapping[str, Array]
"""What travels in one message: named arrays, nothing else. A received array is read-only."""

State = Any
"""A node's own object, made by `Method.init_domain` or `Method.init_server`."""


def _mentions(annotation: Any, kind: type) -> bool:
    """Whether an annotation is a type, or is made of it."""
    return annotation is kind or any(_mentions(part, kind) for part in typing.get_args(annotation))


class Checked(BaseModel):
    """Base of all settings: frozen, unknown keys are errors, and a number is a finite number of a
    size that can be used.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    largest: ClassVar[int] = 2**63 - 1

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, bool) and not _mentions(
                cls.model_fields[str(info.field_name)].annotation, bool
            ):
                raise ValueError("it is true or false where a number or a word is wanted")
            if isinstance(part, int) and abs(part) > cls.largest:
                raise ValueError(f"whole numbers go up to {cls.largest}")
        return value


class MethodConfig(Checked):
    """Base of every method's `Config`: as `Checked`, and its defaults are validated."""

    model_config = ConfigDict(validate_default=True)
    largest: ClassVar[int] = 2**31 - 1


RANKING: dict[str, Any] = {"ranking": True}
"""`Field(…, json_schema_extra=RANKING)` marks a key of a Config that matters only when items are
ranked.

Training and state must not depend on it: `crossfed evaluate` changes such keys of a model that is
finished."""


def ranking_keys(config: type[MethodConfig]) -> tuple[str, ...]:
    """The keys of a method's Config that are marked with `RANKING`."""
    marked = {name: info.json_schema_extra for name, info in config.model_fields.items()}
    return tuple(
        name for name, extra in marked.items() if isinstance(extra, dict) and extra.get("ranking")
    )


def in_stage(name: str) -> dict[str, Any]:
    """`Field(…, json_schema_extra=in_stage("finetune"))` marks a key of a Config that only one
    stage reads.

    A search says so where its trials end before that stage.
    """
    return {"stage": name}


def stage_keys(config: type[MethodConfig]) -> dict[str, str]:
    """The keys of a method's Config that are marked with `in_stage`, and their stages."""
    marked = {name: info.json_schema_extra for name, info in config.model_fields.items()}
    return {
        name: str(extra["stage"])
        for name, extra in marked.items()
        if isinstance(extra, dict) and "stage" in extra
    }


class Direction(StrEnum):
    """Which way a payload travels."""

    UP = "up"  # domain → server
    DOWN = "down"  # server → domain
    PEER = "peer"  # domain → domain


@dataclass(frozen=True, slots=True)
class Field:
    """One declared key of a payload.

    Args:
        key: the array's name in the payload; a trailing `*` declares every key with that prefix.
        direction: which way it travels.
        shape: one entry per axis: an integer, the name of a Config field or property (`"K"`),
            `"n_items"` (the item count of the domain at the domain end), or `"n_users"`, which is
            the only way to send anything that grows with users. `None` means "whatever shape, but
            the same at every domain and in every round" (model parameters).
        meaning: what it is, in words; printed by `crossfed methods`.
        dtype: the NumPy dtype it must have.
        high: for integer arrays, the exclusive upper bound of the values (an integer or a Config
            name); the lower is 0.
    """

    key: str
    direction: Direction
    shape: tuple[int | str, ...] | None
    meaning: str
    dtype: str = "float32"
    high: int | str | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """What leaves under noise, and what its receivers can learn from it at most.

    A message is one payload of a phase: the same arrays sent to several receivers are one message,
    differently perturbed arrays are several. A message holds `count` releases: vectors that are
    clipped and perturbed each by itself, all computed from the same interactions, so that their
    losses add up.

    Args:
        stage: the name of the stage in which the keys leave.
        keys: the payload keys of the message that are perturbed, as in `Method.fields`.
        mechanism: "laplace": independent Laplace(scale) noise on every coordinate, set against the
            L1 sensitivity; "gaussian": independent N(0, scale²) noise, set against the L2
            sensitivity.
        unit: the unit of protection, in words: what may change between two data sets that cannot be
            told apart.
        sensitivity: how far one release can move when one unit changes, in the mechanism's norm (2C
            after clipping to C).
        scale: Laplace's b or the Gaussian's σ, as it is really added.
        per_round_epsilon: ε that the paper counts for the whole message (ε₀), whether or not it
            holds.
        count: releases per message, e.g. 2K for K user and K item prototypes.
        at: whose messages these are, as for a `Phase`. What a server sends on of what came
            perturbed costs nothing more and is no release.
        parts: where in the stage it leaves: in every round ("each"), before the first ("open"),
            after the last ("close").
    """

    stage: str
    keys: tuple[str, ...]
    mechanism: Literal["laplace", "gaussian"]
    unit: str
    sensitivity: float
    scale: float
    per_round_epsilon: float
    count: int = 1
    at: Literal["domains", "server"] = "domains"
    parts: tuple[Literal["open", "each", "close"], ...] = ("each",)

    @property
    def norm(self) -> Literal["L1", "L2"]:
        """The norm in which the sensitivity counts."""
        return "L1" if self.mechanism == "laplace" else "L2"

    @property
    def epsilon(self) -> float:
        """ε of one release at δ = 0: sensitivity / scale for Laplace noise, infinite for Gaussian
        noise.
        """
        return self.sensitivity / self.scale if self.mechanism == "laplace" else math.inf


@dataclass(frozen=True, slots=True)
class Out:
    """What a step hands back: `send` maps a receiver's node name to its payload, `metrics` are
    scalars for the tracker.
    """

    send: Mapping[str, Payload] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Interactions:
    """A domain's own training interactions, in its own row numbers.

    Sorted by user, then by time (ties by the data set's stated rule), so
    `items[indptr[u]:indptr[u + 1]]` is the training history of user `u` in order. Validation and
    test interactions are not in here.

    Attributes:
        n_users, n_items: sizes of the domain; users and items are `0 … n-1`.
        users, items: int64 [n_interactions].
        times: int64 [n_interactions], seconds since 1970 (or an order where the source has no
            times).
        indptr: int64 [n_users + 1].
    """

    n_users: int
    n_items: int
    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    indptr: npt.NDArray[np.int64]

    @classmethod
    def build(
        cls, n_users: int, n_items: int, users: Array, items: Array, times: Array | None = None
    ) -> Interactions:
        """Sort by (user, time), keeping the given order on ties, and index by user."""
        users, items = np.asarray(users, np.int64), np.asarray(items, np.int64)
        times = np.zeros(len(users), np.int64) if times is None else np.asarray(times, np.int64)
        order = np.lexsort((np.arange(len(users)), times, users))
        indptr = np.concatenate([[0], np.cumsum(np.bincount(users, minlength=n_users))]).astype(
            np.int64
        )
        return cls(n_users, n_items, users[order], items[order], times[order], indptr)


def noise_generator(seed: int | None = None, *where: str | int) -> np.random.Generator:
    """The generator that privacy noise is drawn from (`Context.noise_rng`).

    Without a seed its 128-bit key comes from the operating system's cryptographic source, anew at
    every call, and nobody can draw the noise again. With a seed (`privacy.noise_seed`, for tests)
    the noise depends on the arguments alone: whoever knows the seed can subtract it, so nothing is
    promised.

    What floating-point noise does not promise: ε is proven for real numbers. A float64 Laplace draw
    reaches only some of the floats, and which ones depends on the value it is added to; the low
    bits of the sum can tell neighbouring data sets apart (Mironov, "On Significance of the Least
    Significant Bits for Differential Privacy", CCS 2012). Rounding to float32 before sending leaves
    fewer such bits but is no proof. Snapping, or discrete noise, closes the gap and is not done
    here; Philox is also a generator for statistics, not a cipher. Take the totals as those of the
    mathematical mechanism, not of a hardened implementation.

    Args:
        seed: None for fresh noise.
        where: the place in the run, with a seed: stage, round, node, part and phase.
    """
    if seed is None:
        return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
    return np.random.Generator(np.random.Philox(stream(seed, *where, "noise")))


@dataclass(frozen=True, slots=True)
class Context:
    """What a step may know besides its state and its inbox.

    Attributes:
        node: this node's name. stage, round: where the run is; rounds count from 1.
        peers: the other domains (at a domain) or all domains (at the server), in a fixed order.
        rng: NumPy generator, and torch_rng: CPU torch generator; both derived from (seed, stage,
            round, node, phase) alone.
        device: where this node's tensors belong.
        data: the domain's own training interactions; None at the server.
        artifacts: shared, content-keyed arrays by name: "text" float32 [n_items, width], "sids"
            int64 [n_items, levels] (semantic IDs); empty at the server.
        noise_rng: NumPy generator for what perturbs a `Release`, and for nothing else: unlike `rng`
            it cannot be drawn again, unless the run sets `privacy.noise_seed`. See
            `noise_generator` for what its noise promises.
    """

    node: str
    stage: str
    round: int
    peers: tuple[str, ...]
    rng: np.random.Generator
    torch_rng: torch.Generator
    device: torch.device
    data: Interactions | None = None
    artifacts: Mapping[str, Array] = field(default_factory=dict)
    noise_rng: np.random.Generator = field(default_factory=noise_generator)

    @property
    def own(self) -> Interactions:
        """The domain's training interactions; raises at the server, which has none."""
        if self.data is None:
            raise RuntimeError(f"node {self.node} holds no interactions")
        return self.data


Step = Callable[[State, Mapping[str, Payload], Context], Out]
"""step(state, inbox, ctx) -> Out, with inbox: sender's name -> payload."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One step, run at every domain (in parallel) or at the server."""

    step: Step
    at: Literal["domains", "server"] = "domains"


@dataclass(frozen=True, slots=True)
class Stage:
    """A number of rounds of the same phases.

    Args:
        name: the stage's name in metrics and checkpoints.
        rounds: how many rounds at most; 0 skips the stage, `open` and `close` included.
        each: the phases of a round.
        open, close: phases before the first and after the last round (messages along the same edges
            are allowed). `close` runs at all domains, also those that stopped early, and on the
            best state where `keep_best` is set.
        edges: the directions in which messages may travel; empty for a stage that stays local,
            where sending raises.
        evaluate: rank the validation set after the rounds of this stage (at the run's evaluation
            interval).
        patience: stop after so many evaluations without a better validation metric; None never
            stops early. In a stage without edges every domain stops by itself; with edges the
            federation's mean decides.
        keep_best: end the stage with the state of the best evaluated round instead of the last
            round's.
    """

    name: str
    rounds: int
    each: tuple[Phase, ...]
    open: tuple[Phase, ...] = ()
    close: tuple[Phase, ...] = ()
    edges: frozenset[Direction] = frozenset()
    evaluate: bool = True
    patience: int | None = None
    keep_best: bool = True

    @property
    def local(self) -> bool:
        """Whether nothing may be sent in this stage."""
        return not self.edges


class Scope(StrEnum):
    """Who sees which interactions."""

    FEDERATED = "federated"  # every domain its own
    LOCAL = "local"  # every domain its own, and nothing is exchanged at all


def inner_product(
    exported: Mapping[str, torch.Tensor], users: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Scores [len(users), n_items] from exported "users" [n_users, d] and "items" [n_items, d]."""
    import torch  # here, because this module is imported by what answers without it, e.g. `--help`

    return exported["users"][torch.from_numpy(users)] @ exported["items"].T


def no_releases(config: Any) -> tuple[Release, ...]:
    """Nothing is perturbed."""
    return ()


@dataclass(frozen=True, slots=True)
class Method:
    """A method, whole. One file in `methods/` defines one of these as `METHOD`.

    Attributes:
        name, title, paper: as shown by `crossfed methods`.
        Config: a frozen pydantic model with the paper's values as defaults.
        stages: Config -> the stages, in order.
        init_domain: (Config, Context) -> State. Context has stage "init" and round 0.
        init_server: the same at the server; None where a method has no server.
        score: (State, users int64 [b]) -> float tensor [b, n_items] on any device. The platform
            masks and ranks.
        state_dict: State -> nested dict/list/tuple of tensors, arrays and scalars: all that
            training continues from, optimizer included.
        load_state_dict: (State, the same structure) -> None.
        export: State -> the tensors that are enough to recommend with, without any interactions:
            the saved model. A [K, d] tensor whose name ends in `_prototypes` is drawn as a cosine
            heat map and by its principal components.
        score_exported: (exported tensors, users int64 [b]) -> float tensor [b, n_items], equal to
            `score` of that state; or -inf for an item that the saved model does not keep for this
            user, where only the best of each are kept.
        fields: every payload key that may cross, in any direction.
        artifacts: names of the artifacts it needs ("text", "sids"). With "sids" its Config holds
            `levels` and `codebook`.
        scope: who sees which interactions.
        releases: Config -> what of that leaves under noise; the rest is sent as it is.
        observe: (State, Interactions) -> None: from now on, `score` and `export` take these as the
            users' histories. For methods that read a history when they recommend; called before
            every ranking with exactly what is masked in it: the training interactions for
            validation, those and the validation interactions for the test. None where users have
            parameters instead.
        ordered: whether it reads a user's interactions in their order. Data without one are refused
            to it.
        deterministic: nothing is drawn, so every seed gives the same model from the same data.
    """

    name: str
    title: str
    paper: str
    Config: type[MethodConfig]
    stages: Callable[[Any], tuple[Stage, ...]]
    init_domain: Callable[[Any, Context], State]
    score: Callable[[State, npt.NDArray[np.int64]], torch.Tensor]
    state_dict: Callable[[State], Mapping[str, Any]]
    load_state_dict: Callable[[State, Mapping[str, Any]], None]
    export: Callable[[State], Mapping[str, torch.Tensor]]
    score_exported: Callable[[Mapping[str, torch.Tensor], npt.NDArray[np.int64]], torch.Tensor] = (
        inner_product
    )
    init_server: Callable[[Any, Context], State] | None = None
    fields: tuple[Field, ...] = ()
    artifacts: tuple[str, ...] = ()
    scope: Scope = Scope.FEDERATED
    releases: Callable[[Any], tuple[Release, ...]] = no_releases
    observe: Callable[[State, Interactions], None] | None = None
    ordered: bool = False
    deterministic: bool = False


def stream(seed: int, *where: str | int) -> np.random.SeedSequence:
    """The seed sequence of one place in a run, e.g. `stream(seed, stage, round, node, "torch")`.

    Stable across processes and Python versions: it depends on the arguments alone.
    """
    digest = hashlib.sha256("\x1f".join(str(part) for part in where).encode()).digest()
    return np.random.SeedSequence([seed, *np.frombuffer(digest[:16], np.uint32).tolist()])


def generators(seed: int, *where: str | int) -> tuple[np.random.Generator, torch.Generator]:
    """NumPy's and torch's generator for one place in a run; the two streams are independent."""
    import torch  # as in `inner_product`

    numpy_seed, torch_seed = stream(seed, *where).spawn(2)
    torch_rng = torch.Generator().manual_seed(
        int(torch_seed.generate_state(1, np.uint64)[0] >> np.uint64(1))
    )
    return np.random.default_rng(numpy_seed), torch_rng
