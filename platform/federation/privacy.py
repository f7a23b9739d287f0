"""The privacy accountant: counts every perturbed message that left, before it is delivered, and
composes the losses.

A method declares what leaves under noise (`Method.releases`). `Rounds` writes one line of
`releases.jsonl` per sender, release and phase, fsynced, before any receiver sees the messages. That
file is never cut back: a round that is repeated after a lost node or a resume was sent twice and
counts twice.

Three totals, per sending domain, with n the releases that left (messages × `Release.count`):

    paper   Σ ε₀ over messages, as the method's paper counts (T·ε₀ over T rounds), whether or not that holds
    whole   basic composition of every release: Σ ε over n Laplace releases (δ = 0). Of g Gaussian releases each takes δ/g, and
            its ε at that δ is the exact one of Balle and Wang (ICML 2018)
    tight   the composed privacy loss distribution of all n releases at δ (dp-accounting), or `whole` where that is smaller

`tight` takes each release for one Laplace or Gaussian variable that is shifted by the whole
sensitivity. For the Gaussian this is exact by rotation. For Laplace noise on a vector that moves by
at most Δ in the L1 norm it is an upper bound, because a shift by a + c in one coordinate dominates
shifts by a and c in two: at b = 1 the likelihood ratio of a shift is exp(2Y - shift) with Y =
min(max(X, 0), shift); the survival function of Y₁ + Y₂ crosses that of the single Y once, from
above, and both ratios have mean one, so the single one is larger in convex order, and with it every
hockey-stick divergence. Composed dominating pairs dominate the adaptive composition (Zhu, Dong and
Wang, "Optimal Accounting of Differential Privacy via Characteristic Function", AISTATS 2022).

A total is that of one domain's own messages. Whoever is protected in several domains (a shared
user) adds those up. Keys that no release names are outside the account.
"""  # noqa: E501

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from crossfed.platform.config.settings import Privacy
from crossfed.platform.errors import CrossfedError, LeakError
from crossfed.platform.federation.payloads import Entry
from crossfed.platform.method import (
    SERVER,
    Array,
    Direction,
    Method,
    MethodConfig,
    Payload,
    Release,
    Stage,
)

RECORD = "releases.jsonl"
"""The record of a run's perturbed messages, in its directory."""

UNPERTURBED = "no release is perturbed: what crosses is sent as it is"

Counts = Mapping[Release, int]
"""Messages by release."""


# -- what is declared ------------------------------------------------------------------------------


def check_releases(
    method: Method, config: MethodConfig, stages: Sequence[Stage]
) -> tuple[Release, ...]:
    """The method's releases, after checking that they speak of what the method sends.

    Raises:
        CrossfedError: a release names a stage or key that is not there, a key occurs twice, numbers
            are not positive, or two releases protect different units, which no single total could
            hold for.
    """
    releases, by_name = method.releases(config), {stage.name: stage for stage in stages}
    for release in releases:
        where = (
            f"{method.name}: the release of {', '.join(release.keys) or 'nothing'} in "
            f"stage {release.stage!r}"
        )
        stage = by_name.get(release.stage)
        if stage is None:
            raise CrossfedError(f"{where}: there is no such stage; it has {', '.join(by_name)}.")
        ways = (Direction.DOWN,) if release.at == "server" else (Direction.UP, Direction.PEER)
        for key in release.keys:
            if not any(
                field.key == key and field.direction in stage.edges & set(ways)
                for field in method.fields
            ):
                told = " or ".join(ways)
                raise CrossfedError(
                    f"{where}: {key!r} is no declared field that goes {told} "
                    f"along the stage's edges."
                )
        if not release.keys or not release.parts or not release.unit:
            raise CrossfedError(
                f"{where} must name its keys, its parts and its unit of protection."
            )
        if (
            min(release.sensitivity, release.scale, release.count) <= 0
            or release.per_round_epsilon < 0
        ):
            raise CrossfedError(
                f"{where}: sensitivity, scale and count must be positive; where no noise is "
                f"added, declare no release."
            )
    named = Counter(
        (release.stage, release.at, key) for release in releases for key in release.keys
    )
    for (name, _, key), times in named.items():
        if times > 1:
            raise CrossfedError(
                f"{method.name}: key {key!r} occurs in {times} releases of stage {name!r}."
            )
    if len(units := sorted({release.unit for release in releases})) > 1:
        raise CrossfedError(
            f"{method.name}: its releases protect different units ({'; '.join(units)}); name one."
        )
    return releases


def _covers(keys: Iterable[str], key: str) -> bool:
    """Whether `key` is one of `keys`, of which a trailing `*` stands for every ending."""
    return any(key.startswith(name[:-1]) if name.endswith("*") else key == name for name in keys)


def tell_apart(
    releases: Sequence[Release],
    stage: str,
    part: str,
    send: Mapping[str, Payload],
    rows: Sequence[Entry],
) -> list[Entry]:
    """Number the different arrays that one node sends under a perturbed key in one phase
    (`Entry.copy`).

    Args:
        releases: the method's. stage, part: where the run is.
        send: the node's messages. rows: their ledger rows.

    Raises:
        LeakError: a perturbed key leaves in a part of the stage that its release does not declare.
    """
    seen: dict[str, list[Array]] = {}
    told = []
    for row in rows:
        release = _release(releases, stage, row)
        if release is None:
            told.append(row)
            continue
        if part not in release.parts:
            raise LeakError(
                f"{row.sender} → {row.receiver}: payload key {row.key!r} left in {part!r} of "
                f"stage {stage!r}, but its release "
                f"is declared for {', '.join(release.parts)}; it was not sent."
            )
        value, known = send[row.receiver][row.key], seen.setdefault(row.key, [])
        number = next(
            (n for n, other in enumerate(known) if other is value or np.array_equal(other, value)),
            None,
        )
        if number is None:
            number = len(known)
            known.append(value)
        told.append(replace(row, copy=number))
    return told


def _release(releases: Sequence[Release], stage: str, row: Entry) -> Release | None:
    """The release that a ledger row belongs to."""
    at = "server" if row.sender == SERVER else "domains"
    for release in releases:
        if release.stage == stage and release.at == at and _covers(release.keys, row.key):
            return release
    return None


# -- what it adds up to ----------------------------------------------------------------------------


def paper_epsilon(counts: Counts) -> float:
    """Σ ε₀ over messages, as the paper counts."""
    return float(sum(release.per_round_epsilon * messages for release, messages in counts.items()))


def whole_epsilon(counts: Counts, delta: float) -> float:
    """Basic composition of every release: at δ = 0 for Laplace noise; Gaussian releases share δ
    evenly.
    """
    gaussian = sum(
        r.count * messages for r, messages in counts.items() if r.mechanism == "gaussian"
    )
    total = sum(
        r.epsilon * r.count * messages for r, messages in counts.items() if r.mechanism == "laplace"
    )
    if gaussian:
        from dp_accounting import get_epsilon_gaussian  # takes over a second to import

        for release, messages in counts.items():
            if release.mechanism == "gaussian":
                one = get_epsilon_gaussian(release.scale / release.sensitivity, delta / gaussian)
                total += one * release.count * messages
    return float(total)


def tight_epsilon(counts: Counts, delta: float) -> float:
    """ε at δ of the composed privacy loss distributions; `whole_epsilon` where that is smaller
    (always at δ = 0).
    """
    return _tight(
        frozenset((release, messages) for release, messages in counts.items() if messages), delta
    )


@functools.lru_cache(maxsize=256)
def _tight(counts: frozenset[tuple[Release, int]], delta: float) -> float:
    from dp_accounting import GaussianDpEvent, LaplaceDpEvent
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    whole = whole_epsilon(dict(counts), delta)
    if not counts or not delta:
        return whole
    if whole > 1e6 or any(
        release.mechanism == "laplace" and release.epsilon > 1e4 for release, _ in counts
    ):
        return whole  # hardly any noise: nothing to gain, and the grid would not fit into memory
    # grid points of a millionth of the range; rounding goes upwards, so a coarser grid can only
    # make the total larger
    interval = min(1e-2, max(1e-5, 1e-6 * whole))
    accountant = PLDAccountant(value_discretization_interval=interval)
    for release, messages in sorted(counts, key=repr):
        event = LaplaceDpEvent if release.mechanism == "laplace" else GaussianDpEvent
        accountant.compose(event(release.scale / release.sensitivity), release.count * messages)
    return float(min(whole, accountant.get_epsilon(delta)))


# -- the account of a run --------------------------------------------------------------------------


class Accountant:
    """What the perturbed messages of one run cost so far, by sender.

    Args:
        settings: budget, counting, δ.
        releases: what the method declares.
        rows: the run's record so far.
    """

    def __init__(
        self, settings: Privacy, releases: Sequence[Release], rows: Iterable[Mapping[str, Any]] = ()
    ):
        self.settings, self.releases = settings, tuple(releases)
        if not settings.delta and any(release.mechanism == "gaussian" for release in self.releases):
            raise CrossfedError(
                "Gaussian noise promises nothing at δ = 0: set privacy.delta above 0."
            )
        self.sent: dict[str, Counter[Release]] = {}
        self.repeated: dict[str, Counter[Release]] = {}
        self._places: set[tuple[Any, ...]] = set()
        self._usual: dict[tuple[str, Release, str], dict[int, int]] = {}
        self.add(rows)

    def lines(
        self, stage: str, part: str, phase: int, round: int, rows: Mapping[str, Sequence[Entry]]
    ) -> list[dict[str, Any]]:
        """The record's lines for one phase: how many different messages each sender sends under
        each release.

        Args:
            stage, part, phase, round: where the run is.
            rows: ledger rows by sender, numbered by `tell_apart`.
        """
        found = []
        for sender, entries in rows.items():
            messages: dict[Release, dict[str, list[tuple[str, int]]]] = {}
            for row in entries:
                if (release := _release(self.releases, stage, row)) is not None:
                    messages.setdefault(release, {}).setdefault(row.receiver, []).append(
                        (row.key, row.copy)
                    )
            for release, receivers in messages.items():
                different = len({tuple(sorted(arrays)) for arrays in receivers.values()})
                place = {
                    "sender": sender,
                    "stage": stage,
                    "part": part,
                    "phase": phase,
                    "round": round,
                }
                found.append({**place, "messages": different, "release": asdict(release)})
        return found

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Count lines of the record.

        Raises:
            CrossfedError: a line is not one that `lines` made.
        """
        for line in lines:
            try:
                release = _read(line["release"])
                sender, stage, part, phase, round, messages = (
                    line[key] for key in ("sender", "stage", "part", "phase", "round", "messages")
                )
                if messages < 0 or not {sender, stage, part, phase, round, release}:
                    raise ValueError("messages are counted from 0")
                place = (sender, stage, part, phase, round, release)
                self.sent.setdefault(sender, Counter())[release] += messages
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise CrossfedError(
                    f"A line of {RECORD} is no record of a release ({type(error).__name__}: "
                    f"{error}); restore it from a copy."
                ) from error
            if place in self._places:
                self.repeated.setdefault(sender, Counter())[release] += messages
            self._places.add(place)
            usual = self._usual.setdefault((sender, release, part), {})
            usual[phase] = max(usual.get(phase, 0), messages)

    def total(self, counting: str, counts: Counts) -> float:
        """One of the three totals ("paper", "whole", "tight") of so many messages."""
        match counting:
            case "paper":
                return paper_epsilon(counts)
            case "whole":
                return whole_epsilon(counts, self.settings.delta)
        return tight_epsilon(counts, self.settings.delta)

    def metrics(self) -> dict[str, float]:
        """`privacy/<sender>/epsilon_<counting>` so far, and the largest of any sender under
        `privacy/max/…`.

        "tight" is among them where it limits the run; it takes a moment to compute.
        """
        shown = dict.fromkeys(["paper", "whole", self.settings.counting])
        found = {
            (name, counting): self.total(counting, counts)
            for name, counts in self.sent.items()
            for counting in shown
        }
        told = {
            f"privacy/{name}/epsilon_{counting}": value for (name, counting), value in found.items()
        }
        for counting in shown if found else ():
            told[f"privacy/max/epsilon_{counting}"] = max(
                v for (_, other), v in found.items() if other == counting
            )
        return told

    # -- the budget --------------------------------------------------------------------------------

    def planned(
        self, stage: str, parts: Mapping[str, int], domains: Sequence[str]
    ) -> dict[str, Counter[Release]]:
        """Messages by sender that so many times each part of a stage will send: one per phase
        unless more were seen.
        """
        plan: dict[str, Counter[Release]] = {}
        for release in self.releases:
            if release.stage != stage:
                continue
            for sender in [SERVER] if release.at == "server" else domains:
                for part in release.parts:
                    usual = self._usual.get((sender, release, part), {})
                    messages = max(1, sum(usual.values())) * parts.get(part, 0)
                    plan.setdefault(sender, Counter())[release] += messages
        return plan

    def over(self, extra: Mapping[str, Counts]) -> tuple[str, float] | None:
        """The sender whose total would exceed the budget with `extra` messages, and that total;
        None where nobody's would.
        """
        budget = self.settings.budget
        if budget is None:
            return None
        for name, counts in extra.items():
            total = self.total(
                self.settings.counting, Counter(self.sent.get(name, {})) + Counter(counts)
            )
            # sums of many ε₀ such as 0.1 miss the budget by rounding alone
            if any(counts.values()) and total > budget * (1 + 1e-9):
                return name, total
        return None

    def expectation(self, stages: Sequence[Stage], domains: Sequence[str]) -> list[str]:
        """What a run that starts now will cost, in words, and how many of its rounds the budget
        lets through.

        Raises:
            CrossfedError: not even the first round of a stage that releases something fits.
        """
        told, counting, budget = [], self.settings.counting, self.settings.budget
        spent: dict[str, Counter[Release]] = {}

        def cost(stage: Stage, rounds: int) -> dict[str, Counter[Release]]:
            plan = (
                self.planned(stage.name, {"open": 1, "each": rounds, "close": 1}, domains)
                if rounds
                else {}
            )
            return {name: spent.get(name, Counter()) + counts for name, counts in plan.items()}

        for stage in stages:
            if not stage.rounds or not (first := cost(stage, 1)):
                continue
            low, fits = 0, stage.rounds
            while (
                budget is not None and low < fits
            ):  # halve until the largest number of rounds that is not over is left
                middle = (low + fits + 1) // 2
                low, fits = (low, middle - 1) if self.over(cost(stage, middle)) else (middle, fits)
            if not fits and not spent and (over := self.over(first)) is not None:
                raise self.refused(stage.name, over)
            spent |= cost(stage, fits)
            shown = ((1, first), (fits, spent)) if fits > 1 else ((1, first),)
            costs = [
                f"ε = {max(paper_epsilon(sent) for sent in by_name.values()):g} as the paper "
                f"counts and "
                f"{max(whole_epsilon(sent, self.settings.delta) for sent in by_name.values()):g} whole after round {n}"  # noqa: E501
                for n, by_name in shown
            ]
            limit = (
                ""
                if budget is None
                else f"; {fits} of {stage.rounds} rounds fit the budget of {budget:g} ({counting})"
            )
            told.append(f"{stage.name}: {', '.join(costs)}{limit}")
        return told

    def refused(self, stage: str, over: tuple[str, float]) -> CrossfedError:
        """Why a run may not start."""
        name, total = over
        already = self.total(self.settings.counting, self.sent.get(name, {}))
        left = f", {already:g} of it for what left before" if already else ""
        return CrossfedError(
            f"privacy.budget={self.settings.budget:g} does not let the first round of stage "
            f"{stage!r} start: it would bring "
            f"{name} to ε = {total:g} ({self.settings.counting} counting{left}); raise the "
            f"budget or add more noise."
        )

    # -- telling -----------------------------------------------------------------------------------

    def report(
        self, ledger: Iterable[Mapping[str, Any]], stops: Mapping[str, int]
    ) -> dict[str, Any]:
        """The "privacy" block of a result: every release with its parameters and counts, and the
        totals by sender.

        Args:
            ledger: rows of everything that crossed, with stage, direction and key.
            stops: stage -> rounds it got before the budget stopped it.
        """
        settings = self.settings
        perturbed = [(release.stage, release.at, release.keys) for release in self.releases]
        plain = [
            f"{stage}: {key} ({way})"
            for stage, way, key in dict.fromkeys(
                (row["stage"], row["direction"], row["key"]) for row in ledger
            )
            if not any(
                stage == name and (way == Direction.DOWN) == (at == "server") and _covers(keys, key)
                for name, at, keys in perturbed
            )
        ]
        note = "" if self.releases else UNPERTURBED if plain else "nothing crosses"
        if self.releases and settings.noise_seed is not None:
            note = (
                f"the noise is drawn from privacy.noise_seed={settings.noise_seed} and can "
                f"be removed: a test, not a promise"
            )
        return {
            "note": note,
            "unit": self.releases[0].unit if self.releases else None,
            "delta": settings.delta,
            "composition": {
                "paper": "the paper's ε₀ of every message, added up",
                "whole": "every release, added up (basic composition)",
                "tight": "privacy loss distributions of every release, at delta",
            },
            "budget": settings.budget,
            "counting": settings.counting,
            "stopped_by_budget": dict(stops),
            "sent_as_it_is": plain,
            "domains": {
                name: {
                    "epsilon_paper": paper_epsilon(counts),
                    "epsilon_whole": whole_epsilon(counts, settings.delta),
                    "epsilon_tight": tight_epsilon(counts, settings.delta),
                    "releases": [
                        self._line(name, release, messages) for release, messages in counts.items()
                    ],
                }
                for name, counts in sorted(self.sent.items())
            },
        }

    def _line(self, name: str, release: Release, messages: int) -> dict[str, Any]:
        only = {release: messages}
        return {
            **asdict(release),
            "keys": list(release.keys),
            "parts": list(release.parts),
            "norm": release.norm,
            "epsilon": release.epsilon if release.mechanism == "laplace" else None,
            "messages": messages,
            "repeated": self.repeated.get(name, Counter())[release],
            "released": messages * release.count,
            "epsilon_paper": paper_epsilon(only),
            "epsilon_whole": whole_epsilon(only, self.settings.delta),
        }


def messages_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Counter[Release]]:
    """Messages by sender and release of lines of the record."""
    found: dict[str, Counter[Release]] = {}
    for line in lines:
        found.setdefault(line["sender"], Counter())[_read(line["release"])] += line["messages"]
    return found


def summary(block: Mapping[str, Any]) -> list[str]:
    """The "privacy" block of a result in a few lines; the same totals of several domains are told
    once.
    """
    said: dict[str, list[str]] = {}
    for name, row in block["domains"].items():
        totals = (
            f"ε = {row['epsilon_paper']:g} as the paper counts, {row['epsilon_whole']:g} whole, "
            f"{row['epsilon_tight']:g} at δ = {block['delta']:g}"
        )
        said.setdefault(totals, []).append(name)
    lines = [f"{', '.join(names)}: {totals}, for {block['unit']}" for totals, names in said.items()]
    for stage, rounds in block["stopped_by_budget"].items():
        lines.append(
            f"stopped by the budget of ε = {block['budget']:g} ({block['counting']}): {stage} "
            f"after round {rounds}"
        )
    repeated = sum(
        line["repeated"] for row in block["domains"].values() for line in row["releases"]
    )
    if repeated:
        lines.append(
            f"{repeated} messages are of rounds that ran again; they left twice and count twice"
        )
    if block["domains"] and block["sent_as_it_is"]:
        lines.append(f"sent as it is: {', '.join(block['sent_as_it_is'])}")
    return lines + ([block["note"]] if block["note"] else [])


def _read(raw: Mapping[str, Any]) -> Release:
    """A release from the JSON of a record line."""
    return Release(**{**raw, "keys": tuple(raw["keys"]), "parts": tuple(raw["parts"])})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines. A last line that was cut off in writing is left out: in the record it
    was never delivered.

    Raises:
        CrossfedError: another line is damaged.
    """
    if not path.is_file():
        return []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise CrossfedError(f"{path} cannot be read: {error.strerror}.") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CrossfedError(
                f"{path}, line {number} is damaged ({error}); restore the file from a copy."
            ) from error
        if not isinstance(row, dict):
            raise CrossfedError(
                f"{path}, line {number} is damaged (no record); restore the file from a copy."
            )
        found.append(row)
    return found


def mend(path: Path) -> None:
    """Cut off a last line that was not written to its end, so that the file can be continued."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
