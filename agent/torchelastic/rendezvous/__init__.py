"""The rendezvous: the nodes of a run agree on the members of each round.

One node is the leader. The leader watches the other nodes and commits numbered rounds by compare-and-swap; every node
watches the committed round. :mod:`.policy` holds the rules as pure functions, :mod:`.leader` applies them, :mod:`.node`
runs on every node, and :mod:`.peer_connection` detects a dead node within milliseconds.

For launchers: :mod:`.api` defines the interface of handlers, :mod:`.registry` selects a handler by name,
:mod:`.handler` is a handler for launchers that wait synchronously for a round; :mod:`.torchrun` passes it to torchrun.
"""

from torchelastic.lazy import lazy_attributes
from torchelastic.rendezvous.api import *  # noqa: F403
from torchelastic.rendezvous.registry import *  # noqa: F403

__getattr__ = lazy_attributes(__name__, {"torch.distributed.elastic.rendezvous": "RendezvousStoreInfo"})
