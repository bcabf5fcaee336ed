"""See what happened while vLLM loaded your weights.

    import loadlens as ll

    ll.run("recipe:glm-dsa-fp8", delivery="file", model_class="nvidia")                             # FAIL: L1, L2, L3
    ll.run("recipe:glm-dsa-fp8", delivery="file", model_class="nvidia", variant="0.32.0+pr46168")   # PASS

A checkpoint is delivered to a variant of vLLM; a run records what happened; five laws say whether it was right.
Importing this starts nothing: the first `run` starts a process that imports vLLM, and keeps it for the next.
"""

from . import figures
from .checkpoint import Checkpoint, TensorInfo, open_checkpoint
from .delivery import Delivery
from .errors import CannotRun
from .fixes import FIXES, survey
from .laws import FAIL, LAWS, PASS, UNRESOLVED, Finding, Verdict
from .matrix import matrix
from .recipes import RECIPES
from .run import Run, by_hand, generate, run
from .trace import write_trace
from .variant import Variant, installed_release, resolve
from .workers import Workers, warm

__all__ = [
    "Checkpoint", "TensorInfo", "open_checkpoint", "RECIPES",  # Checkpoint
    "Delivery",
    "Variant", "resolve", "installed_release", "FIXES", "survey",  # Variant
    "Run", "Workers", "run", "by_hand", "generate", "matrix", "warm", "write_trace",  # Run
    "LAWS", "Verdict", "PASS", "FAIL", "UNRESOLVED",  # Law
    "Finding", "CannotRun", "figures",  # Finding
]

__version__ = "0.1.0"
