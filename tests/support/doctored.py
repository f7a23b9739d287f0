"""What a sound machine says of itself, for the doctor."""

from __future__ import annotations

from typing import Any

from crossfed.platform.doctor.judge import GIB, Wanted

WANTED = Wanted("/mnt/shared/runs", "http://127.0.0.1:5000", "minilm", set_aside=True)


VERSIONS = {
    "crossfed": "0.1.0",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "numpy": "2.4.1",
    "optuna": "5.0.0",
}


def machine(name: str, gpus: int = 0, head: bool = False, driver: bool = False) -> dict[str, Any]:
    """A sound machine; the driver runs on the head."""
    return {
        "name": name,
        "host": "head" if driver else name,
        "driver": driver,
        "head": head,
        "gpus": float(gpus),
        "python": "3.11.14",
        "packages": dict(VERSIONS),
        "source": {"hash": "abc", "path": "/x"},
        "skew": None if driver else 0.0,
        "cuda": {"build": "12.8", "devices": ["L4"] * gpus},
        "storage": {"writable": True, "same": True},
        "mlflow": {"reached": True},
        "encoder": {"name": "minilm"},
        "auth": {"mode": "token"},
        "disk": {
            "places": {
                "the runs": {"path": "/mnt/shared/runs", "free": 500 * GIB, "total": 1000 * GIB},
                "Ray's temporary files": {"path": "/tmp/ray", "free": 80 * GIB, "total": 150 * GIB},
            }
        },
        "memory": {"free": 24 * GIB, "total": 32 * GIB},
    }
