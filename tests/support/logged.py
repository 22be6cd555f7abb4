"""What is logged, as a list."""

from contextlib import ExitStack

from dppo_megatron.texts import logged

_LISTENING = ExitStack()


def logged_lines() -> list[str]:
    """Gets every line that this process logs from now on, until somebody else listens."""
    lines: list[str] = []
    _LISTENING.close()
    _LISTENING.enter_context(logged(lines.append))
    return lines
