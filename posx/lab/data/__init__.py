"""Text in, batches out, in four steps, one file each.

    text  -> documents   `corpus`: local files and Hugging Face data sets (`texts`, `readers`).
          -> tokens      `tokenizers`: bytes, byte-level BPE trained here, or any tokenizer.json.
          -> token file  `store`: one memory-mapped file a split, keyed by the content of the text, never by its date.
          -> windows     `batches`: a pure function of (data digest, seed, step, batch size, length).

Every fault of the input is a one-line `DataError`. A document is text, a chat (`chat`), or token ids (`ids`). `encoded`
returns the tokens of each. `prepare(DataConfig(...))` runs the first three steps once, and opens their result
afterwards. `batch(...)` does the fourth. Importing this package loads neither `datasets` nor `tokenizers`; they are
imported when first needed.
"""

from posx.lab.config.data import DataConfig
from posx.lab.data.batches import Dataset, Weighted, batch, check_length, num_windows
from posx.lab.data.store import TextDataset, TokenStore, prepare
from posx.lab.data.tasks import TaskDataset
from posx.lab.data.tokenizers import BpeTokenizer, ByteTokenizer, IdTokenizer, Tokenizer, load_tokenizer, train_bpe
from posx.lazy import module_getter

__all__ = [
    "BpeTokenizer", "ByteTokenizer", "DataConfig", "Dataset", "IdTokenizer", "TaskDataset", "TextDataset", "TokenStore",
    "Tokenizer", "Weighted", "batch", "check_length", "load_tokenizer", "num_windows", "prepare",
    "train_bpe",
]  # fmt: skip

__getattr__ = module_getter(__name__)
