"""Users per second of constrained beam search: the tables of `parts.beam` beside transformers'
`prefix_allowed_tokens_fn`.

    python tests/benchmarks/bench_beam.py [--users 32] [--beams 50] [--items 12101] [--dim 256]
    [--repeats 3] [--threads 1]
                                          [--device cpu]

Prints one JSON line. One encoder-decoder with random weights (3 + 3 layers, 4 heads, histories of
up to 50 items, three codes of 256) is decoded in four ways for the same users. Ours is
`beam_search`: one table look-up and one top-k per level, and each user's memory is projected to
keys and values once. The peers are `transformers`' `generate` with a Python trie as
`prefix_allowed_tokens_fn`:

    peer         the decoder gets the memory that `generate` has repeated for every beam, and attends to it at every step
    peer_cached  keys and values are projected once per user, and `generate` repeats those for every beam
    peer_shared  the decoder undoes the repetition; the model then costs the same as ours, and only the decoding differs

All return the same items in the same order, which is checked before anything is timed. Times are
medians of interleaved repeats, the encoder included; machines that others use slow all sides alike,
so only the ratios mean anything.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from crossfed.methods.parts.beam import beam_search, item_scores
from crossfed.methods.parts.transformer import Block, initialise
from crossfed.methods.parts.trie import Trie

LEVELS, CODES, LENGTH = 3, 256, 50
START = LEVELS * CODES
"""Token ids of the peer: level · CODES + code, then the start token, which also pads."""


class Generator(nn.Module):
    """A history of items as summed code embeddings; a decoder with one query per level, made of the
    codes so far.
    """

    def __init__(self, dim: int, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(CODES, dim)) for _ in range(LEVELS))
        self.positions, self.levels = (
            nn.Parameter(torch.empty(LENGTH, dim)),
            nn.Parameter(torch.empty(LEVELS, dim)),
        )
        self.start = nn.Parameter(torch.empty(1, dim))
        self.contexts = nn.ModuleList(nn.Linear(level * dim, dim) for level in range(1, LEVELS))
        self.heads = nn.ModuleList(nn.Linear(dim, CODES) for _ in range(LEVELS))
        self.encoder = nn.ModuleList(
            Block(dim, heads, 2 * dim, 0.0, "post", "relu") for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            Block(dim, heads, 2 * dim, 0.0, "post", "relu", cross=True) for _ in range(layers)
        )

    def encode(self, histories: Tensor, real: Tensor) -> Tensor:
        """Codes int64 [b, T, L] and where they are real, bool [b, T] -> memory [b, T, d]."""
        x = torch.stack(
            [table[codes] for table, codes in zip(self.tables, histories.unbind(2), strict=True)]
        ).sum(0)
        x = x + self.positions[: x.shape[1]]
        for block in self.encoder:
            x = block(x, mask=real[:, None, None])
        return x

    def project(self, memory: Tensor) -> Tensor:
        """Memory [b, T, d] -> keys and values of every decoder layer, [b, layers, 2, heads, T, d /
        heads].
        """
        layers = []
        for block in self.decoder:
            both = block.cross.key(memory), block.cross.value(memory)
            layers.append(
                torch.stack(
                    [x.unflatten(2, (block.cross.heads, -1)).transpose(1, 2) for x in both], dim=1
                )
            )
        return torch.stack(layers, dim=1)

    def next_codes(self, projected: Tensor, real: Tensor, prefixes: Tensor) -> Tensor:
        """Keys and values as from `project`, prefixes int64 [b, k, l] -> log-probabilities [b, k,
        C].

        A query is alone in its sequence, so its self-attention is its own value.
        """
        level, k = prefixes.shape[2], prefixes.shape[1]
        if level:
            told = torch.cat([self.tables[at][prefixes[..., at]] for at in range(level)], dim=2)
            x = self.contexts[level - 1](told)
        else:
            x = self.start.expand(len(real), k, -1)
        x = x + self.levels[level]
        mask = real[:, None, None]
        for layer, block in enumerate(self.decoder):
            keys, values = projected[:, layer].unbind(1)
            own, cross = block.attention, block.cross
            x = block.around_attention(x, lambda z, own=own: own.out(own.value(z)))

            def look(
                z: Tensor, cross: Any = cross, keys: Tensor = keys, values: Tensor = values
            ) -> Tensor:
                query = cross.query(z).unflatten(2, (cross.heads, -1)).transpose(1, 2)
                seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
                return cross.out(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

            x = block.around_feed(block.around_cross(x, look), block.feed)
        return self.heads[level](x).log_softmax(-1)  # type: ignore[no-any-return]


class Peer(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The same model as `transformers` decodes it; `kind` as in the module's docstring."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, model: Generator, beams: int, kind: str) -> None:
        config = PretrainedConfig(
            is_encoder_decoder=True,
            vocab_size=START + 1,
            decoder_start_token_id=START,
            pad_token_id=START,
            bos_token_id=START,
            eos_token_id=None,
            num_hidden_layers=1,
            use_cache=False,
        )
        super().__init__(config)
        self.model, self.beams, self.kind = model, beams, kind
        self.generation_config = GenerationConfig.from_model_config(config)

    def get_encoder(self, *_: object, **__: object) -> nn.Module:
        return self.model

    def forward(
        self,
        decoder_input_ids: Tensor,
        encoder_outputs: BaseModelOutput,
        attention_mask: Tensor,
        **_: object,
    ) -> Seq2SeqLMOutput:
        prefixes = (decoder_input_ids[:, 1:] % CODES).unsqueeze(1)  # [b * beams, 1, l]
        memory, real = encoder_outputs.last_hidden_state, attention_mask.bool()
        if self.kind == "peer_shared":
            memory, real = memory[:: self.beams], real[:: self.beams]
            prefixes = prefixes.view(len(memory), self.beams, -1)
        if self.kind == "peer":
            memory = self.model.project(memory)
        told = self.model.next_codes(memory, real, prefixes).flatten(0, 1)
        level = prefixes.shape[2]
        logits = told.new_full((len(told), 1, START + 1), torch.finfo(told.dtype).min)
        logits[:, 0, level * CODES : (level + 1) * CODES] = told
        return Seq2SeqLMOutput(logits=logits)

    def prepare_inputs_for_generation(
        self,
        decoder_input_ids: Tensor,
        encoder_outputs: BaseModelOutput,
        attention_mask: Tensor,
        **_: object,
    ) -> dict[str, object]:
        return {
            "decoder_input_ids": decoder_input_ids,
            "encoder_outputs": encoder_outputs,
            "attention_mask": attention_mask,
        }

    @torch.no_grad()
    def decode(
        self, histories: Tensor, real: Tensor, allowed: Callable[[int, Tensor], list[int]]
    ) -> tuple[Tensor, Tensor]:
        """Codes [b, beams, L] and scores [b, beams], best first."""
        memory = self.model.encode(histories, real)
        encoded = BaseModelOutput(
            last_hidden_state=memory if self.kind == "peer" else self.model.project(memory)
        )
        found = self.generate(
            encoder_outputs=encoded,
            attention_mask=real.long(),
            num_beams=self.beams,
            do_sample=False,
            num_return_sequences=self.beams,
            max_new_tokens=LEVELS,
            min_new_tokens=LEVELS,
            length_penalty=0.0,
            prefix_allowed_tokens_fn=allowed,
            return_dict_in_generate=True,
            output_scores=True,
            use_cache=False,
        )
        codes = found.sequences[:, 1:] % CODES
        return codes.view(len(histories), self.beams, LEVELS), found.sequences_scores.view(
            len(histories), self.beams
        )


def python_trie(sids: np.ndarray) -> Callable[[int, Tensor], list[int]]:
    """The usual `prefix_allowed_tokens_fn`: a dictionary from prefix to the tokens that may
    follow.
    """
    following: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for path in (sids + CODES * np.arange(LEVELS)).tolist():
        for level, token in enumerate(path):
            following[tuple(path[:level])].add(token)
    ready = {prefix: sorted(tokens) for prefix, tokens in following.items()}
    # `generate` carries on beams that ran dry at the lowest score; they may take any token of their
    # level
    anything = [list(range(level * CODES, (level + 1) * CODES)) for level in range(LEVELS)]

    def allowed(_: int, tokens: Tensor) -> list[int]:
        prefix = tuple(tokens.tolist()[1:])
        return ready.get(prefix) or anything[len(prefix)]

    return allowed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--beams", type=int, default=50)
    parser.add_argument("--items", type=int, default=12_101)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)

    rng = np.random.default_rng(0)
    g = torch.Generator().manual_seed(0)
    sids = rng.integers(0, CODES, (args.items, LEVELS))
    trie = Trie.build(sids, rng.random(args.items), CODES).to(device)
    model = Generator(args.dim)
    initialise(model, 0.2, g)
    model = model.to(device).eval()
    lengths = rng.integers(5, LENGTH + 1, args.users)
    lengths[0] = LENGTH
    histories = torch.from_numpy(sids[rng.integers(0, args.items, (args.users, LENGTH))]).to(device)
    real = (torch.arange(LENGTH) < torch.from_numpy(lengths)[:, None]).to(device)
    paths = torch.from_numpy(np.unique(sids, axis=0)).to(device)

    @torch.no_grad()
    def ours() -> tuple[Tensor, Tensor]:
        projected = model.project(model.encode(histories, real))
        leaves, scores = beam_search(
            lambda p: model.next_codes(projected, real, p), trie, args.users, args.beams
        )
        return paths[leaves], scores

    allowed = python_trie(sids)
    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"ours": ours}
    for kind in ("peer", "peer_cached", "peer_shared"):
        peer = Peer(model, args.beams, kind).to(device).eval()
        ways[kind] = lambda peer=peer: peer.decode(histories, real, allowed)  # type: ignore[misc]
    codes, scores = ours()
    for name, way in ways.items():
        found, value = way()
        torch.testing.assert_close(
            value, scores, rtol=1e-4, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
        same = float((found == codes).all(2).float().mean())
        if same < 0.99:  # scores within rounding of each other may change places
            raise SystemExit(f"{name} found other items: only {same:.1%} are in the same place.")

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, way in ways.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    rate = {name: args.users / median(times) for name, times in seconds.items()}
    with torch.no_grad():
        encoding = min(_seconds(lambda: model.encode(histories, real)) for _ in range(args.repeats))
        exact = _seconds(lambda: item_scores(trie, scores.new_zeros(args.users, trie.sizes[-1])))
    print(
        json.dumps(
            {
                "benchmark": "beam",
                **vars(args),
                "users_per_s": {name: round(value, 2) for name, value in rate.items()},
                "ratio": {
                    name: round(rate["ours"] / rate[name], 2) for name in rate if name != "ours"
                },
                "encoder_s_per_user": round(encoding / args.users, 5),
                "item_scores_s_per_user": round(exact / args.users, 5),
                "leaves": trie.sizes[-1],
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            }
        )
    )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
