"""Cluster files: the templates hold, cluster.yaml is one of them, and a mistake in any is named by
line and key.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from crossfed.platform.cluster.files import TEMPLATES, Problem, check, template
from crossfed.platform.errors import CrossfedError

ROOT = Path(__file__).resolve().parents[3]
LAUNCHED = tuple(name for name in TEMPLATES if name != "kuberay")


def errors(found: list[Problem]) -> list[Problem]:
    return [problem for problem in found if problem.severity == "error"]


def checked(tmp_path: Path, text: str) -> list[Problem]:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return check(path)


def test_cluster_yaml_is_the_aws_template() -> None:
    assert (ROOT / "cluster.yaml").read_text() == template("aws")


@pytest.mark.parametrize("name", LAUNCHED)
def test_ray_accepts_the_templates(name: str) -> None:
    """By Ray's own code, without ours."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load(template(name))))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_lacks_only_what_is_to_be_set(name: str, tmp_path: Path) -> None:
    found = checked(tmp_path, template(name))
    assert not errors(found) and found
    lines = template(name).splitlines()
    for problem in found:
        assert problem.text.endswith("is the template's; set yours")
        near = lines[max(0, problem.line - 6) : problem.line]
        assert any("SET" in line for line in near), problem


@pytest.mark.parametrize("name", LAUNCHED)
def test_nobody_joins_without_the_token(name: str) -> None:
    config = yaml.safe_load(template(name))
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in config[key]
        if "ray start" in command
    ]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in command for command in starts)
    head = " ".join(config["head_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in head and "mlflow server --host 127.0.0.1" in head
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_locked_versions_are_installed(name: str) -> None:
    config = yaml.safe_load(template(name))
    assert any(
        "-c ~/crossfed-source/constraints.txt" in command for command in config["setup_commands"]
    )
    for source in config["file_mounts"].values():
        assert source.startswith("~") or (ROOT / source).exists()


def test_the_kubernetes_image_has_the_locked_ray() -> None:
    locked = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    text = template("kuberay")
    assert f"rayproject/ray:{locked['ray']}-" in text
    assert yaml.safe_load(text)["spec"]["rayClusterSpec"]["rayVersion"] == locked["ray"]


MISTAKES = [
    # template, text that is there, what it becomes, the key that is named, words
    (
        "aws",
        "max_workers: 0\n",
        "max_worker: 0\n",
        "available_node_types.head.max_worker",
        "unknown key; did you mean max_workers",
    ),
    (
        "aws",
        "upscaling_speed: 1.0",
        "upscaling_speed: fast",
        "upscaling_speed",
        "must be a number, not 'fast'",
    ),
    (
        "aws",
        "  type: aws",
        "  type: awss",
        "provider.type",
        "'awss' is none of Ray's; did you mean aws",
    ),
    (
        "aws",
        "head_node_type: head",
        "head_node_type: haed",
        "head_node_type",
        "'haed' is none .* did you mean head",
    ),
    (
        "aws",
        "InstanceType: m6i.2xlarge",
        "instanceType: m6i.2xlarge",
        "available_node_types.head.node_config.InstanceType",
        r"missing \(there is instanceType\)",
    ),
    (
        "aws",
        "min_workers: 2",
        "min_workers: 6",
        "available_node_types.gpu_worker.min_workers",
        "6 is above max_workers = 4",
    ),
    (
        "aws",
        "max_workers: 4\nup",
        "max_workers: 1\nup",
        "max_workers",
        "1 is below the 2 that min_workers ask for",
    ),
    (
        "aws",
        "ulimit -n 65536; RAY_AUTH_MODE=token ray start --address",
        "ulimit -n 65536; ray start --address",
        "worker_start_ray_commands.1",
        "lacks RAY_AUTH_MODE=token",
    ),
    (
        "aws",
        "RAY_AUTH_MODE=token ray start --head",
        "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=1234 ray start --head",
        "head_start_ray_commands.1",
        "the token itself does not belong",
    ),
    (
        "aws",
        "    --autoscaling-config=~/ray_bootstrap_config.yaml --disable-usage-stats",
        "    --disable-usage-stats",
        "head_start_ray_commands.1",
        "lacks --autoscaling-config",
    ),
    (
        "aws",
        "worker_start_ray_commands:",
        "workers_start_ray_commands:",
        "workers_start_ray_commands",
        "unknown key",
    ),
    ("aws", "cluster_name: crossfed", "name: crossfed", "cluster_name", "missing"),
    (
        "aws",
        "  region: eu-west-1",
        "  region: eu-west-1\n  region: eu-west-2",
        "provider.region",
        "given twice",
    ),
    (
        "gcp",
        "{CPU: 8, GPU: 1}",
        "{GPU: 1}",
        "available_node_types.gpu_worker.resources",
        "CPU is missing",
    ),
    (
        "gcp",
        "{CPU: 8, GPU: 1}",
        "{CPU: 8, GPU: 0.5}",
        "available_node_types.gpu_worker.resources.GPU",
        "a whole number, not 0.5",
    ),
    (
        "gcp",
        "machineType: g2",
        "machine_type: g2",
        "available_node_types.gpu_worker.node_config.machineType",
        r"missing \(there is machine_type\)",
    ),
    ("local", "  head_ip:", "  headip:", "provider.head_ip", r"missing \(there is headip\)"),
    (
        "local",
        "[192.0.2.11, 192.0.2.12]",
        "[192.0.2.11, 192.0.2.11]",
        "provider.worker_ips",
        "192.0.2.11 is named twice",
    ),
    ("local", "[192.0.2.11, 192.0.2.12]", "192.0.2.11", "provider.worker_ips", "must be a list"),
    (
        "local",
        "upscaling_speed: 1.0",
        "head_node_type: head",
        "head_node_type",
        "not possible with provider local",
    ),
    (
        "local",
        "RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6379",
        "RAY_AUTH_MODE=token ray start",
        "worker_start_ray_commands.1",
        "lacks --address",
    ),
    (
        "kuberay",
        "apiVersion: ray.io/v1",
        "apiVersion: ray.io/v1alpha1",
        "apiVersion",
        "must be ray.io/v1, not 'ray.io/v1alpha1'",
    ),
    (
        "kuberay",
        "kind: RayJob",
        "kind: RayJobs",
        "kind",
        "must be RayJob or RayCluster, not 'RayJobs'",
    ),
    (
        "kuberay",
        "entrypoint: >-",
        "entryPoint: >-",
        "spec.entryPoint",
        "unknown key; did you mean entrypoint",
    ),
    (
        "kuberay",
        "mode: token",
        "mode: disabled",
        "spec.rayClusterSpec.authOptions",
        "whoever reaches a pod could run code",
    ),
    (
        "kuberay",
        "    headGroupSpec:",
        "    headGroup:",
        "spec.rayClusterSpec.headGroupSpec",
        "missing",
    ),
    (
        "kuberay",
        'num-gpus: "0"',
        "num-gpus: 0",
        "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-gpus",
        "must be text, not 0",
    ),
    (
        "kuberay",
        "minReplicas: 2",
        "minReplicas: 3",
        "spec.rayClusterSpec.workerGroupSpecs.0.replicas",
        "2 is not between 3 and 4",
    ),
    (
        "kuberay",
        "    - name: shared\n",
        "    - name: share\n",
        "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.volumeMounts.0.name",
        "no volume 'shared'; did you mean share",
    ),
    (
        "kuberay",
        "- name: mlflow\n              image",
        "- name: mlflow\n              img",
        "spec.rayClusterSpec.headGroupSpec.template.spec.containers.1.image",
        "missing",
    ),
    (
        "kuberay",
        """'"{\\"crossfed_server\\": 1}"'""",
        "'{crossfed_server: 1}'",
        "spec.rayClusterSpec.headGroupSpec.rayStartParams.resources",
        "not JSON inside quotes",
    ),
]


@pytest.mark.parametrize(("name", "there", "becomes", "key", "words"), MISTAKES)
def test_a_mistake_is_named(
    name: str, there: str, becomes: str, key: str, words: str, tmp_path: Path
) -> None:
    before = template(name)
    assert there in before
    after = before.replace(there, becomes, 1)
    found = [problem for problem in errors(checked(tmp_path, after)) if problem.key == key]
    assert found and any(re.search(words, problem.text) for problem in found), errors(
        checked(tmp_path, after)
    )
    changed = next(
        n
        for n, (a, b) in enumerate(zip(before.split("\n"), after.split("\n"), strict=False), 1)
        if a != b
    )
    # a list entry begins where its dash is, a missing key is told where its mapping is
    assert (
        0 <= changed - found[0].line <= 30
        or "missing" in words
        or "above" in words
        or "volume" in words
    )


@pytest.mark.parametrize(
    ("name", "there", "becomes", "words"),
    [
        (
            "aws",
            "--dashboard-host=127.0.0.1",
            "--dashboard-host=0.0.0.0",
            "job server, would listen on 0.0.0.0",
        ),
        (
            "gcp",
            "mlflow server --host 127.0.0.1",
            "mlflow server --host 0.0.0.0",
            "MLflow, would listen on 0.0.0.0",
        ),
        (
            "local",
            "--resources='{\"crossfed_server\": 1}'",
            "",
            "no machine has the resource crossfed_server",
        ),
        (
            "kuberay",
            "serviceType: ClusterIP",
            "serviceType: LoadBalancer",
            "reachable from outside",
        ),
        (
            "kuberay",
            'rayVersion: "2.60.0"',
            'rayVersion: "2.9.0"',
            "2.9.0, but this crossfed runs with Ray",
        ),
    ],
)
def test_what_may_be_meant_is_a_warning(
    name: str, there: str, becomes: str, words: str, tmp_path: Path
) -> None:
    text = template(name)
    assert there in text
    found = checked(tmp_path, text.replace(there, becomes, 1))
    assert not errors(found)
    assert any(words in problem.text and problem.severity == "warning" for problem in found)


def test_the_line_of_a_key_that_is_merged_in(tmp_path: Path) -> None:
    """`<<: *machine` brings ImageId to the worker: its line is where it stands."""
    text = "a: &a\n  x: 1\nb:\n  <<: *a\n  y: 2\n"
    from crossfed.platform.cluster.files import _line

    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    assert [_line(tree, key) for key in (("b",), ("b", "x"), ("b", "y"), ("b", "z"), ())] == [
        3,
        2,
        5,
        3,
        0,
    ]


@pytest.mark.parametrize("text", ["a: [1", "- a\n- b\n", "", "a: 1\n---\nb: 2\n"])
def test_what_is_no_mapping_is_one_sentence(text: str, tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match=r"cluster\.yaml"):
        checked(tmp_path, text)
    with pytest.raises(CrossfedError, match="cannot be read"):
        check(tmp_path / "absent.yaml")


def test_an_unknown_template_is_named_with_those_that_are() -> None:
    with pytest.raises(CrossfedError, match="no cluster template 'awss'; did you mean aws"):
        template("awss")


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_shell_commands_parse(name: str) -> None:
    """By bash itself, without running them."""
    config = yaml.safe_load(template(name))
    for key, commands in config.items():
        if key.endswith("_commands"):
            for command in commands:
                done = subprocess.run(
                    ["bash", "-n", "-c", command], capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, (command, done.stderr)


def test_the_environment_file_that_setup_writes(tmp_path: Path) -> None:
    """`printf` repeats its format: one export per value."""
    (command,) = [
        row for row in yaml.safe_load(template("aws"))["setup_commands"] if "printf" in row
    ]
    subprocess.run(
        ["bash", "-c", command], check=True, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    )
    assert (tmp_path / ".crossfed_env").read_text().splitlines() == [
        "export PATH=$HOME/crossfed-env/bin:$PATH",
        "export RAY_AUTH_MODE=token",
        "export MLFLOW_TRACKING_URI=http://127.0.0.1:5000",
        "export RAY_JOB_STOP_WAIT_TIME_S=60",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_local_template_launches_as_far_as_one_machine_goes(tmp_path: Path) -> None:
    """Its own shell commands start a head with MLflow and a worker, here, on other ports; then the
    doctor looks at both.

    Left out: `ray stop`, which would end other clusters of this machine, and the autoscaler, which
    would look for the others.
    """
    import psutil

    config = yaml.safe_load(template("local"))
    home, temp, venv = tmp_path / "home", Path(f"/tmp/cf{os.getpid()}"), Path(sys.executable).parent
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text("d" * 64)
    ours = {
        "6379": "6415",
        "5000": "5015",
        "/mnt/shared": str(tmp_path),
        "--autoscaling-config=~/ray_bootstrap_config.yaml": "",
        "$RAY_HEAD_IP": "127.0.0.1",
    }
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_AUTH", "MLFLOW"))
    }
    env |= {
        "HOME": str(home),
        "PATH": f"{venv}:{env['PATH']}",
        "RAY_TMPDIR": str(temp),
        "CROSSFED_CACHE": str(tmp_path / "cache"),
    }
    env |= {"RAY_AUTH_MODE": "token", "HF_HUB_OFFLINE": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        with (tmp_path / "log").open(
            "w"
        ) as log:  # a pipe would stay open for as long as what is started in the background
            done = subprocess.run(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=300, check=False
            )
        return subprocess.CompletedProcess(command, done.returncode, (tmp_path / "log").read_text())

    try:
        for command in [
            *config["initialization_commands"][1:],
            *config["head_start_ray_commands"],
            *config["worker_start_ray_commands"],
        ]:
            for old, new in ours.items():
                command = command.replace(old, new)
            if command != "ray stop":
                done = run("bash", "-c", command)
                assert done.returncode == 0, (command, done.stdout)
        end = time.monotonic() + 120
        while (
            done := run("curl", "-sf", "http://127.0.0.1:5015/health")
        ).returncode and time.monotonic() < end:
            time.sleep(1)
        assert done.stdout == "OK"
        doctor = [
            sys.executable,
            "-m",
            "crossfed.platform.cli.main",
            "doctor",
            "--address",
            "127.0.0.1:6415",
            "--patience",
            "120",
        ]
        done = run(
            *doctor, "--out", str(tmp_path / "runs"), "--tracking-uri", "http://127.0.0.1:5015"
        )
        assert done.returncode == 0 and "A run can start." in done.stdout, done.stdout
        assert (
            "a machine is set aside for server actors" in done.stdout and "│ token" in done.stdout
        )
        assert "warning" not in done.stdout, done.stdout
        (home / ".ray/auth_token").write_text("e" * 64)
        done = run(*doctor)
        assert done.returncode == 2 and "is not the cluster's" in " ".join(
            done.stdout.replace("│", " ").split()
        ), done.stdout
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if any(
                str(place) in word
                for place in (temp, tmp_path)
                for word in process.info["cmdline"] or ()
            ):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(temp, ignore_errors=True)
