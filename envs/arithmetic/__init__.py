"""Procedural sums with a sandboxed Python tool: a built-in environment for real language models.

The tasks are `chain_sum` of the reasoning-gym collection, such as "State the final answer to the following
arithmetic problem: 4812 - 907 + 33 =".  A small model gets them wrong in its head and right with Python.
"""

from sostenuto.envs.arithmetic.environment import ChainSum as ChainSum
from sostenuto.envs.arithmetic.tasks import SumTask as SumTask
from sostenuto.envs.arithmetic.tasks import held_out_tasks as held_out_tasks
from sostenuto.envs.arithmetic.tasks import training_tasks as training_tasks
