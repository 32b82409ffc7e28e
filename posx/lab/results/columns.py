"""The columns of the table of results, and the steps between stored rows and that table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd

from posx.lab.files.rows import number


class Column(NamedTuple):
    """A column of the table.

    Attributes:
      dtype: "text" (missing: ""), "int64", "Int64" and "float64" (missing: NA and NaN), or "object" (missing: None).
      unit: of its values, "" if they have none.
      meaning: one line.
    """

    dtype: str
    unit: str
    meaning: str


#: The columns of a run. They are the same in all of its rows.
RUN_COLUMNS = {
    "run": Column("text", "", "the path of the run below the folder that was read; each run has another"),
    "workdir": Column("text", "", "the folder that was read, as a command can name it"),
    "method": Column(
        "text", "", "the encodings of all layers, with windows and parent, as `rope under window(size=9)`"
    ),
    "train_len": Column("int64", "tokens", "the training length"),
    "kind": Column("text", "", "all settings of training but the seed, as JSON; the seeds of one curve share it"),
    "around": Column("text", "", "all settings but encoding, data, seed and length, with `scored_step`, as JSON"),
    "train_seed": Column("text", "", "the seed of training; an imported model has none"),
    "weights_of": Column("text", "", "the `hash` of the run whose weights it has, its own unless they are of a parent"),
    "scored_text": Column("text", "", "the digest of the text that its rows are of"),
    "scored_step": Column("Int64", "steps", "the training step of its rows; `train.steps` if training solved the task"),
    "longest": Column("Int64", "tokens", "the longest window that its targets serve"),
    "settings": Column("object", "", "the settings of training, the code, the scored text and step, by name"),
}
#: All columns. After those of a run, `left_out` and `rule` come the fields of a row of `eval.jsonl`.
COLUMNS = RUN_COLUMNS | {
    "left_out": Column("text", "", "why figures and tables leave the row out; empty if they use it"),
    "rule": Column("Int64", "tokens", "the stride, if windows of one length were slid with several"),
    "run_id": Column("text", "", "the name of the run's folder when it was measured"),
    "hash": Column("text", "", "the digest of the settings that decide the weights"),
    "encoding": Column("text", "", "the encoding, as it can be typed"),
    "seed": Column("Int64", "", "the seed of training"),
    "step": Column("Int64", "steps", "the training step of the weights"),
    "weights": Column("text", "", "the digest of the weights"),
    "code": Column("object", "", "the digests of the user's own classes of encodings, by name"),
    "tokenizer": Column("text", "", "the name of the tokenizer"),
    "data_source": Column("text", "", "the place of the scored text, or the task"),
    "data_digest": Column("text", "", "the digest of the scored text"),
    "own_text": Column("object", "", "whether this is the text that was held out in training"),
    "protocol": Column("text", "", "how windows are laid over the text"),
    "eval_len": Column("int64", "tokens", "the window"),
    "stride": Column("Int64", "tokens", "the distance between windows"),
    "anchor": Column("Int64", "tokens", "the longest window that the targets serve"),
    "max_targets": Column("Int64", "tokens", "the targets that were asked for; 0 is all"),
    "num_targets": Column("Int64", "tokens", "the scored targets"),
    "num_stretches": Column("Int64", "", "the stretches of text that they lie in"),
    "num_documents": Column("Int64", "", "the documents that they lie in"),
    "own_context": Column("float64", "", "the share of the context of the targets that is of their own document"),
    "num_separators": Column("Int64", "tokens", "the separators of documents among them"),
    "num_bytes": Column("Int64", "bytes", "their text without separators"),
    "targets": Column("text", "", "the digest of their positions; equal digests can be compared"),
    "status": Column("text", "", "`ok`, `oom`, `nonfinite`, `undefined`, `apart` (other targets) or `diverged`"),
    "nll": Column("float64", "nats per token", "the mean loss"),
    "ppl": Column("float64", "per token", "the perplexity, exp(nll); infinite from e^700 on"),
    "bpb": Column("float64", "bits per byte", "the loss of the text without separators"),
    "unigram_ppl": Column("float64", "per token", "the perplexity by token frequencies of the training text alone"),
    "num_items": Column("Int64", "", "the items of a task that were answered"),
    "item_lens": Column("object", "tokens", "the shortest and the longest of these items"),
    "exact_match": Column("float64", "", "the share of items whose whole answer is right"),
    "exact_match_interval": Column("object", "", "the ends of its 95 % interval over items"),
    "block_wrong": Column("object", "items", "the wrong answers among each 16 items, or the wrong hidden tokens"),
    "block_hidden": Column("object", "tokens", "the hidden tokens of each 16 items, if tokens are hidden"),
    "accuracy": Column("float64", "", "the share of tokens of answers that are right"),
    "accuracy_interval": Column("object", "", "the ends of its 95 % interval over items"),
    "distance_edges": Column("object", "tokens", "the edges of the bins of distances to what an answer is read from"),
    "distance_accuracy": Column("object", "", "the share of right tokens of answers in each bin"),
    "distance_targets": Column("object", "tokens", "the tokens of answers in each bin"),
    "attention_items": Column("Int64", "", "the items, or windows of text, whose attention weights were read"),
    "right_weight": Column("float64", "", "the mean weight on the right token, of the head with the largest"),
    "mean_right_weight": Column("float64", "", "the mean weight on the right token, over all heads"),
    "zero_weights": Column("float64", "", "the share of attention weights that are exactly 0"),
    "zero_weights_bfloat16": Column("float64", "", "the same, if weights are rounded to bfloat16"),
    "attention_entropy": Column("float64", "nats", "the mean entropy of the scored queries, over all heads"),
    "far_weight": Column("float64", "", "the mean weight on tokens L or more back, over all heads"),
    "attention": Column("object", "", "these numbers for each layer and head"),
    "nll_interval": Column("object", "nats per token", "the ends of the 95 % interval of `nll` over text"),
    "block_len": Column("Int64", "tokens", "the targets in a block"),
    "block_nll": Column("object", "nats", "the sum of the losses of each block"),
    "position_edges": Column("object", "tokens", "the edges of the bins of positions"),
    "position_nll": Column("object", "nats per token", "the mean loss in each bin"),
    "position_targets": Column("object", "tokens", "the targets in each bin"),
    "precision": Column("text", "", "the precision of float32 products"),
    "env": Column("object", "", "the versions and the device of the measurement"),
}
#: Why a row has no perplexity, in words. The last two are set here, for runs without results or comparable ones.
FAILED = {
    "undefined": "undefined",
    "nonfinite": "not finite",
    "oom": "out of memory",
    "diverged": "ended with NaN",
    "apart": "on other targets",
}


def make_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Column] = COLUMNS) -> pd.DataFrame:
    """Return rows as a table of `columns`. Other fields of the rows are left out."""
    rows = list(rows)
    return pd.DataFrame({name: _series([row.get(name) for row in rows], column) for name, column in columns.items()})


def _series(values: list[Any], column: Column) -> pd.Series:
    if column.dtype == "text":
        values = ["" if value is None else str(value) for value in values]
    elif column.dtype == "float64":
        values = [math.inf if value == "inf" else math.nan if number(value) is None else value for value in values]
    return pd.Series(values, dtype="object" if column.dtype == "text" else column.dtype)


def plain_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as dicts of plain Python values, with None for a missing number."""
    return [{name: _plain(value) for name, value in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    return None if value is pd.NA or (isinstance(value, float) and math.isnan(value)) else value


def finite_perplexity(table: pd.DataFrame) -> pd.Series:
    """Return the perplexity per token of each row, NaN if the row has no finite one."""
    known = (table.status == "ok") & (table.ppl > 0) & (table.ppl < math.inf)
    return table.ppl.where(known)
