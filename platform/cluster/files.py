"""Files that start a cluster: the templates that ship, and what is wrong with a file, by key and
line.

Of a file for `ray up`, Ray's own schema and preparation are asked first; a RayJob or RayCluster of
KubeRay is held against `templates/kuberay-schema.yaml`. Then come rules of ours: token
authentication, what listens where, machines for the server actor.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jsonschema
import yaml
from ray.autoscaler._private import providers
from ray.autoscaler._private.util import prepare_config, validate_config

from crossfed.platform.cluster.connect import SERVER_RESOURCE
from crossfed.platform.errors import CrossfedError
from crossfed.platform.registry import nearest
from crossfed.platform.yaml_text import load_yaml

TEMPLATES = ("aws", "gcp", "local", "kuberay")
Key = tuple[str | int, ...]
"""Where in a file: names of mappings and positions in lists, from the top."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_OWN = r"ami-0{17}|fs-0{17}|\bmy-project\b|SET-a-family|registry\.example\.com|192\.0\.2\.\d+|\b10\.0\.0\.0:/"  # noqa: E501
"""Values of the templates that stand for the user's."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a file.

    Attributes:
        key: where, in dots. line: counted from 1; 0 where the key is not in the file.
        severity: an error keeps the cluster from starting or leaves it open; a warning is worth a
            look.
    """

    key: str
    line: int
    text: str
    severity: Literal["error", "warning"] = "error"


def template(name: str) -> str:
    """The text of a template that ships.

    Raises:
        CrossfedError: there is none of this name.
    """
    if name not in TEMPLATES:
        raise CrossfedError(f"There is no cluster template {name!r}{nearest(name, TEMPLATES)}")
    return _packaged(f"{name}.yaml")


def _packaged(file: str) -> str:
    return (
        importlib.resources.files("crossfed.platform.cluster.templates")
        .joinpath(file)
        .read_text(encoding="utf-8")
    )


def check(path: Path) -> list[Problem]:
    """What is wrong with a cluster file, in the order of its lines; nothing is started and no cloud
    is asked.

    Raises:
        CrossfedError: the file cannot be read, or is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        # keys that stand twice are among the problems that are listed
        config = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise CrossfedError(f"The cluster file {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise CrossfedError(f"{path}{line}: not valid YAML: {problem}.") from error
    if not isinstance(config, dict) or tree is None:
        raise CrossfedError(f"{path} must hold a mapping: keys with values.")
    kube = "kind" in config or "apiVersion" in config
    raw = [*_twice(tree), *(_kuberay(config) if kube else _launcher(config))]
    found = {
        Problem(".".join(map(str, key)), _line(tree, key), said, severity)
        for key, said, severity in raw
    }
    for number, row in enumerate(text.splitlines(), 1):
        if own := re.search(_OWN, row.partition("#")[0]):
            found.add(Problem("", number, f"{own[0]} is the template's; set yours", "warning"))
    return sorted(found, key=lambda problem: (problem.line, problem.key, problem.text))


Said = tuple[Key, str, Literal["error", "warning"]]


def _child(node: yaml.Node, part: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """The key and value nodes of an entry; what a `<<` brings counts after the mapping's own."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key, value
        for key, value in node.value:
            if key.value == "<<" and (found := _child(value, part)):
                return found
    return None


def _line(tree: yaml.Node, key: Key) -> int:
    """The line of the deepest part of a key that is in the file."""
    node, line = tree, 0
    for part in key:
        if (found := _child(node, part)) is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def _twice(node: yaml.Node, above: Key = ()) -> Iterator[Said]:
    """Keys that a mapping has twice, of which YAML would keep the last."""
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _twice(value, (*above, index))
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        for name, (_, value) in zip(names, node.value, strict=True):
            yield from _twice(value, (*above, name))
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield (*above, name), "given twice; only the last counts", "error"


def _schema(config: Any, schema: Mapping[str, Any]) -> Iterator[Said]:
    """What a JSON schema says, in our words."""
    for error in jsonschema.Draft7Validator(schema).iter_errors(config):
        key = tuple(error.absolute_path)
        if error.validator == "additionalProperties" and isinstance(error.schema, dict):
            known = error.schema.get("properties", {})
            for name in set(error.instance) - set(known):
                # the value is wrong, not the key, and told by itself
                if isinstance(error.validator_value, dict):
                    continue
                yield (*key, name), f"unknown key{nearest(str(name), known)}", "error"
        elif error.validator == "required":
            for name in error.validator_value:
                if name not in error.instance:
                    yield (*key, name), f"missing{_misspelt(name, error.instance)}", "error"
        elif error.validator == "type":
            yield (
                key,
                (f"must be {_kind(error.validator_value)}, not {_short(error.instance)}"),
                "error",
            )
        elif error.validator in ("enum", "const"):
            allowed = (
                error.validator_value if error.validator == "enum" else [error.validator_value]
            )
            yield (
                key,
                (f"must be {' or '.join(map(str, allowed))}, not {_short(error.instance)}"),
                "error",
            )
        else:
            yield key, error.message, "error"


def _kind(names: str | Sequence[str]) -> str:
    words = {
        "object": "a mapping",
        "array": "a list",
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "true or false",
        "null": "null",
    }
    return " or ".join(words[name] for name in ([names] if isinstance(names, str) else names))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}…"


def _misspelt(name: str, instance: Mapping[str, Any]) -> str:
    """A hint where the missing key is there in another spelling."""
    for other in instance:
        if str(other).replace("_", "").replace("-", "").lower() == name.replace("_", "").lower():
            return f" (there is {other})"
    return ""


# -- Ray's cluster launcher ------------------------------------------------------------------------


def _launcher(config: dict[str, Any]) -> list[Said]:
    kind = config["provider"].get("type") if isinstance(config.get("provider"), dict) else None
    local = kind == "local"
    # Ray lets min_workers stand at the top for machines of one's own, but not in its schema
    held = {key: value for key, value in config.items() if not (local and key == "min_workers")}
    path = Path(providers.__file__).parents[1] / "ray-schema.json"
    found = list(_schema(held, json.loads(path.read_text(encoding="utf-8"))))
    known = sorted(map(str, providers._NODE_PROVIDERS))
    if isinstance(kind, str) and kind not in known:
        found.append(
            (("provider", "type"), f"{kind!r} is none of Ray's{nearest(kind, known)}", "error")
        )
    if found:
        return found
    found = list(_local(config) if local else _types(config, str(kind)))
    if not found:
        try:
            # without its files, of which Ray warns what matters in containers only
            validate_config(prepare_config(copy.deepcopy({**config, "file_mounts": {}})))
        except (ValueError, RuntimeError, jsonschema.ValidationError) as error:
            found.append(((), getattr(error, "message", str(error).splitlines()[0]), "error"))
    return found + list(_commands(config, str(kind)))


def _local(config: Mapping[str, Any]) -> Iterator[Said]:
    """What Ray's preparation of on-premise clusters refuses, with an exit instead of an error."""
    for key in ("available_node_types", "head_node_type", "head_node", "worker_nodes"):
        if key in config:
            yield (
                (key,),
                ("not possible with provider local, where all machines are of one kind"),
                "error",
            )
    provider = config["provider"]
    if "coordinator_address" in provider:
        return
    for key in ("head_ip", "worker_ips"):
        if not provider.get(key):
            yield ("provider", key), f"missing{_misspelt(key, provider)}", "error"
    addresses = [provider.get("head_ip"), *(provider.get("worker_ips") or [])]
    for index, address in enumerate(addresses):
        if address in addresses[:index]:
            yield ("provider", "worker_ips"), f"{address} is named twice", "error"


_NEEDED = {"aws": ("InstanceType", "ImageId"), "gcp": ("machineType", "disks")}
"""Keys of a cloud's machines that Ray's schema does not look at."""


def _types(config: Mapping[str, Any], kind: str) -> Iterator[Said]:
    types, head = config.get("available_node_types"), config.get("head_node_type")
    if not types:
        yield ("available_node_types",), "missing; Ray's own machines would be taken", "error"
        return
    if head not in types:
        yield (
            ("head_node_type",),
            (f"{head!r} is none of available_node_types{nearest(str(head), types)}"),
            "error",
        )
    for name, machine in types.items():
        where: Key = ("available_node_types", name)
        node = machine["node_config"]
        for key in _NEEDED.get(kind, ()):
            if key not in node:
                yield (*where, "node_config", key), f"missing{_misspelt(key, node)}", "error"
        low, high = (
            machine.get("min_workers", 0),
            machine.get("max_workers", config.get("max_workers", 0)),
        )
        if name != head and low > high:
            yield (*where, "min_workers"), f"{low} is above max_workers = {high}", "error"
        if kind == "gcp" and "CPU" not in machine["resources"]:
            yield (
                (*where, "resources"),
                ("CPU is missing: on Google Cloud Ray does not know what a machine has"),
                "error",
            )
    if "max_workers" in config:
        least = sum(
            machine.get("min_workers", 0) for name, machine in types.items() if name != head
        )
        if least > config["max_workers"]:
            yield (
                ("max_workers",),
                (f"{config['max_workers']} is below the {least} that min_workers ask for"),
                "error",
            )


def _commands(config: Mapping[str, Any], kind: str) -> Iterator[Said]:
    """The commands that start Ray and MLflow: who may join, and what listens where."""
    for key, role in (
        ("head_start_ray_commands", "--head"),
        ("worker_start_ray_commands", "--address"),
    ):
        commands = config.get(key)
        if not commands:
            yield (key,), "missing; Ray's own would start without token authentication", "error"
            continue
        starts = [
            (index, command) for index, command in enumerate(commands) if "ray start" in command
        ]
        if not starts:
            yield (key,), "no command holds `ray start`", "error"
        for index, command in starts:
            if role not in command:
                yield (key, index), f"`ray start` lacks {role}", "error"
            if not re.search(r"\bRAY_AUTH_MODE=[\"']?token\b", command):
                yield (
                    (key, index),
                    "`ray start` lacks RAY_AUTH_MODE=token: whoever reaches the machine could "
                    "run code",
                    "error",
                )
            if role == "--head" and kind != "local" and "--autoscaling-config" not in command:
                yield (
                    (key, index),
                    "`ray start` lacks --autoscaling-config=~/ray_bootstrap_config.yaml: no "
                    "worker would start",
                    "error",
                )
        for index, command in enumerate(commands):
            yield from _listening((key, index), command)
    for key, commands in config.items():
        for index, command in enumerate(commands if isinstance(commands, list) else ()):
            if isinstance(command, str) and re.search(r"\bRAY_AUTH_TOKEN=[\"']?\w", command):
                yield (
                    (key, index),
                    ("the token itself does not belong in this file; use RAY_AUTH_TOKEN_PATH"),
                    "error",
                )
    if SERVER_RESOURCE not in json.dumps(config):
        yield (
            (),
            f"no machine has the resource {SERVER_RESOURCE}: server actors may be placed on "
            f"GPU machines",
            "warning",
        )


def _listening(key: Key, command: str) -> Iterator[Said]:
    """Services in a shell command that listen beyond the loopback interface."""
    for service, option in (("ray start", "dashboard-host"), ("mlflow server", "host")):
        for start in re.findall(rf"{service}\b[^;&|]*", command):
            for host in re.findall(rf"--{option}[= ]+[\"']?([^\s\"']+)", start):
                if host not in _LOOPBACK:
                    what = (
                        "the dashboard, and with it the job server"
                        if service == "ray start"
                        else "MLflow"
                    )
                    yield (
                        key,
                        (f"{what}, would listen on {host}, beyond the loopback interface"),
                        "warning",
                    )


# -- KubeRay ---------------------------------------------------------------------------------------


def _kuberay(config: dict[str, Any]) -> list[Said]:
    found = list(_schema(config, load_yaml(_packaged("kuberay-schema.yaml"))))
    if found:
        return found
    job = config["kind"] == "RayJob"
    where: Key = ("spec", "rayClusterSpec") if job else ("spec",)
    cluster = config["spec"]["rayClusterSpec"] if job else config["spec"]
    return [*found, *_guarded(cluster, where), *_groups(cluster, where)]


def _guarded(cluster: Mapping[str, Any], where: Key) -> Iterator[Said]:
    mode = cluster.get("authOptions", {}).get("mode")
    if mode != "token":
        said = "missing" if mode is None else f"mode is {mode}"
        yield (
            (*where, "authOptions"),
            (f"{said}: whoever reaches a pod could run code; set mode: token"),
            "error",
        )
    ours = importlib.metadata.version("ray")
    if cluster.get("rayVersion", ours) != ours:
        yield (
            (*where, "rayVersion"),
            (f"{cluster['rayVersion']}, but this crossfed runs with Ray {ours}"),
            "warning",
        )
    head = cluster["headGroupSpec"]
    if head.get("serviceType", "ClusterIP") != "ClusterIP":
        yield (
            (*where, "headGroupSpec", "serviceType"),
            f"{head['serviceType']} makes the dashboard and Ray reachable from outside the "
            f"Kubernetes cluster",
            "warning",
        )
    if SERVER_RESOURCE not in json.dumps(cluster):
        yield (
            where,
            f"no group has the resource {SERVER_RESOURCE}: server actors may be placed on GPU "
            f"machines",
            "warning",
        )


def _groups(cluster: Mapping[str, Any], where: Key) -> Iterator[Said]:
    groups: list[tuple[Key, Mapping[str, Any]]] = [
        ((*where, "headGroupSpec"), cluster["headGroupSpec"])
    ]
    workers = cluster.get("workerGroupSpecs", [])
    groups += [((*where, "workerGroupSpecs", index), group) for index, group in enumerate(workers)]
    names = [group["groupName"] for group in workers]
    for key, group in groups:
        if "groupName" in group and names.count(group["groupName"]) > 1:
            yield (*key, "groupName"), f"{group['groupName']!r} names two groups", "error"
        low, high = group.get("minReplicas", 0), group.get("maxReplicas", 2**31)
        if not low <= group.get("replicas", low) <= high:
            yield (
                (*key, "replicas"),
                (f"{group.get('replicas', low)} is not between {low} and {high}"),
                "error",
            )
        named = group.get("rayStartParams", {}).get("resources")
        if named is not None:
            try:
                json.loads(json.loads(named) if named.startswith('"') else named)
            except ValueError:
                yield (
                    (*key, "rayStartParams", "resources"),
                    f"""not JSON inside quotes, as in '"{{\\"{SERVER_RESOURCE}\\": 1}}"'""",
                    "error",
                )
        spec = group["template"]["spec"]
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        for index, container in enumerate(spec["containers"]):
            at: Key = (*key, "template", "spec", "containers", index)
            for number, mount in enumerate(container.get("volumeMounts", [])):
                if mount["name"] not in volumes:
                    said = f"there is no volume {mount['name']!r}{nearest(mount['name'], volumes)}"
                    yield (*at, "volumeMounts", number, "name"), said, "error"
            command = " ".join([*container.get("command", []), *container.get("args", [])])
            yield from _listening((*at, "command"), command)
