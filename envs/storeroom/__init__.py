"""The storeroom: a built-in environment whose answer needs three tool calls, each on the one before.

Six files hold one record each, such as `plum:14 old,23 new` in `oak.txt`.  "How many plum in all?"
is answered by finding the file, reading it and adding.  Small enough for a model of half a million
parameters, and neither the file nor the sum can be guessed.
"""

from sostenuto.envs.storeroom.environment import Storeroom as Storeroom
from sostenuto.envs.storeroom.world import Record as Record
from sostenuto.envs.storeroom.world import StoreroomTask as StoreroomTask
from sostenuto.envs.storeroom.world import held_out_tasks as held_out_tasks
from sostenuto.envs.storeroom.world import training_tasks as training_tasks
