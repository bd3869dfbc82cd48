"""The tests build SGLang's own layers on a CPU, so that is settled before any of them imports SGLang."""

import os

from b12x_conformance import sglang_cpu

os.environ["B12X_CONFORMANCE_CPU"] = "1"
sglang_cpu.activate()
