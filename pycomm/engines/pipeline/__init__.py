"""Pipeline parallelism: schedules as data (actions, schedules/, lower, simulate, draw) and what runs them."""
