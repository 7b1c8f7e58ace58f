"""Guessing the next tokens of requests that decode, and verifying several in one step.

What is sampled does not change.  The engine draws each token from the model's own distribution with the
noise of (seed, position); a guess that equals what was drawn saves the step that would have drawn it.
"""
