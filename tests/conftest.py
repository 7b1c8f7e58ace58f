"""Settings of the whole suite."""

import asyncio

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# pytest-asyncio asks for the current loop before it makes its own; on Python 3.11 the question alone
# would make one that nobody closes.
asyncio.set_event_loop(None)
