"""The wiring of a matrix stream: the table of reads and writes, what passed over it on a text, load, and cuts.

import rmt
from rmt.wires import cut, trace

table = rmt.wiring(model)                    # reads x writes, raw and normalised
seen = trace(model, ids)                     # seen.contributions("layer3.head2.query"), seen.lens(), ...
with cut(model, "layer3.ff <- layer1.ff"):   # the model without that connection
    model(ids)
"""

from rmt.wires.cut import cut, rank_edges
from rmt.wires.load import crosstalk, load
from rmt.wires.table import Wiring, wiring
from rmt.wires.trace import Trace, trace

__all__ = ["Trace", "Wiring", "crosstalk", "cut", "load", "rank_edges", "trace", "wiring"]
