"""How the nodes of a run agree on who trains together.

One node leads. It alone watches the others and commits numbered epochs by compare-and-swap; everybody watches the
committed epoch. :mod:`.decide` holds the rules as pure functions, :mod:`.leader` carries them out, :mod:`.node` is what
every node does, :mod:`.link` tells a death within milliseconds, and :mod:`.ranks` turns an epoch into ranks.
"""
