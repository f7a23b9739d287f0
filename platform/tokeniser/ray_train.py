"""Training the shared tokeniser with Ray Train: data-parallel workers, checkpoints, and a new start
from the last one.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, ScalingConfig
from ray.train import RunConfig as TrainConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

from crossfed.platform import checkpoint
from crossfed.platform.cluster import connect
from crossfed.platform.config.settings import Resources
from crossfed.platform.errors import CrossfedError
from crossfed.platform.tokeniser import spec


def in_a_trial() -> bool:
    """Whether this process runs in somebody's placement group, as a Tune trial does.

    Workers of a nested trainer would have to wait for resources that the trial holds, so training
    stays in this process there.
    """
    return bool(ray.is_initialized()) and ray.util.get_current_placement_group() is not None


def train(
    spec: spec.Spec, x: torch.Tensor, out: Path, key: str, resources: Resources
) -> Mapping[str, torch.Tensor]:
    """Train an RQ-VAE on `spec.workers` workers; returns its parameters.

    With one worker on a CPU the numbers are those of `tokeniser.train_here`, bit for bit. A lost
    worker, and a training of the same key that was interrupted, go on from the last checkpoint.

    Args:
        x: [n, width]. out: absolute folder on storage that all machines share. key: names the
            training in it.

    Raises:
        CrossfedError: the workers failed again and again.
    """
    started = connect.connect(resources)
    try:
        total = ray.cluster_resources()
        gpu = resources.device == "auto" and total.get("GPU", 0.0) >= spec.workers
        share = min(1.0, total.get("CPU", 1.0) / (spec.workers + 1))
        trainer = TorchTrainer(
            _worker,
            train_loop_config={"spec": spec, "x": ray.put(x.numpy()), "threads": resources.threads},
            scaling_config=ScalingConfig(
                num_workers=spec.workers, use_gpu=gpu, resources_per_worker={"CPU": share}
            ),
            run_config=TrainConfig(
                name=key,
                storage_path=str(out),
                checkpoint_config=CheckpointConfig(num_to_keep=1),
                failure_config=FailureConfig(max_failures=resources.max_restarts),
            ),
        )
        try:
            found: Any = _fit(trainer, resources.round_timeout).checkpoint
        except ray.train.TrainingFailedError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise CrossfedError(f"The tokeniser could not be trained on Ray: {reason}") from error
        with found.as_directory() as folder:
            return checkpoint.load(Path(folder) / "training")["model"]
    finally:
        if started:
            ray.shutdown()


def _fit(trainer: TorchTrainer, seconds: float) -> ray.train.Result:
    """`trainer.fit()` beside the main thread, in which it would keep Ctrl-C for itself for as long
    as the process lives.

    Raises:
        CrossfedError: it took longer than so many seconds.
    """
    done: Future[ray.train.Result] = Future()

    def run() -> None:
        try:
            done.set_result(trainer.fit())
        except BaseException as error:  # whatever it is, the waiting thread raises it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError as error:
        if done.done():  # the training's own
            raise
        raise CrossfedError(
            f"The tokeniser was not trained within {seconds:g} s (resources.round_timeout); "
            f"its last checkpoint stays, and the "
            "same command goes on from it."
        ) from error


def _worker(told: dict[str, Any]) -> None:
    """One worker's part of the training."""
    context, spec = ray.train.get_context(), told["spec"]
    torch.set_num_threads(told["threads"])
    x = torch.from_numpy(ray.get(told["x"]).copy())
    training = spec.start(
        spec,
        x,
        get_device(),
        wrap=prepare_model,
        rank=context.get_world_rank(),
        workers=context.get_world_size(),
    )
    kept = ray.train.get_checkpoint()
    if kept is not None:
        with kept.as_directory() as folder:
            training.load_state_dict(checkpoint.load(Path(folder) / "training"))
    while training.done < spec.epochs:
        losses = training.epoch()
        if training.done % spec.EVERY and training.done < spec.epochs:
            continue
        with tempfile.TemporaryDirectory() as folder:
            state = None
            if context.get_world_rank() == 0:
                checkpoint.save(Path(folder) / "training", training.state_dict())
                state = Checkpoint.from_directory(folder)
            ray.train.report(losses, checkpoint=state)
