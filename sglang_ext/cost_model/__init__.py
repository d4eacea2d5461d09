"""The cost model: how long a prefill takes, and whether to compute KV, load it or fetch it (MemServe, 5.3).

No SGLang, no torch: the router calculates with it, and so does a simulator. ``calibration`` measures.
"""

from sglang_ext.cost_model.batch import Batch, Batching
from sglang_ext.cost_model.levels import ArchLevel, OperatorLevel
from sglang_ext.cost_model.model import CostModel, Execution
from sglang_ext.cost_model.operators import Attention, Linear, Link, Outside, Rest, Scaling, Waves
from sglang_ext.cost_model.passes import Passes
from sglang_ext.cost_model.profile import Decode, Identity, Profile, Quality, load, save

__all__ = [
    "ArchLevel",
    "Attention",
    "Batch",
    "Batching",
    "CostModel",
    "Decode",
    "Execution",
    "Identity",
    "Linear",
    "Link",
    "OperatorLevel",
    "Outside",
    "Passes",
    "Profile",
    "Quality",
    "Rest",
    "Scaling",
    "Waves",
    "load",
    "save",
]
