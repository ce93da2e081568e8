"""The batcher: decides which requests run how many tokens in the next step."""

from .batcher import Batcher, QueueFull
from .modes import Batches, PaddedBatches, StaticBatches
from .policies import POLICIES, Policy, make_policy
from .preemption import PREEMPTION_MODES, PreemptionCost, preemption_mode
from .schedule import Schedule, ScheduledRequest

__all__ = [
    "POLICIES",
    "PREEMPTION_MODES",
    "Batcher",
    "Batches",
    "PaddedBatches",
    "Policy",
    "PreemptionCost",
    "QueueFull",
    "Schedule",
    "ScheduledRequest",
    "StaticBatches",
    "make_policy",
    "preemption_mode",
]
