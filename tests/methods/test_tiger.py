"""TIGER as a method: its state over the seam and its declaration.

Eq. (3), Eq. (8), Eq. (9) and Eq. (21) to Eq. (23) are tested by themselves in
`parts/test_generative.py`.
"""

import copy
import importlib.resources

import numpy as np
import pytest
import torch
import yaml

from crossfed.methods.parts.generative import GenerativeLearner, Generator, sid_loss
from crossfed.methods.tiger import METHOD, Config, score, train
from crossfed.platform.method import Context, Interactions, Scope, generators

SMALL = {
    "levels": 2,
    "codebook": 4,
    "dim": 8,
    "heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "inner": 8,
    "decoder_inner": 8,
    "length": 6,
    "batch_size": 8,
    "dropout": 0.0,
    "epochs": 10,
    "warmup": 2,
}
SIDS = np.stack([np.arange(15) // 4, np.arange(15) % 4], axis=1)


@pytest.fixture
def data() -> Interactions:
    rng = np.random.default_rng(0)
    items = np.concatenate([rng.permutation(15)[:8] for _ in range(20)])
    return Interactions.build(20, 15, np.repeat(np.arange(20), 8), items, np.arange(160))


def context(data: Interactions, stage: str, round: int) -> Context:
    rng, torch_rng = generators(0, stage, round, "shop")
    torch.manual_seed(round)
    return Context(
        "shop", stage, round, (), rng, torch_rng, torch.device("cpu"), data, {"sids": SIDS}
    )


def start(data: Interactions, **sets: object) -> GenerativeLearner:
    return METHOD.init_domain(Config.model_validate({**SMALL, **sets}), context(data, "init", 0))


def test_eq_3_scores_are_sums_of_log_probabilities_of_the_codes(data):
    """Eq. (3): log p(c_1) + log p(c_2 | c_1) of every item after the whole known history."""
    state = start(data)
    found = score(state, np.array([4, 11]))
    for row, user in enumerate((4, 11)):
        history = data.items[data.indptr[user + 1] - 6 : data.indptr[user + 1]]
        x, real = state.net.embed(torch.from_numpy(SIDS[history])[None], torch.tensor([6]))
        state.net.eval()
        memory = state.net.encode(x, real)
        for item in range(15):
            log_p = state.net.target_codes(memory, torch.from_numpy(SIDS[[item]]))
            expected = sum(
                float(told[0, code].detach()) for told, code in zip(log_p, SIDS[item], strict=True)
            )
            assert float(found[row, item]) == pytest.approx(expected, rel=1e-5)


def test_eq_23_is_what_an_epoch_reports_and_lowers(data):
    """Eq. (23): at a learning rate of nearly 0 the epoch's loss is that of all instances at the
    start.
    """
    state = start(data, lr=1e-12)
    told = train(state, {}, context(data, "train", 1)).metrics
    place = np.arange(1, 8)
    begin, count = (
        (data.indptr[:-1, None] + np.maximum(place - 6, 0)).ravel(),
        np.tile(np.minimum(place, 6), 20),
    )
    target = state.sids[data.items.reshape(20, 8)[:, 1:].ravel()]
    with torch.no_grad():
        log_p = state.net.target_codes(state.encode(data, begin, count), target)
        expected = sid_loss(log_p, target, 0.1)
    assert set(told) == {"loss_sid"}
    assert told["loss_sid"] == pytest.approx(float(expected), rel=1e-4)
    state = start(data, lr=0.02, epochs=15)
    losses = [train(state, {}, context(data, "train", r)).metrics["loss_sid"] for r in range(1, 16)]
    assert losses[-1] < losses[0] - 0.05


def test_the_rate_follows_the_epoch(data):
    """Warm-up of two epochs: half the rate in the first, all of it in the second, less in the
    third.
    """
    state = start(data, lr=0.01)
    rates = []
    for round in (1, 2, 3):
        train(state, {}, context(data, "train", round))
        rates.append(state.adam.param_groups[0]["lr"])
    assert rates[:2] == pytest.approx([0.005, 0.01]) and rates[2] < 0.01


def test_state_comes_back(data):
    state = start(data, lr=0.01)
    train(state, {}, context(data, "train", 1))
    other = start(data, lr=0.01)
    METHOD.load_state_dict(other, copy.deepcopy(METHOD.state_dict(state)))
    for each in (state, other):
        train(each, {}, context(data, "train", 2))
    assert torch.equal(METHOD.score(state, np.arange(20)), METHOD.score(other, np.arange(20)))


def test_it_is_local(data):
    (stage,) = METHOD.stages(Config(epochs=7, patience=3))
    assert METHOD.scope == Scope.LOCAL and stage.local
    assert (stage.rounds, stage.patience) == (7, 3)
    assert train(start(data), {}, context(data, "train", 1)).send == {}


def test_at_the_papers_sizes_it_would_upload_17_4_megabytes():
    """FedCGR, section 4.6: TIGER+FedAvg uploads 17.4 MB, there called 4.3 M parameters."""
    bytes_up = 4 * sum(p.numel() for p in Generator(Config(), torch.Generator()).parameters())
    assert round(bytes_up / 1e6, 1) == 17.4


def test_the_shipped_file_states_the_defaults_and_valid_presets():
    text = importlib.resources.files("crossfed.methods.configs").joinpath("tiger.yaml").read_text()
    shipped = yaml.safe_load(text)
    assert Config.model_validate(shipped["config"]) == Config()
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
