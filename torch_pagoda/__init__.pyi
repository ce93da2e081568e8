"""The public names, each with the module that it lives in."""

from .async_llm import AsyncLLM as AsyncLLM
from .compiler.user_passes import Pattern as Pattern
from .compiler.user_passes import register_pass as register_pass
from .compiler.user_passes import unregister_pass as unregister_pass
from .generation import compile as compile
from .generation import restore as restore
from .llm import LLM as LLM
from .passes import PassRecord as PassRecord
from .passes import Rejection as Rejection
from .passes import TracedGraph as TracedGraph
from .reports import Explanation as Explanation
from .reports import explain as explain
from .runtime.batching import QueueFull as QueueFull
from .runtime.requests.beam_search_params import BeamSearchParams as BeamSearchParams
from .runtime.requests.outputs import BeamSearchOutput as BeamSearchOutput
from .runtime.requests.outputs import BeamSearchSequence as BeamSearchSequence
from .runtime.requests.outputs import CompletionOutput as CompletionOutput
from .runtime.requests.outputs import RequestOutput as RequestOutput
from .runtime.requests.sampling_params import SamplingParams as SamplingParams

__version__: str
