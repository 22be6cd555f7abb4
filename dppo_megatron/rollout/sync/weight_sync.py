"""Around a weight sync: what becomes of requests in flight, and when a server counts as up to date."""

from __future__ import annotations

from collections.abc import Sequence

from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Refused
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import DEVICE_MEMORY, DeviceMemory, InFlight
from dppo_megatron.rollout.sync.channels import on_each


def pause_for_update(fleet: Fleet, members: Sequence[Member], in_flight: InFlight, timeout_s: float) -> None:
    """Before an update: running requests are treated as `in_flight` says, leftovers of an outage are ended, since their
    ids come back; new ones wait at the server."""

    def pause(member: Member) -> None:
        """One server."""
        member.server.pause("abort" if member.has_leftovers else in_flight, timeout_s=timeout_s)

    on_each(fleet, members, pause)


def put_to_sleep(fleet: Fleet, timeout_s: float) -> None:
    """Device memory back to the actor, from every server that answers and is awake. What still runs there has been
    given up: by this run, in an outage, or by an earlier one."""

    def sleep(member: Member) -> None:
        """One server. On a timeout we assume that it sleeps."""
        awake = DEVICE_MEMORY - member.asleep
        with fleet.lock:
            member.slept()
        member.server.sleep(awake, timeout_s=timeout_s)

    awake = [member for member in fleet.members if member.asleep != DEVICE_MEMORY]
    on_each(fleet, awake, sleep, doing="going to sleep")


def wake(fleet: Fleet, members: Sequence[Member], what: DeviceMemory, timeout_s: float) -> None:
    """Weights before an update and the cache after it: both beside the actor's update would not fit."""

    def wake_one(member: Member) -> None:
        """One server."""
        member.server.wake(what, timeout_s=timeout_s)
        with fleet.lock:
            member.woke(what)

    on_each(fleet, [member for member in members if what in member.asleep], wake_one, doing="waking up")


def resume_and_confirm(fleet: Fleet, members: Sequence[Member], version: str, timeout_s: float) -> None:
    """After an update: generate again, and read the version back. Those that agree are live."""

    def finish(member: Member) -> None:
        """One server; Refused if it names other weights than it was sent."""
        server = member.server
        server.resume(timeout_s=timeout_s)
        found = server.weights_version(timeout_s=timeout_s)
        if found != version:
            raise Refused(409, f"its weights version is '{found}' after the sync of '{version}'")

    took = on_each(fleet, members, finish)
    with fleet.lock:
        for member in took:
            member.took(version)
