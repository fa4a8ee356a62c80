"""Cases for the torch.distributed backend, run by ``jobs/torch_backend.py`` on every rank of one job.

A case is a function ``case_NAME()`` that asserts; all ranks run all cases, in order. ``BACKEND=gloo`` runs them over
gloo: what passes there has to pass over pycomm.
"""
