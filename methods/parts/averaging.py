"""FedAvg and FedProx as parts: which parameters of a network cross, their average, the proximal
term, and the steps.

A method declares a `Sharing`: parameter names and what they are. Whatever is not named stays with
its domain: `upload` takes the named ones only, and since `fields` are the method's declarations,
the platform refuses any other tensor before it leaves the domain.

Sources: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017 (FedAvg); Li et al., "Federated Optimization in Heterogeneous Networks", MLSys
2020, arXiv 1812.06127 (FedProx).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import (
    SERVER,
    Array,
    Context,
    Direction,
    Field,
    Interactions,
    Out,
    Payload,
    Phase,
    Step,
)

COUNT = "n"
"""The key under which a domain sends its number of training instances, int64 [1]."""


class Member(Protocol):
    """A domain's state, as far as averaging cares."""

    @property
    def net(self) -> nn.Module:
        """What is trained and partly shared."""

    def changed(self) -> None:
        """Forget what was computed from the network's former parameters."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The parameters that cross; all others are private.

    Args:
        names: a parameter's name in the network, or a prefix ended by `*` -> what it is, in words.
    """

    names: Mapping[str, str]

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every shared parameter up and down, and the count of training instances up."""
        ways = (Direction.UP, Direction.DOWN)
        shared = [
            Field(name, way, None, meaning) for way in ways for name, meaning in self.names.items()
        ]
        return (
            *shared,
            Field(COUNT, Direction.UP, (1,), "number of training instances", dtype="int64"),
        )

    def parameters(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """The shared parameters by name, in the network's order.

        Raises:
            ValueError: a declared name fits no parameter.
        """
        every = dict(net.named_parameters())
        chosen = {name for name in every for declared in self.names if _fits(declared, name)}
        if unused := [
            declared for declared in self.names if not any(_fits(declared, name) for name in every)
        ]:
            raise ValueError(
                f"declared as shared, but no parameter has the name: {', '.join(unused)}"
            )
        return {name: parameter for name, parameter in every.items() if name in chosen}

    def upload(self, net: nn.Module) -> dict[str, Array]:
        """The shared parameters as float32 arrays of their own."""
        return {
            name: p.detach().to("cpu", torch.float32).numpy().copy()
            for name, p in self.parameters(net).items()
        }

    @torch.no_grad()
    def load(self, net: nn.Module, payload: Payload, sender: str = SERVER) -> None:
        """Put received values into the shared parameters, all of them and no others.

        Raises:
            CrossfedError: a tensor is missing, is not shared, or has another shape; names it.
        """
        own = self.parameters(net)
        check_same(sender, payload, {name: tuple(p.shape) for name, p in own.items()})
        for name, parameter in own.items():
            parameter.copy_(torch.tensor(payload[name]))


def _fits(declared: str, name: str) -> bool:
    return name.startswith(declared[:-1]) if declared.endswith("*") else name == declared


def check_same(sender: str, payload: Payload, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a payload of parameters that are not exactly the expected ones.

    Raises:
        CrossfedError: a tensor is missing, unknown, or has another shape; names the sender and the
            tensor.
    """
    if unknown := sorted(set(payload) - set(shapes)):
        raise CrossfedError(f"{sender} sent {unknown[0]!r}, which is not a shared parameter")
    for name, shape in shapes.items():
        if name not in payload:
            raise CrossfedError(f"{sender} sent no {name!r}, which all share")
        if payload[name].shape != shape:
            raise CrossfedError(
                f"{sender} sent {name!r} with shape {payload[name].shape}, but here it is {shape}"
            )


def volume_weights(
    counts: npt.ArrayLike, affinity: npt.ArrayLike | None = None
) -> npt.NDArray[np.float64]:
    """n_j a_j / Σ_k n_k a_k for every domain j; with a = 1, FedAvg's weights by data volume.

    Args:
        counts: training instances n, [domains]. affinity: a ≥ 0, [domains]; 1 by default.

    Returns:
        float64 [domains], summing to one.

    Raises:
        CrossfedError: they are all zero.
    """
    mass = np.asarray(counts, np.float64) * (
        1.0 if affinity is None else np.asarray(affinity, np.float64)
    )
    if not mass.sum() > 0:
        raise CrossfedError(
            "no domain has a training instance, so that there is nothing to average"
        )
    return np.asarray(mass / mass.sum(), np.float64)


def weighted_average(payloads: Sequence[Payload], weights: npt.ArrayLike) -> dict[str, Array]:
    """Σ_j w_j W_j, tensor by tensor, summed in float64 and in the given order, returned as float32.

    Args:
        payloads: the domains' parameters, with equal names and shapes. weights: [domains].
    """
    w = np.asarray(weights, np.float64)
    average = {}
    for name in payloads[0]:
        total = np.zeros(payloads[0][name].shape, np.float64)
        for share, payload in zip(w, payloads, strict=True):
            total += share * payload[name]
        average[name] = total.astype(np.float32)
    return average


def proximal(parameters: Iterable[Tensor], reference: Iterable[Tensor], mu: float) -> Tensor:
    """(μ/2)‖w - w_global‖², FedProx's proximal term.

    Args:
        parameters: w, the shared parameters. reference: w_global, what the server sent, in the same
            order and constant.

    Returns:
        A scalar.
    """
    squares = [(w - fixed).square().sum() for w, fixed in zip(parameters, reference, strict=True)]
    return mu / 2 * torch.stack(squares).sum()


@dataclass(slots=True)
class Server:
    """The averaging server's state: the shared parameters as last sent."""

    shared: dict[str, Array]

    def state_dict(self) -> dict[str, Any]:
        """What training continues from."""
        return {"shared": self.shared}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`."""
        self.shared = {name: np.array(value) for name, value in saved["shared"].items()}


def announce(state: Server, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Send the shared parameters to every domain, so that all start from the same."""
    return Out(dict.fromkeys(ctx.peers, state.shared))


def average(state: Server, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """FedAvg: every domain gets the average of all, by data volume."""
    shapes = {name: value.shape for name, value in state.shared.items()}
    payloads = [
        {key: value for key, value in inbox[name].items() if key != COUNT} for name in ctx.peers
    ]
    for name, payload in zip(ctx.peers, payloads, strict=True):
        check_same(name, payload, shapes)
    weights = volume_weights([int(inbox[name][COUNT][0]) for name in ctx.peers])
    state.shared = weighted_average(payloads, weights)
    told = {
        f"weight_{name}": float(weight) for name, weight in zip(ctx.peers, weights, strict=True)
    }
    return Out(dict.fromkeys(ctx.peers, state.shared), told)


def adopt_step(sharing: Sharing) -> Step:
    """A domain's step that takes the server's parameters over."""

    def adopt(state: Member, inbox: Mapping[str, Payload], ctx: Context) -> Out:
        """Replace the shared parameters by what the server sent."""
        sharing.load(state.net, inbox[SERVER])
        state.changed()
        return Out()

    return adopt


def upload_step(sharing: Sharing, train: Step, count: Callable[[Interactions], int]) -> Step:
    """A domain's step that trains and then sends its shared parameters and its number of training
    instances.

    Args:
        train: the local step; sends nothing itself. count: training instances of the domain's data.
    """

    def train_and_upload(state: Member, inbox: Mapping[str, Payload], ctx: Context) -> Out:
        """Train locally, then upload the shared parameters."""
        metrics = train(state, inbox, ctx).metrics
        n = np.array([count(ctx.own)], np.int64)
        return Out({SERVER: {**sharing.upload(state.net), COUNT: n}}, metrics)

    return train_and_upload


def opening(sharing: Sharing) -> tuple[Phase, ...]:
    """Before the first round: all domains take over the server's initial parameters."""
    return (Phase(announce, at="server"), Phase(adopt_step(sharing)))


def rounds(
    sharing: Sharing, train: Step, count: Callable[[Interactions], int]
) -> tuple[Phase, ...]:
    """A round of FedAvg around any local training step; ends with the average in place, so that is
    what is evaluated.
    """
    return (
        Phase(upload_step(sharing, train, count)),
        Phase(average, at="server"),
        Phase(adopt_step(sharing)),
    )
