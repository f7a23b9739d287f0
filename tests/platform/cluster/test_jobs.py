"""Jobs: the command that runs, what is uploaded, logs that survive a broken connection, exit codes;
a real job server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.cluster import jobs as ray_jobs
from crossfed.platform.errors import CrossfedError

# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (
            "run fedcrf --data /mnt/d --out /mnt/r",
            "crossfed run fedcrf --data /mnt/d --out /mnt/r --address auto",
        ),
        ("crossfed run fedcrf --out=s3://b/r", "crossfed run fedcrf --out=s3://b/r --address auto"),
        (
            "run fedcrf --out /r --address 10.0.0.1:6379",
            "crossfed run fedcrf --out /r --address 10.0.0.1:6379",
        ),
        ("run --resume fedcrf-s0 --out /r", "crossfed run --resume fedcrf-s0 --out /r"),
        (
            "tune fedcrf --out /r --trials 3",
            "crossfed tune fedcrf --out /r --trials 3 --address auto",
        ),
        ("tune resume care --out /r", "crossfed tune resume care --out /r"),
        (
            "tune-all fedcrf,lightgcn --out /r",
            "crossfed tune-all fedcrf,lightgcn --out /r --address auto",
        ),
        ("doctor --out /r", "crossfed doctor --out /r --address auto"),
    ],
)
def test_the_command_of_a_job(arguments: str, command: str) -> None:
    assert ray_jobs.entrypoint(arguments.split()) == command


def test_words_reach_the_shell_as_they_are() -> None:
    command = ray_jobs.entrypoint(
        ["run", "fedcrf", "--out", "/r", "--set", "K=$(rm -rf x); y", "--address", "auto"]
    )
    done = subprocess.run(
        ["bash", "-c", f"crossfed() {{ printf '%s|' \"$@\"; }}; {command}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "run|fedcrf|--out|/r|--set|K=$(rm -rf x); y|--address|auto|"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "Say what to run"),
        ("ui --out /r", "'ui' cannot be submitted"),
        ("submit -- run", "'submit' cannot be submitted"),
        ("run fedcrf", "--out is missing"),
        (
            "run fedcrf --out runs",
            "--out runs is relative to a temporary folder .* such as /mnt/shared/runs",
        ),
        ("run fedcrf --out /r --data data/x", "--data data/x is relative"),
        ("run fedcrf --out /r --out=runs", "--out runs is relative"),
    ],
)
def test_a_command_that_makes_no_job(arguments: str, words: str) -> None:
    with pytest.raises(CrossfedError, match=words):
        ray_jobs.entrypoint(arguments.split())


def test_a_job_is_named_after_what_it_does() -> None:
    name = ray_jobs.job_name("crossfed run my_package.my_module:METHOD --out /r")
    assert re.fullmatch(r"run-my_package_my_module_METHOD-\d{8}-\d{6}-[0-9a-f]{4}", name)
    assert ray_jobs.job_name("crossfed run x") != ray_jobs.job_name("crossfed run x")


# -- the upload ------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in (
        "mine.py", "run.yaml", "pack/data/table.py", "pack/mod.py", "data/big.csv", "runs/r1/x", "shared/y", ".git/objects/ab",  # noqa: E501
        ".venv/lib/z.py", "pack/__pycache__/mod.pyc", ".mypy_cache/1", "pkg.egg-info/PKG-INFO", "notes/secret.txt", "mlflow.db",  # noqa: E501
        "pack/auth_token", ".env",
    ):  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (root / "loop").symlink_to(root)
    return root


def listed(project: Path, *exclude: str) -> list[str]:
    return [path.relative_to(project).as_posix() for path in ray_jobs.files(project, exclude)]


def test_what_is_uploaded(project: Path) -> None:
    """Data at the top is left out, a package that is called data is not."""
    assert listed(project) == [
        "mine.py",
        "run.yaml",
        "notes/secret.txt",
        "pack/mod.py",
        "pack/data/table.py",
    ]
    assert listed(project, "notes", "pack/d*") == ["mine.py", "run.yaml", "pack/mod.py"]
    assert listed(project, "*.yaml", "notes/") == ["mine.py", "pack/mod.py", "pack/data/table.py"]
    with pytest.raises(CrossfedError, match="There is no working directory"):
        ray_jobs.files(project / "absent")


def test_the_same_files_give_the_same_bytes(project: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "1.zip", tmp_path / "2.zip"
    assert ray_jobs.pack(project, one) == (5, one.stat().st_size)
    os.utime(project / "mine.py", (0, 0))
    ray_jobs.pack(project, two)
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as packed:
        assert packed.read("pack/data/table.py") == b"pack/data/table.py"


def test_an_upload_that_is_too_large_is_refused_with_what_is_in_it(
    project: Path, tmp_path: Path
) -> None:
    (project / "weights.bin").write_bytes(os.urandom(300_000))
    with pytest.raises(
        CrossfedError,
        match=r"is 0 MB to upload, above 0\.2 MB: weights.bin "
        r"0\.3 MB, .*--exclude",
    ):
        ray_jobs.pack(project, tmp_path / "x.zip", limit_mb=0.2)
    assert ray_jobs.pack(project, tmp_path / "x.zip", ["*.bin"], limit_mb=0.2)[0] == 5
    with (project / "weights.bin").open("wb") as file:
        file.truncate(200_000_000)  # a hole: would be small when packed, and is not packed at all
    with pytest.raises(CrossfedError, match="is 200 MB to upload"):
        ray_jobs.pack(project, tmp_path / "y.zip", limit_mb=5)
    assert not (tmp_path / "y.zip").exists()


# -- a job server, as far as its protocol goes -----------------------------------------------------


class FakeServer:
    """Answers as Ray's dashboard does. `breaks`: characters after which the log's connection is
    cut, one entry per connection.
    """

    def __init__(self) -> None:
        self.log, self.status, self.code = "one\ntwo\nthree\n", "SUCCEEDED", 0
        self.breaks: list[int] = []
        self.submitted: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.packages: list[bytes] = []

    def job(self, name: str) -> dict[str, Any]:
        return {
            "type": "SUBMISSION",
            "submission_id": name,
            "status": self.status,
            "entrypoint": "crossfed run x",
            "driver_exit_code": self.code,
            "start_time": 1_800_000_000_000,
            "end_time": None,
        }

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "s"}
        )

    async def jobs(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.submitted.append(await request.json())
            return web.json_response(
                {"job_id": "j", "submission_id": self.submitted[-1]["submission_id"]}
            )
        return web.json_response([self.job("run-a")])

    async def one(self, request: web.Request) -> web.Response:
        if request.match_info["name"] == "absent":
            return web.Response(status=404, text="Job absent does not exist")
        return web.json_response(self.job(request.match_info["name"]))

    async def stop(self, request: web.Request) -> web.Response:
        self.stopped.append(request.match_info["name"])
        self.status = "STOPPED"
        return web.json_response({"stopped": True})

    async def package(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.Response(status=404)
        self.packages.append(await request.read())
        return web.Response()

    async def tail(self, request: web.Request) -> web.WebSocketResponse:
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        end = self.breaks.pop(0) if self.breaks else None
        for start in range(0, len(self.log[:end]), 3):
            await stream.send_str(self.log[:end][start : start + 3])
        if end is not None and request.transport is not None:
            request.transport.abort()
            return stream
        await stream.close()
        return stream

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        loop = asyncio.new_event_loop()
        made = web.Application(client_max_size=2**26)
        made.router.add_get("/api/version", self.version)
        made.router.add_route("*", "/api/jobs/", self.jobs)
        made.router.add_get("/api/jobs/{name}", self.one)
        made.router.add_post("/api/jobs/{name}/stop", self.stop)
        made.router.add_get("/api/jobs/{name}/logs/tail", self.tail)
        made.router.add_route("*", "/api/packages/{protocol}/{package}", self.package)
        runner = web.AppRunner(made)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        loop.run_until_complete(site.start())
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.run_until_complete(runner.cleanup())
            loop.close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.setattr(ray_jobs, "_PAUSE", 0.01)
    monkeypatch.setenv(
        "RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1"
    )  # which Ray would take before an address that is given
    server = FakeServer()
    with server.serving() as address:
        yield SimpleNamespace(server=server, address=address, client=ray_jobs.server(address))


def followed(fake: SimpleNamespace) -> tuple[str, int, list[str]]:
    written, warned = [], []
    code = ray_jobs.follow(fake.client, "run-a", written.append, warned.append)
    return "".join(written), code, warned


@pytest.mark.parametrize("breaks", [[], [4], [7, 2, 9], [0, 0]])
def test_a_log_is_whole_however_often_the_connection_breaks(
    fake: SimpleNamespace, breaks: list[int]
) -> None:
    fake.server.breaks = list(breaks)
    text, code, _ = followed(fake)
    assert (text, code) == (fake.server.log, 0) and not fake.server.breaks


@pytest.mark.parametrize(
    ("status", "driver", "code"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 2, 2),
        ("FAILED", None, 1),
        ("STOPPED", 143, 130),
        ("SUCCEEDED", None, 0),
    ],
)
def test_the_exit_code_is_the_jobs(
    fake: SimpleNamespace, status: str, driver: int | None, code: int
) -> None:
    fake.server.status, fake.server.code = status, driver
    assert followed(fake)[1] == code


def test_a_server_that_stays_away_is_told_and_the_job_named(
    fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_jobs, "_LOST", 0.3)
    monkeypatch.setattr(fake.client, "_address", "http://127.0.0.1:1")
    warned: list[str] = []
    with pytest.raises(
        CrossfedError,
        match=r"has not answered .* the job goes on: crossfed "
        r"submit --follow run-a",
    ):
        ray_jobs.follow(fake.client, "run-a", print, warned.append)
    assert len(warned) == 1


def test_commands_against_a_job_server(fake: SimpleNamespace, project: Path) -> None:
    invoke = CliRunner().invoke
    here = ["submit", "--address", fake.address]
    fake.server.status, fake.server.code = "FAILED", 2
    done = invoke(app, [*here, "--working-dir", str(project), "--", "run", "fedcrf", "--out", "/r"])
    assert done.exit_code == 2, done.output
    name = fake.server.submitted[0]["submission_id"]
    assert f"uploading {project}: 5 files, 0.0 MB" in done.output
    assert (
        f"find it again: crossfed submit --follow {name}" in done.output
        and "one\ntwo\nthree\n" in done.output
    )
    assert fake.server.submitted[0]["entrypoint"] == "crossfed run fedcrf --out /r --address auto"
    assert fake.server.submitted[0]["runtime_env"]["working_dir"].startswith("gcs://")
    assert fake.server.submitted[0]["runtime_env"]["env_vars"] == {"PYTHONUNBUFFERED": "1"}
    assert len(fake.server.packages) == 1

    done = invoke(app, [*here, "--no-upload", "--detach", "--", "tune", "fedcrf", "--out", "/r"])
    assert done.exit_code == 0 and "working_dir" not in fake.server.submitted[1]["runtime_env"]
    assert "three" not in done.output and len(fake.server.packages) == 1

    assert invoke(app, [*here, "--follow", "run-a"]).output == "one\ntwo\nthree\n"
    assert invoke(
        app, [*here, "--stop", "run-a"]
    ).output == "run-a: STOPPED\n" and fake.server.stopped == ["run-a"]
    assert "run-a" in invoke(app, [*here, "--list"]).output
    absent = invoke(app, [*here, "--follow", "absent"])
    assert isinstance(absent.exception, CrossfedError) and "has no job 'absent'" in str(
        absent.exception
    )
    both = invoke(app, [*here, "--list", "--stop", "x"])
    assert isinstance(both.exception, CrossfedError) and "Give one thing to do" in str(
        both.exception
    )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://127.0.0.1:1", "127.0.0.1:1: connection refused; run `ray dashboard cluster.yaml`"),
        ("127.0.0.1:1", "http://127.0.0.1:1: connection refused"),
        ("auto", "--address auto is no job server"),
        ("ray://127.0.0.1:10001", "is no job server"),
    ],
)
def test_a_server_that_is_not_there(address: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(CrossfedError, match=words):
        ray_jobs.server(address)
    assert time.monotonic() - began < 10


def test_a_web_server_that_is_not_rays() -> None:
    server = FakeServer()

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    server.version = page  # type: ignore[method-assign]
    with (
        server.serving() as address,
        pytest.raises(CrossfedError, match="what listens there is not Ray's dashboard"),
    ):
        ray_jobs.server(address)


# -- a real one ------------------------------------------------------------------------------------


@pytest.fixture
def head(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Ray head with a job server, started as cluster.yaml does; the environment that reaches
    it.
    """
    pytest.importorskip(
        "aiohttp_cors", reason="the job server needs pip install -e '.[test,cluster]'"
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "b" * 64,
        "PATH": path,
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        "CROSSFED_CACHE": os.environ["CROSSFED_CACHE"],
    }
    env.pop("RAY_ADDRESS", None)
    temp = f"/tmp/cf{os.getpid()}"  # short: Ray's sockets lie in it
    start = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--port=6414",
        "--num-cpus=2",
        "--dashboard-port=8314",
        "--dashboard-host=127.0.0.1",
        "--disable-usage-stats",
        f"--temp-dir={temp}",
    ]
    with (tmp_path / "head.log").open("w") as log:
        ray = subprocess.Popen(
            start, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        end = time.monotonic() + 90
        import requests

        headers = {"Authorization": f"Bearer {env['RAY_AUTH_TOKEN']}"}
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get("http://127.0.0.1:8314/api/version", headers=headers, timeout=5).ok:
                    break
            assert time.monotonic() < end and ray.poll() is None, (
                tmp_path / "head.log"
            ).read_text()
            time.sleep(1)
        yield env
    finally:
        os.killpg(ray.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ray.pid, 9)
        shutil.rmtree(temp, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_on_a_real_job_server(head: dict[str, str], shops: Path, tmp_path: Path) -> None:
    """A method of the user's own travels with the upload; exit codes come back; stopping saves; a
    wrong token is told.
    """
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "own.py").write_text((Path(__file__).parents[2] / "support" / "toys.py").read_text())
    out = tmp_path / "runs"

    def submit(*words: str, token: str = head["RAY_AUTH_TOKEN"]) -> subprocess.CompletedProcess:
        command = [
            sys.executable,
            "-m",
            "crossfed.platform.cli.main",
            "submit",
            "--address",
            "http://127.0.0.1:8314",
        ]
        return subprocess.run(
            [*command, *words],
            cwd=mine,
            env={**head, "RAY_AUTH_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    run = [
        "--",
        "run",
        "own:AVERAGE",
        "--data",
        str(shops),
        "--out",
        str(out),
        "--set",
        "tracking.enabled=false",
    ]
    done = submit(*run, "--set", "rounds=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "uploading .: 1 files" in done.stdout and "result.json" in done.stdout
    (result,) = out.glob("*/result.json")
    assert result.parent.name in done.stdout

    assert submit(*run, "--set", "rounds=0.5").returncode == 2  # the job's own

    done = submit("--detach", *run, "--set", "rounds=100000")
    name = re.search(r"--follow (\S+)", done.stdout)[1]  # type: ignore[index]
    end = time.monotonic() + 120
    while (
        not [path for path in out.glob("*/checkpoints/*") if path.parents[1] != result.parent]
        and time.monotonic() < end
    ):
        time.sleep(1)
    assert submit("--stop", name).stdout == f"{name}: STOPPED\n"
    done = submit("--follow", name)
    assert (
        done.returncode == 130 and "What was committed stays: crossfed run --resume" in done.stdout
    )
    assert name in submit("--list").stdout
    wrong = submit("--list", token="c" * 64)
    assert (
        wrong.returncode == 2 and "the token in RAY_AUTH_TOKEN is not the cluster's" in wrong.stderr
    )


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "/mnt/runs/a", "--protocol", "ratio-80-10-10-99"],
        ["compare", "a", "b", "--out", "/mnt/runs"],
        ["compare", "mlflow:tags.method = 'x'", "--tracking-uri", "http://head:5000"],
        ["audit", "/mnt/runs/a", "--controls"],
        ["report", "/mnt/runs/a", "--to", "/mnt/reports"],
        ["analyse", "cohorts", "/mnt/runs/a", "--to", "/mnt/reports"],
    ],
)
def test_commands_that_read_runs_are_jobs_too(words: list[str]) -> None:
    """They take no cluster's address: what they run has that of its run."""
    assert shlex.split(ray_jobs.entrypoint(words)) == ["crossfed", *words]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare", "a", "b"], "compare names no run that a job would find"),
        (["evaluate", "runs/a"], "evaluate names no run"),
        (
            ["report", "/mnt/runs/a"],
            "--to is missing: report writes into the job's working directory",
        ),
        (["analyse", "cohorts", "/mnt/runs/a"], "--to is missing"),
        (
            ["report", "/mnt/runs/a", "--to", "reports"],
            "--to reports is relative to a temporary folder",
        ),
        (["methods"], "'methods' cannot be submitted"),
    ],
)
def test_commands_that_would_lose_what_they_write_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(CrossfedError, match=told):
        ray_jobs.entrypoint(words)
