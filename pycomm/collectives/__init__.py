"""Groups of ranks, and the verbs that they call: what ``import pycomm`` gives. The public names are in ``pycomm``."""
