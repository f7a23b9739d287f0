"""The shared tokeniser: public item text vectors of all domains to semantic IDs, trained once and
then frozen.

A method that names "sids" among its artifacts finds int64 [n_items, levels] in
`ctx.artifacts["sids"]`: the semantic IDs of its own domain's items, made by one tokeniser for all
domains of the run. Its Config says how many `levels` and how large a `codebook` it wants, because
shapes of its parameters follow from them; the run's `tokeniser:` block says everything else.

    ROOT/sids/ab/ab12….npy           the semantic IDs of all items
    ROOT/sids/ab/ab12….safetensors   the frozen tokeniser that gives them
    ROOT/sids/ab/ab12….json          how it was made, and what it leaves unexplained

The key is a hash over the text vectors' keys and the settings, whatever the domains are called and
in whatever order they come. While a tokeniser is trained, its checkpoints lie below `--out`; an
interrupted training goes on from there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from crossfed.platform import checkpoint
from crossfed.platform.cluster.devices import local_device
from crossfed.platform.config.settings import RunConfig
from crossfed.platform.console import Progress
from crossfed.platform.data.artifacts import ArtifactStore
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Array
from crossfed.platform.tokeniser.spec import EVERY, Quantiser, Spec, make, start

CHECKPOINTS = ".tokeniser"
"""Folder of unfinished trainings below `--out`."""

SIDS, SHAPE, ERRORS = "sids", "sids_shape", "sids_errors"
"""Names of the arrays that a domain gets: its semantic IDs; (levels, codebook) as int64 [2]; per
level, float64 [levels], the share of the variance of all domains' text vectors that the codes up to
there leave unexplained."""


def train_here(
    spec: Spec, x: torch.Tensor, folder: Path, device: torch.device
) -> Mapping[str, torch.Tensor]:
    """Train an RQ-VAE in this process, from its last checkpoint in `folder` if there is one;
    returns its parameters.
    """
    training, kept = start(spec, x, device), checkpoint.Checkpoints(folder, ("training",))
    if (found := kept.latest()) is not None:
        training.load_state_dict(checkpoint.load(found[0] / "training"))
    while training.done < spec.epochs:
        losses = training.epoch()
        if training.done % EVERY == 0 or training.done == spec.epochs:
            partial = kept.open(training.done)
            files = checkpoint.save(partial / "training", training.state_dict())
            kept.commit(partial, {"epoch": training.done, "losses": losses}, files)
    return training.model.state_dict()


def frozen(path: Path) -> Quantiser:
    """A trained tokeniser from its `.safetensors` file, on the CPU."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["tokeniser"])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    model = make(Spec(**about["spec"]), about["width"])
    model.load_state_dict(state)
    return model


def _train(config: RunConfig, spec: Spec, x: torch.Tensor, key: str) -> Mapping[str, torch.Tensor]:
    """The parameters of a trained tokeniser, wherever this run trains."""
    if spec.kind == "residual-kmeans":
        model = make(spec, x.shape[1])
        model.fit(x, spec.seed)
        return model.state_dict()
    out = config.out.absolute() / CHECKPOINTS
    if config.backend == "ray":
        from crossfed.platform.tokeniser import ray_train

        if not ray_train.in_a_trial():
            state = ray_train.train(spec, x, out, key, config.resources)
            shutil.rmtree(out / key, ignore_errors=True)
            return state
    if spec.workers > 1:
        raise CrossfedError(
            f"tokeniser.workers={spec.workers} trains with Ray Train, which neither --backend "
            f"inprocess nor a search's trial "
            "uses; set it to 1."
        )
    state = train_here(spec, x, out / key, local_device(config))
    shutil.rmtree(out / key, ignore_errors=True)
    return state


def tokenise(
    config: RunConfig, texts: Mapping[str, tuple[str, Array]], view: Progress
) -> dict[str, dict[str, Array]]:
    """The semantic IDs of every domain's items; trains the tokeniser where the cache does not hold
    it.

    Args:
        texts: domain -> the key of its text vectors, and the vectors, float32 [n_items, width].
        view: told in one line what the tokeniser is like.

    Returns:
        domain -> the arrays named above.

    Raises:
        CrossfedError: the tokeniser has collapsed, cannot be trained here, or the method does not
            say what it wants.
    """
    spec, settings = Spec.of(config), config.tokeniser
    order = sorted(texts, key=lambda name: (texts[name][0], name))
    key = spec.key([texts[name][0] for name in order])
    vectors = torch.from_numpy(np.concatenate([texts[name][1] for name in order]))
    # an item without text has a zero vector, and nothing to teach
    described = vectors[vectors.abs().sum(dim=1) > 0]
    store, about = ArtifactStore(), dict[str, Any](spec=asdict(spec), items=len(vectors))
    model_file = store.root / "sids" / key[:2] / f"{key}.safetensors"

    def compute() -> Array:
        view.note(f"tokeniser  training on {len(described)} item texts: {_name(spec)}")
        threads = torch.get_num_threads()
        torch.set_num_threads(config.resources.threads)
        try:
            state = {
                name: value.detach().cpu().contiguous()
                for name, value in _train(config, spec, described, key).items()
            }
            told = json.dumps({"spec": asdict(spec), "width": vectors.shape[1]})
            temporary = model_file.with_suffix(".partial")
            with checkpoint.writing(model_file):
                save_file(state, temporary, metadata={"tokeniser": told})
                # safetensors' 0600 would lock other users of a shared cache out
                temporary.chmod(0o644)
                temporary.replace(model_file)
            model = frozen(model_file)
            about["errors"] = model.errors(described)
            return model.codes(vectors).numpy()
        finally:
            torch.set_num_threads(threads)

    path, sids, hit = store.ensure("sids", key, compute, about)
    errors = np.array(checkpoint.read_json(path.with_suffix(".json"))["about"]["errors"])
    ends = np.cumsum([len(texts[name][1]) for name in order])
    parts = dict(zip(order, np.split(np.asarray(sids), ends[:-1]), strict=True))
    shape = np.array([spec.levels, spec.codebook])
    found = {name: {SIDS: parts[name], SHAPE: shape, ERRORS: errors} for name in texts}
    report = describe(config, found)
    view.note(f"tokeniser  {_told(spec, report)}{' (cached)' if hit else ''}")
    _check(report, len(described.unique(dim=0)), settings.min_perplexity, settings.max_dead)
    return found


def fits(config: RunConfig, artifacts: Mapping[str, Mapping[str, Array]]) -> bool:
    """Whether semantic IDs made for another configuration of the same study have the shape that
    this one wants.
    """
    if SIDS not in config.resolved.artifacts:
        return True
    spec = Spec.of(config)
    return all(tuple(found[SHAPE]) == (spec.levels, spec.codebook) for found in artifacts.values())


# -- what it is like -------------------------------------------------------------------------------


def codebook_use(sids: npt.NDArray[np.int64], codebook: int) -> tuple[list[float], list[int]]:
    """Per level, the perplexity of the codes and the number of codes that no item has.

    The perplexity is exp(-Σ p ln p), p the share of items with a code: the number of codes if all
    were used alike.

    Args:
        sids: [n_items, levels].
    """
    counts = np.stack([np.bincount(column, minlength=codebook) for column in sids.T])
    p = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(p * np.log(p, out=np.zeros_like(p), where=p > 0), axis=1)
    return np.exp(entropy).tolist(), (counts == 0).sum(axis=1).tolist()


def collision_rate(sids: npt.NDArray[np.int64]) -> float:
    """The share of items that have their semantic ID in common with another item. [n_items,
    levels].
    """
    counts = np.unique(sids, axis=0, return_counts=True)[1]
    return float(counts[counts > 1].sum() / len(sids))


def describe(config: RunConfig, artifacts: Mapping[str, Mapping[str, Array]]) -> dict[str, Any]:
    """What the tokeniser of a run is like, from what `tokenise` returned; goes into
    `result.json`.
    """
    spec, any_domain = Spec.of(config), next(iter(artifacts.values()))
    perplexity, dead = codebook_use(
        np.concatenate([found[SIDS] for found in artifacts.values()]), spec.codebook
    )
    return {
        "kind": spec.kind,
        "levels": spec.levels,
        "codebook": spec.codebook,
        "perplexity": perplexity,
        "dead_codes": dead,
        "reconstruction_error": any_domain[ERRORS].tolist(),
        "collision_rate": {name: collision_rate(found[SIDS]) for name, found in artifacts.items()},
    }


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two reports can be of the same semantic IDs."""
    if (
        one["collision_rate"].keys() != other["collision_rate"].keys()
        or one["dead_codes"] != other["dead_codes"]
    ):
        return False
    now, then = (
        [report["collision_rate"][name] for name in one["collision_rate"]]
        for report in (one, other)
    )
    return np.allclose(one["perplexity"], other["perplexity"]) and np.allclose(now, then)


def parameters(config: RunConfig) -> dict[str, Any]:
    """The settings for the tracker; empty where the method has no use for semantic IDs."""
    if SIDS not in config.resolved.artifacts:
        return {}
    return {f"tokeniser.{name}": value for name, value in config.tokeniser.model_dump().items()}


def _name(spec: Spec) -> str:
    return f"{spec.kind}, {spec.levels} × {spec.codebook} codes"


def _told(spec: Spec, report: Mapping[str, Any]) -> str:
    perplexity = ", ".join(f"{value:.0f}" for value in report["perplexity"])
    dead = ", ".join(map(str, report["dead_codes"]))
    errors = ", ".join(f"{value:.3f}" for value in report["reconstruction_error"])
    shared = ", ".join(f"{name} {rate:.1%}" for name, rate in report["collision_rate"].items())
    return (
        f"{_name(spec)}: perplexity {perplexity}; dead {dead}; error {errors}; items that "
        f"share an ID: {shared}"
    )


def _check(
    report: Mapping[str, Any], distinct: int, min_perplexity: float, max_dead: float
) -> None:
    """Refuse a tokeniser that has collapsed. `distinct`: how many different vectors there are to
    tell apart.
    """
    usable = min(report["codebook"], distinct)
    if distinct < report["codebook"]:
        advice = f"there are only {distinct} different item texts: lower the method's codebook"
    elif report["kind"] == "rqvae":
        advice = (
            "raise tokeniser.entropy or tokeniser.epochs, lower tokeniser.lr, or set "
            "tokeniser.kind=residual-kmeans"
        )
    else:
        advice = "lower tokeniser.dim or the method's codebook"
    for level, (perplexity, dead) in enumerate(
        zip(report["perplexity"], report["dead_codes"], strict=True), start=1
    ):
        used = report["codebook"] - dead
        if perplexity < min_perplexity * usable:
            raise CrossfedError(
                f"The tokeniser has collapsed: level {level} has a perplexity of "
                f"{perplexity:.1f} where {usable} codes can be "
                f"used, less than tokeniser.min_perplexity={min_perplexity:g} of them; {advice}."
            )
        if usable - used > max_dead * usable:
            raise CrossfedError(
                f"The tokeniser has collapsed: level {level} uses {used} of the {usable} codes "
                f"that can be used, more than "
                f"tokeniser.max_dead={max_dead:g} of them are dead; {advice}."
            )
