"""The configuration of one run: one YAML file in, one written back in full, unknown keys refused by
name.

A value's path: the method's `Config` defaults ← `config:` of `methods/configs/<method>.yaml` ← the
preset ← the run's YAML file ← `--set key=value`. `build` walks that path once; everything
downstream holds the frozen result.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator
from pydantic.fields import FieldInfo

from crossfed.platform import uris
from crossfed.platform.data import synthetic
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.metrics import metric_name, parse_metric
from crossfed.platform.evaluation.protocols import get_protocol
from crossfed.platform.method import Checked, Method, MethodConfig
from crossfed.platform.registry import config_class, find_method, method_file, nearest, nearest_few
from crossfed.platform.uris import redact
from crossfed.platform.yaml_text import load_yaml


class Settings(Checked):
    """Base of every settings block."""


_SHOPS = synthetic.PRESETS["small"]


class Synthetic(Settings):
    """The embedded synthetic shops, used when no data directory is given."""

    domains: int = Field(_SHOPS["domains"], ge=1, le=64, description="number of domains")
    users: int = Field(_SHOPS["users"], ge=20, description="users per domain")
    items: int = Field(_SHOPS["items"], ge=20, description="items per domain")
    interactions_per_user: float = Field(
        _SHOPS["interactions_per_user"], ge=5, description="mean interactions per user"
    )
    overlap: float = Field(
        _SHOPS["overlap"], ge=0, le=1, description="share of a domain's users found in every domain"
    )
    seed: int = Field(0, ge=0, description="seed of the generator, apart from the run's seed")
    shared: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of tastes that are common to all domains; 0: nothing transfers",
    )
    smallest: float = Field(
        1.0, gt=0, le=1, description="users of the last domain as a share of the others'"
    )
    taste_in_text: bool = Field(True, description="whether an item's text tells its taste")


class Text(Settings):
    """How item text becomes vectors."""

    encoder: str = Field(
        "minilm",
        description="minilm (packaged), hashing[:width], or a sentence-transformers name or path",
    )
    missing: Literal["zero", "mean", "error"] = Field(
        "zero", description="vector of an item without text"
    )


class Tokeniser(Settings):
    """How item text vectors become semantic IDs, for methods that use them; levels and codebook are
    the method's own keys.
    """

    kind: Literal["rqvae", "residual-kmeans"] = Field(
        "rqvae",
        description="rqvae: trained by gradients; residual-kmeans: principal axes and "
        "K-means, in seconds",
    )
    dim: PositiveInt = Field(32, description="width of the latent vectors that are quantised")
    hidden: PositiveInt = Field(256, description="rqvae: width of the hidden layers")
    epochs: PositiveInt = Field(30, description="rqvae: passes over all item texts")
    batch_size: PositiveInt = Field(1024, description="rqvae: items per step, over all workers")
    lr: float = Field(
        1e-3, gt=0, description="rqvae: Adam's learning rate, falling to 0 along a cosine"
    )
    beta: float = Field(0.25, ge=0, description="rqvae: weight of the commitment loss")
    entropy: float = Field(
        0.5, ge=0, description="rqvae: weight of the loss that keeps all codes in use"
    )
    collision: float = Field(
        50.0,
        ge=0,
        description="rqvae: weight of the loss that tells items of one semantic ID apart",
    )
    workers: PositiveInt = Field(
        1, description="rqvae: data-parallel workers; more than one needs the back end ray"
    )
    seed: int = Field(0, ge=0, description="seed of the tokeniser, apart from the run's seed")
    min_perplexity: float = Field(
        0.1,
        ge=0,
        le=1,
        description="collapsed below this: a level's perplexity as a share of the codes it can use",
    )
    max_dead: float = Field(
        0.5,
        ge=0,
        le=1,
        description="collapsed above this: share of a level's codes without an item",
    )


class Evaluation(Settings):
    """What is measured, on which split, and what selects."""

    protocol: str = Field("ratio-80-10-10", description="split and candidate set, by id")
    split_seed: int = Field(
        42, ge=0, description="seed of the split and of sampled candidates; the same for all runs"
    )
    order: Literal["time", "file"] = Field(
        "time",
        description="of data without times: time refuses them where an order is needed, file "
        "takes that of their files",
    )
    train_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of its training interactions that a domain trains on; the others "
        "stay masked",
    )
    ks: tuple[PositiveInt, ...] = Field(
        (10, 20), min_length=1, description="cut-offs of the metrics"
    )
    metrics: tuple[str, ...] = Field(
        ("recall", "ndcg", "hit_rate", "mrr", "precision", "map", "coverage"),
        min_length=1,
        description="metric names",
    )
    select: str = Field("recall_at_20", description="validation metric that selects the best round")
    every: PositiveInt = Field(1, description="rounds between two evaluations")
    audit: bool = Field(
        False,
        description="attack the uploaded item vectors at the end (similarity-based inference)",
    )

    @field_validator("protocol")
    @classmethod
    def _known_protocol(cls, value: str) -> str:
        return get_protocol(value).id

    @field_validator("select")
    @classmethod
    def _canonical(cls, value: str) -> str:
        return metric_name(value)

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_metric(f"{name}_at_1")[0] for name in value)

    def model_post_init(self, _: Any) -> None:
        measured = [f"{name}_at_{k}" for name in self.metrics for k in self.ks]
        if self.select not in measured:
            raise ValueError(
                f"select={self.select} is not measured{nearest(self.select, measured)}"
            )


class Resources(Settings):
    """What every node gets, and which Ray cluster runs it."""

    address: str | None = Field(
        None, description="address of a running Ray cluster; none starts a local one"
    )
    cpus_per_domain: float | None = Field(
        None, gt=0, description="CPU share per domain actor; none divides what is there"
    )
    cpus_server: float | None = Field(
        None, gt=0, description="CPU share of the server actor; none divides what is there"
    )
    gpus_per_domain: float | None = Field(
        None, ge=0, description="GPU share per domain actor; none divides what is there"
    )
    device: Literal["auto", "cpu"] = Field(
        "auto", description="auto: the GPU Ray assigned, else the CPU; cpu: always CPU"
    )
    gpu_memory_fraction: float | None = Field(
        None, gt=0, le=1, description="cap on a domain's share of its GPU's memory"
    )
    threads: int = Field(
        1, ge=1, le=512, description="torch threads per node; part of what makes CPU runs bit-equal"
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="Ray's strategy"
    )
    start_timeout: float = Field(
        120.0,
        gt=0,
        description="seconds without a sign of life of starting actors after "
        "which they are given up",
    )
    round_timeout: float = Field(
        21_600.0,
        gt=0,
        description="seconds within which every node must have done its part of a round; later "
        "ones are lost",
    )
    heartbeat_timeout: float = Field(
        120.0,
        gt=0,
        description="seconds without a sign of life from a node's process after which it is lost",
    )
    max_message_mb: float | None = Field(
        None,
        gt=0,
        description="largest message in MiB; none: what the declared shapes add up "
        "to, 1024 for one without",
    )
    on_failure: Literal["rollback", "fail"] = Field(
        "rollback",
        description="when a node is lost: rollback goes on from the last committed "
        "round; fail ends the run",
    )
    max_restarts: int = Field(
        2, ge=0, description="how often lost nodes are restarted from the last committed round"
    )

    def without_ray(self) -> list[str]:
        """The settings, other than by default, that do nothing in a run in one process."""
        used = {"device", "threads", "gpus_per_domain", "max_message_mb"}
        fields = type(self).model_fields
        return [
            name
            for name in fields
            if name not in used and getattr(self, name) != fields[name].get_default()
        ]


class TrackingSettings(BaseModel):
    """The `tracking:` block of a run's configuration.

    Args:
        enabled: record the run in MLflow at all.
        uri: `http(s)://…` of an MLflow server, or a database (`sqlite:///PATH`, `postgresql://…`).
            None takes the environment variable MLFLOW_TRACKING_URI, and without it `mlflow.db` in
            the folder that holds the runs.
        experiment: name of the MLflow experiment.
        require: refuse to start when the store is out of reach, instead of spooling.
        system_metrics: record CPU, memory and free disk of the driving machine once per round,
            after the first minute: shorter runs have none.
        parent_run_id: the MLflow run under which this one is shown (a study).
        params: which of the method's values are the run's parameters, e.g. those that a study
            searches; None means all.
        tags: added to the run's own tags.
        artifacts: record files, figures and models besides metrics; they stay in the run's
            directory otherwise.
        register_models: make each domain's model a new version of the registered model
            METHOD-DATA-DOMAIN.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    uri: str | None = None
    experiment: str = "crossfed"
    require: bool = False
    system_metrics: bool = True
    parent_run_id: str | None = None
    params: tuple[str, ...] | None = None
    tags: dict[str, str] = {}
    artifacts: bool = True
    register_models: bool = False

    @field_validator("uri")
    @classmethod
    def _without_password(cls, value: str | None) -> str | None:
        if value is not None and redact(value) != value:
            raise ValueError(
                "a password does not belong in a run's files: set MLFLOW_TRACKING_URI, or "
                "MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, in the environment"
            )
        return value


class Privacy(Settings):
    """How perturbed releases are counted, and when a run has to stop. Only for methods that declare
    releases.
    """

    budget: float | None = Field(
        None,
        gt=0,
        description="largest total ε of any domain; a run stops before the round "
        "that would exceed it",
    )
    counting: Literal["paper", "whole", "tight"] = Field(
        "whole",
        description="which total the budget limits: the paper's, basic composition, or the "
        "tighter one at delta",
    )
    delta: float = Field(
        1e-6, ge=0, lt=1, description="δ at which the tighter total (and Gaussian noise) is stated"
    )
    noise_seed: int | None = Field(
        None,
        ge=0,
        description="makes the noise reproducible, for tests: whoever knows it can "
        "remove the noise",
    )


class Evaluated(Settings):
    """The finished run whose selected model is measured again. Written by `crossfed evaluate`; such
    a run trains nothing.
    """

    run: str = Field(description="name of its directory")
    protocol: str = Field(
        description="the protocol under which `evaluation.select` selected its model"
    )
    ranking: dict[str, Any] = Field(
        default_factory=dict,
        description="the method's keys that were otherwise then, with their values of then",
    )


Control = Literal[
    "none", "noise", "shuffle", "stale", "solo", "peers-noise", "peers-shuffle", "peers-stale"
]


class RunConfig(Settings):
    """One federated run."""

    method: str = Field(description="method name, or package.module:ATTRIBUTE")
    preset: str | None = Field(None, description="a preset of the method")
    config: dict[str, Any] = Field(
        default_factory=dict, description="the method's own values, in full"
    )
    data: Path | None = Field(
        None, description="a prepared data directory; none uses the embedded synthetic shops"
    )
    domains: tuple[str, ...] | None = Field(
        None, description="a subset of the data's domains, in this order"
    )
    synthetic: Synthetic = Field(default_factory=Synthetic)
    text: Text = Field(default_factory=Text)
    tokeniser: Tokeniser = Field(default_factory=Tokeniser)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    resources: Resources = Field(default_factory=Resources)
    tracking: TrackingSettings = Field(default_factory=TrackingSettings)
    privacy: Privacy = Field(default_factory=Privacy)
    control: Control = Field(
        "none",
        description="replaces what every node receives: noise (same mean and variance), "
        "shuffle (rows), stale (the first); "
        "peers-noise, peers-shuffle, peers-stale: only what other domains contributed; solo: "
        "every domain alone",
    )
    seed: int = Field(0, ge=0, description="seed of every random number of the run but the split's")
    backend: Literal["ray", "inprocess"] = Field("ray", description="Ray actors, or one process")
    out: Path = Field(
        Path("runs"), description="folder of run directories, or a URI, which then is mirrored"
    )
    mirror: str | None = Field(
        None,
        description="URI (s3://bucket/prefix …) to which every commit and the results "
        "are copied as well",
    )
    checkpoint_every: PositiveInt = Field(1, description="rounds between two committed checkpoints")
    evaluated: Evaluated | None = Field(
        None, description="written by `crossfed evaluate`: whose model is measured again"
    )

    @field_validator("mirror")
    @classmethod
    def _without_credentials(cls, value: str | None) -> str | None:
        return None if value is None else uris.checked(value)

    @property
    def resolved(self) -> Method:
        """The method this run names."""
        return find_method(self.method)

    def method_config(self) -> MethodConfig:
        """The method's own Config, validated."""
        return self.resolved.Config.model_validate(self.config)

    def hash(self) -> str:
        """Twelve hex digits over what can change a number; seed and data stand beside it, and how
        it is run changes none.
        """
        told = self.model_dump(
            mode="json",
            exclude={
                "out",
                "mirror",
                "tracking",
                "preset",
                "resources",
                "backend",
                "checkpoint_every",
                "seed",
                "data",
            },
        )
        told["threads"] = self.resources.threads
        if "sids" not in self.resolved.artifacts:
            del told["tokeniser"]
        if self.privacy == Privacy():  # came later: runs that set none of it keep their hash
            del told["privacy"]
        if self.evaluation.train_share == 1:
            del told["evaluation"]["train_share"]
        if self.evaluation.order == "time":
            del told["evaluation"]["order"]
        told["synthetic"] = synthetic.turned(**told["synthetic"])
        if self.control == "none":
            del told["control"]
        if self.evaluated is None:
            del told["evaluated"]
        else:
            del told["evaluated"]["run"]  # a name changes no number
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    def to_yaml(self) -> str:
        """The run in full, as YAML that `crossfed run FILE` accepts."""
        return (
            f"# crossfed run "
            f"THIS_FILE\n{yaml.safe_dump(self.model_dump(mode='json'), sort_keys=False)}"
        )


def _leaves(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Dotted names of every settable value of a model -> its field."""
    found: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= _leaves(kind, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = info
    return found


def run_keys() -> dict[str, FieldInfo]:
    """The keys of a run that `--set` takes besides the method's own, by dotted name."""
    apart = ("config", "method", "preset", "evaluated")
    return {key: info for key, info in _leaves(RunConfig).items() if key not in apart}


def first_error(error: ValidationError, where: str, model: type[BaseModel]) -> CrossfedError:
    """One sentence for the first thing that is wrong."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        parent = first["loc"][:-1]
        scope: Any = model
        for part in parent:
            kind = scope.model_fields[str(part)].annotation
            scope = next(
                one for one in (kind, *typing.get_args(kind)) if hasattr(one, "model_fields")
            )
        return CrossfedError(
            f"{where}: unknown key {key!r}{nearest(str(first['loc'][-1]), scope.model_fields)}"
        )
    if first["type"] == "missing":
        return CrossfedError(f"{where}: {key} is missing.")
    if isinstance(inner := first.get("ctx", {}).get("error"), CrossfedError):
        return CrossfedError(f"{where}: {key}: {inner}")
    message = first["msg"].removeprefix("Value error, ")
    given = redact(first["input"]) if isinstance(first["input"], str) else first["input"]
    value = "" if isinstance(given, dict) else f" = {given!r}"
    return CrossfedError(
        f"{where}: {key}{value} is not possible: {message[0].lower()}{message[1:].rstrip('.')}."
    )


def declared_search(method: str) -> dict[str, Any]:
    """The `search:` block of a method's YAML file: what its authors search, as raw values; empty
    where there is none.
    """
    return dict(method_file(method).get("search") or {})


UNREADABLE = (ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError)
"""What PyYAML raises besides its own errors: for dates that there are not, numbers without end,
brackets without end.
"""


def parse_value(text: str, option: str = "--set") -> Any:
    """The value of `--set key=value`: YAML, so `0.5`, `true`, `[10, 20]`, `null` and plain words
    mean what they look like.
    """
    try:
        value = load_yaml(text)
    except (yaml.YAMLError, *UNREADABLE) as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise CrossfedError(
            f"{option}: {text[:200]!r} is not a value YAML can read: {problem}."
        ) from error
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as a word
        except ValueError:
            return value
    return value


def _accepts(annotation: Any, kind: type) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_accepts(part, kind) for part in typing.get_args(annotation))
    return annotation is kind


def _set(target: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for part in path:
        inner = target.get(part) or {}
        if not isinstance(inner, Mapping):
            raise CrossfedError(
                f"{part} = {inner!r} is not possible: it holds keys such as {dotted}."
            )
        target[part] = dict(inner)
        target = target[part]
    target[last] = value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CrossfedError(f"There is no run file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CrossfedError(f"The run file {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise CrossfedError(f"{path}{line}: not valid YAML: {problem}.") from error
    except UNREADABLE as error:
        raise CrossfedError(f"{path}: not valid YAML: {error}.") from error
    if not isinstance(loaded, dict):
        raise CrossfedError(f"{path} must hold a mapping with at least `method:`.")
    return loaded


def _shown(method: str) -> str:
    """A method's name in messages: its own, also where it is brought from outside."""
    return find_method(method).name if ":" in method else method


def build(
    method: str,
    *,
    preset: str | None = None,
    sets: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Build a run's configuration from all its sources.

    Args:
        method: a method's name, or a run's YAML file (recognised by its ending).
        preset: one of the method's presets.
        sets: `key=value` strings; a key is one of the method's own or a dotted key of the run
            (`resources.threads`).
        values: run-level values given as options (data, seed, out, backend, …); None means "not
            given".
        settings: keys as in `sets`, with their values as Python objects.

    Raises:
        CrossfedError: an unknown key, a wrong type or an impossible value, named with what is
            allowed.
    """
    where, raw = "run", dict[str, Any](method=method)
    if method.endswith((".yaml", ".yml")):
        where, raw = method, _read_yaml(Path(method))
        if not isinstance(raw.get("method"), str):
            raise CrossfedError(f"{where}: method is missing.")
        if not isinstance(raw.get("config") or {}, dict):
            raise CrossfedError(
                f"{where}: config = {raw['config']!r} is not possible: it maps the method's "
                f"keys to values."
            )
    Config, name = config_class(raw["method"]), _shown(raw["method"])
    shipped = method_file(raw["method"])
    preset = preset if preset is not None else raw.get("preset")
    presets = shipped.get("presets", {})
    # a list, because YAML may give what cannot be hashed
    if preset is not None and preset not in list(presets):
        raise CrossfedError(f"{name} has no preset {preset!r}{nearest(str(preset), presets)}")
    raw = {**raw, "preset": preset}
    for key, value in (values or {}).items():
        if value is not None:
            _set(raw, key, value)
    own: dict[str, Any] = {
        **shipped.get("config", {}),
        **presets.get(preset, {}),
        **(raw.get("config") or {}),
    }

    own_fields = Config.model_fields
    of_run = run_keys()

    def unknown_key(sentence: str, key: str) -> CrossfedError:
        everything = f"`crossfed methods {raw['method']} --all` shows all"
        return CrossfedError(f"{sentence}{nearest_few(key, [*own_fields, *of_run], everything)}")

    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip().removeprefix("config.")
        if not equals or not value:
            raise CrossfedError(
                f"--set {text!r} must read key=value; the value null stands for none."
            )
        if key in own_fields:
            own[key] = value if own_fields[key].annotation is str else parse_value(value)
        elif key in of_run:
            _set(
                raw,
                key,
                value
                if _accepts(of_run[key].annotation, str) and value != "null"
                else parse_value(value),
            )
        else:
            raise unknown_key(f"--set: unknown key {key!r}", key)
    for key, value in (settings or {}).items():
        if key in own_fields:
            own[key] = value
        elif key in of_run:
            _set(raw, key, value)
        else:
            raise unknown_key(f"unknown key {key!r}", key)
    if isinstance(raw.get("out"), str) and uris.is_uri(raw["out"]):
        raw = {key: value for key, value in raw.items() if key != "out"} | {"mirror": raw["out"]}
    try:
        checked = Config.model_validate(own)
    except ValidationError as error:
        raise first_error(error, f"{name} configuration", Config) from None
    try:
        return RunConfig.model_validate({**raw, "config": checked.model_dump(mode="json")})
    except ValidationError as error:
        raise first_error(error, where, RunConfig) from None
