"""Trained runs as models of lm-evaluation-harness, which knows a model once it is registered.

`python -m posx.lab.lm_eval` is the command `lm_eval` with the model `posx`:

    python -m posx.lab.lm_eval --model posx --model_args run=runs/NAME --tasks TASK --batch_size auto
"""

from __future__ import annotations

import collections
import functools
import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from posx.errors import ConfigError, PosxError
from posx.lab.cross_entropy import score_answers
from posx.lab.generate import Sampling, generate
from posx.lab.progress import quantity
from posx.lab.runs.describe import is_defined
from posx.lab.runs.load import load
from posx.machine.platforms import product_precision
from posx.notices import say

#: Tokens of a call of the model if the batch size is "auto". Windows are padded to powers of 2, at least the shortest.
BATCH_TOKENS, SHORTEST = 16384, 16
#: New tokens of a request that names no number, and the settings of generation that are understood.
NEW_TOKENS, SETTINGS = 256, {"do_sample", "max_gen_toks", "temperature", "top_k", "until"}


def register() -> type:
    """Add the model `posx` to lm-evaluation-harness and return its class. Raises ConfigError without the library."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ConfigError(f"lm-evaluation-harness: {error}. Install it: pip install 'posx[lm-eval]'") from None
    if "posx" not in model_registry:
        model_registry.register("posx")(type("PosxLM", (Harness, TemplateLM), {}))
    return model_registry.get("posx")


@functools.partial(jax.jit, static_argnums=0)
def _scores(model: Any, params: Any, tokens: jax.Array, pos: Any) -> tuple[jax.Array, jax.Array]:
    """Return for tokens [b, t + 1] the log-probabilities [b, t] of the next ones, and whether they are most likely.

    pos: positions [t], None for 0 to t - 1.
    """
    with product_precision("highest"):
        return score_answers(model(params, tokens[:, :-1], pos), tokens[:, 1:])


class Harness:
    """A trained run that answers the requests of lm-evaluation-harness; `register` makes a model of it.

    The encoding is set for windows of `max_length` tokens, whatever the length of a request. So are random positions.

    Args:
      run: the folder of a run, or an exported file.
      max_length: the longest window in tokens, 0 for the training length.
      batch_size: rows of a call of the model; "auto" for as many as have 16,384 tokens, at most `max_batch_size`.
      device: not used. The command always names one, but JAX_PLATFORMS chooses.
      add_bos_token: whether every text begins with the begin token; None for as the tokenizer's own template says.
      prefix_token_id: the token before an empty context and before a rolled document; None for the begin token.
      seed: of sampled texts. The draws of a request depend on this, its prompt, and how often the prompt came before.
    """

    cache_hook: Any
    add_bos_token: bool | None = None
    _prefix: int | None = None
    _seed = 0
    # The harness reads a class and a method of its own of these names, too.
    backend, tokenizer = "causal", None

    def __init__(
        self,
        run: str,
        max_length: int = 0,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str = "",
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        apply, self.params, self._tokenizer = load(run)
        apply.model.config.require_causal("lm-evaluation-harness")
        self.max_length = max_length or apply.model.dims.train_len
        most = apply.positions.policy.most or self.max_length
        if self.max_length < 2 or self.max_length > most or not is_defined(apply.model, self.max_length):
            raise ConfigError(f"max_length={self.max_length}: the model is not defined for such windows. Lower it.")
        self._positions = apply.positions
        self._trained, self.model = apply.model, apply.model.at_length(self.max_length)
        self._rows = None if str(batch_size).startswith("auto") else int(batch_size)
        self._most_rows = max_batch_size or BATCH_TOKENS
        self.add_bos_token, self._prefix, self._seed = add_bos_token, prefix_token_id, seed
        if prefix_token_id is not None and not 0 <= prefix_token_id < apply.model.vocab_size:
            raise ConfigError(
                f"prefix_token_id={prefix_token_id}: the model has ids 0 to {apply.model.vocab_size - 1}."
            )

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a text."""
        return self._tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """Return the token that stands for an empty context."""
        return self._tokenizer.begin if self._prefix is None else self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text as the harness's HFLM does, which encodes like transformers.

        A text that begins with the text of the prefix token gets no second one.
        """
        prefix, add = self._tokenizer.spell(self.prefix_token_id), add_special_tokens
        if add is None:
            add = False if prefix and string.startswith(prefix) else self.add_bos_token
        ids = self._tokenizer.encode_whole(string, add is not False)
        return [self._tokenizer.begin, *ids] if add and self.add_bos_token and not self._tokenizer.template else ids

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return, per (key, context, rest), the log-probability of the rest and whether greedy decoding produces it."""
        requests = [(key, context or [self.prefix_token_id], rest) for key, context, rest in requests]
        rows = [np.array((context + rest)[-self.max_length - 1 :], np.int32) for _, context, rest in requests]
        self._say_cut([len(context) + len(rest) - self.max_length - 1 for _, context, rest in requests])
        if too_long := [len(rest) for _, _, rest in requests if len(rest) > self.max_length]:
            raise ConfigError(f"max_length={self.max_length}, but a continuation has {max(too_long)} tokens. Raise it.")
        answers, pos = dict[int, tuple[float, bool]](), self._positions.measure(self.max_length)
        for size, batch in self._batches([len(row) - 1 for row in rows]):
            tokens = np.zeros((self._batch_rows(size), size + 1), np.int32)
            for place, n in enumerate(batch):
                tokens[place, : len(rows[n])] = rows[n]
            scores = _scores(self.model, self.params, tokens, None if pos is None else pos[:size])
            log_probs, best = map(np.asarray, scores)
            for place, n in enumerate(batch):
                key, _context, rest = requests[n]
                scored = slice(len(rows[n]) - 1 - len(rest), len(rows[n]) - 1)
                answers[n] = float(log_probs[place, scored].sum(dtype=np.float64)), bool(best[place, scored].all())
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answers[n])
        return [answers[n] for n in range(len(requests))]

    def _say_cut(self, beyond: Sequence[int]) -> None:
        """Say how many requests lose the start of their context. `beyond` has the tokens by which each is too long."""
        if cut := [count for count in beyond if count > 0]:
            say(
                f"notice: max_length={self.max_length}: {len(cut):,} of {quantity(len(beyond), 'context')} do not fit. "
                f"They lost {sum(cut):,} tokens at their start, at most {max(cut):,} each. A larger max_length keeps "
                "them."
            )

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield the padded length of each batch and its requests. One program serves all batches of a length."""
        sizes = [min(max(SHORTEST, 1 << (n - 1).bit_length()), self.max_length) for n in lengths]
        for size in sorted(set(sizes), reverse=True):
            members, rows = [n for n, own in enumerate(sizes) if own == size], self._batch_rows(size)
            for start in range(0, len(members), rows):
                yield size, members[start : start + rows]

    def _batch_rows(self, size: int) -> int:
        return self._rows or max(1, min(BATCH_TOKENS // size, self._most_rows))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in the windows of the protocol `lm_eval_rolling`.

        As in HFLM, tokens that the template puts before a text are scored too.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for n, (text,) in enumerate(request.args for request in requests):
            for pair in get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(n)
        totals = [0.0] * len(requests)
        for n, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[n] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first stop sequence."""
        from lm_eval.models.utils import normalize_gen_kwargs

        prompts, beyond, groups = [], [], dict[Any, list[int]]()
        for n, (context, settings) in enumerate(request.args for request in requests):
            settings = normalize_gen_kwargs(settings, min(NEW_TOKENS, self.max_length // 2))
            if unknown := sorted(set(settings) - SETTINGS):
                raise ConfigError(f"{', '.join(unknown)}: posx samples with temperature and top_k alone. Leave it out.")
            count, until = settings["max_gen_toks"], tuple(settings["until"])
            if not 0 < count < self.max_length:
                raise ConfigError(
                    f"max_gen_toks={count} must be between 1 and {self.max_length - 1}. Raise max_length."
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(ids[count - self.max_length :])
            beyond.append(len(ids) + count - self.max_length)
            sampling = Sampling(
                settings.get("temperature", 0.0), settings.get("top_k", 0), vocab_size=self._tokenizer.vocab_size
            )
            # Encodings that are set for a length are set for that of a text, and so are random positions.
            length = len(prompts[n]) + count
            set_for = self._trained.at_length(length), self._positions.policy.most and length
            groups.setdefault((count, until, sampling, set_for), []).append(n)
        self._say_cut(beyond)
        texts, seeds = dict[int, str](), _seeds(self._seed, prompts)
        for (count, until, sampling, _), members in groups.items():
            members.sort(key=lambda n: len(prompts[n]))
            rows = self._batch_rows(self.max_length)
            for start in range(0, len(members), rows):
                batch = members[start : start + rows]
                drawn = sampling, [seeds[n] for n in batch]
                continuations = self._texts([prompts[n] for n in batch], count, until, *drawn)
                texts |= dict(zip(batch, continuations, strict=True))
        for n, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[n])
        return [texts[n] for n in range(len(requests))]

    def _texts(
        self, prompts: list[list[int]], count: int, until: Sequence[str], sampling: Sampling, seeds: list[int]
    ) -> list[str]:
        """Return at most `count` tokens of text after each prompt, without the stop sequence that ends it."""
        from lm_eval.models.utils import postprocess_generated_text

        ids, is_open = [list[int]() for _ in prompts], set(range(len(prompts)))
        ends, given = {self._tokenizer.eos, *self._tokenizer.ends}, [np.array(one) for one in prompts]
        new_ids = generate(
            self._trained, self.params, given, count, sampling=sampling, seed=seeds, positions=self._positions
        )
        for new in new_ids:
            for n in sorted(is_open):
                is_end = int(new[n]) in ends
                ids[n] += [] if is_end else [int(new[n])]
                text = self._tokenizer.decode(ids[n])
                if is_end or any(stop and stop in text for stop in until):
                    is_open.discard(n)
            if not is_open:
                break
        return [postprocess_generated_text(self._tokenizer.decode(own), list(until), None) for own in ids]


def _seeds(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return a seed for each prompt, made of `seed`, the prompt, and the number of equal prompts before this one."""
    seeds, times = list[int](), collections.Counter[tuple[int, ...]]()
    for prompt in map(tuple, prompts):
        seeds.append(int.from_bytes(hashlib.sha256(repr((seed, prompt, times[prompt])).encode()).digest()[:4], "big"))
        times[prompt] += 1
    return seeds


def run_harness() -> int:
    """Run the command `lm_eval` with the model `posx`. A foreseen failure is one line on standard error."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except PosxError as error:
        say(f"posx: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_harness())
