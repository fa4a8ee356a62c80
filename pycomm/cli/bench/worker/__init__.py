"""What runs inside one rank of a benchmark job: it waits for commands, makes calls, reports times and wrong elements.

The same code serves pycomm, gloo and every MPI. The MPIs live in environments of their own without torch and pycomm, so
this package uses the standard library and numpy alone, imports nothing from the rest of pycomm, and is started there as
the top-level package ``worker`` (with its parent folder on ``PYTHONPATH``).
"""
