"""Reads a timeline back: its spans by rank and track, in whole nanoseconds."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple


class Shown(NamedTuple):
    """A span of a file."""

    start: int
    end: int
    name: str


def read_timeline(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def nested(events: list[dict[str, Any]]) -> dict[tuple[int, str], list[Shown]]:
    """Of each rank and track whose spans nest: by start, the longer first."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[int, str], list[Shown]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            found[event["pid"], names[event["pid"], event["tid"]]].append(Shown(start, start + length, event["name"]))
    return {key: sorted(spans, key=lambda span: (span.start, -span.end)) for key, spans in found.items()}


def overlapping(events: list[dict[str, Any]]) -> dict[str, list[Shown]]:
    """Of each track whose spans may overlap: by start."""
    begun = {(e["pid"], e["id2"]["local"]): e for e in events if e["ph"] == "b"}
    ended = {(e["pid"], e["id2"]["local"]): e for e in events if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    found: dict[str, list[Shown]] = defaultdict(list)
    for key, event in begun.items():
        found[event["cat"]].append(Shown(round(event["ts"] * 1000), round(ended[key]["ts"] * 1000), event["name"]))
    return {track: sorted(spans) for track, spans in found.items()}
