"""samples.jsonl: every sampled answer with its grade, in full, so that any program can grade it again.

One flat JSON object per sample. Files are written under a temporary name and renamed, so they are never incomplete.
Until an evaluation ends, its samples are in `samples.unfinished.jsonl`, to which lines are appended: first one about
the evaluation, then one for each generated sample, and a short one for each verdict. A kill loses only samples that
were still being generated: the same command resumes from that file.
"""

from __future__ import annotations

import errno
import fcntl
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec

from dppo_megatron.config.changes import flat
from dppo_megatron.config.paths import check_writable, json_reason, writing
from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.evaluation.eval_scores import EvalSample, EvalScores, score
from dppo_megatron.files import append_to, make_directory, open_to_read, replacing
from dppo_megatron.texts import log, one_line
from dppo_megatron.types import Prompt, UserError

FORMAT = "dppo_megatron evaluation 1"
SAMPLES, RESULTS, COMPARISON = "samples.jsonl", "results.json", "comparison.json"
UNFINISHED = "samples.unfinished.jsonl"
FOLLOWED = "eval/follow"
"""Directory below a run's for the evaluations of its checkpoints by `eval --follow`."""
Key: TypeAlias = tuple[str, int, int]
"""Set, index of the problem in it, number of the sample."""
_SETTINGS = "settings"
"""Key in the first line of the unfinished file: `reward` and `sets` in full, as in results.json. They are not compared
on resume, because settings such as the graders' limits may change."""
_FREE_AT_RESUME = [item.name for item in fields(RewardConfig) if item.metadata.get("free_at_resume")]
_VERDICT = ("reward", "correct", "extracted", "vote", "unparsed", "why", "failure")


def problem_ids(prompts: Sequence[Prompt]) -> list[str]:
    """A unique id for each problem of a set: the `id` of its row, with the index appended if several rows have it;
    without an `id`, the index.

    Example:
        rows with id "a", "b", "b"  ->  ["a", "b#1", "b#2"]; rows without  ->  ["0", "1", "2"]
    """
    ids = [str(prompt.row.get("id", "")) for prompt in prompts]
    unique = [f"{name}#{index}" if name else str(index) for index, name in enumerate(ids)]
    counts = Counter([*ids, *unique])  # with `unique`, since a row's id may look like "b#1" or "1" itself
    return [name if name and counts[name] == 1 else other for name, other in zip(ids, unique, strict=True)]


Problems: TypeAlias = dict[str, list[EvalSample]]
"""Problem id -> samples, of one set."""


def by_problem(samples: Iterable[EvalSample]) -> dict[str, Problems]:
    """The problems of each set, in the order in which the samples come."""
    sets: dict[str, Problems] = {}
    for sample in samples:
        sets.setdefault(sample.set, {}).setdefault(sample.problem, []).append(sample)
    return sets


def share_correct(samples: Iterable[EvalSample]) -> float | None:
    """Share of correct samples among those that were graded; None if none was."""
    graded = [one.correct for one in samples if one.correct is not None]
    return sum(graded) / len(graded) if graded else None


def scores_of(samples: Sequence[EvalSample]) -> list[EvalScores]:
    """Scores of every set in a list of samples, in the order in which the sets appear."""
    return [
        score(
            name,
            problems=len(problems),
            samples=1 + max(one.sample for members in problems.values() for one in members),
            graded=[one for members in problems.values() for one in members],
        )
        for name, problems in by_problem(samples).items()
    ]


def check_out(out: Path, name: str) -> None:
    """Raise UserError if `name` cannot be written to `out` or exists there; called before anything is generated."""
    if (out / name).exists():
        what = "a comparison" if name == COMPARISON else "an evaluation"
        raise UserError(f"'{out}' already holds {what}; choose another --out, or remove it")
    if out.is_symlink() or (out.parent.name == "eval" and out.parent.is_symlink()):  # RUN/eval/MODEL
        raise UserError(f"--out '{out}' is a symbolic link or is in one; name the directory that the link leads to")
    check_writable("--out", out, directory=True)


def write_text(path: Path, pieces: Iterable[str]) -> None:
    """Write a file atomically. Raises UserError if it cannot be written."""
    with writing(f"'{path}'"):
        make_directory(path.parent)
        with replacing(path) as file:
            file.writelines(piece.encode() for piece in pieces)


def write_samples(path: Path, samples: Iterable[EvalSample]) -> None:
    """Write one JSON object per line, in ASCII: a model can write lone surrogates, which UTF-8 cannot encode."""
    write_text(path, (json.dumps(asdict(sample), default=str) + "\n" for sample in samples))


def check_ended(directory: Path) -> None:
    """Raise UserError if the evaluation in `directory` was killed, or still runs."""
    if (directory / UNFINISHED).is_file() and not (directory / RESULTS).is_file():
        raise UserError(f"'{directory}': the evaluation has not ended; repeat its command to resume it")


def read_samples(path: Path) -> list[EvalSample]:
    """Read what `write_samples` wrote, from the file or its directory. Raises UserError if there is no such file, or
    with the number of a line that is not a sample."""
    if path.is_dir():
        check_ended(path)
        path = path / SAMPLES
    elif path.suffix == ".json" or path.name == UNFINISHED:
        raise UserError(f"'{path}' is not {SAMPLES}: name the one beside it, or the directory of the evaluation")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"'{path}' cannot be read: {reason}; expected the {SAMPLES} of an evaluation") from None
    samples: dict[Key, EvalSample] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            sample = msgspec.convert(json.loads(line), EvalSample)  # msgspec's own reader refuses lone surrogates
        except msgspec.ValidationError as error:
            raise UserError(f"{where}: not a sample of an evaluation: {error}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON: {json_reason(error)}") from None
        if samples.setdefault(key_of(sample), sample) is not sample:
            named = f"sample {sample.sample} of problem {sample.problem[:60]} of {sample.set[:60]}"
            raise UserError(f"{where}: {named} is there twice")
    if not samples:
        raise UserError(f"'{path}' holds no samples")
    return list(samples.values())


def read_results(path: Path) -> dict[str, Any]:
    """Read a results.json. Raises UserError if it cannot be read, or is not one."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sets = raw["sets"].values()
        inner = (one.get(key) or {} for one in sets for key in ("reward", "template"))
        if raw["format"] != FORMAT or not all(isinstance(one, dict) for one in (*sets, *inner, raw.get("graders", {}))):
            raise ValueError("another format")
        RewardConfig(**raw["reward"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = error.strerror if isinstance(error, OSError) else one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"'{path}' holds no results of an evaluation: {detail}") from None
    return raw


def deciding(reward: Mapping[str, Any]) -> dict[str, Any]:
    """Reward settings without those that may change on resume, which decide only how graders run."""
    return {name: value for name, value in reward.items() if name not in _FREE_AT_RESUME}


def key_of(sample: EvalSample) -> Key:
    return sample.set, sample.problem_index, sample.sample


class UnfinishedSamples:
    """The samples of an evaluation that has not ended; resumes one that was begun before.

    Args:
        directory: of the evaluation; created if it does not exist.
        about: what decides the samples and their grades, as JSON; must be the same on resume.
        graded_by: fingerprint of the current graders. Verdicts with another fingerprint (an edited file, another time
            limit) and failures (a judge that was down) are dropped, and those samples graded again.
        settings: written at the first start, for `read_unfinished`; in the form of results.json.

    Raises:
        UserError: the evaluation was begun with another `about`, or the file cannot be read or written.
    """

    def __init__(
        self,
        directory: Path,
        about: Mapping[str, Any],
        graded_by: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._path, self._graded_by = directory / UNFINISHED, graded_by
        self.samples: dict[Key, EvalSample] = {}
        try:
            make_directory(directory)
            self._file = append_to(self._path)
            _lock(self._file)
            self._file.seek(0)
            head, samples, end = _read(self._file.read(), graded_by)
            if head is None and end:
                raise UserError(f"'{self._path}': its first line is damaged; repair it, or remove the file")
            if head is None:
                self._file.truncate(0)
                self._append([{**about, _SETTINGS: settings or {}}])
                return
            self._file.truncate(end)  # removes a line that a kill has left incomplete
        except BlockingIOError:
            raise UserError(f"another evaluation is writing to '{directory}'; choose another --out") from None
        except OSError as error:
            raise UserError(f"'{self._path}' cannot be written: {error.strerror}") from None
        head.pop(_SETTINGS, None)
        if different := difference(head, about):
            raise UserError(
                f"'{directory}' holds an evaluation that was begun with something else ({different}); repeat it"
                f" unchanged, choose another --out, or remove {UNFINISHED}"
            )
        self.samples = samples

    def add(self, sample: EvalSample) -> None:
        """Store a generated sample, which has no verdict yet."""
        self.samples[key_of(sample)] = sample
        self._append([{name: value for name, value in asdict(sample).items() if name not in _VERDICT}])

    def add_verdicts(self, samples: Iterable[EvalSample]) -> None:
        """Store the verdicts of samples that were added before."""
        graded = list(samples)
        self.samples |= {key_of(one): one for one in graded}
        keys = ("set", "problem_index", "sample", *_VERDICT)
        self._append([{name: getattr(one, name) for name in keys} | {"by": self._graded_by} for one in graded])

    def finished(self) -> None:
        """Remove the file, once the results are written."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row, default=str) + "\n" for row in rows)  # ASCII: see `write_samples`
        with writing(f"'{self._path}'"):
            unwritten = memoryview(text.encode())
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]


def _lock(file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some cluster file systems have no locks (Lustre mounted without flock)
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def read_unfinished(directory: Path) -> tuple[dict[str, Any], list[EvalSample]] | None:
    """(its `about` and settings, its samples so far) of an evaluation that has not ended; None if there is none."""
    try:
        with open_to_read(directory / UNFINISHED) as file:
            head, samples, _ = _read(file.read())
    except OSError:
        return None
    if head is None:
        return None
    settings = head.pop(_SETTINGS, None)
    return head | (settings if isinstance(settings, dict) else {}), list(samples.values())


def _read(text: bytes, graded_by: str | None = None) -> tuple[dict[str, Any] | None, dict[Key, EvalSample], int]:
    """Returns the first line (None if damaged), the samples, and the offset at which the last complete line ends. Reads
    only verdicts that `graded_by` made and that are not failures; None: all verdicts."""
    lines = text.split(b"\n")
    end = len(text) - len(lines.pop())
    rows, damaged = dict[Key, dict[str, Any]](), 0
    outdated: set[Key] = set()
    try:
        head = dict(json.loads(lines[0])) if lines else None
    except (ValueError, TypeError, RecursionError):
        return None, {}, end
    for line in lines[1:]:
        try:
            row = json.loads(line)
            key = row["set"], row["problem_index"], row["sample"]
            if graded_by is None or (row.get("by", graded_by) == graded_by and not row.get("failure")):
                rows[key] = rows.get(key, {}) | row
            else:
                outdated.add(key)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged += 1
    samples: dict[Key, EvalSample] = {}
    for key, row in rows.items():
        try:
            samples[key] = msgspec.convert(row, EvalSample)
        except msgspec.ValidationError:  # a verdict without its sample, whose line was damaged
            damaged += 1
    if damaged:
        log(f"eval: {damaged} lines of {UNFINISHED} are damaged; their samples are generated again")
    if again := sum(not one.is_graded for key, one in samples.items() if key in outdated):
        log(
            f"eval: {again} samples are graded again: the graders, their code or limits have changed, or grading failed"
        )
    return head, samples, end


def difference(head: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """What differs, as `reward.function: 'math', now 'my:grade'`; empty: nothing."""
    lacking = {"quantization": "off", "server_args": []}  # in files of earlier versions
    both = lacking | dict(head), lacking | json.loads(json.dumps(about, default=str))
    before, now = (flat(_without_keys(one)) for one in both)
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    texts = [f"{key}: {before.get(key)!r}, now {now.get(key)!r}" for key in changed[:3]]
    return "; ".join(texts) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")


def _without_keys(about: Mapping[str, Any]) -> dict[str, Any]:
    """`about` without the names of the settings that sets came from: one set may be named by different settings."""
    sets = {
        name: {key: value for key, value in settings.items() if key not in ("key", "max_prompt_tokens_key")}
        for name, settings in about.get("sets", {}).items()
    }
    return {**about, "sets": sets}
