"""cluster.yaml against Ray's own schema, without any cloud."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_cluster_yaml_is_what_ray_accepts() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    validate_config(prepare_config(config))


def test_nobody_joins_without_the_token() -> None:
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in config[key]
        if "ray start" in command
    ]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in command for command in starts)
    head = " ".join(config["head_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in head and "mlflow server --host 127.0.0.1" in head
