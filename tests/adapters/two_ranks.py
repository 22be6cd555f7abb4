"""One rank of a TRL run, `python two_ranks.py FOLDER RANK RANKS PORT GROUP`: writes what it was left with, and resumes
from its middle; or with the name of a loss, or `images`, in place of GROUP, that check over all ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

folder, rank, ranks, port, what = Path(sys.argv[1]), *sys.argv[2:6]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

import torch  # noqa: E402
from tiny_trl import trainer  # noqa: E402


def train(out: Path, resume: Path | None = None) -> dict[str, Any]:
    """Weights and history of a run."""
    made = trainer(
        out,
        per_device_train_batch_size=12 // int(ranks),
        gradient_accumulation_steps=2,
        num_generations=int(what),
        max_steps=5,
        save_strategy="steps",
        save_steps=3,
    )
    made.train(resume_from_checkpoint=str(resume) if resume else None)
    own = ("prune", "ledger")
    history = [{name: row[name] for name in row if name.startswith(own)} for row in made.state.log_history]
    weights = [float(one.detach().double().sum()) for one in made.model.parameters()]
    return {"history": history, "weights": weights, "ranks": made.accelerator.num_processes}


torch.set_num_threads(1)
# of several processes on a CPU transformers loads an optimizer to "cpu:0", which torch does not know
torch.serialization.register_package(5, lambda _: None, lambda storage, at: storage if at.startswith("cpu:") else None)
if what.isdecimal():
    found = train(folder)
    found["resumed"] = train(folder / "again", folder / "checkpoint-3")["weights"]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
else:
    from test_trl_exact import check_expectation, check_images_are_refused

    torch.set_default_dtype(torch.float64)
    if what == "images":
        check_images_are_refused(folder)
    else:
        check_expectation(what, folder)
# a gloo thread that still drops a collective's tensors when the interpreter ends aborts the process
torch.distributed.destroy_process_group()
