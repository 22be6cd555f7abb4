"""How long a large training set takes to load, and what a rank then holds: the first start, and those after it.

  python benchmarks/data_loading.py [--model DIR] [--rows 1000000] [--template qwen3_nothink] [--out FOLDER]

DIR is any model's directory with a tokenizer. Without it, the vocabulary is 150,000 made-up words, whose tokens cost
less to make and as much to load. The problems are made up too: 60 to 140 words, in a Parquet file in verl's layout.
Each start is a process that does what every rank does: load sets, features, and the prompts of a first step. It prints
its CPU seconds, and by how much its resident memory grew: its own memory, and pages of the cache file, which all ranks
share. A FOLDER that already holds file and cache is measured again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetWriter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dppo_megatron.config.data import TrainSetConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.data.cache import LazyPrompts
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.data.sets import load_train_sets
from dppo_megatron.job import features_of

_WORDS = 150_000
_AT_ONCE = 10_000


def _write_problems(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(_WORDS)])
    writer: ParquetWriter | None = None
    for first in range(0, rows, _AT_ONCE):
        count = min(_AT_ONCE, rows - first)
        texts = [" ".join(words[rng.integers(0, _WORDS, rng.integers(60, 141))]) for _ in range(count)]
        table = pa.table(
            {
                "data_source": ["math_dapo"] * count,
                "prompt": [[{"role": "user", "content": text}] for text in texts],
                "ability": ["MATH"] * count,
                "reward_model": [{"ground_truth": str(first + i), "style": "rule"} for i in range(count)],
                "extra_info": [{"index": f"{first + i:032x}"} for i in range(count)],
            }
        )
        writer = writer or ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    if model:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(_WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    return fast


def _memory() -> tuple[float, float]:
    """MiB of this process's own memory, and of files that it has mapped."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped = (int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    return own, mapped


def _start(path: str, cache: str, model: str, template: str) -> None:
    """Load as a rank does; runs in a process of its own."""
    config, tokenizer = Config(), _tokenizer(model)
    one = TrainSetConfig(path=path, problem_field="prompt", answer_field="reward_model.ground_truth")
    config.data.train_sets, config.data.cache_path = {"made_up": one}, cache
    config.data.source_field, config.data.max_prompt_tokens = "data_source", 100_000
    config.data.template = template
    config.data.apply_chat_template = None if template else True
    (own, mapped), began = _memory(), time.process_time()
    sets = load_train_sets(config, tokenizer, {})
    loaded = time.process_time() - began
    features, prompts = (
        features_of([one.columns for one in sets.values()]),
        LazyPrompts.joined([one.prompts for one in sets.values()]),
    )
    taken, _ = PromptOrder(len(prompts), 0).take(0, 512)
    step = [prompts[index] for index in taken]
    seconds, (own_now, mapped_now) = time.process_time() - began, _memory()
    print(
        f"{len(prompts):,} problems of {features.prompt_tokens.mean():.0f} tokens: {seconds:.2f} s of CPU ({loaded:.2f}"
        f" for the sets), {own_now - own:,.0f} MiB of its own, {mapped_now - mapped:,.0f} MiB of files"
        f" ({len(step)} prompts taken)",
        flush=True,
    )
    print(*sets["made_up"].notes, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--template", default="")
    parser.add_argument("--out", default="", help="keep file and cache here (default: they are removed)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.out or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"problems-{arguments.rows}.parquet"
        if not path.exists():
            _write_problems(path, arguments.rows)
        for start in ("first", "second", "third"):
            print(f"{start} start:", flush=True)
            process = multiprocessing.get_context("spawn").Process(
                target=_start, args=(str(path), str(folder / "cache"), arguments.model, arguments.template)
            )
            process.start()
            process.join()


if __name__ == "__main__":
    main()
