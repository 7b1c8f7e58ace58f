"""Programs as those who run a gateway see and release them, in the shapes of ThunderAgent.

A program is `reasoning` while a call of it is under way and `acting` between its calls; `active` while an
engine is to hold its KV, and `paused` while it holds none.
"""

from collections import Counter

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from sostenuto.runtime.gateway.bodies import Body, Text, read
from sostenuto.runtime.gateway.dialects.dialect import Json
from sostenuto.runtime.gateway.keys import Scope
from sostenuto.runtime.gateway.refusing import json_reply
from sostenuto.runtime.gateway.server import Gateway, body_of, object_of, require
from sostenuto.runtime.gateway.sessions import Resident
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.scheduler.program import Snapshot
from sostenuto.types import Usage


class ReleaseBody(Body):
    program_id: Text


def programs_routes(gateway: Gateway) -> list[web.RouteDef]:
    """They need the scope `admin`, and `/metrics` the scope `metrics`."""

    async def programs(request: web.Request) -> web.Response:
        require(gateway.grantee(request), Scope.ADMIN)
        snapshot = gateway.sessions.snapshot()
        return json_reply({one.name: _program(one, snapshot) for one in gateway.sessions.all()})

    async def metrics(request: web.Request) -> web.Response:
        require(gateway.grantee(request), Scope.METRICS)
        snapshot = gateway.sessions.snapshot()
        standings = Counter(_standing(one, snapshot) for one in gateway.sessions.all())
        text = gateway.meters.text(standings, snapshot)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def release(request: web.Request) -> web.Response:
        require(gateway.grantee(request), Scope.ADMIN)
        name = read(ReleaseBody, object_of(await body_of(request))).program_id
        gateway.sessions.release(name)
        return json_reply({"program_id": name, "released": True})

    async def profiles(request: web.Request) -> web.Response:
        require(gateway.grantee(request), Scope.ADMIN)
        return json_reply({one.name: _profile(one) for one in gateway.sessions.all()})

    async def profile(request: web.Request) -> web.Response:
        require(gateway.grantee(request), Scope.ADMIN)
        name = request.match_info["program"]
        found = gateway.sessions.find(name)
        if found is None:
            raise Refused(
                f"program {name[:80]!r} is not here; it has ended, or never made a call",
                status=404,
                field="program_id",
                code="unknown_program",
            )
        return json_reply(_profile(found))

    return [
        web.get("/metrics", metrics),
        web.get("/programs", programs),
        own_route(gateway),
        web.post("/programs/release", release),
        web.get("/profiles", profiles),
        web.get("/profiles/{program}", profile),
    ]


def own_route(gateway: Gateway) -> web.RouteDef:
    """What a program may know of itself, by its own key."""

    async def own(request: web.Request) -> web.Response:
        grantee = gateway.grantee(request)
        require(grantee, Scope.AGENT)
        found = gateway.sessions.find(grantee.program) if grantee.program else None
        if found is None:
            raise Refused("this key is of no program; ask with the one that was minted for it", status=404)
        # A call that failed may have been sampled, too.
        has_called = bool(found.session.lanes)
        return json_reply({"program": found.name, "calls": found.session.calls, "has_called": has_called})

    return web.get("/v1/program", own)


def _standing(resident: Resident, snapshot: Snapshot) -> tuple[str, str]:
    """reasoning or acting, and active or paused."""
    phases = [snapshot.phases.get(lane.id) for lane in resident.session.lanes]
    is_active = any(phase is not None and phase.holds_kv for phase in phases)
    return "reasoning" if resident.session.is_busy else "acting", "active" if is_active else "paused"


def _program(resident: Resident, snapshot: Snapshot) -> Json:
    session = resident.session
    status, state = _standing(resident, snapshot)
    lengths = [len(lane.record.token_ids) for lane in session.lanes]
    waits_for = [reason for lane in session.lanes if (reason := snapshot.waits_for.get(lane.id))]
    return {
        "id": session.id,
        "backend": next((engine_id for lane in session.lanes for engine_id in lane.engine_ids), None),
        "status": status,
        "state": state,
        "waits_for": waits_for[0] if waits_for else None,
        "context_len": max(lengths, default=0),
        "total_tokens": sum(lengths),
        "step_count": session.calls,
        "purpose": session.terms.purpose.value,
        "sub_agents": len(resident.children),
        "profile": _profile(resident),
    }


def _profile(resident: Resident) -> Json:
    """Where its time went, on average over its calls, in seconds."""
    session = resident.session
    usage, calls = sum((lane.usage for lane in session.lanes), Usage()), max(session.calls, 1)
    return {
        "step_count": session.calls,
        "avg_prefill_s": usage.prefill_s / calls,
        "avg_decode_s": usage.decode_s / calls,
        "avg_pause_s": (usage.queue_s + usage.pause_s) / calls,
        "avg_tool_call_s": usage.tool_s / calls,
        "avg_kv_hit_rate": usage.cached_tokens / max(usage.prompt_tokens, 1),
    }
