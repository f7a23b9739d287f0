"""Where steps run: one `Node` holds one domain (or the server), its data, its state and its checks.

`InProcess` runs all nodes one after the other in this process. `actors.RayNodes` wraps the same
`Node` in Ray actors. Both give a method the same view, so that both give the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import resource
import shutil
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file

from crossfed.platform import checkpoint
from crossfed.platform.cluster.devices import local_device
from crossfed.platform.config.settings import RunConfig
from crossfed.platform.data import splits
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation import candidates
from crossfed.platform.evaluation.attack import (
    popularity_baseline,
    random_baseline,
    similarity_attack,
)
from crossfed.platform.evaluation.metrics import WHOLE
from crossfed.platform.evaluation.protocols import get_protocol
from crossfed.platform.evaluation.ranking import Ranking, Score, rank
from crossfed.platform.federation import export
from crossfed.platform.federation.controls import SOLO, Delivery, separate
from crossfed.platform.federation.payloads import Entry, Gate, check_metrics, freeze
from crossfed.platform.federation.privacy import tell_apart
from crossfed.platform.method import (
    SERVER,
    Array,
    Context,
    Interactions,
    Out,
    Payload,
    Step,
    generators,
    noise_generator,
)
from crossfed.platform.registry import at

P = ParamSpec("P")
R = TypeVar("R")

Artifacts = Mapping[str, Mapping[str, Array]]
"""Shared arrays by domain and name, made once of public data: domain -> "text" -> float32 [n_items,
width].
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every node of a run is built from; holds paths and settings, no data."""

    config: RunConfig
    data: Path
    domains: tuple[str, ...]
    run_dir: Path
    cache: Path

    @property
    def nodes(self) -> tuple[str, ...]:
        """All node names, the server (where the method has one) first."""
        return ((SERVER,) if self.config.resolved.init_server else ()) + self.domains


@dataclass(frozen=True, slots=True)
class Sent:
    """What a phase left behind at one node: handles of its messages by receiver, ledger rows,
    metrics.
    """

    send: Mapping[str, Any]
    rows: list[Entry]
    metrics: Mapping[str, float]

    def only(self, receivers: Collection[str]) -> Sent:
        """Without the messages to anybody else."""
        send = {name: handle for name, handle in self.send.items() if name in receivers}
        return Sent(send, [row for row in self.rows if row.receiver in receivers], self.metrics)


@dataclass(frozen=True, slots=True)
class Measured:
    """One domain's metrics on one split, with what they were measured against."""

    metrics: dict[str, float]
    candidates: str
    users: int
    popularity: dict[str, float] | None = None  # the same metrics of ranking by popularity


class Node:
    """One domain or the server. Nothing but checked payloads, metrics and counts leaves it."""

    def __init__(self, plan: Plan, name: str, device: torch.device):
        self.plan, self.name, self.device = plan, name, device
        self.method, self.config = plan.config.resolved, plan.config.method_config()
        self.stages, self.releases = (
            self.method.stages(self.config),
            self.method.releases(self.config),
        )
        self.data: Interactions | None = None  # what it trains on
        self.seen: Interactions | None = None  # its whole training split
        self.artifacts: dict[str, Array] = {}
        self.validation: tuple[Array, Array] | None = None
        self.state: Any = None
        self._parts: Array | None = None
        self.best: Any = None
        self._best_file: Path | None = None
        self._best_digests: dict[str, str] = {}
        self._drawn: dict[str, candidates.Candidates] = {}
        self.uploaded: dict[str, Array] = {}
        self.delivery = Delivery(plan.config.control, plan.config.seed, name)
        # then `state` (and `best`) is one of each domain's own server, by domain
        self.separate = name == SERVER and separate(plan.config.control)
        torch.set_num_threads(plan.config.resources.threads)
        if device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(device)
        # a process may live longer than a run; not every container lets it forget
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def memory(self) -> dict[str, int | None]:
        """The most memory held since this node was made, in bytes: resident of its process, and
        torch's on its GPU or None.
        """
        # getrusage would count the parent's memory before the exec
        told = re.search(
            r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
        )
        kilobytes = int(told[1]) if told else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gpu = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {"process": 1024 * kilobytes, "gpu": gpu}

    # -- building ----------------------------------------------------------------------------------

    def prepare(self, artifacts: Mapping[str, Array]) -> int:
        """Load this domain's own data and split it; returns its item count (0 at the server).

        Args:
            artifacts: what was made of this domain's public side beforehand, e.g. "text": float32
                [n_items, width].
        """
        if self.name == SERVER:
            return 0
        probe = self.plan.run_dir / "config.yaml"
        if not probe.is_file():
            raise CrossfedError(
                f"{self.name} does not see {probe}: --out must lie on storage "
                f"that all machines share."
            )
        self.seen, self.validation, self.artifacts = (
            self.load("train"),
            self._truth("validation"),
            dict(artifacts),
        )
        self.data = self._share(self.seen)
        return self.data.n_items

    def load(self, part: str) -> Interactions:
        """One part ("train", "validation", "test") of this domain's own interactions."""
        evaluation = self.plan.config.evaluation
        store = PreparedData.open(self.plan.data)
        users, items, times = store.interactions(self.name)
        n_users, n_items = store.sizes(self.name)
        if self._parts is None:
            rule = get_protocol(evaluation.protocol).split
            ordered = self.method.name if self.method.ordered else None
            splits.refuse_without_order(
                store.times(self.name), self.name, rule, ordered, evaluation.order
            )
            self._parts = splits.assign(users, items, times, n_users, rule, evaluation.split_seed)
        chosen = self._parts == ("train", "validation", "test").index(part)
        return Interactions.build(n_users, n_items, users[chosen], items[chosen], times[chosen])

    def _share(self, train: Interactions) -> Interactions:
        """The share of its training interactions that a domain trains on, the same for every method
        and seed.
        """
        evaluation = self.plan.config.evaluation
        if evaluation.train_share == 1:
            return train
        kept = splits.share_of(
            train.users, train.items, evaluation.train_share, evaluation.split_seed
        )
        return Interactions.build(
            train.n_users, train.n_items, train.users[kept], train.items[kept], train.times[kept]
        )

    def _truth(self, part: str) -> tuple[Array, Array]:
        held = self.load(part)
        return held.indptr, held.items

    def connect(self, sizes: Mapping[str, int]) -> None:
        """Learn who else is there (names and item counts) and make this node's initial state."""
        n_users = self.data.n_users if self.data else None
        megabytes = self.plan.config.resources.max_message_mb
        max_bytes = None if megabytes is None else int(megabytes * 2**20)
        self.gate = Gate(self.method, self.config, self.name, sizes, n_users, max_bytes)
        alone = self.plan.config.control == SOLO
        self.peers = () if alone else tuple(d for d in self.plan.domains if d != self.name)
        init = self.method.init_server if self.name == SERVER else self.method.init_domain
        if init is None:
            raise RuntimeError(f"{self.method.name} has no server")
        with self._own("its start", init), _memory(self.name):
            if self.separate:
                self.state = {
                    name: init(self.config, self._context("init", 0, owner=name))
                    for name in self.plan.domains
                }
            else:
                self.state = init(self.config, self._context("init", 0))

    def _context(
        self, stage: str, round: int, *where: str | int, owner: str | None = None
    ) -> Context:
        """The context of one place in the run. Torch's global generator (dropout) is put there too.

        Args:
            owner: of a server that answers one domain, that domain.
        """
        peers = self.peers
        if owner is not None and self.plan.config.control == SOLO:
            peers = (owner,)
        place = (stage, round, self.name, *where)
        rng, torch_rng = generators(self.plan.config.seed, *place)
        torch.manual_seed(
            int(generators(self.plan.config.seed, *place, "global")[0].integers(2**63))
        )
        noise_rng = noise_generator(self.plan.config.privacy.noise_seed, *place)
        return Context(
            self.name,
            stage,
            round,
            peers,
            rng,
            torch_rng,
            self.device,
            self.data,
            self.artifacts,
            noise_rng,
        )

    # -- running -----------------------------------------------------------------------------------

    def run_phase(
        self, stage: int, part: str, phase: int, round: int, inbox: Mapping[str, Payload]
    ) -> tuple[dict[str, Payload], list[Entry], dict[str, float]]:
        """Run one step; returns its checked messages, their ledger rows and its metrics.

        Args:
            stage, part, phase: which step: stage index, "open" | "each" | "close", index within it.
            round: from 1; 0 in `open`.
            inbox: sender -> read-only payload.
        """
        where = self.stages[stage]
        step = getattr(where, part)[phase].step
        self.gate.receive(where, inbox)
        place = (where.name, round, part, phase)
        if self.separate:
            out = self._answers(step, place, inbox)
        else:
            out = self._step(step, place, self.state, self.delivery(*place, inbox))
        rows = tell_apart(
            self.releases, where.name, part, out.send, self.gate.check(where, round, out.send)
        )
        if self.plan.config.evaluation.audit and self.data is not None:
            for payload in out.send.values():
                self.uploaded |= {
                    key: np.array(v)
                    for key, v in payload.items()
                    if v.shape[:1] == (self.data.n_items,)
                }
        return dict(out.send), rows, check_metrics(self.name, out.metrics)

    def _step(
        self,
        step: Step,
        place: tuple[str, int, str, int],
        state: Any,
        inbox: Mapping[str, Payload],
        owner: str | None = None,
    ) -> Out:
        """One step at a place (stage, round, part, phase)."""
        stage, round, part, phase = place
        where = f"stage {stage}, {part}, phase {phase + 1}" + (f", round {round}" if round else "")
        with self._own(where, step), _memory(self.name):
            out = step(state, inbox, self._context(*place, owner=owner))
        if not isinstance(out, Out):
            raise CrossfedError(
                f"{self.name}, {where}: step {_called(step)} returned a {type(out).__name__}, "
                f"not an Out{_lies(step)}."
            )
        return out

    def _answers(
        self, step: Step, place: tuple[str, int, str, int], inbox: Mapping[str, Payload]
    ) -> Out:
        """The step of every domain's own server: to each domain what its server answers it, and
        means of metrics.
        """
        send: dict[str, Payload] = {}
        metrics: dict[str, list[float]] = {}
        for name, state in self.state.items():
            if inbox and name not in inbox and self.plan.config.control == SOLO:
                continue  # it has stopped
            out = self._step(step, place, state, self.delivery(*place, inbox, name), name)
            if name in out.send:
                send[name] = out.send[name]
            for key, value in out.metrics.items():
                metrics.setdefault(key, []).append(value)
        return Out(send, {key: sum(values) / len(values) for key, values in metrics.items()})

    def evaluate(self) -> Measured:
        """Metrics on the validation split: training items masked, everything else a candidate (or
        the drawn ones).
        """
        if self.data is None or self.seen is None or self.validation is None:
            raise RuntimeError("the server has nothing to evaluate")
        return self.measure("validation", self.seen, self.data, self.validation)[0]

    def audit(self) -> dict[str, float]:
        """What the vectors last sent give away: F1 of the similarity-based inference attack on this
        domain's users.

        `<key>/f1_at_<k>` for every sent array with one row per item, `<key>_random/f1_at_<k>` for
        random vectors of its width, `<key>_popularity/f1_at_<k>` for guessing by popularity; empty
        where nothing of the kind was sent. FedCRF, Table 6.
        """
        assert self.data is not None
        found: dict[str, float] = {}
        for key, vectors in self.uploaded.items():
            if vectors.ndim == 2:
                found |= {
                    f"{key}/f1_at_{k}": f1
                    for k, f1 in similarity_attack(vectors, self.data).items()
                }
                random = random_baseline(self.data, vectors.shape[1])
                found |= {f"{key}_random/f1_at_{k}": f1 for k, f1 in random.items()}
                found |= {
                    f"{key}_popularity/f1_at_{k}": f1
                    for k, f1 in popularity_baseline(self.data).items()
                }
        return found

    def measure(
        self,
        part: str,
        seen: Interactions,
        known: Interactions,
        truth: tuple[Array, Array],
        score: Score | None = None,
    ) -> tuple[Measured, Ranking]:
        """Rank `truth` (indptr, items) for every user who has some; `seen` is masked, the method
        may look at `known`.

        Args:
            score: ranks in place of the method.
        """
        evaluation, data = self.plan.config.evaluation, self.data
        assert data is not None
        indptr, items = truth
        users = np.flatnonzero(np.diff(indptr))
        if not len(users):
            raise CrossfedError(
                f"Domain {self.name} has no user with a {part} interaction under "
                f"{evaluation.protocol}."
            )
        protocol = get_protocol(evaluation.protocol)
        whole = part == "test" and WHOLE in evaluation.metrics
        torch.manual_seed(0)
        if self.method.observe is not None and score is None:
            with self._own(f"before ranking {part}", self.method.observe):
                self.method.observe(self.state, known)
        try:
            drawn = (
                None
                if protocol.negatives is None
                else self._candidates(part, users, protocol.negatives)
            )
            ranking = rank(
                score or (lambda batch: self._score(part, batch)),
                users,
                seen.indptr,
                seen.items,
                indptr,
                items,
                data.n_items,
                evaluation.ks,
                candidates=drawn,
                whole=whole,
            )
        except CrossfedError as error:
            words = str(error).removeprefix(f"{self.name}, ranking {part}: ").rstrip(".")
            raise CrossfedError(f"Domain {self.name}, {part}: {words}.") from error
        wanted = [
            evaluation.select,
            *(f"{name}_at_{k}" for name in evaluation.metrics for k in evaluation.ks),
        ]
        wanted += [WHOLE] if whole else []
        metrics = {name: float(ranking.macro[name]) for name in dict.fromkeys(wanted)}
        return Measured(metrics, ranking.candidates, len(users)), ranking

    def _score(self, part: str, users: Array) -> torch.Tensor:
        """The method's scores of users (row numbers), [b, n_items]; that they are a tensor is
        checked.
        """
        score = self.method.score
        with self._own(f"ranking {part}", score), _memory(self.name):
            scores = score(self.state, users)
        if not isinstance(scores, torch.Tensor):
            raise CrossfedError(
                f"{_called(score)} returned a {type(scores).__name__}, not a tensor [users, "
                f"items]{_lies(score)}"
            )
        return scores

    @contextlib.contextmanager
    def _own(self, where: str, function: Callable[..., Any]) -> Iterator[None]:
        """Tell in one sentence what the method's own code raised, and where; the traceback is kept
        in a file.
        """
        try:
            yield
        except CrossfedError:
            raise
        except Exception as error:
            files = {_source(function), _source(self.method.stages)}
            file = self.plan.run_dir / f"error-{self.name}.txt"
            with contextlib.suppress(OSError):  # the sentence matters more
                file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            words = " ".join(str(error).split())[:300].rstrip(".")
            raise CrossfedError(
                f"{self.name}, {where}: {_called(function)} raised {type(error).__name__}"
                f"{': ' if words else ''}{words}{at(error, files)}; the traceback is in {file}."
            ) from error

    def _candidates(self, part: str, users: Array, count: int) -> candidates.Candidates:
        """The sampled items of a part, drawn from what the user has in no part; kept for the next
        evaluation.
        """
        if part not in self._drawn:
            store = PreparedData.open(self.plan.data)
            all_users, all_items, _ = store.interactions(self.name)
            n_users, n_items = store.sizes(self.name)
            known = Interactions.build(n_users, n_items, all_users, all_items)
            seed = self.plan.config.evaluation.split_seed
            folder = self.plan.cache / "candidates" / store.fingerprint / self.name
            self._drawn[part] = candidates.load_or_draw(
                folder, part, users, known.indptr, known.items, n_items, count, seed
            )
        return self._drawn[part]

    def export(self) -> None:
        """Write what is enough to recommend with to `model/` of the run: tensors, item ids, digests
        of user ids.

        No interactions, and no user id.
        """
        with self._own("the export of the model", self.method.export):
            tensors = {
                key: value.detach().cpu().contiguous().clone()
                for key, value in self.method.export(self.state).items()
            }
        path = self.plan.run_dir / "model" / f"{self.name}.safetensors"
        with checkpoint.writing(path):
            path.parent.mkdir(exist_ok=True)
            save_file(tensors, path)
            store = PreparedData.open(self.plan.data)
            export.write_index(
                path.parent, self.name, store.user_ids(self.name), store.item_ids(self.name)
            )

    def apply(
        self, function: Callable[Concatenate[Node, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `function(self, …)` where this node's data is; what it returns leaves the node."""
        return function(self, *args, **kwargs)

    # -- keeping -----------------------------------------------------------------------------------

    def _state_dict(self) -> Any:
        """What training continues from; by domain where every domain has a server of its own."""
        if not self.separate:
            return self.method.state_dict(self.state)
        return {name: self.method.state_dict(state) for name, state in self.state.items()}

    def _load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The reverse of `_state_dict`; servers that are not in it stay as they are."""
        if not self.separate:
            self.method.load_state_dict(self.state, saved)
            return
        for name, part in saved.items():
            self.method.load_state_dict(self.state[name], part)

    def keep(self, owner: str | None = None) -> None:
        """Remember the present state as the best of the stage; with `owner` that domain's own
        server's only.
        """
        if owner is None:
            self.best = _detached(self._state_dict())
        else:
            own = _detached(self.method.state_dict(self.state[owner]))
            self.best = {**(self.best or {}), owner: own}
        self._best_file = None

    def restore_best(self) -> None:
        """Go back to the best state of the stage that ends, and forget it."""
        if self.best is not None:
            self._load_state_dict(self.best)
        self.best = self._best_file = None

    def save(self, folder: Path, inbox: Mapping[str, Payload]) -> dict[str, str]:
        """Write state, best state and unread messages into a checkpoint folder; returns the SHA-256
        of every file.
        """
        files = checkpoint.save(folder / self.name, self._state_dict())
        files |= checkpoint.save(folder / f"{self.name}.inbox", dict(inbox))
        if self.uploaded:
            files |= checkpoint.save(folder / f"{self.name}.uploaded", self.uploaded)
        if self.delivery.first:
            files |= checkpoint.save(folder / f"{self.name}.first", self.delivery.first)
        if self.best is None:
            return files
        target = folder / f"{self.name}.best"
        if self._best_file is not None:
            with checkpoint.writing(target):
                _link(self._best_file, target)
        else:
            self._best_digests = checkpoint.save(target, self.best)
        self._best_file = checkpoint.final_folder(folder) / target.name
        # of the bytes as first written: a file that has rotted since is found out
        return files | self._best_digests

    def load_state(self, folder: Path) -> dict[str, Payload]:
        """Continue from a checkpoint folder; returns the unread messages.

        Raises:
            CrossfedError: what it holds is damaged, or is not the state of this method and
                configuration.
        """
        try:
            return self._load_state(folder)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CrossfedError(
                f"{folder / self.name} does not hold a state of {self.name} "
                f"({type(error).__name__}: {reason}); it was written "
                "by another version or is damaged."
            ) from error

    def _load_state(self, folder: Path) -> dict[str, Payload]:
        self._load_state_dict(checkpoint.load(folder / self.name))
        self.best = self._best_file = None
        best = folder / f"{self.name}.best"
        if Path(f"{best}.json").is_file():
            self.best, self._best_file = checkpoint.load(best), best
            told = checkpoint.digests(folder)
            self._best_digests = {
                name: told[name] for name in (f"{best.name}.json", f"{best.name}.safetensors")
            }
        sent = folder / f"{self.name}.uploaded"
        self.uploaded = checkpoint.load(sent) if Path(f"{sent}.json").is_file() else {}
        first = folder / f"{self.name}.first"
        self.delivery.first = checkpoint.load(first) if Path(f"{first}.json").is_file() else {}
        return {
            sender: dict(payload)
            for sender, payload in checkpoint.load(folder / f"{self.name}.inbox").items()
        }


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that the method's file defines, without what is wrapped around it."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _called(function: Callable[..., Any]) -> str:
    """A function's name, in words."""
    return str(getattr(_bare(function), "__qualname__", type(function).__name__))


def _source(function: Callable[..., Any]) -> str:
    """The file that defines a function; nothing where that is not known."""
    code = getattr(_bare(function), "__code__", None)
    return str(code.co_filename) if code else ""


def _lies(function: Callable[..., Any]) -> str:
    """Where a function is defined, for the middle of a sentence."""
    code = getattr(_bare(function), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


@contextlib.contextmanager
def _memory(name: str) -> Iterator[None]:
    """Tell in one sentence that a node's memory is full."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        told = str(error).splitlines()[0] if str(error) else "no memory is left"
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in told:
            raise CrossfedError(
                f"{name} ran out of memory ({told}); lower the sizes in its configuration, or "
                f"give it a larger machine."
            ) from error
        raise


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_detached(item) for item in value)
    return value


def _link(source: Path, target: Path) -> None:
    """The same file under a second name; a copy where the storage knows no hard links."""
    for suffix in (".json", ".safetensors"):
        try:
            os.link(f"{source}{suffix}", f"{target}{suffix}")
        except OSError:
            shutil.copyfile(f"{source}{suffix}", f"{target}{suffix}")


class Nodes(Protocol):
    """All nodes of a run, wherever they are. A handle stands for a payload without showing it."""

    def preflight(self, plan: Plan) -> None:
        """Refuse, before anything is computed, what cannot be placed."""

    def start(
        self, plan: Plan, artifacts: Artifacts, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Build every node and its initial state; `say` is told, in a line, what is being waited
        for.
        """

    def deadline(self, seconds: float, what: str) -> None:
        """From now on, all that is asked of the nodes must be done within so many seconds; `what`
        it is, in words.
        """

    def each(self, call: str, args: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call a `Node` method at every named node, in parallel where possible; results by node."""

    def run_phase(
        self,
        stage: int,
        part: str,
        phase: int,
        round: int,
        inboxes: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Sent]:
        """Run a phase at every node of `inboxes`, whose values map a sender to a handle."""

    def save(self, folder: Path, inboxes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Every node writes itself into `folder`; the SHA-256 of every file, once all have written
        theirs.
        """

    def load_state(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Every node continues from `folder`; returns the unread messages as handles, by
        receiver.
        """

    def placement(self) -> dict[str, dict[str, Any]]:
        """Where every node runs: host, process, device."""

    def stop(self) -> None:
        """End every node; may be called more than once."""

    def close(self) -> None:
        """End every node and leave what they ran on, after which no other call makes sense; may be
        called again.
        """


class InProcess:
    """All nodes in this process, one after the other."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._threads = torch.get_num_threads()

    def preflight(self, plan: Plan) -> None:
        local_device(plan.config)

    def start(
        self, plan: Plan, artifacts: Artifacts, say: Callable[[str], None] = lambda _: None
    ) -> None:
        say(f"nodes      {len(plan.nodes)} in this process load their data")
        device = local_device(plan.config)
        self.nodes = {name: Node(plan, name, device) for name in plan.nodes}
        sizes = {name: node.prepare(artifacts.get(name, {})) for name, node in self.nodes.items()}
        for node in self.nodes.values():
            node.connect(sizes)

    def deadline(self, seconds: float, what: str) -> None:
        """Nobody waits for another process here; a step that is too slow can be seen, but not be
        left behind.
        """

    def each(self, call: str, args: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {name: getattr(self.nodes[name], call)(*values) for name, values in args.items()}

    def run_phase(
        self,
        stage: int,
        part: str,
        phase: int,
        round: int,
        inboxes: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Sent]:
        done = {}
        for name, inbox in inboxes.items():
            send, rows, metrics = self.nodes[name].run_phase(stage, part, phase, round, inbox)
            done[name] = Sent(
                {receiver: freeze(payload) for receiver, payload in send.items()}, rows, metrics
            )
        return done

    def save(self, folder: Path, inboxes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        files: dict[str, str] = {}
        for name, node in self.nodes.items():
            files |= node.save(folder, inboxes.get(name, {}))
        return files

    def load_state(self, folder: Path) -> dict[str, dict[str, Any]]:
        return {
            name: {sender: freeze(payload) for sender, payload in node.load_state(folder).items()}
            for name, node in self.nodes.items()
        }

    def placement(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"host": os.uname().nodename, "pid": os.getpid(), "device": str(node.device)}
            for name, node in self.nodes.items()
        }

    def stop(self) -> None:
        self.nodes = {}
        torch.set_num_threads(self._threads)

    def close(self) -> None:
        self.stop()


class NodeLost(Exception):
    """A node died (its process, its machine, or its memory), fell silent or was late.

    The run goes back to the last committed round, or ends (`resources.on_failure`).
    """
