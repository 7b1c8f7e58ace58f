"""The CPU reference engine: any transformers causal LM behind the token-in-token-out surface of `wire`.

- `settings` and `refusal` load no torch; everything else here does, and runs in the engine's process alone.
- One thread steps the model (`worker`), the event loop beside it speaks HTTP (`server`).
"""
