"""Text that follows a grammar: which tokens are allowed next, by llguidance.

A grammar comes from outside and is not trusted.  It is first tried in a process of its own, with limits
on time, memory and stack; only what passed is compiled here, away from the engine's thread.
"""
