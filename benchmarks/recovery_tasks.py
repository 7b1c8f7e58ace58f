"""Tasks of the jobs that are killed, for their job files."""

from itertools import islice

from sostenuto.envs.storeroom.world import StoreroomTask, held_out_tasks, training_tasks


def training(count: int) -> list[StoreroomTask]:
    return list(islice(training_tasks(1), count))


def held_out(count: int) -> list[StoreroomTask]:
    return held_out_tasks(count, 1)
