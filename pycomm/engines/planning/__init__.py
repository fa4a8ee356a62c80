"""Planners: what to decide before a training job starts, from arithmetic and from a few measured steps.

model.py          the sizes of a model that the planners go by             (no torch)
memory.py         what a rank holds, by strategy and layout                (no torch)
step_time.py      what a step takes, by strategy and layout                (no torch)
parallelism.py    which strategy and layout: ``pycomm.plan_parallelism``    (no torch)
learning_rate.py  the learning rate of a larger batch, and a scheduler
batch.py          the largest micro-batch that fits, and accumulation
checkpointing.py  which blocks to compute again instead of keeping them
peak.py           what the last two measure with

Bucket sizes are planned in ``reducer/planner.py``, by the reducer itself.
"""
