"""The rendezvous: the nodes of a run agree on the members of each round.

One node leads. It watches the others and commits numbered rounds by compare-and-swap; every node watches the
committed round. :mod:`.policy` holds the rules as pure functions, :mod:`.leader` carries them out, :mod:`.node` is what
every node does, and :mod:`.peer_connection` detects a death within milliseconds.

For launchers: :mod:`.api` has the interface of handlers, :mod:`.registry` chooses one by name, :mod:`.handler` is ours
for callers that block, and :mod:`.torchrun` offers it to torchrun.
"""

from torchelastic.rendezvous.api import *  # noqa: F403
from torchelastic.rendezvous.registry import *  # noqa: F403
